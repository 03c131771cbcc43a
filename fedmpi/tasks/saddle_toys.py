"""Min-max problems with known saddles."""

import dataclasses

import numpy as np
import torch

from fedmpi.ground.settings import setting
from fedmpi.ground.streams import generator
from fedmpi.tasks.auc import auc_loss
from fedmpi.tasks.base import BaseTask
from fedmpi.tasks.toys import LoadedPoint, Slow, SlowProblem, distance_to


@dataclasses.dataclass(frozen=True)
class SaddleQuadratic(BaseTask):
    """Quadratics f_i(θ, w), strongly convex in θ and strongly concave in w, whose common saddle is known.

    f_i = ½ (z - b_i)ᵀ H_i (z - b_i) with z = (θ, w) and H_i = [[A_i, B], [Bᵀ, -C_i]]: A_i and C_i are
    diagonal with entries in [1, 1 + heterogeneity], B is normal, b_i is normal with deviation
    heterogeneity; 0 makes the clients equal. Metric: distance = ‖z - z*‖.
    """

    name = "saddle_quadratic"

    dim: int = setting(6, "number of variables that descend", least=1)
    dual_dim: int = setting(3, "number of variables that ascend", least=1)
    heterogeneity: float = setting(1.0, "how unlike the clients are", least=0)
    coupling: float = setting(1.0, "deviation of the entries of B", least=0)
    noise: float = setting(0.0, "deviation of the noise in each gradient", least=0)

    has_model = False

    def load(self, context, partition):
        size, sign = self.dim + self.dual_dim, np.r_[np.ones(self.dim), -np.ones(self.dual_dim)]
        coupling = self.coupling * generator(context.seed, "saddle").standard_normal((self.dim, self.dual_dim))
        H, b = np.zeros((context.num_clients, size, size)), np.zeros((context.num_clients, size))
        for client in range(context.num_clients):
            draw = generator(context.seed, "saddle", client)
            H[client] = np.diag(sign * (1 + self.heterogeneity * draw.random(size)))
            H[client, : self.dim, self.dim :] = coupling
            H[client, self.dim :, : self.dim] = coupling.T
            b[client] = self.heterogeneity * draw.standard_normal(size)
        saddle = np.linalg.solve(H.sum(0), np.einsum("cij,cj->i", H, b))
        H, b = (torch.tensor(t, dtype=context.dtype, device=context.device) for t in (H, b))

        def exact_loss(client, z):
            away = z - b[client]
            return 0.5 * away @ H[client] @ away

        loss, start = with_noise(exact_loss, self.noise), np.ones(size, dtype=np.float32)
        return _LoadedSaddle(context, start, self.dim, loss, exact_loss, distance_to(saddle))


@dataclasses.dataclass(frozen=True)
class TwoParameterAUC(BaseTask):
    """The smallest deep AUC problem: the network h = m1 sigmoid(m2 x) and the points (1, +), (-1, -).

    z = (m1, m2, a, b, w). After min over a and b and max over w the objective is
    Φ = ¼ ((1 - m1 tanh(m2/2))² - 1), with minimum -¼ where m1 tanh(m2/2) = 1; (0, 0) is stationary
    and no minimum, so Φ has no Polyak-Łojasiewicz constant. All clients are equal.
    Metrics: gap = Φ + ¼; distance = how far (a, b, w) is from its optimum for this network.

    Source: "On the Convergence of Federated Deep AUC Maximization", section 5.3.
    """

    name = "two_parameter_auc"

    m1: float = setting(0.5, "m1 of the starting point")
    m2: float = setting(0.5, "m2 of the starting point")
    noise: float = setting(0.0, "deviation of the noise in each gradient", least=0)

    has_model = False

    def load(self, context, partition):
        x = torch.tensor([1.0, -1.0], dtype=context.dtype, device=context.device)
        positive = torch.tensor([1, 0], device=context.device)

        def exact_loss(client, z):
            m1, m2, a, b, w = z
            return auc_loss(m1 * torch.sigmoid(m2 * x), positive, 0.5, a, b, w)

        def metrics(z):
            m1, m2, *rest = z
            h = m1 / (1 + np.exp(-m2 * np.array([1, -1])))  # the means of the positive and the negative scores
            gap = (1 - m1 * np.tanh(m2 / 2)) ** 2 / 4
            return {"gap": float(gap), "distance": float(np.linalg.norm(rest - np.r_[h, h[1] - h[0]]))}

        start = [self.m1, self.m2, 1.0, 0.0, 0.0]
        loss = with_noise(exact_loss, self.noise)
        return _LoadedSaddle(context, start, 4, loss, exact_loss, metrics, goal=("gap", -1))


