"""Local SGD, and its variant with a proximal term."""

import dataclasses

from fedmpi.algorithms.base import Algorithm, Client, Oracle, Server
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class FedAvg(Algorithm):
    """FedAvg, also called local SGD: q steps of SGD on every client, then the average.

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
    Data", AISTATS 2017, Algorithm 1; the weights of the average are the run's setting `weighting`.
    Paper to code: w_k -> client.x; w -> server.x; η -> step_size; η_g -> server_step_size.
    Special cases: one local step is minibatch SGD on the union of the batches; one client is SGD.

    Cheng et al. (`fedavg_m`) write the server step as x <- x - γ mean(x - x_i) / (ηK): γ is η_g ηK.
    """

    also_called = ("local_sgd", "fed_sgd")

    step_size: float = setting(0.1, "η, step size of the local SGD steps", above=0)
    server_step_size: float = setting(1.0, "η_g, how far the server moves to the average; 1 is the average", above=0)

    @property
    def server_rows(self) -> tuple[str, ...]:
        return () if self.server_step_size == 1 else ("x_start",)  # x at the start of the round

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """x_i <- x_i - η ∇f_i(x_i; ξ)."""
        g = oracle.gradient(client.x, oracle.draw())
        client.x.add_(g, alpha=-self.eta(client))

    def server_start(self, server: Server) -> None:
        """Keep x of the first round's start."""
        if "x_start" in self.server_rows:
            server.x_start.copy_(server.x)

    def server_step(self, server: Server) -> None:
        """x <- x + η_g (mean(x_i) - x)."""
        if "x_start" in self.server_rows:
            server.x_start.lerp_(server.x, self.server_step_size)
            server.x.copy_(server.x_start)


@dataclasses.dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg whose clients are pulled towards x of the round's start.

    Source: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2.
    Paper to code: w_k -> client.x; w^t -> server.x_start; η -> step_size; μ -> proximal_weight.
    Special case: μ = 0 is FedAvg.
    Differs from the paper: K local SGD steps instead of an inexact inner solve to accuracy γ.
    """

    proximal_weight: float = setting(0.01, "μ, weight of ½ ‖x_i - x‖² in the clients' objective", least=0)

    server_rows = ("x_start",)  # x at the start of the round

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """x_i <- x_i - η (∇f_i(x_i; ξ) + μ (x_i - x))."""
        g = oracle.gradient(client.x, oracle.draw())
        g.add_(client.x, alpha=self.proximal_weight).sub_(server.x_start, alpha=self.proximal_weight)
        client.x.add_(g, alpha=-self.eta(client))
