"""Every algorithm once more, in float64 numpy, as its paper's listing: all clients in one array.

Written from the equations and not from `fedmpi.algorithms`, so that the two check each other. A
function is named like the algorithm on the command line and takes

    f          the clients' gradients, a `Clients`
    x          [dim] the starting point
    rounds     number of rounds
    K          [num_clients] local steps of each client in a round; all equal in the iteration methods
    S          S(round) -> the sorted list of participants
    ...        hyper-parameters by the names of the settings; step_size is a number or a function of t

and yields {row: value} after the start, after every local step, and after every communication. Rows
of all clients are [num_clients, dim]: x, m, v, ... of an absent client are what all clients received.
"""

import numpy as np

from fedmpi.ground.streams import generator


class Clients:
    """Gradients of all clients on their own samples.

    Args:
        gradient: gradient(client, x, sample) -> [dim]. num_clients: N. weights: of the clients in averages; the
            methods that papers compare with today have them, and those with periods.
    """

    def __init__(self, gradient, num_clients, weights=None):
        self.gradient, self.num = gradient, num_clients
        self.draws = np.zeros(num_clients, int)
        self.weights = np.ones(num_clients) if weights is None else np.asarray(weights)

    def mean(self, values, here):
        """The weighted mean of values, one for each client of `here`."""
        return np.average(np.asarray(values), axis=0, weights=self.weights[list(here)])

    def share(self, here):
        """Of those clients in the weights of all."""
        return self.weights[list(here)].sum() / self.weights.sum()

    def draw(self, here):
        """A fresh sample for every client of `here`; the others' counters stand still."""
        xi = {i: self.draws[i] for i in here}
        self.draws[list(here)] += 1
        return xi

    def __call__(self, here, x, xi):
        """[len(here), dim]: gradients of those clients at x, one row each or one point for all."""
        x = np.asarray(x)
        rows = [self.gradient(i, x[i] if x.ndim == 2 else x, xi[i]) for i in here]
        return np.array(rows).reshape(len(rows), x.shape[-1])

    def first(self, x):
        """[num_clients, dim]: gradients at x on the initial batches (sample -1)."""
        return self(range(self.num), x, [-1] * self.num)

    def whole(self, i, x):
        """[dim]: gradient of client i at x on all its data (sample -2)."""
        return self.gradient(i, x, -2)


def everywhere(x, f):
    """x for every client."""
    return np.tile(x, (f.num, 1))


def in_period(row, here, f, num_rounds, every):
    """The participants' mean for every client if so many rounds are a multiple of `every`, otherwise what they have."""
    return everywhere(f.mean(row[here], here), f) if num_rounds % every == 0 else row


def steps(here, K):
    """(k, the clients that make local step k), for k = 0, 1, ..."""
    for k in range(max(K[i] for i in here)):
        yield k, [i for i in here if k < K[i]]


def at(step_size, t):
    """The step size at time t."""
    return step_size(t) if callable(step_size) else step_size


# --- local SGD and its relatives --------------------------------------------------------------------


def fedavg(f, x, rounds, K, S, step_size, server_step_size=1.0):
    yield {"x": everywhere(x, f)}
    for r in range(rounds):
        x_i = everywhere(x, f)
        for _, here in steps(S(r), K):
            x_i[here] = x_i[here] - at(step_size, r) * f(here, x_i, f.draw(here))
            yield {"x": x_i}
        x = x + server_step_size * (x_i[S(r)].mean(0) - x)
        yield {"x": everywhere(x, f)}


def fedprox(f, x, rounds, K, S, step_size, proximal_weight, server_step_size=1.0):
    yield {"x": everywhere(x, f)}
    for r in range(rounds):
        x_i = everywhere(x, f)
        for _, here in steps(S(r), K):
            g = f(here, x_i, f.draw(here)) + proximal_weight * (x_i[here] - x)
            x_i[here] = x_i[here] - at(step_size, r) * g
            yield {"x": x_i}
        x = x + server_step_size * (x_i[S(r)].mean(0) - x)
        yield {"x": everywhere(x, f)}


def scaffold(f, x, rounds, K, S, step_size, server_step_size=1.0, option="II", c0="zero"):
    c_i = f.first(x) if c0 == "gradient" else np.zeros((f.num, x.size))
    c = c_i.mean(0)
    yield {"x": everywhere(x, f), "c_i": c_i, "c": c}
    for r in range(rounds):
        y = everywhere(x, f)
        for _, here in steps(S(r), K):
            y[here] = y[here] - at(step_size, r) * (f(here, y, f.draw(here)) - c_i[here] + c)
            yield {"x": y, "c_i": c_i, "c": c}
        c_new = c_i.copy()
        for i in S(r):
            if option == "I":
                c_new[i] = f.whole(i, x)
            else:
                c_new[i] = c_i[i] - c + (x - y[i]) / (K[i] * at(step_size, r))
        x = x + server_step_size * (y[S(r)].mean(0) - x)
        c = c + (c_new - c_i).sum(0) / f.num
        c_i = c_new
        yield {"x": everywhere(x, f), "c_i": c_i, "c": c}


