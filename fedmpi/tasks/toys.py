"""Problems with known answers."""

import dataclasses

import numpy as np
import torch
from torch import nn

from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import setting
from fedmpi.ground.streams import FIRST, WHOLE, generator
from fedmpi.tasks.base import BaseTask, LoadedTask, constructor_of, sums_of_ranks


class Point(nn.Module):
    """A model that is nothing but its parameter vector `x`.

    Args:
        x0: [dim] list or array, the starting point.
    """

    def __init__(self, x0):
        super().__init__()
        self.x = nn.Parameter(torch.tensor(x0))

    def forward(self):
        """The point itself."""
        return self.x


@dataclasses.dataclass(frozen=True)
class CounterExample(BaseTask):
    """Three clients in one dimension on which naive adaptive averaging moves away from the minimum.

    f_1 = 3x² and f_2 = f_3 = -x² for |x| <= 1, continued linearly outside with the same slope; their
    mean is x²/3, continued linearly, with the minimum 0. Metric: distance = |x|.

    Source: the FAFED paper, Theorem 1 (with the constant -3 that makes f_1 continuous).
    """

    x0: float = setting(10.0, "the common starting point")

    has_model = False

    def load(self, context, partition):
        if context.num_clients != 3:
            raise UserError(f"clients = {context.num_clients}: task counterexample has 3 clients, use --clients 3")
        return LoadedPoint(context, [self.x0], self._loss, self._loss, distance_to(np.zeros(1)))

    def _loss(self, client, x):
        scale = 3 if client == 0 else -1
        inside = x.clamp(-1, 1)
        return (scale * (inside**2 + 2 * (x - inside).abs())).sum()


@dataclasses.dataclass(frozen=True)
class Quadratic(BaseTask):
    """Strongly convex quadratics f_i(x) = ½ (x - b_i)ᵀ H_i (x - b_i) whose common minimum is known.

    H_i is diagonal with entries in [1, 1 + heterogeneity], b_i is normal with that deviation, so 0
    makes the clients equal. Gradients are exact. Metric: distance = ‖x - x*‖.
    """

    dim: int = setting(10, "number of variables", least=1)
    heterogeneity: float = setting(1.0, "how unlike the clients are", least=0)

    has_model = False

    def load(self, context, partition):
        curvature, centre = [], []
        for client in range(context.num_clients):
            draw = generator(context.seed, "quadratic", client)
            curvature.append(1 + self.heterogeneity * draw.random(self.dim))
            centre.append(self.heterogeneity * draw.standard_normal(self.dim))
        curvature, centre = np.array(curvature), np.array(centre)
        minimum = (curvature * centre).sum(0) / curvature.sum(0)
        h = torch.tensor(curvature, dtype=context.dtype, device=context.device)
        b = torch.tensor(centre, dtype=context.dtype, device=context.device)

        def loss(client, x):
            return 0.5 * (h[client] * (x - b[client]) ** 2).sum()

        return LoadedPoint(context, np.ones(self.dim, dtype=np.float32), loss, loss, distance_to(minimum))


@dataclasses.dataclass(frozen=True)
class Slow(BaseTask):
    """Non-convex, noisy, unlike clients, and slow: no stationary point is near, and all constants are known exactly.

    x = (u, v), f_i = Σ h(u_j) + Σ (a_ij g(v_j) - c_ij v_j), h(u) = (1 + u²)^(-p/2) / p, g(v) = √(1 + v²) - 1. Over the
    clients the mean of a_ij is 1 and that of c_ij is 0, so f = Σ h + Σ g, with infimum 0 at u = ∞. A sample multiplies
    h' and a_ij g' of every variable by 1 + δ, δ uniform in [-D, D], and adds a normal vector of total variance s²; a
    minibatch is the mean of such samples. Start: u = 1, v = 0. Metric: gradient_norm = ‖∇f(x)‖.

    `problem(num_clients, seed)` has the constants.
    """

    num_slow: int = setting(4, "number of variables u", least=1)
    num_unlike: int = setting(8, "number of variables v", least=1)
    power: float = setting(0.25, "p of h; near 0 it is slowest", above=0)
    heterogeneity: float = setting(1.0, "root of the mean of ‖c_i‖²; 2 (a_ij - 1) is so or minus so", least=0)
    curvature_noise: float = setting(0.5, "D", least=0, most=1)
    noise: float = setting(1.0, "s", least=0)

    has_model = False

    def problem(self, num_clients, seed=0):
        """The `SlowProblem` with these settings."""
        return SlowProblem(self, num_clients, seed)

    def load(self, context, partition):
        return LoadedSamples(context, self.problem(context.num_clients, context.seed))


