"""Adam on the clients, its moments averaged with the model."""

import dataclasses

import torch

from fedmpi.algorithms.base import Algorithm, Client, Exchange, Oracle, Server
from fedmpi.algorithms.periods import in_periods
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class LocalAdam(Algorithm):
    """Adam's steps on every client; the model is averaged every q steps, and so are both moments, or more rarely.

    Source: Cheng, Glasgow, "Convergence of Distributed Adaptive Optimization with Local Updates", ICLR 2025,
    arXiv:2409.13155, Local Adam; its clipping of gradients is the run's setting clip_norm (by the norm, not by
    coordinate).
    Paper to code: x, u, v -> client.x, client.m, client.v; η -> step_size; β1 -> momentum;
    β2 -> second_moment_decay; λ -> epsilon.
    Special case: β1 = 0, β2 = 1 and λ = 1 is FedAvg, because v stays 0.

    No bias correction, as in the paper. With m_every or v_every above 1 it is DES-LOC (`DESLOC`).
    """

    name = "local_adam"

    step_size: float = setting(1e-3, "η, step size", above=0)
    momentum: float = setting(0.9, "β1, weight of the old direction", least=0, below=1)
    second_moment_decay: float = setting(0.999, "β2, weight of the old second moment", least=0, most=1)
    epsilon: float = setting(1e-6, "λ: the denominator is √(v + λ²)", above=0)
    m_every: int = setting(1, "K_m / K_x, rounds between two averages of m", least=1)
    v_every: int = setting(1, "K_v / K_x, rounds between two averages of v", least=1)

    clock = "iteration"
    exchanged = ("x", "m", "v")
    kinds = {"m": "gradient", "v": "square"}

    def exchanges(self) -> tuple[Exchange, ...]:
        """x, m and v; those with a period above 1 apart."""
        return in_periods(self.exchanged, {"m": self.m_every, "v": self.v_every}, {"x": self.server_step})

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """m_i and v_i as Adam's, then x_i <- x_i - η m_i / √(v_i + λ²)."""
        g = oracle.gradient(client.x, oracle.draw())
        client.m.lerp_(g, 1 - self.momentum)
        client.v.lerp_(g.square_(), 1 - self.second_moment_decay)
        root = torch.add(client.v, self.epsilon**2, out=g).sqrt_()
        client.x.addcdiv_(client.m, root, value=-self.eta(client))


@dataclasses.dataclass(frozen=True)
class DESLOC(LocalAdam):
    """Local Adam whose moments are averaged more rarely than the model, each with a period of its own.

    Source: Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation Models",
    ICLR 2026, arXiv:2505.22549, Algorithm 1 with Adam.
    Paper to code: x, u, v -> client.x, client.m, client.v; K_x -> q, the local steps of a round; K_u / K_x, K_v / K_x
    -> m_every, v_every; η -> step_size; β1 -> momentum; β2 -> second_moment_decay; λ -> epsilon.
    Special case: m_every = v_every = 1 is local Adam.
    Differs from the paper: no bias correction, as in `LocalAdam`; averages are made after the step, where the authors
    make them before it: the iterates are the same.

    Between two averages, a row is the client's own; the average also replaces that of a client which is absent.
    """

    name = "desloc"
    also_called = ("des_loc", "desynced_local_adam")

    m_every: int = setting(3, "K_u / K_x, rounds between two averages of m", least=1)
    v_every: int = setting(6, "K_v / K_x, rounds between two averages of v", least=1)
