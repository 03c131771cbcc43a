"""Local AMSGrad, also called Fed-AMS: the clients make adaptive steps with a common denominator."""

import dataclasses

import torch

from fedmpi.algorithms.base import Algorithm, Client, Exchange, Oracle, Server
from fedmpi.algorithms.periods import in_periods
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class LocalAMSGrad(Algorithm):
    """Adam's moments m_i and v_i, kept by every client; one shared v̂, the largest mean of v_i so far.

    Not FedAMS, in which the server makes the adaptive step.

    Source: Chen, Li, Li, "Toward Communication Efficient Adaptive Gradient Method", FODS 2020,
    Algorithm 3.
    Paper to code: x_{t,i} -> client.x; m_{t,i}, v_{t,i} -> client.m, client.v; v̂ -> server.v_hat;
    α -> step_size; β1 -> momentum; β2 -> second_moment_decay; ε (of v̂_0) -> v0.
    Invariant: v̂ is the same on all clients and never decreases.
    Special case: one client with one local step is AMSGrad without bias correction.
    Differs from the paper: v0 is by default the mean square of one initial gradient, because v̂ is v0
    during the whole first round: with 1e-8 its steps would be α m 10⁴.

    With refresh = "before" the last local step of a round moves with the new v̂: two averages a round. With v_every
    above 1 it is a variant of ours: v̂ is refreshed in every so many rounds, by what v_i have become since the start.
    """

    name = "local_amsgrad"
    also_called = ("fed_ams",)

    step_size: float = setting(0.01, "α, step size", above=0)
    momentum: float = setting(0.9, "β1, weight of the old direction", least=0, below=1)
    second_moment_decay: float = setting(0.999, "β2, weight of the old second moment", least=0, most=1)
    v0: float | None = setting(
        None, "v̂ and v_i at the start; default: mean of the clients' squared initial gradients, at least 1e-8", above=0
    )
    refresh: str = setting(
        "before",
        "whether v̂ is updated before the last step of a round (the paper) or after it",
        among=("before", "after"),
    )
    v_every: int = setting(1, "rounds between two averages of v; above 1, a variant of ours", least=1)

    exchanged = ("v_mean", "x")
    kinds = {"v_mean": "square"}
    server_rows = ("v_hat",)
    client_rows = ("m", "v")
    scratch = ("denominator",)
    downlink = ("x", "v_hat")

    @property
    def exchanged_at_start(self) -> tuple[str, ...]:
        return ("v_mean",) if self.v0 is None else ()

    def exchanges(self) -> tuple[Exchange, ...]:
        """v and then x; both at once if the last step does not need the new v̂."""
        rows = ("v_mean", "x") if self.refresh == "after" else ("v_mean",)
        steps = in_periods(rows, {"v_mean": self.v_every}, {"v_mean": self.refresh_v_hat})
        return steps if self.refresh == "after" else (*steps, Exchange(("x",), work=self.last_move))

    def start(self, client: Client, server: Server, oracle: Oracle) -> None:
        """The square of an initial gradient, if v0 is not set."""
        if self.v0 is None:
            g = oracle.gradient(client.x, oracle.draw_first())
            torch.mul(g, g, out=client.v_mean)

    def server_start(self, server: Server) -> None:
        """v̂ = v0."""
        if self.v0 is None:
            torch.clamp(server.v_mean, min=1e-8, out=server.v_hat)
        else:
            server.v_hat.fill_(self.v0)

    def client_start(self, client: Client, server: Server) -> None:
        """m_i = 0, v_i = v0."""
        client.v.copy_(server.v_hat)

    def download(self, client: Client, server: Server) -> None:
        """√v̂, frozen in the round."""
        torch.sqrt(server.v_hat, out=client.denominator)

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """m_i and v_i as Adam's, then x_i <- x_i - α m_i / √v̂."""
        g = oracle.gradient(client.x, oracle.draw())
        client.m.lerp_(g, 1 - self.momentum)
        client.v.lerp_(g.square_(), 1 - self.second_moment_decay)
        if not client.is_last_step or self.refresh == "after":
            client.x.addcdiv_(client.m, client.denominator, value=-self.eta(client))

    def upload(self, client: Client, server: Server, oracle: Oracle) -> None:
        """A copy of v_i is averaged; v_i itself is kept by the client."""
        client.v_mean.copy_(client.v)

    def refresh_v_hat(self, server: Server) -> None:
        """v̂ <- max(v̂, mean(v_i))."""
        torch.maximum(server.v_hat, server.v_mean, out=server.v_hat)

    def last_move(self, client: Client, server: Server, oracle: Oracle) -> None:
        """x_i <- x_i - α m_i / √v̂ with the new v̂."""
        torch.sqrt(server.v_hat, out=client.denominator)
        client.x.addcdiv_(client.m, client.denominator, value=-self.eta(client))
