"""Adam on the clients, its moments averaged with the model."""

import dataclasses

import torch

from fedmpi.algorithms.base import Algorithm, Client, Oracle, Server
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class LocalAdam(Algorithm):
    """Adam's steps on every client; the model and both moments are averaged every q steps.

    Source: Cheng, Glasgow, "Convergence of Distributed Adaptive Optimization with Local Updates", ICLR 2025,
    arXiv:2409.13155, Local Adam; its clipping of gradients is the run's setting clip_norm (by the norm, not by
    coordinate).
    Paper to code: x, u, v -> client.x, client.m, client.v; η -> step_size; β1 -> momentum;
    β2 -> second_moment_decay; λ -> epsilon.
    Special case: β1 = 0, β2 = 1 and λ = 1 is FedAvg, because v stays 0.

    No bias correction, as in the paper.
    """

    name = "local_adam"

    step_size: float = setting(1e-3, "η, step size", above=0)
    momentum: float = setting(0.9, "β1, weight of the old direction", least=0, below=1)
    second_moment_decay: float = setting(0.999, "β2, weight of the old second moment", least=0, most=1)
    epsilon: float = setting(1e-6, "λ: the denominator is √(v + λ²)", above=0)

    clock = "iteration"
    exchanged = ("x", "m", "v")
    kinds = {"m": "gradient", "v": "square"}

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """m_i and v_i as Adam's, then x_i <- x_i - η m_i / √(v_i + λ²)."""
        g = oracle.gradient(client.x, oracle.draw())
        client.m.lerp_(g, 1 - self.momentum)
        client.v.lerp_(g.square_(), 1 - self.second_moment_decay)
        root = torch.add(client.v, self.epsilon**2, out=g).sqrt_()
        client.x.addcdiv_(client.m, root, value=-self.eta(client))