def fednova(f, x, rounds, K, S, step_size, momentum=0.0, proximal_weight=0.0):
    yield {"x": everywhere(x, f)}
    for r in range(rounds):
        x_i, buffer, eta = everywhere(x, f), np.zeros((f.num, x.size)), at(step_size, r)
        for _, here in steps(S(r), K):
            buffer[here] = momentum * buffer[here] + f(here, x_i, f.draw(here))
            x_i[here] = x_i[here] - eta * (buffer[here] + proximal_weight * (x_i[here] - x))
            yield {"x": x_i}
        # a_i: how often each gradient is in the move, from the last to the first
        kept, decayed = 1 - eta * proximal_weight, momentum
        a = [sum(kept ** (n - j) * decayed**j for n in range(K[i]) for j in range(n + 1)) for i in range(f.num)]
        tau_eff = f.mean([K[i] if proximal_weight else a[i] for i in S(r)], S(r))
        x = x + tau_eff * f.mean([(x_i[i] - x) / a[i] for i in S(r)], S(r))
        yield {"x": everywhere(x, f)}


def fedexp(f, x, rounds, K, S, step_size, epsilon):
    yield {"x": everywhere(x, f)}
    for r in range(rounds):
        x_i = everywhere(x, f)
        for _, here in steps(S(r), K):
            x_i[here] = x_i[here] - at(step_size, r) * f(here, x_i, f.draw(here))
            yield {"x": x_i}
        moves = x - x_i[S(r)]
        mean, square = f.mean(moves, S(r)), f.mean((moves**2).sum(1), S(r))
        x = x - max(1, square / (2 * (mean @ mean + epsilon))) * mean
        yield {"x": everywhere(x, f)}


def feddyn(f, x, rounds, K, S, step_size, proximal_weight):
    gradients, h = np.zeros((f.num, x.size)), np.zeros(x.size)  # of the clients' own minima; -α times the mean of h_i
    yield {"x": everywhere(x, f), "h_i": gradients, "h": h}
    for r in range(rounds):
        theta = everywhere(x, f)
        for _, here in steps(S(r), K):
            g = f(here, theta, f.draw(here)) - gradients[here] + proximal_weight * (theta[here] - x)
            theta[here] = theta[here] - at(step_size, r) * g
            yield {"x": theta, "h_i": -gradients / proximal_weight, "h": -h / proximal_weight}
        for i in S(r):
            gradients[i] = gradients[i] - proximal_weight * (theta[i] - x)
        h = h - proximal_weight * f.share(S(r)) * f.mean(theta[S(r)] - x, S(r))
        x = f.mean(theta[S(r)], S(r)) - h / proximal_weight
        yield {"x": everywhere(x, f), "h_i": -gradients / proximal_weight, "h": -h / proximal_weight}


def scaffnew(f, x, rounds, K, S, step_size, probability=None, average_chance=1.0, coin_seed=0):
    h, shift, x_hat = np.zeros((f.num, x.size)), np.zeros(x.size), everywhere(x, f)
    yield {"x": x_hat, "c": shift}
    for r in range(rounds):
        gamma = at(step_size, r)
        rate = (average_chance / max(K) if probability is None else probability) / gamma
        for _, here in steps(S(r), K):
            x_hat[here] = x_hat[here] - gamma * (f(here, x_hat, f.draw(here)) - h[here])
            yield {"x": x_hat, "c": shift}
        if average_chance < 1 and generator(coin_seed, "average", r).random() >= average_chance:
            yield {"x": x_hat, "c": shift}
            continue
        new = f.mean(x_hat[S(r)], S(r))
        if len(S(r)) == f.num:
            h, shift = h + rate * (new - x_hat), rate * (x - new)  # the paper's line
        else:  # c_i and c as in SCAFFOLD, h_i = c_i - c
            c_i, share = h + shift, f.share(S(r))
            for i in S(r):
                c_i[i] = c_i[i] - shift + rate * (x - x_hat[i])
            shift = (1 - share) * shift + share * rate * (x - new)
            h = c_i - shift
        x, x_hat = new, everywhere(new, f)
        yield {"x": x_hat, "c": shift}


