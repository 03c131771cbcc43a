"""Local SGD and what is built directly on it."""

import dataclasses

from fedmpi.algorithms.base import Algorithm
from fedmpi.settings import setting


@dataclasses.dataclass(frozen=True)
class FedAvg(Algorithm):
    """FedAvg, also called local SGD: q steps of SGD on every client, then the average.

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
    Data", AISTATS 2017, Algorithm 1, with uniform weights as in the five papers that fedmpi follows.
    Paper to code: w_k -> client.x; w -> server.x; η -> step_size; η_g -> server_step_size.
    Special cases: one local step is minibatch SGD on the union of the batches; one client is SGD.
    """

    step_size: float = setting(0.1, "η, step size of the local SGD steps", above=0)
    server_step_size: float = setting(1.0, "η_g, how far the server moves to the average; 1 is the average", above=0)

    @property
    def server_rows(self):
        return () if self.server_step_size == 1 else ("x_start",)  # x at the start of the round

    def local_step(self, client, server, oracle):
        """x_i <- x_i - η ∇f_i(x_i; ξ)."""
        g = oracle.gradient(client.x, oracle.draw())
        client.x.add_(g, alpha=-self.step_size)

    def server_start(self, server):
        """Remember where the first round starts."""
        if self.server_step_size != 1:
            server.x_start.copy_(server.x)

    def server_step(self, server):
        """x <- x + η_g (mean(x_i) - x)."""
        if self.server_step_size != 1:
            server.x_start.lerp_(server.x, self.server_step_size)
            server.x.copy_(server.x_start)
