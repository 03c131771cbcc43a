"""Problems with known answers."""

import dataclasses

import numpy as np
import torch
from torch import nn

from fedmpi.errors import UserError
from fedmpi.settings import setting
from fedmpi.streams import generator
from fedmpi.tasks.base import BaseTask, LoadedTask, constructor_of


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
        mine = sum(self._exact_loss(client, point).item() for client in self._context.clients)
        loss = link.allgather([mine]).sum() / link.num_present(self._context.num_clients)
        return {"train_loss": loss, **self._metrics(point.double().cpu().numpy())}


def distance_to(point):
    """The metrics of a problem whose solution is known: how far `x` is from it."""
    return lambda x: {"distance": float(np.linalg.norm(x - point))}