@dataclasses.dataclass(frozen=True)
class Saddle(Slow):
    """The task `slow` under a maximum: Φ = max over w is its f, up to a constant, and all constants are known exactly.

    F_i = f_i(θ) - (μ/2) ‖w - k θ - e_i‖², where the mean of e_i is 0, so w*(θ) = k θ. The normal noise is added to both
    blocks, with total variance s² in each. Start: θ as in `slow`, w = k θ. Metrics: gradient_norm = ‖∇Φ(θ)‖;
    distance = ‖w - k θ‖.
    """

    concavity: float = setting(1.0, "μ, strong concavity in w", above=0)
    coupling: float = setting(1.0, "k", least=0)

    def problem(self, num_clients, seed=0):
        return SaddleProblem(self, num_clients, seed)


class SaddleProblem(SlowProblem):
    """The functions and constants of the task `saddle`, of which `SlowProblem` has the others.

    Attributes:
        shift: [N, dim], e_i.
        L_11, L_12, L_22: smoothness of every F_i, by blocks; L_f: the largest of them and 1.
        mu, kappa: μ, and L_f / μ. L: smoothness of Φ that the theorem uses, L_f (1 + κ).
        w_distance: ‖w_0 - w*(θ_0)‖. G: infinite.
    """

    def __init__(self, task, num_clients, seed):
        super().__init__(task, num_clients, seed)
        e = generator(seed, "saddle", num_clients).standard_normal((num_clients, self.dim))
        e -= e.mean(0)
        self.shift = e * task.heterogeneity / max(np.sqrt((e**2).sum(1).mean()), 1e-30)
        self.num_dual, self.mu = self.dim, task.concavity
        self.start = np.r_[self.start, task.coupling * self.start].astype(np.float32)
        bend = self.mu * task.coupling**2
        self.L_11 = max(1 + bend, np.abs(self.weight[:, task.num_slow :]).max() - bend)
        self.L_12, self.L_22 = self.mu * task.coupling, self.mu
        self.L_f = max(self.L_11, self.L_12, self.L_22, 1.0)
        self.kappa = self.L_f / self.mu
        self.w_distance, self.G, self.L = 0.0, np.inf, self.L_f * (1 + self.kappa)

    @property
    def zeta(self):
        """Of the larger block."""
        a, c, e = (of_clients[:, None] - of_clients for of_clients in (self.weight, self.linear, self.shift))
        primal = np.abs(a) + np.abs(c + self.L_12 * e)
        return np.sqrt(max((primal**2).sum(2).max(), self.mu**2 * (e**2).sum(2).max()))

    def loss(self, client, x, delta=0.0, z=0.0):
        """F_i(θ, w) on the noise."""
        theta, w = x[: self.dim], x[self.dim :]
        away = w - self.task.coupling * theta - x.new_tensor(self.shift[client])
        return super().loss(client, theta, delta) - self.mu / 2 * (away * away).sum() + (z * x).sum()

    def gradient(self, client, x, delta=0.0, z=0.0):
        """(∇_θ F_i, ∇_w F_i) on the noise; of client None (∇Φ, 0)."""
        theta, w = x[..., : self.dim], x[..., self.dim :]
        primal = super().gradient(client, theta, delta)
        if client is None:
            return np.concatenate([primal, np.zeros_like(w)], axis=-1)
        pull = self.mu * (w - self.task.coupling * theta - self.shift[client])
        return np.concatenate([primal + self.task.coupling * pull, -pull], axis=-1) + z

    def metrics(self, x):
        theta, w = np.split(x, 2)
        return super().metrics(x) | {"distance": float(np.linalg.norm(w - self.task.coupling * theta))}


def with_noise(loss, deviation):
    """A loss whose gradient has further normal noise of this standard deviation."""
    return lambda client, z: loss(client, z) + deviation * (torch.randn_like(z) @ z)


class _LoadedSaddle(LoadedPoint):
    """A task whose clients' losses are functions of the point, the last variables of which ascend.

    Args:
        num_primal: how many variables descend. goal: see `LoadedTask`. The others: see `LoadedPoint`.
    """

    def __init__(self, context, z0, num_primal, loss, exact_loss, metrics, goal=("distance", -1)):
        super().__init__(context, z0, loss, exact_loss, metrics)
        self._num_primal, self.goal = num_primal, goal

    def ascent(self, flat):
        return slice(self._num_primal, flat.dim)
