"""Min-max problems with known saddles."""

import dataclasses

import numpy as np
import torch

from fedmpi.settings import setting
from fedmpi.streams import generator
from fedmpi.tasks.auc import auc_loss
from fedmpi.tasks.base import LoadedTask, Task, constructor_of
from fedmpi.tasks.toys import Point


@dataclasses.dataclass(frozen=True)
class SaddleQuadratic(Task):
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

        def loss(client, z, noise):
            away = z - b[client]
            return 0.5 * away @ H[client] @ away + noise * (torch.randn_like(z) @ z)

        def metrics(z):
            return {"distance": float(np.linalg.norm(z - saddle))}

        return _LoadedSaddle(context, np.ones(size, dtype=np.float32), self.dim, loss, metrics, self.noise)


@dataclasses.dataclass(frozen=True)
class TwoParameterAUC(Task):
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

        def loss(client, z, noise):
            m1, m2, a, b, w = z
            value = auc_loss(m1 * torch.sigmoid(m2 * x), positive, 0.5, a, b, w)
            return value + noise * (torch.randn_like(z) @ z)

        def metrics(z):
            m1, m2, *rest = z
            h = m1 / (1 + np.exp(-m2 * np.array([1, -1])))  # the means of the positive and the negative scores
            gap = (1 - m1 * np.tanh(m2 / 2)) ** 2 / 4
            return {"gap": float(gap), "distance": float(np.linalg.norm(rest - np.r_[h, h[1] - h[0]]))}

        start = [self.m1, self.m2, 1.0, 0.0, 0.0]
        return _LoadedSaddle(context, start, 4, loss, metrics, self.noise, goal=("gap", -1))


class _LoadedSaddle(LoadedTask):
    """A task whose clients' losses are functions of the point; every sample differs by its noise only."""

    def __init__(self, context, z0, num_primal, loss, metrics, noise, goal=("distance", -1)):
        self._context, self._z0, self._num_primal = context, z0, num_primal
        self._loss, self._metrics, self._noise, self.goal = loss, metrics, noise, goal

    def build_model(self, model_class, model_settings):
        return Point(self._z0)

    def constructor(self, model_class, model_settings):
        return constructor_of(Point, x0=np.asarray(self._z0).tolist())

    def try_out(self, module, client):
        """Nothing to check: the module is ours."""

    def ascent(self, flat):
        return slice(self._num_primal, flat.dim)

    def num_samples(self, client):
        return 1

    def batch(self, client, indices):
        return client

    def loss(self, module, batch):
        return self._loss(batch, module(), self._noise)

    def evaluate(self, module, link):
        point = module()
        mine = sum(self._loss(client, point, 0.0).item() for client in self._context.clients)
        total = link.allgather([mine]).sum()
        return {
            "train_loss": total / link.num_present(self._context.num_clients),
            **self._metrics(point.double().cpu().numpy()),
        }