class SlowProblem:
    """The functions and constants of the tasks `slow` and `saddle`.

    Args:
        task: a `Slow`. num_clients: N. seed: of a_ij and c_ij.

    Attributes:
        weight, linear: [N, dim], a_ij and c_ij, with -1 and 0 for the variables u.
        start: [dim].
        L: smoothness of every f_i; L_f: of f; L_mean_square, L_sample: of a sample's loss, in mean square and at most.
        Delta: f(x_0) - inf f. G: supremum of ‖∇f_i‖. G_0: mean over i of ‖∇f_i(x_0)‖².
        sigma: supremum of a sample's deviation. zeta: supremum of ‖∇f_i - ∇f_j‖ over pairs; zeta_mean: of the root of
            the mean over i of ‖∇f_i - ∇f‖².
    """

    num_dual = 0

    def __init__(self, task, num_clients, seed):
        u, v, N, zeta = task.num_slow, task.num_unlike, num_clients, task.heterogeneity
        draw = generator(seed, "slow", N)
        signs = np.arange(N) % 2 * 2.0 - 1
        if N % 2:
            signs[-1] = 0
        unlike = np.stack([draw.permutation(signs) for _ in range(v)], axis=1)
        c = draw.standard_normal((N, v))
        c -= c.mean(0)
        c *= zeta / max(np.sqrt((c**2).sum(1).mean()), 1e-30)
        self.task, self.num_clients, self.dim = task, N, u + v
        self.weight = np.hstack([-np.ones((N, u)), 1 + zeta / 2 * unlike])
        self.linear = np.hstack([np.zeros((N, u)), c])
        self.power = np.r_[np.full(u, -task.power / 2), np.full(v, 0.5)]  # of 1 + x² in h and g
        self.start = np.r_[np.ones(u), np.zeros(v)].astype(np.float32)
        self._mean_weight = np.r_[-np.ones(u), np.ones(v)]
        p, D = task.power, task.curvature_noise
        a, c = np.abs(self.weight[:, u:]), np.abs(self.linear[:, u:])  # of the variables v
        slope = u / (1 + p) * (1 + 1 / (1 + p)) ** (-p - 2)  # the largest |h'| of the variables u, squared and summed
        self.L_f, self.L, self.Delta = 1.0, max(1.0, a.max()), u * 2 ** (-p / 2) / p
        self.sigma = np.sqrt(task.noise**2 + D**2 / 3 * (slope + (a**2).sum(1).max()))
        self.G = np.sqrt(slope + ((a + c) ** 2).sum(1).max())
        self.G_0 = u * 2.0 ** (-p - 2) + (self.linear**2).sum(1).mean()
        a, c = self.weight - self._mean_weight, self.linear
        self.zeta_mean = np.sqrt(((a**2).mean(0) + 2 * np.abs((a * c).mean(0)) + (c**2).mean(0)).sum())

    @property
    def L_mean_square(self):
        return self.L * np.sqrt(1 + self.task.curvature_noise**2 / 3)

    @property
    def L_sample(self):
        return self.L * (1 + self.task.curvature_noise)

    @property
    def zeta(self):
        a, c = (np.abs(of_clients[:, None] - of_clients) for of_clients in (self.weight, self.linear))  # of all pairs
        return np.sqrt(((a + c) ** 2).sum(2).max())

    def draw(self, normal, uniform, size):
        """The noise (δ, z) of a mean of `size` samples, 0 of an exact gradient, by functions shape -> tensor.

        `normal` is standard, `uniform` in [0, 1).
        """
        if size == 0:
            return 0.0, 0.0
        count = self.dim + self.num_dual
        z = normal(count) * (self.task.noise / (self.dim * size) ** 0.5)
        return (2 * uniform(size, self.dim).mean(0) - 1) * self.task.curvature_noise, z

    def loss(self, client, x, delta=0.0, z=0.0):
        """f_i(x) on the noise (δ, z): a 0-d tensor."""
        power, weight, linear = (x.new_tensor(part) for part in (self.power, self.weight[client], self.linear[client]))
        h = ((1 + x * x) ** power - (power > 0).to(x)) / (2 * power)
        return (weight * (1 + delta) * h - linear * x + z * x).sum()

    def gradient(self, client, x, delta=0.0, z=0.0):
        """∇f_i on the noise (δ, z), of [..., dim] numpy vectors side by side; of client None: ∇f, the mean."""
        weight = self._mean_weight if client is None else self.weight[client]
        linear = 0.0 if client is None else self.linear[client]
        return weight * (1 + delta) * x * (1 + x * x) ** (self.power - 1) - linear + z

    def metrics(self, x):
        """Name -> value at a point."""
        return {"gradient_norm": float(np.linalg.norm(self.gradient(None, x)))}


