"""One-process transcriptions of the min-max and zeroth-order papers, in float64 numpy.

Written from the papers' listings and independent of fedmpi: θ descends and w ascends by their own
lines, with their own signs. `grad(i, z, k)` is client i's plain gradient of F at z = (θ, w) on its
sample k (-1: the initial batch); `d1` is the length of θ. Each returns the list of z after every
communication, z_0 first. `active(s)` are the clients of round s; None: all. `q` is the number of
local steps, or a list of one number per client; those with fewer wait for the average.
"""

import itertools

import numpy as np


def participants_of(n, active, s):
    return list(range(n)) if active is None else list(active(s))


def steps_of(n, q):
    return [q] * n if isinstance(q, int) else list(q)


def local_sgda(grad, z0, d1, n, rounds, q, eta_theta, eta_w, active=None):
    z, draws, trace, K = np.array(z0, float), [0] * n, [np.array(z0, float)], steps_of(n, q)
    for s in range(rounds):
        moved = []
        for i in participants_of(n, active, s):
            theta, w = z[:d1].copy(), z[d1:].copy()
            for _ in range(K[i]):
                g = grad(i, np.concatenate([theta, w]), draws[i])
                draws[i] += 1
                theta, w = theta - eta_theta * g[:d1], w + eta_w * g[d1:]
            moved.append(np.concatenate([theta, w]))
        z = np.mean(moved, axis=0)
        trace.append(z)
    return trace


def momentum_local_sgda(grad, z0, d1, n, rounds, q, eta_theta, eta_w, beta_theta, beta_w, kappa):
    theta, w = np.tile(z0[:d1], (n, 1)), np.tile(z0[d1:], (n, 1))
    g = np.array([grad(i, np.array(z0, float), -1) for i in range(n)])
    D, E = g[:, :d1].copy(), g[:, d1:].copy()
    trace, draws, K = [np.array(z0, float)], [0] * n, steps_of(n, q)
    q = max(K)
    for t in range(rounds * q):
        for i in [i for i in range(n) if t % q < K[i]]:
            theta[i], w[i] = theta[i] - kappa * eta_theta * D[i], w[i] + kappa * eta_w * E[i]
            g = grad(i, np.concatenate([theta[i], w[i]]), draws[i])
            draws[i] += 1
            D[i] = (1 - beta_theta * kappa) * D[i] + beta_theta * kappa * g[:d1]
            E[i] = (1 - beta_w * kappa) * E[i] + beta_w * kappa * g[d1:]
        if (t + 1) % q == 0:
            theta[:], w[:], D[:], E[:] = theta.mean(0), w.mean(0), D.mean(0), E.mean(0)
            trace.append(np.concatenate([theta[0], w[0]]))
    return trace


def at(value, t):
    """A number, or the value of a function of t = 1, 2, ..."""
    return value(t) if callable(value) else value


