"""Mime: the server's optimiser, applied on the clients while its statistics are frozen."""

import dataclasses

import torch

from fedmpi.algorithms.base import Algorithm, Client, Exchange, Oracle, Server
from fedmpi.algorithms.fedopt import check_correction, correction, corrections
from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class MimeAdam(Algorithm):
    """Adam's steps on every client with m and v of the server, which are updated by full gradients at x only.

    Source: Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh, "Breaking the Centralized Barrier
    for Cross-Device Federated Learning", NeurIPS 2021, Algorithm 1 with Adam as base optimiser.
    Paper to code: y_i -> client.x; c -> client.c; x -> server.x_start; m, v -> server.m, server.v;
    η -> step_size; β1 -> momentum; β2 -> second_moment_decay; ε -> epsilon.
    Special case: with one local step, β1 = 0 and √v + ε = 1 it would be gradient descent along c.

    Differs from the paper: v begins with c² of the first round. From 0, its frozen denominator would be ε
    during the whole first round, and the first steps 1/ε times as long as later ones.

    Two averages a round: first c, the gradient over the participants' whole data, then the model. With update
    "fresh", v0 0 and correction torch it is fedjax's Mime with its Adam: a local step's denominator contains the
    gradient of that step, and nothing of it is kept.
    """

    step_size: float = setting(0.01, "η, step size of the local steps", above=0)
    momentum: float = setting(0.9, "β1, weight of the old direction", least=0, below=1)
    second_moment_decay: float = setting(0.99, "β2, weight of the old second moment", least=0, most=1)
    epsilon: float = setting(1e-3, "ε, added to the root of the second moment", above=0)
    server_step_size: float = setting(1.0, "η_g, how far the server moves to the average; 1 is the average", above=0)
    v0: float | None = setting(None, "v before the first round; default: c² of the first round", least=0)
    update: str = setting(
        "frozen",
        "denominator of a local step: √v of the round's start (frozen, the paper), or √(β2 v + (1-β2) g²) (fresh)",
        among=("frozen", "fresh"),
    )
    correction: str = correction()
    lite: bool = setting(False, "MimeLite: plain minibatch gradients, without the correction by c - ∇f_i(x; ξ)")

    exchanged = ("c", "x")
    kinds = {"c": "gradient"}
    server_rows = ("x_start", "m", "v")
    scratch = ("denominator",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_correction(self)
        if self.correction != "none" and self.update == "frozen":
            raise UserError(f"algorithm.correction = {self.correction}: expected none, or update = fresh beside it")

    @property
    def downlink(self) -> tuple[str, ...] | None:
        return ("x", "m", "v") if self.lite else ("x", "m", "v", "c")

    def exchanges(self) -> tuple[Exchange, ...]:
        """c, then x."""
        return (Exchange(("c",), work=self.full_gradient, then=self.first_v), Exchange(("x",), then=self.server_step))

    def server_start(self, server: Server) -> None:
        """m = 0, v = v0."""
        server.x_start.copy_(server.x)
        server.v.fill_(self.v0 or 0)

    def full_gradient(self, client: Client, server: Server, oracle: Oracle) -> None:
        """c = ∇f_i(x) over the client's whole data."""
        client.c.copy_(oracle.gradient(client.x, oracle.whole()))

    def first_v(self, server: Server) -> None:
        """v = c² in the first round, unless v0 is set."""
        if self.v0 is None and server.round_index == 0:
            torch.mul(server.c, server.c, out=server.v)

    def download(self, client: Client, server: Server) -> None:
        """√v + ε, frozen in the round."""
        torch.sqrt(server.v, out=client.denominator).add_(self.epsilon)

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """y_i <- y_i - η (β1 m + (1-β1)g) / (√v + ε) with g = ∇f_i(y_i; ξ) - ∇f_i(x; ξ) + c."""
        if self.lite:
            g = oracle.gradient(client.x, oracle.draw())
        else:
            g, g_start = oracle.gradient_pair(client.x, server.x_start, oracle.draw())
            g.sub_(g_start).add_(client.c)
        factor, divisor, of_root = corrections(self, client.round_index)
        if self.update == "fresh":
            root = torch.mul(server.v, self.second_moment_decay, out=client.denominator)
            root.addcmul_(g, g, value=1 - self.second_moment_decay).sqrt_().div_(of_root).add_(self.epsilon)
        direction = g.mul_(1 - self.momentum).add_(server.m, alpha=self.momentum)
        client.x.addcdiv_(direction, client.denominator, value=-self.eta(client) * factor / divisor)

    def server_step(self, server: Server) -> None:
        """x <- x + η_g (mean(y_i) - x); m <- β1 m + (1-β1) c, v <- β2 v + (1-β2) c²."""
        server.x_start.lerp_(server.x, self.server_step_size)
        server.x.copy_(server.x_start)
        server.m.lerp_(server.c, 1 - self.momentum)
        server.v.mul_(self.second_moment_decay).addcmul_(server.c, server.c, value=1 - self.second_moment_decay)
