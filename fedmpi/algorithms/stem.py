"""STEM: variance-reduced momentum that clients share."""

import dataclasses

from fedmpi.algorithms.base import Algorithm, Client, Oracle, Server
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class STEM(Algorithm):
    """Two-sided stochastic momentum: local recursive momentum, averaged with the model every q steps.

    Source: Khanduri, Sharma, Yang, Hong, Liu, Rajawat, Varshney, "STEM: A Stochastic Two-Sided
    Momentum Algorithm Achieving Near-Optimal Sample and Communication Complexities for Federated
    Learning", NeurIPS 2021, Algorithm 1; its x_1 is our x_0, as in FAFED.
    Paper to code: x_t^k -> client.x; x_{t-1}^k -> client.x_prev; d_t^k -> client.d; η_t -> step_size;
    a_t -> fresh_weight; I -> q, the local steps of a round; κ̄, w, σ² -> step_size, schedule_offset
    and schedule_rate of schedule cube_root.
    Invariant: with full batches the mean of d_i is the mean of ∇f_i(x_i) after every step.
    Special cases: a = 1 is one SGD step on the initial batches, then FedAvg; FAFED with A = 1 is STEM.

    The last local step of a round does not move: the server moves x for all clients, so after a round
    server.x is x_{t+1}. x_{t-1} is the client's own iterate and is never averaged.
    """

    step_size: float = setting(0.05, "η_t, step size of every move", above=0)
    fresh_weight: float = setting(0.1, "a_t, weight of the fresh gradient in d", least=0, most=1)
    fresh_weight_scale: float | None = setting(None, "c: replaces fresh_weight by a_{t+1} = min(1, c η_t²)", above=0)

    clock = "iteration"
    exchanged = ("x", "d")
    kinds = {"d": "gradient"}
    exchanged_at_start = ("d",)
    client_rows = ("x_prev",)

    def start(self, client: Client, server: Server, oracle: Oracle) -> None:
        """d_i = ∇f_i(x_0; B_0), which is averaged next."""
        client.d.copy_(oracle.gradient(client.x, oracle.draw_first()))
        client.x_prev.copy_(client.x)

    def server_start(self, server: Server) -> None:
        """x_1 = x_0 - η_0 d."""
        server.x.add_(server.d, alpha=-self.eta(server))

    def download(self, client: Client, server: Server) -> None:
        """After an absence x_prev is stale: reset it to x, so that the correction vanishes."""
        if client.was_absent:
            client.x_prev.copy_(client.x)

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """d_i <- g + (1 - a)(d_i - g⁻), both gradients on the same sample; then x_i <- x_i - η d_i."""
        g, g_prev = oracle.gradient_pair(client.x, client.x_prev, oracle.draw())
        a = self.alpha(client, self.fresh_weight, self.fresh_weight_scale)
        client.d.sub_(g_prev).mul_(1 - a).add_(g)
        client.x_prev.copy_(client.x)
        if not client.is_last_step:
            client.x.add_(client.d, alpha=-self.eta(client))

    def server_step(self, server: Server) -> None:
        """x_{t+1} = mean(x_t) - η mean(d)."""
        server.x.add_(server.d, alpha=-self.eta(server))
