"""Mime: the server's optimiser, applied on the clients while its statistics are frozen."""

import dataclasses

import torch

from fedmpi.algorithms.base import Algorithm, Exchange
from fedmpi.settings import setting


@dataclasses.dataclass(frozen=True)
class MimeAdam(Algorithm):
    """Adam's steps on every client with m and v of the server, which are updated by full gradients at x only.

    Source: Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh, "Breaking the Centralized Barrier
    for Cross-Device Federated Learning", NeurIPS 2021, Algorithm 1 with Adam as base optimiser.
    Paper to code: y_i -> client.x; c -> client.c; x -> server.x_start; m, v -> server.m, server.v;
    η -> step_size; β1 -> momentum; β2 -> second_moment_decay; ε -> epsilon.
    Special case: with one local step, β1 = 0 and √v + ε = 1 it would be gradient descent along c.

    Two averages a round: first c, the gradient over the participants' whole data, then the model.
    """

    step_size: float = setting(0.01, "η, step size of the local steps", above=0)
    momentum: float = setting(0.9, "β1, weight of the old direction", least=0, below=1)
    second_moment_decay: float = setting(0.99, "β2, weight of the old second moment", least=0, most=1)
    epsilon: float = setting(1e-3, "ε, added to the root of the second moment", above=0)
    lite: bool = setting(False, "MimeLite: plain minibatch gradients, without the correction by c - ∇f_i(x; ξ)")

    exchanged = ("c", "x")
    server_rows = ("x_start", "m", "v")
    scratch = ("denominator",)

    @property
    def downlink(self):
        return ("x", "m", "v") if self.lite else ("x", "m", "v", "c")

    def exchanges(self):
        """c, then x."""
        return (Exchange(("c",), work=self.full_gradient), Exchange(("x",), then=self.server_step))

    def server_start(self, server):
        """m = v = 0."""
        server.x_start.copy_(server.x)

    def full_gradient(self, client, server, oracle):
        """c = ∇f_i(x) over the client's whole data."""
        client.c.copy_(oracle.gradient(client.x, oracle.whole()))

    def download(self, client, server):
        """√v + ε, frozen in the round."""
        torch.sqrt(server.v, out=client.denominator).add_(self.epsilon)

    def local_step(self, client, server, oracle):
        """y_i <- y_i - η (β1 m + (1-β1)(∇f_i(y_i; ξ) - ∇f_i(x; ξ) + c)) / (√v + ε)."""
        if self.lite:
            g = oracle.gradient(client.x, oracle.draw())
        else:
            g, g_start = oracle.gradient_pair(client.x, server.x_start, oracle.draw())
            g.sub_(g_start).add_(client.c)
        direction = g.mul_(1 - self.momentum).add_(server.m, alpha=self.momentum)
        client.x.addcdiv_(direction, client.denominator, value=-self.eta(client))

    def server_step(self, server):
        """x = mean(y_i); m <- β1 m + (1-β1) c, v <- β2 v + (1-β2) c²."""
        server.x_start.copy_(server.x)
        server.m.lerp_(server.c, 1 - self.momentum)
        server.v.mul_(self.second_moment_decay).addcmul_(server.c, server.c, value=1 - self.second_moment_decay)
