"""Fed-LAMB: adaptive per coordinate and per layer."""

import dataclasses

import torch

from fedmpi.algorithms.base import Algorithm, Client, Exchange, Oracle, Server
from fedmpi.algorithms.periods import in_periods
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class FedLAMB(Algorithm):
    """Local AMSGrad whose step in each layer is as long as α times the layer's own norm.

    Source: Karimi, Li, Li, "Layerwise and Dimensionwise Locally Adaptive Optimization", arXiv:2110.00532
    (2021), Algorithm 1, with φ(z) = z; a layer is a parameter tensor (weight and bias are two).
    Paper to code: θ_i -> client.x; m, v -> client.m, client.v; v̂ -> server.v_hat; α_r -> step_size;
    β1 -> momentum; β2 -> second_moment_decay; λ -> layer_decay; ε -> epsilon.
    Invariant: every local step moves each layer by α times its norm (both norms > 0).
    Special case: with ratio 1 and λ = 0 it is Local AMSGrad with m restarted and bias-corrected, and
    v_i = v̂, in each round.
    Differs from the paper: the gradient of local step t is taken at θ^(t-1), not θ^0; m̂ does not
    overwrite m; v, which starts from v̂ as in line 6, has no bias correction; the denominator has
    the v̂ of the round's start; v̂ averages v over the participants; a layer of norm 0 moves by α u.
    With v_every above 1 it is a variant of ours: v̂ is refreshed in every so many rounds, by what v became in them.
    The bound of its Theorem 1 ends in a constant that does not fall with the rounds, so no order follows from it.
    """

    name = "fed_lamb"

    step_size: float = setting(
        0.01, "α_r, step size: length of a layer's step divided by the norm of the layer's parameters", above=0
    )
    momentum: float = setting(0.9, "β1, weight of the old direction", least=0, below=1)
    second_moment_decay: float = setting(0.999, "β2, weight of the old second moment", least=0, most=1)
    epsilon: float = setting(1e-8, "ε, added to the root of v̂; also v̂ before the first round", above=0)
    layer_decay: float = setting(0.0, "λ, weight decay inside a layer's direction", least=0)
    v_every: int = setting(1, "rounds between two averages of v; above 1, a variant of ours", least=1)

    exchanged = ("x", "v")
    kinds = {"v": "square"}
    server_rows = ("v_hat",)
    scratch = ("m", "denominator")
    downlink = ("x", "v_hat")

    def exchanges(self) -> tuple[Exchange, ...]:
        """x and v, or v apart."""
        return in_periods(self.exchanged, {"v": self.v_every}, {"v": self.server_step})

    def server_start(self, server: Server) -> None:
        """v̂ = ε."""
        server.v_hat.fill_(self.epsilon)

    def download(self, client: Client, server: Server) -> None:
        """Line 6: m = 0, v = v̂."""
        client.m.zero_()
        client.v.copy_(server.v_hat)
        torch.sqrt(server.v_hat, out=client.denominator).add_(self.epsilon)

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """Lines 8-13: p = m̂ / (√v̂ + ε), then θ^ℓ <- θ^ℓ - α ‖θ^ℓ‖ u / ‖u‖ with u = p^ℓ + λ θ^ℓ."""
        g = oracle.gradient(client.x, oracle.draw())
        client.m.lerp_(g, 1 - self.momentum)
        client.v.lerp_(g.square_(), 1 - self.second_moment_decay)
        u = torch.div(client.m, client.denominator, out=g)
        u.div_(1 - self.momentum ** (client.step_index + 1)).add_(client.x, alpha=self.layer_decay)
        for layer in server.segments:
            u[layer].mul_(self.ratio(client.x[layer], u[layer]))
        client.x.add_(u, alpha=-self.eta(client))

    def ratio(self, x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """‖θ^ℓ‖ / ‖u‖, or 1 where a norm is 0; a 0-d tensor."""
        x_norm, u_norm = torch.linalg.vector_norm(x), torch.linalg.vector_norm(u)
        return torch.where((x_norm > 0) & (u_norm > 0), x_norm / u_norm, 1.0)

    def server_step(self, server: Server) -> None:
        """Lines 15-16: θ̄ = mean(θ_i), v̂ <- max(v̂, mean(v_i))."""
        torch.maximum(server.v_hat, server.v, out=server.v_hat)
