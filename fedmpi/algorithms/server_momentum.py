"""Local steps, and an optimiser with momentum on the server, which follows the clients' mean move."""

import dataclasses
import math

import torch

from fedmpi.algorithms.base import Client, Oracle, Server
from fedmpi.algorithms.fedavg import FedAvg
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class FedAvgServerMomentum(FedAvg):
    """FedAvg whose server moves with momentum along the clients' mean move: the FedAvgM of most other systems.

    Not FedAvg-M (`fedavg_m`), in which the clients use the momentum.

    Source: Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification", arXiv:1909.06335 (2019), Section 4.3.
    Paper to code: w -> server.x_start; -Δw -> delta; v -> -server.m; β -> momentum; η -> step_size.
    Special case: β = 0 is FedAvg.
    """

    name = "fedavgm"
    also_called = ("fedavg_server_momentum", "server_momentum")

    server_step_size: float = setting(1.0, "η_g, step size of the server", above=0)
    momentum: float = setting(0.9, "β, weight of the old direction of the server", least=0, below=1)

    server_rows = ("x_start", "m")
    downlink = ("x",)

    def server_start(self, server: Server) -> None:
        """m = 0."""
        server.x_start.copy_(server.x)

    def server_step(self, server: Server) -> None:
        """m <- β m + Δ, x <- x + η_g m, with Δ = mean(x_i) - x."""
        delta = server.x.sub_(server.x_start)
        server.m.mul_(self.momentum).add_(delta)
        server.x_start.add_(server.m, alpha=self.server_step_size)
        server.x.copy_(server.x_start)


@dataclasses.dataclass(frozen=True)
class DiLoCo(FedAvgServerMomentum):
    """AdamW on the clients, whose moments they keep, and Nesterov's momentum on the server.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
    arXiv:2311.08105 (2023), Algorithm 1 with the optimisers of its experiments; AdamW: Loshchilov, Hutter,
    "Decoupled Weight Decay Regularization", ICLR 2019, Algorithm 2, as torch.optim.AdamW computes it.
    Paper to code: θ_i -> client.x; θ^(t-1) -> server.x_start; Δ^(t) -> -delta; H -> local_steps; inner and outer
    learning rate -> step_size, server_step_size; β1, β2, ε, λ -> first_moment_decay, second_moment_decay, epsilon,
    decay; outer momentum -> momentum.
    Special cases: outer momentum 0 and η_g = 1 averages; one client is then AdamW.

    t of the bias corrections is the number of steps of the client's own AdamW, that is of the samples it has drawn.
    """

    name = "diloco"

    step_size: float = setting(4e-4, "η, step size of AdamW on the clients", above=0)
    server_step_size: float = setting(0.7, "η_g, step size of the server", above=0)
    first_moment_decay: float = setting(0.9, "β1 of AdamW", least=0, below=1)
    second_moment_decay: float = setting(0.999, "β2 of AdamW", least=0, below=1)
    epsilon: float = setting(1e-8, "ε of AdamW, added to the root of the second moment", above=0)
    decay: float = setting(0.1, "λ of AdamW, weight decay beside the gradient", least=0)

    clock = "iteration"
    client_rows = ("m", "v")

    server_rows = ("x_start", "b")

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """x_i <- (1 - ηλ) x_i - η m̂_i / (√v̂_i + ε)."""
        g = oracle.gradient(client.x, oracle.draw())
        eta, t = self.eta(client), client.num_draws - client.num_undone
        client.x.mul_(1 - eta * self.decay)
        client.m.lerp_(g, 1 - self.first_moment_decay)
        client.v.mul_(self.second_moment_decay).addcmul_(g, g, value=1 - self.second_moment_decay)
        root = torch.sqrt(client.v, out=g).div_(math.sqrt(1 - self.second_moment_decay**t)).add_(self.epsilon)
        client.x.addcdiv_(client.m, root, value=-eta / (1 - self.first_moment_decay**t))

    def server_step(self, server: Server) -> None:
        """b <- μ b + Δ, x <- x + η_g (Δ + μ b), with Δ = mean(x_i) - x."""
        delta = server.x.sub_(server.x_start)
        server.b.mul_(self.momentum).add_(delta)
        server.x_start.add_(delta.add_(server.b, alpha=self.momentum), alpha=self.server_step_size)
        server.x.copy_(server.x_start)