def fmgda(grad, z0, d1, n, rounds, q, eta_theta, eta_w, alpha, beta, active=None):
    """Algorithm 1 as printed: iteration t moves (averaged if q divides t), then estimates.

    eta_theta, eta_w, alpha and beta are numbers or functions of t. A client with K_i < q steps has its
    last move with the others', at the average.
    """
    K = steps_of(n, q)
    q = max(K)
    z, D, E = np.tile(np.array(z0, float), (n, 1)), [None] * n, [None] * n
    for i in range(n):
        g = grad(i, z[i], -1)
        D[i], E[i] = g[:d1], g[d1:]
    old, draws, trace, present = z.copy(), [0] * n, [np.array(z0, float)], set(range(n))
    for t in range(1, rounds * q + 1):
        working = participants_of(n, active, (t - 1) // q)  # the block that ends with the average at t = q, 2q, ...
        if t % q:
            working = [i for i in working if t % q < K[i]]
        for i in working:
            old[i] = z[i]
        if t % q == 0:
            mean_D, mean_E = np.mean([D[i] for i in working], 0), np.mean([E[i] for i in working], 0)
            theta = np.mean([old[i][:d1] - at(eta_theta, t) * mean_D for i in working], 0)
            w = np.mean([old[i][d1:] + at(eta_w, t) * mean_E for i in working], 0)
            for i in range(n):
                z[i], D[i], E[i] = np.concatenate([theta, w]), mean_D.copy(), mean_E.copy()
            trace.append(z[0].copy())
            present = set(working)
            working = participants_of(n, active, t // q)  # who takes part
            for i in working:
                if i not in present:
                    old[i] = z[i]
        else:
            for i in working:
                z[i] = np.concatenate([old[i][:d1] - at(eta_theta, t) * D[i], old[i][d1:] + at(eta_w, t) * E[i]])
        for i in working:
            g, g_old = grad(i, z[i], draws[i]), grad(i, old[i], draws[i])
            draws[i] += 1
            D[i] = g[:d1] + (1 - at(alpha, t)) * (D[i] - g_old[:d1])
            E[i] = g[d1:] + (1 - at(beta, t)) * (E[i] - g_old[d1:])
    return trace


def coda(
    grad,
    z0,
    d1,
    n,
    stages,
    stage_rounds,
    q,
    eta,
    eta_w,
    prox,
    decay=3.0,
    closed=False,
    average=False,
    active=None,
    scores=None,
    growth=1,
):
    """`scores(i, z, k)` gives (h, labels ±1) of a sample, for the dual restart; None: w goes on."""
    theta, w, draws, trace = z0[:d1].astype(float), z0[d1:].astype(float), [0] * n, [np.array(z0, float)]
    K = steps_of(n, q)
    rounds = itertools.count()
    for s in range(stages):
        ref, visited, length = theta.copy(), [], round(stage_rounds * growth**s)
        for r in range(length):
            ends, means, working = [], [], participants_of(n, active, next(rounds))
            for i in working:
                th, dual, seen = theta.copy(), w.copy(), []
                for _ in range(K[i]):
                    g = grad(i, np.concatenate([th, dual]), draws[i])
                    draws[i] += 1
                    if closed:
                        th = (th / eta + prox * ref - g[:d1]) / (1 / eta + prox)
                    else:
                        th = th - eta * (g[:d1] + prox * (th - ref))
                    dual = dual + eta_w * g[d1:]
                    seen.append(th)
                ends.append(np.concatenate([th, dual]))
                means.append(np.mean(seen, axis=0))
            mean = np.mean(ends, axis=0)
            theta, w = mean[:d1], mean[d1:]
            visited.append(np.mean(means, axis=0))
            if r == length - 1:
                if average:
                    theta = np.mean(visited, axis=0)
                if scores is not None:
                    pooled = [scores(i, np.concatenate([theta, w]), draws[i]) for i in working]
                    h, labels = (np.concatenate(column) for column in zip(*pooled))
                    w = np.array([h[labels == -1].mean() - h[labels == 1].mean()])
                    for i in working:
                        draws[i] += 1
            trace.append(np.concatenate([theta, w]))
        eta, eta_w = eta / decay, eta_w / decay
    return trace


def codasca(
    grad,
    z0,
    d1,
    n,
    stages,
    stage_rounds,
    q,
    eta,
    eta_w,
    prox,
    decay=3.0,
    eta_g=1.0,
    active=None,
    controls=None,
    growth=1,
):
    z, draws, trace, K = np.array(z0, float), [0] * n, [np.array(z0, float)], steps_of(n, q)
    c_theta, c_w = np.zeros((n, d1)), np.zeros((n, len(z0) - d1))
    C_theta, C_w, rounds = np.zeros(d1), np.zeros(len(z0) - d1), itertools.count()
    for s in range(stages):
        ref = z[:d1].copy()
        for _ in range(round(stage_rounds * growth**s)):
            working = participants_of(n, active, next(rounds))
            ends, change_theta, change_w = [], np.zeros(d1), np.zeros(len(z0) - d1)
            for i in working:
                theta, w = z[:d1].copy(), z[d1:].copy()
                for _ in range(K[i]):
                    g = grad(i, np.concatenate([theta, w]), draws[i])
                    draws[i] += 1
                    theta = theta - eta * (g[:d1] + prox * (theta - ref) - c_theta[i] + C_theta)
                    w = w + eta_w * (g[d1:] - c_w[i] + C_w)
                new_theta = c_theta[i] - C_theta + (z[:d1] - theta) / (K[i] * eta)
                new_w = c_w[i] - C_w + (w - z[d1:]) / (K[i] * eta_w)
                change_theta += new_theta - c_theta[i]
                change_w += new_w - c_w[i]
                c_theta[i], c_w[i] = new_theta, new_w
                ends.append(np.concatenate([theta, w]))
            C_theta, C_w = C_theta + change_theta / n, C_w + change_w / n
            z = z + eta_g * (np.mean(ends, axis=0) - z)
            trace.append(z)
            if controls is not None:
                controls.append((c_theta.copy(), c_w.copy(), C_theta, C_w))
        eta, eta_w = eta / decay, eta_w / decay
    return trace


def two_point(loss, i, x, k, directions, mu):
    """d / (μ b2) Σ_n [F(x + μ v_n) - F(x)] v_n, sums written out."""
    v = np.asarray(directions(i, k), float)
    total = np.zeros(len(x))
    for row in v:
        total += (loss(i, x + mu * row, k) - loss(i, x, k)) * row
    return len(x) / (mu * len(v)) * total


def fedzo(loss, directions, x0, n, rounds, q, eta, mu, active=None):
    x, draws, trace = np.array(x0, float), [0] * n, [np.array(x0, float)]
    for s in range(rounds):
        ends = []
        for i in participants_of(n, active, s):
            x_i = x.copy()
            for _ in range(q):
                x_i = x_i - eta * two_point(loss, i, x_i, draws[i], directions, mu)
                draws[i] += 1
            ends.append(x_i)
        x = np.mean(ends, axis=0)
        trace.append(x)
    return trace


def fafedzo(loss, directions, x0, n, rounds, q, eta, mu, alpha, beta, rho):
    """ZO Algorithm 1 as resolved: FAFED on estimates; both of a pair on V_t."""

    def estimate(i, x, k):
        return two_point(loss, i, x, k, directions, mu)

    x = np.tile(np.array(x0, float), (n, 1))
    first = np.array([estimate(i, x[i], -1) for i in range(n)])
    m, v = np.tile(first.mean(0), (n, 1)), np.tile((first**2).mean(0), (n, 1))
    A = np.sqrt(v[0]) + rho
    old = x.copy()
    x = x - eta * m
    trace = [x[0].copy()]
    for t in range(1, rounds * q + 1):
        for i in range(n):
            g, g_old = estimate(i, x[i], t - 1), estimate(i, old[i], t - 1)
            m[i] = g + (1 - alpha) * (m[i] - g_old)
            v[i] = beta * v[i] + (1 - beta) * g**2
        old = x.copy()
        if t % q:
            x = x - eta * m / A
        else:
            v[:], m[:] = v.mean(0), m.mean(0)
            A = np.sqrt(v[0]) + rho
            x = np.tile(x.mean(0) - eta * m[0] / A, (n, 1))
            trace.append(x[0].copy())
    return trace