def naive_adaptive_fedavg(f, x, rounds, K, S, step_size, second_moment_decay, epsilon, v0=0.0):
    beta, q = second_moment_decay, K[0]
    x_i, v = everywhere(x, f), np.full((f.num, x.size), v0)
    yield {"x": x_i, "v": v}
    for t in range(1, rounds * q + 1):
        here = S((t - 1) // q)
        g = f(here, x_i, f.draw(here))
        v[here] = beta * v[here] + (1 - beta) * g**2
        root = np.sqrt(v[here]) + epsilon
        x_i[here] = x_i[here] - at(step_size, t) * np.divide(g, root, out=np.zeros_like(g), where=root > 0)
        yield {"x": x_i, "v": v}
        if t % q == 0:
            x_i = everywhere(x_i[here].mean(0), f)
            yield {"x": x_i, "v": v}


# --- recursive momentum -----------------------------------------------------------------------------


def alpha(t, fresh_weight, fresh_weight_scale, step_size):
    if fresh_weight_scale is None:
        return fresh_weight
    return min(1.0, fresh_weight_scale * at(step_size, t - 1) ** 2)


def stem(f, x, rounds, K, S, step_size, fresh_weight=None, fresh_weight_scale=None):
    q = K[0]
    d = everywhere(f.first(x).mean(0), f)
    x_prev, x_i = everywhere(x, f), everywhere(x, f) - at(step_size, 0) * d
    yield {"x": x_i, "x_prev": x_prev, "d": d}
    present = range(f.num)
    for t in range(1, rounds * q + 1):
        here = S((t - 1) // q)
        if (t - 1) % q == 0:  # a block begins: reset the stale x_prev of clients that were absent
            for i in here:
                if i not in present:
                    x_prev[i] = x_i[i]
            present = here
        eta, a = at(step_size, t), alpha(t, fresh_weight, fresh_weight_scale, step_size)
        xi = f.draw(here)
        d[here] = f(here, x_i, xi) + (1 - a) * (d[here] - f(here, x_prev, xi))
        x_prev[here] = x_i[here]
        if t % q:
            x_i[here] = x_i[here] - eta * d[here]
            yield {"x": x_i, "x_prev": x_prev, "d": d}
        else:
            yield {"x": x_i, "x_prev": x_prev, "d": d}
            d = everywhere(d[here].mean(0), f)
            x_i = everywhere(x_i[here].mean(0), f) - eta * d
            yield {"x": x_i, "x_prev": x_prev, "d": d}


def fafed(
    f,
    x,
    rounds,
    K,
    S,
    step_size,
    second_moment_decay,
    epsilon,
    fresh_weight=None,
    fresh_weight_scale=None,
    adaptive_matrix="diagonal",
    v_every=1,
):
    beta, rho, q = second_moment_decay, epsilon, max(K)

    def square(g):
        if adaptive_matrix == "diagonal":
            return g**2
        return np.tile((g**2).sum(1, keepdims=True), (1, g.shape[1]))

    g = f.first(x)
    m, v = (everywhere(f.mean(z, range(f.num)), f) for z in (g, square(g)))
    A = np.sqrt(v[0]) + rho
    x_prev = everywhere(x, f)
    x_i = x_prev - at(step_size, 0) * m
    yield {"x": x_i, "x_prev": x_prev, "m": m, "v": v, "A": A}
    present = range(f.num)
    for t in range(1, rounds * q + 1):
        here = S((t - 1) // q)
        if (t - 1) % q == 0:
            for i in here:
                if i not in present:
                    x_prev[i] = x_i[i]
            present = here
        here = [i for i in here if (t - 1) % q < K[i]]
        eta, a = at(step_size, t), alpha(t, fresh_weight, fresh_weight_scale, step_size)
        xi = f.draw(here)
        g, g_prev = f(here, x_i, xi), f(here, x_prev, xi)
        m[here] = g + (1 - a) * (m[here] - g_prev)
        if adaptive_matrix == "adagrad_norm":
            v[here] = v[here] + square(g)
        else:
            v[here] = beta * v[here] + (1 - beta) * square(g)
        x_prev[here] = x_i[here]
        for i in here:
            if (t - 1) % q < K[i] - 1:
                x_i[i] = x_i[i] - eta * m[i] / A
        yield {"x": x_i, "x_prev": x_prev, "m": m, "v": v, "A": A}
        if t % q == 0:
            here = present
            m, x_i = (everywhere(f.mean(z[here], here), f) for z in (m, x_i))
            v = in_period(v, here, f, t // q, v_every)
            A = np.sqrt(v[0]) + rho if t // q % v_every == 0 else A
            x_i = x_i - eta * m / A
            yield {"x": x_i, "x_prev": x_prev, "m": m, "v": v, "A": A}


def fafed_code(
    f,
    x,
    rounds,
    K,
    S,
    step_size,
    second_moment_decay,
    epsilon,
    fresh_weight=None,
    fresh_weight_scale=None,
    first_step="plain",
    sync_order="code",
    prev_grad_scale=1.0,
    adaptive_matrix="diagonal",
    m_every=1,
    v_every=1,
):
    beta, rho, q = second_moment_decay, epsilon, max(K)

    def square(g):
        if adaptive_matrix == "diagonal":
            return g**2
        return np.tile((g**2).sum(1, keepdims=True), (1, g.shape[1]))

    g = f.first(x)
    m, v = (everywhere(f.mean(z, range(f.num)), f) for z in (g, square(g)))
    A = np.sqrt(v[0]) + rho
    x_prev = everywhere(x, f)
    x_i = x_prev - at(step_size, 0) * (m / A if first_step == "adaptive" else m)
    yield {"x": x_i, "x_prev": x_prev, "m": m, "v": v, "A": A}
    present = range(f.num)
    for t in range(1, rounds * q + 1):
        here = S((t - 1) // q)
        if (t - 1) % q == 0:
            for i in here:
                if i not in present:
                    x_prev[i] = x_i[i]
            present = here
        here = [i for i in here if (t - 1) % q < K[i]]
        eta, a = at(step_size, t), alpha(t, fresh_weight, fresh_weight_scale, step_size)
        xi = f.draw(here)
        g, g_prev = f(here, x_i, xi), f(here, x_prev, xi)
        m[here] = g + (1 - a) * (m[here] - prev_grad_scale * g_prev)
        if adaptive_matrix == "adagrad_norm":
            v[here] = v[here] + square(g)
        else:
            v[here] = beta * v[here] + (1 - beta) * square(g)
        x_prev[here] = x_i[here]
        for i in here:
            if (t - 1) % q < K[i] - 1 or sync_order == "code":
                x_i[i] = x_i[i] - eta * m[i] / A
        yield {"x": x_i, "x_prev": x_prev, "m": m, "v": v, "A": A}
        if t % q == 0:
            here = present
            x_i = everywhere(f.mean(x_i[here], here), f)
            m, v = in_period(m, here, f, t // q, m_every), in_period(v, here, f, t // q, v_every)
            A = np.sqrt(v[0]) + rho if t // q % v_every == 0 else A
            if sync_order == "paper":
                x_i = x_i - eta * m / A
            yield {"x": x_i, "x_prev": x_prev, "m": m, "v": v, "A": A}


# --- adaptive servers -------------------------------------------------------------------------------


def fedopt(f, x, rounds, K, S, step_size, momentum, v, new_v, move):
    """What follows has this in common: Δ of local SGD, m, v, then a move of the server."""
    m = np.zeros(x.size)
    yield {"x": everywhere(x, f), "m": m, "v": v}
    for r in range(rounds):
        x_i = everywhere(x, f)
        for _, here in steps(S(r), K):
            x_i[here] = x_i[here] - at(step_size, r) * f(here, x_i, f.draw(here))
            yield {"x": x_i, "m": m, "v": v}
        delta = (x_i[S(r)] - x).mean(0)
        m = momentum * m + (1 - momentum) * delta
        v = new_v(v, delta)
        x = x + move(r, m, v)
        yield {"x": everywhere(x, f), "m": m, "v": v}


def adam_move(correction, r, m, root, eta, beta1, beta2, offset):
    """The step in round r = 0, 1, ...; `root` is √v."""
    t = r + 2 if correction == "flower" else r + 1
    if correction == "torch":
        return eta * (m / (1 - beta1**t)) / (root / np.sqrt(1 - beta2**t) + offset)
    if correction != "none":
        eta = eta * np.sqrt(1 - beta2**t) / (1 - beta1**t)
    return eta * m / (root + offset)


def fedadam(
    f,
    x,
    rounds,
    K,
    S,
    step_size,
    server_step_size,
    momentum,
    second_moment_decay,
    epsilon,
    v0=None,
    correction="none",
):
    beta2, tau = second_moment_decay, epsilon

    def move(r, m, v):
        return adam_move(correction, r, m, np.sqrt(v), server_step_size, momentum, beta2, tau)

    v = np.full(x.size, tau**2 if v0 is None else v0)
    yield from fedopt(
        f, x, rounds, K, S, step_size, momentum, v, lambda v, delta: beta2 * v + (1 - beta2) * delta**2, move
    )


def fedyogi(f, x, rounds, K, S, step_size, server_step_size, momentum, second_moment_decay, epsilon, correction="none"):
    def new_v(v, delta):
        return np.maximum(0, v - (1 - second_moment_decay) * delta**2 * np.sign(v - delta**2))

    def move(r, m, v):
        return adam_move(correction, r, m, np.sqrt(v), server_step_size, momentum, second_moment_decay, epsilon)

    yield from fedopt(f, x, rounds, K, S, step_size, momentum, np.full(x.size, epsilon**2), new_v, move)


def fedadagrad(f, x, rounds, K, S, step_size, server_step_size, momentum, epsilon):
    def move(r, m, v):
        return server_step_size * m / (np.sqrt(v) + epsilon)

    v = np.full(x.size, epsilon**2)
    yield from fedopt(f, x, rounds, K, S, step_size, momentum, v, lambda v, delta: v + delta**2, move)


def fedams(
    f,
    x,
    rounds,
    K,
    S,
    step_size,
    server_step_size,
    momentum,
    second_moment_decay,
    epsilon,
    option=1,
    correction="none",
    v0=0.0,
):
    beta1, beta2 = momentum, second_moment_decay
    v_hat = np.full(x.size, v0)

    def move(r, m, v):
        nonlocal v_hat
        v_hat = np.maximum(v_hat, v)
        if option == 1:
            v_hat = np.maximum(v_hat, epsilon)
        offset = 0 if option == 1 else epsilon
        return adam_move(correction, r, m, np.sqrt(v_hat), server_step_size, beta1, beta2, offset)

    def new_v(v, delta):
        return beta2 * v + (1 - beta2) * delta**2

    for rows in fedopt(f, x, rounds, K, S, step_size, momentum, np.zeros(x.size), new_v, move):
        yield {**rows, "v_hat": v_hat}


# --- adaptive clients -------------------------------------------------------------------------------


def fedavgm(f, x, rounds, K, S, step_size, momentum, server_step_size=1.0):
    m = np.zeros(x.size)
    yield {"x": everywhere(x, f), "m": m}
    for r in range(rounds):
        x_i = everywhere(x, f)
        for _, here in steps(S(r), K):
            x_i[here] = x_i[here] - at(step_size, r) * f(here, x_i, f.draw(here))
            yield {"x": x_i, "m": m}
        m = momentum * m + (x_i[S(r)] - x).mean(0)
        x = x + server_step_size * m
        yield {"x": everywhere(x, f), "m": m}


def diloco(
    f,
    x,
    rounds,
    K,
    S,
    step_size,
    server_step_size,
    momentum,
    first_moment_decay,
    second_moment_decay,
    epsilon,
    decay,
):
    beta1, beta2, b = first_moment_decay, second_moment_decay, np.zeros(x.size)
    m, v, made = np.zeros((f.num, x.size)), np.zeros((f.num, x.size)), np.zeros((f.num, 1))
    yield {"x": everywhere(x, f), "m": m, "v": v, "b": b}
    for r in range(rounds):
        theta = everywhere(x, f)
        for k, here in steps(S(r), K):
            eta = at(step_size, r * K[0] + k + 1)
            g = f(here, theta, f.draw(here))
            made[here] += 1
            m[here] = beta1 * m[here] + (1 - beta1) * g
            v[here] = beta2 * v[here] + (1 - beta2) * g**2
            m_hat, v_hat = m[here] / (1 - beta1 ** made[here]), v[here] / (1 - beta2 ** made[here])
            theta[here] = theta[here] - eta * (m_hat / (np.sqrt(v_hat) + epsilon) + decay * theta[here])
            yield {"x": theta, "m": m, "v": v, "b": b}
        outer_gradient = (x - theta[S(r)]).mean(0)
        b = momentum * b - outer_gradient
        x = x + server_step_size * (momentum * b - outer_gradient)
        yield {"x": everywhere(x, f), "m": m, "v": v, "b": b}


def local_adam(f, x, rounds, K, S, step_size, momentum, second_moment_decay, epsilon, m_every=1, v_every=1):
    beta1, beta2, q = momentum, second_moment_decay, max(K)
    x_i, u, v = everywhere(x, f), np.zeros((f.num, x.size)), np.zeros((f.num, x.size))
    yield {"x": x_i, "m": u, "v": v}
    for t in range(1, rounds * q + 1):
        here = [i for i in S((t - 1) // q) if (t - 1) % q < K[i]]
        g = f(here, x_i, f.draw(here))
        u[here] = beta1 * u[here] + (1 - beta1) * g
        v[here] = beta2 * v[here] + (1 - beta2) * g**2
        x_i[here] = x_i[here] - at(step_size, t) * u[here] / np.sqrt(v[here] + epsilon**2)
        yield {"x": x_i, "m": u, "v": v}
        if t % q == 0:
            here = S((t - 1) // q)
            x_i = everywhere(f.mean(x_i[here], here), f)
            u, v = in_period(u, here, f, t // q, m_every), in_period(v, here, f, t // q, v_every)
            yield {"x": x_i, "m": u, "v": v}


def desloc(f, x, rounds, K, S, step_size, momentum=0.9, second_moment_decay=0.999, epsilon=1e-6, m_every=3, v_every=6):
    """The authors' loop: averages come before a step, of what the step before it has left, and after the last one."""
    q, start = max(K), np.zeros((f.num, x.size))
    state, present = {"x": everywhere(x, f), "m": start, "v": start}, range(f.num)
    yield dict(state)
    for t in range(rounds * q + 1):
        if t and t % q == 0:
            periods = {"x": q, "m": q * m_every, "v": q * v_every}
            for row, period in periods.items():
                if t % period == 0:
                    state[row] = everywhere(f.mean(state[row][present], present), f)
            yield dict(state)
        if t == rounds * q:
            return
        present = S(t // q)
        g = np.zeros_like(start)
        here = [i for i in present if t % q < K[i]]
        g[here] = f(here, state["x"], f.draw(here))
        works = np.isin(np.arange(f.num), here)[:, None]
        m = np.where(works, momentum * state["m"] + (1 - momentum) * g, state["m"])
        v = np.where(works, second_moment_decay * state["v"] + (1 - second_moment_decay) * g * g, state["v"])
        y = state["x"] - at(step_size, t + 1) * m / np.sqrt(v + epsilon**2)
        state = {"x": np.where(works, y, state["x"]), "m": m, "v": v}
        yield dict(state)


def direction(x, moved, K, here, eta, f):
    """Δ = -1/(K η) mean(x_i - x), K the mean number of steps."""
    return -f.mean(moved[here] - x, here) / (f.mean([K[i] for i in here], here) * eta)


def fedadamw(
    f, x, rounds, K, S, step_size, momentum, second_moment_decay, epsilon, alignment, decay, form="paper", segments=()
):
    beta1, beta2 = momentum, second_moment_decay
    v_bar, delta = np.zeros(x.size), np.zeros(x.size)
    yield {"x": everywhere(x, f), "v": everywhere(v_bar, f), "direction": delta}
    for r in range(rounds):
        x_i, m, v, eta = everywhere(x, f), np.zeros((f.num, x.size)), everywhere(v_bar, f), at(step_size, r)
        for k, here in steps(S(r), K):
            t = r * max(K) + k + 1
            g = f(here, x_i, f.draw(here))
            m[here] = beta1 * m[here] + (1 - beta1) * g
            v[here] = beta2 * v[here] + (1 - beta2) * g**2
            m_hat = m[here] / (1 - beta1 ** (t if form == "code" else k + 1))
            step = m_hat / (np.sqrt(v[here] / (1 - beta2**t)) + epsilon) + alignment * delta + decay * x_i[here]
            x_i[here] = x_i[here] - eta * step
            yield {"x": x_i, "v": v, "direction": delta}
        if form == "paper":
            for block in segments:
                v[:, block] = v[:, block].mean(1, keepdims=True)
        delta, x, v_bar = direction(x, x_i, K, S(r), eta, f), f.mean(x_i[S(r)], S(r)), f.mean(v[S(r)], S(r))
        yield {"x": everywhere(x, f), "v": everywhere(v_bar, f), "direction": delta}


def fedlada(f, x, rounds, K, S, step_size, momentum, second_moment_decay, epsilon, alignment):
    beta1, beta2, gamma = momentum, second_moment_decay, alignment
    v_bar, delta = np.zeros(x.size), np.zeros(x.size)
    yield {"x": everywhere(x, f), "v": everywhere(v_bar, f), "direction": delta}
    for r in range(rounds):
        x_i, m, v, eta = everywhere(x, f), np.zeros((f.num, x.size)), everywhere(v_bar, f), at(step_size, r)
        for _, here in steps(S(r), K):
            g = f(here, x_i, f.draw(here))
            m[here] = beta1 * m[here] + (1 - beta1) * g
            v[here] = beta2 * v[here] + (1 - beta2) * g**2
            x_i[here] = x_i[here] - eta * ((1 - gamma) * m[here] / (np.sqrt(v[here]) + epsilon) + gamma * delta)
            yield {"x": x_i, "v": v, "direction": delta}
        delta, x, v_bar = direction(x, x_i, K, S(r), eta, f), f.mean(x_i[S(r)], S(r)), f.mean(v[S(r)], S(r))
        yield {"x": everywhere(x, f), "v": everywhere(v_bar, f), "direction": delta}


def newton_schulz(matrix):
    """[rows, columns] near U Vᵀ of the matrix's singular value decomposition: the polynomial of its singular values."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    s = s / (np.linalg.norm(matrix) + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ np.diag(s) @ v


def fedmuon(
    f,
    x,
    rounds,
    K,
    S,
    step_size,
    momentum,
    alignment,
    matrix_factor,
    first_moment_decay,
    second_moment_decay,
    epsilon,
    shapes=(),
):
    beta1, beta2 = first_moment_decay, second_moment_decay
    M_bar, delta = np.zeros(x.size), np.zeros(x.size)
    ends = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)])
    layers = [(slice(a, b), shape) for a, b, shape in zip(ends, ends[1:], shapes)]
    yield {"x": everywhere(x, f), "direction": delta}
    for r in range(rounds):
        x_i, M, eta = everywhere(x, f), everywhere(M_bar, f), at(step_size, r)
        m, v = np.zeros((f.num, x.size)), np.zeros((f.num, x.size))
        for k, here in steps(S(r), K):
            g, O = f(here, x_i, f.draw(here)), np.zeros((f.num, x.size))
            M[here] = momentum * M[here] + g
            m[here] = beta1 * m[here] + (1 - beta1) * g
            v[here] = beta2 * v[here] + (1 - beta2) * g**2
            for layer, shape in layers:
                for i in here:
                    if len(shape) < 2:
                        m_hat, v_hat = m[i, layer] / (1 - beta1 ** (k + 1)), v[i, layer] / (1 - beta2 ** (k + 1))
                        O[i, layer] = m_hat / (np.sqrt(v_hat) + epsilon)
                        continue
                    matrix = M[i, layer].reshape(shape[0], -1)
                    scale = matrix_factor * max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5
                    O[i, layer] = scale * newton_schulz(matrix).ravel()
            x_i[here] = x_i[here] - eta * ((1 - alignment) * O[here] + alignment * delta)
            yield {"x": x_i, "direction": delta}
        delta, x, M_bar = direction(x, x_i, K, S(r), eta, f), f.mean(x_i[S(r)], S(r)), f.mean(M[S(r)], S(r))
        yield {"x": everywhere(x, f), "direction": delta}


def mimeadam(
    f,
    x,
    rounds,
    K,
    S,
    step_size,
    momentum,
    second_moment_decay,
    epsilon,
    lite=False,
    server_step_size=1.0,
    v0=None,
    update="frozen",
    correction="none",
):
    beta1, beta2 = momentum, second_moment_decay
    m, v = np.zeros(x.size), np.full(x.size, v0 or 0.0)
    yield {"x": everywhere(x, f), "m": m, "v": v}
    for r in range(rounds):
        c = np.mean([f.whole(i, x) for i in S(r)], axis=0)
        shown = v
        if v0 is None and r == 0:
            v = c**2
        y = everywhere(x, f)
        for _, here in steps(S(r), K):
            xi = f.draw(here)
            g = f(here, y, xi)
            if not lite:
                g = g - f(here, x, xi) + c
            root = np.sqrt(v if update == "frozen" else beta2 * v + (1 - beta2) * g**2)
            direction = beta1 * m + (1 - beta1) * g
            y[here] = y[here] - adam_move(correction, r, direction, root, at(step_size, r), beta1, beta2, epsilon)
            yield {"x": y, "m": m, "v": shown}  # as at the round's start
        x = x + server_step_size * (y[S(r)].mean(0) - x)
        m, v = beta1 * m + (1 - beta1) * c, beta2 * v + (1 - beta2) * c**2
        yield {"x": everywhere(x, f), "m": m, "v": v, "c": everywhere(c, f)}


def local_amsgrad(f, x, rounds, K, S, step_size, momentum, second_moment_decay, v0=None, refresh="before", v_every=1):
    beta1, beta2 = momentum, second_moment_decay
    v_hat = np.maximum(1e-8, f.mean(f.first(x) ** 2, range(f.num))) if v0 is None else np.full(x.size, v0)
    m, v = np.zeros((f.num, x.size)), everywhere(v_hat, f)
    yield {"x": everywhere(x, f), "m": m, "v": v, "v_hat": v_hat}
    for r in range(rounds):
        x_i, a = everywhere(x, f), at(step_size, r)
        for k, here in steps(S(r), K):
            g = f(here, x_i, f.draw(here))
            m[here] = beta1 * m[here] + (1 - beta1) * g
            v[here] = beta2 * v[here] + (1 - beta2) * g**2
            for i in here:
                if k < K[i] - 1 or refresh == "after":
                    x_i[i] = x_i[i] - a * m[i] / np.sqrt(v_hat)
            yield {"x": x_i, "m": m, "v": v, "v_hat": v_hat}
        if (r + 1) % v_every == 0:
            v_hat = np.maximum(v_hat, f.mean(v[S(r)], S(r)))
        if refresh == "before":
            x_i = x_i - a * m / np.sqrt(v_hat)
        x = f.mean(x_i[S(r)], S(r))
        yield {"x": everywhere(x, f), "m": m, "v": v, "v_hat": v_hat}


def fed_lamb(
    f,
    x,
    rounds,
    K,
    S,
    step_size,
    momentum,
    second_moment_decay,
    epsilon,
    layer_decay=0.0,
    v_every=1,
    segments=(slice(None),),
):
    beta1, beta2 = momentum, second_moment_decay
    v_hat = np.full(x.size, epsilon)
    yield {"x": everywhere(x, f), "v_hat": v_hat}
    for r in range(rounds):
        theta, m, v = everywhere(x, f), np.zeros((f.num, x.size)), everywhere(v_hat, f)
        for k, here in steps(S(r), K):
            g = f(here, theta, f.draw(here))
            m[here] = beta1 * m[here] + (1 - beta1) * g
            v[here] = beta2 * v[here] + (1 - beta2) * g**2
            for i in here:
                p = m[i] / (1 - beta1 ** (k + 1)) / (np.sqrt(v_hat) + epsilon)
                u = p + layer_decay * theta[i]
                for layer in segments:
                    length, norm = np.linalg.norm(theta[i, layer]), np.linalg.norm(u[layer])
                    ratio = length / norm if length > 0 and norm > 0 else 1.0
                    theta[i, layer] -= at(step_size, r) * ratio * u[layer]
            yield {"x": theta, "v_hat": v_hat}
        x = f.mean(theta[S(r)], S(r))
        v_hat = np.maximum(v_hat, f.mean(v[S(r)], S(r))) if (r + 1) % v_every == 0 else v_hat
        yield {"x": everywhere(x, f), "v_hat": v_hat}


# --- momentum of the server, followed by the clients ------------------------------------------------


def mean_steps(S, K):
    return np.mean([K[i] for i in S])


def fedavg_m(f, x, rounds, K, S, step_size, fresh_weight, server_step_size=None, form="original"):
    beta = fresh_weight
    g = np.zeros(x.size)
    yield {"x": everywhere(x, f), "g": g}
    for r in range(rounds):
        eta = at(step_size, r)
        gamma = server_step_size or eta * mean_steps(S(r), K)
        x_i = everywhere(x, f)
        for _, here in steps(S(r), K):
            fresh = f(here, x_i, f.draw(here))
            if form == "original":
                x_i[here] = x_i[here] - eta * (beta * fresh + (1 - beta) * g)
            else:
                x_i[here] = x_i[here] - eta * (fresh + (1 - beta) * g)
            yield {"x": x_i, "g": g}
        g = (x - x_i[S(r)]).mean(0) / (eta * mean_steps(S(r), K))
        x = x - gamma * g
        yield {"x": everywhere(x, f), "g": g}


def fedavg_m_vr(f, x, rounds, K, S, step_size, fresh_weight, server_step_size=None):
    beta = fresh_weight
    g, x_prev = f.first(x).mean(0), x
    yield {"x": everywhere(x, f), "g": everywhere(g, f), "x_prev": x_prev}
    for r in range(rounds):
        eta = at(step_size, r)
        gamma = server_step_size or eta * mean_steps(S(r), K)
        x_i = everywhere(x, f)
        for _, here in steps(S(r), K):
            xi = f.draw(here)
            g_i = f(here, x_i, xi) + (1 - beta) * (g - f(here, x_prev, xi))
            x_i[here] = x_i[here] - eta * g_i
            yield {"x": x_i, "g": everywhere(g, f), "x_prev": x_prev}
        g = (x - x_i[S(r)]).mean(0) / (eta * mean_steps(S(r), K))
        x_prev, x = x, x - gamma * g
        yield {"x": everywhere(x, f), "g": everywhere(g, f), "x_prev": x_prev}


def scaffold_m(f, x, rounds, K, S, step_size, fresh_weight, server_step_size=None, form="original", c0="gradient"):
    beta = fresh_weight
    c_i = f.first(x) if c0 == "gradient" else np.zeros((f.num, x.size))
    c, g = c_i.mean(0), np.zeros(x.size)
    yield {"x": everywhere(x, f), "g": g, "c_i": c_i, "c": c}
    for r in range(rounds):
        eta = at(step_size, r)
        gamma = server_step_size or eta * mean_steps(S(r), K)
        x_i, c_new = everywhere(x, f), c_i.copy()
        c_new[S(r)] = 0
        for _, here in steps(S(r), K):
            fresh = f(here, x_i, f.draw(here))
            for i, gradient in zip(here, fresh):
                c_new[i] += gradient / K[i]
            corrected = fresh - c_i[here] + c
            if form == "original":
                x_i[here] = x_i[here] - eta * (beta * corrected + (1 - beta) * g)
            else:
                x_i[here] = x_i[here] - eta * (corrected + (1 - beta) * g)
            yield {"x": x_i, "g": g, "c_i": c_i, "c": c}
        g = (x - x_i[S(r)]).mean(0) / (eta * mean_steps(S(r), K))
        x = x - gamma * g
        c = c + (c_new - c_i).sum(0) / f.num
        c_i = c_new
        yield {"x": everywhere(x, f), "g": g, "c_i": c_i, "c": c}


def scaffold_m_vr(f, x, rounds, K, S, step_size, fresh_weight, server_step_size=None, c0="gradient"):
    beta = fresh_weight
    c_i = f.first(x) if c0 == "gradient" else np.zeros((f.num, x.size))
    c = g = c_i.mean(0)
    x_prev = x
    yield {"x": everywhere(x, f), "g": g, "c_i": c_i, "c": c, "x_prev": x_prev}
    for r in range(rounds):
        eta = at(step_size, r)
        gamma = server_step_size or eta * mean_steps(S(r), K)
        x_i, c_new = everywhere(x, f), c_i.copy()
        c_new[S(r)] = 0
        for _, here in steps(S(r), K):
            xi = f.draw(here)
            fresh = f(here, x_i, xi)
            for i, gradient in zip(here, fresh):
                c_new[i] += gradient / K[i]
            g_i = fresh - beta * (c_i[here] - c) + (1 - beta) * (g - f(here, x_prev, xi))
            x_i[here] = x_i[here] - eta * g_i
            yield {"x": x_i, "g": g, "c_i": c_i, "c": c, "x_prev": x_prev}
        g = (x - x_i[S(r)]).mean(0) / (eta * mean_steps(S(r), K))
        x_prev, x = x, x - gamma * g
        c = c + (c_new - c_i).sum(0) / f.num
        c_i = c_new
        yield {"x": everywhere(x, f), "g": g, "c_i": c_i, "c": c, "x_prev": x_prev}


# --- minibatches at one point -----------------------------------------------------------------------


def storm_estimate(f, x, x_prev, g, K, here, beta):
    """(1/SK) Σ [∇f_i(x; ξ) + (1-β)(g - ∇f_i(x_prev; ξ))]."""
    terms = np.zeros((f.num, x.size))
    for _, those in steps(here, K):
        xi = f.draw(those)
        difference = f(those, x, xi) + (1 - beta) * (g - f(those, x_prev, xi))
        for i, term in zip(those, difference):
            terms[i] += term / K[i]
    return terms[here].mean(0)


def mb_storm(f, x, rounds, K, S, step_size=None, fresh_weight=None, server_step_size=None):
    x_prev, g = x, f.first(x).mean(0)
    yield {"x": everywhere(x, f), "x_prev": x_prev, "g": everywhere(g, f)}
    for r in range(rounds):
        g = storm_estimate(f, x, x_prev, g, K, S(r), fresh_weight)
        gamma = server_step_size or at(step_size, r) * mean_steps(S(r), K)
        for _ in range(max(K[i] for i in S(r))):
            yield {"x": everywhere(x, f), "x_prev": x_prev}
        x_prev, x = x, x - gamma * g
        yield {"x": everywhere(x, f), "x_prev": x_prev, "g": everywhere(g, f)}


def ce_lsgd(f, x, rounds, K, S, step_size, fresh_weight, chosen, local="one"):
    x_prev, g = x, f.first(x).mean(0)
    yield {"x": everywhere(x, f), "x_prev": x_prev, "g": everywhere(g, f)}
    for r in range(rounds):
        g = storm_estimate(f, x, x_prev, g, K, S(r), fresh_weight)
        for _ in range(max(K[i] for i in S(r))):
            yield {"x": everywhere(x, f), "x_prev": x_prev}
        ends = []
        for j in [chosen(r)] if local == "one" else S(r):
            w, u = x, g
            for k in range(K[j]):
                w_prev, w = w, w - at(step_size, r) * u
                if k < K[j] - 1:
                    zeta = f.draw([j])[j]
                    u = u + f.gradient(j, w, zeta) - f.gradient(j, w_prev, zeta)
            ends.append(w)
        x_prev, x = x, np.mean(ends, axis=0)
        yield {"x": everywhere(x, f), "x_prev": x_prev, "g": everywhere(g, f)}