class LoadedPoint(LoadedTask):
    """A task whose clients' losses are functions of the point.

    Args:
        context: a `RankContext`. x0: the starting point.
        loss: `loss(client, x) -> 0-d tensor`, on a sample of the client. exact_loss: the same without noise.
        metrics: `metrics(x) -> {name: float}`, x a float64 array.
    """

    goal = ("distance", -1)

    def __init__(self, context, x0, loss, exact_loss, metrics):
        self._context, self._x0 = context, x0
        self._loss, self._exact_loss, self._metrics = loss, exact_loss, metrics

    def build_model(self, model_class, model_settings):
        return Point(self._x0)

    def constructor(self, model_class, model_settings):
        return constructor_of(Point, x0=np.asarray(self._x0).tolist())

    def try_out(self, module, client):
        """Nothing to check: the module is ours."""

    def num_samples(self, client):
        return 1

    def batch(self, client, indices):
        return client

    def loss(self, module, batch):
        return self._loss(batch, module())

    def evaluate(self, module, link):
        point = module()
        own_loss = sum(self._exact_loss(client, point).item() for client in self._context.clients)
        loss = sums_of_ranks(link, [own_loss]).item() / link.num_present(self._context.num_clients)
        return {"train_loss": loss, **self._metrics(point.double().cpu().numpy())}


class LoadedSamples(LoadedPoint):
    """A `SlowProblem` as a task: every minibatch is new."""

    goal = ("gradient_norm", -1)

    def __init__(self, context, problem):
        def loss(batch, x):
            client, size = batch
            new = {"dtype": x.dtype, "device": x.device}
            draws = (lambda *shape: torch.randn(*shape, **new)), (lambda *shape: torch.rand(*shape, **new))
            return problem.loss(client, x, *problem.draw(*draws, size))

        super().__init__(context, problem.start, loss, problem.loss, problem.metrics)
        self._problem = problem

    def sampler(self, client, batch_size, first_batch_size, seed, device):
        return _NewSamples(batch_size, first_batch_size)

    def batch(self, client, indices):
        return client, len(indices)

    def ascent(self, flat):
        return slice(self._problem.dim, flat.dim) if self._problem.num_dual else None


@dataclasses.dataclass(frozen=True)
class _NewSamples:
    """Only the number of samples is used, 0 for all data."""

    batch_size: int
    first_batch_size: int
    batches_per_pass = 1

    def __call__(self, number):
        return range({FIRST: self.first_batch_size, WHOLE: 0}.get(number, self.batch_size))


def distance_to(point):
    """The metrics of a problem whose solution is known: how far `x` is from it."""
    return lambda x: {"distance": float(np.linalg.norm(x - point))}
