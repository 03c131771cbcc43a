"""Recursive momentum on minibatches that all clients draw at the same point."""

import dataclasses

from fedmpi.algorithms.base import Algorithm, Client, Exchange, Oracle, Server
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class MBSTORM(Algorithm):
    """Minibatch STORM: K minibatches per client at one point, one average, one server step.

    Source: Patel, Wang, Woodworth, Bullins, Srebro, "Towards Optimal Communication Complexity in
    Distributed Non-Convex Optimization", NeurIPS 2022, baseline.
    Paper to code: x^r -> server.x; x^{r-1} -> server.x_prev; g^r -> g; β -> fresh_weight;
    γ -> server_step_size; K -> local_steps. step_size (η) is used only in the default γ = ηK.
    Invariant: with full batches g is the gradient of f at x^r, for every β.

    No client moves. A "local step" is one of the K minibatches.
    """

    name = "mb_storm"
    also_called = ("minibatch_storm",)

    step_size: float = setting(0.05, "η, of the default γ = ηK", above=0)
    server_step_size: float | None = setting(None, "γ, step size; default: ηK", above=0)
    fresh_weight: float = setting(0.1, "β, weight of the fresh gradient", least=0, most=1)

    exchanged = ("g",)
    kinds = {"g": "gradient"}
    exchanged_at_start = ("g",)
    server_rows = ("x", "x_prev")
    downlink = ("x",)  # clients recover g = (x^r - x^{r+1}) / γ and remember x^{r-1}

    def start(self, client: Client, server: Server, oracle: Oracle) -> None:
        """g^0 = mean ∇f_i(x^0; B_0)."""
        client.g.copy_(oracle.gradient(server.x, oracle.draw_first()))

    def server_start(self, server: Server) -> None:
        """x^{-1} = x^0."""
        server.x_prev.copy_(server.x)

    def download(self, client: Client, server: Server) -> None:
        """The sum starts at (1-β) g^r."""
        client.g.mul_(1 - self.fresh_weight)

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """g_i <- g_i + (∇f_i(x^r; ξ) - (1-β) ∇f_i(x^{r-1}; ξ)) / K."""
        g, g_prev = oracle.gradient_pair(server.x, server.x_prev, oracle.draw())
        client.g.add_(g.sub_(g_prev, alpha=1 - self.fresh_weight), alpha=1 / client.num_steps)

    def server_step(self, server: Server) -> None:
        """x^{r+1} = x^r - γ g^{r+1}."""
        server.x_prev.copy_(server.x)
        server.x.sub_(server.g, alpha=self.server_step_size or self.eta(server) * server.num_steps)


@dataclasses.dataclass(frozen=True)
class CELSGD(Algorithm):
    """Communication-efficient local SGD: a direction from all clients, then K steps of one drawn client.

    Source: Patel, Wang, Woodworth, Bullins, Srebro, "Towards Optimal Communication Complexity in
    Distributed Non-Convex Optimization", NeurIPS 2022, Algorithm 1.
    Paper to code: x^r, w_k -> client.x; x^{r-1} -> server.x_prev; g^r -> client.g; u_k -> client.u;
    w_k before the move -> client.w_prev; β -> fresh_weight; η -> step_size; K = K_b -> local_steps.
    Special cases: one client with full batches makes K steps of gradient descent a round; K = 1 is
    minibatch STORM with γ = η.

    Two averages a round: of g, and of x, which only the drawn client has moved (a broadcast). With
    local = "all", our extension, every participant makes the K steps and the results are averaged.
    """

    name = "ce_lsgd"

    step_size: float = setting(0.05, "η, step size of the K local steps", above=0)
    fresh_weight: float = setting(0.1, "β, weight of the fresh gradient in g", least=0, most=1)
    local: str = setting("one", "who makes the K local steps: one drawn client, or all", among=("one", "all"))

    exchanged = ("g", "x")
    kinds = {"g": "gradient"}
    exchanged_at_start = ("g",)
    server_rows = ("x_prev",)
    scratch = ("u", "w_prev")
    downlink = ("x",)  # and g to the drawn client

    def exchanges(self) -> tuple[Exchange, ...]:
        """g of all participants, then x of the drawn client."""
        return (
            Exchange(("g",), then=self.server_step),
            Exchange(("x",), work=self.move, alone=self.local == "one"),
        )

    def start(self, client: Client, server: Server, oracle: Oracle) -> None:
        """g^0 = mean ∇f_i(x^0; B_0)."""
        client.g.copy_(oracle.gradient(client.x, oracle.draw_first()))

    def server_start(self, server: Server) -> None:
        """x^{-1} = x^0."""
        server.x_prev.copy_(server.x)

    def download(self, client: Client, server: Server) -> None:
        """The sum starts at (1-β) g^r."""
        client.g.mul_(1 - self.fresh_weight)

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """g_i <- g_i + (∇f_i(x^r; ξ) - (1-β) ∇f_i(x^{r-1}; ξ)) / K_b."""
        g, g_prev = oracle.gradient_pair(client.x, server.x_prev, oracle.draw())
        client.g.add_(g.sub_(g_prev, alpha=1 - self.fresh_weight), alpha=1 / client.num_steps)

    def server_step(self, server: Server) -> None:
        """Between the two averages no client has moved: keep x^r, which is x^{r-1} of the next round."""
        server.x_prev.copy_(server.x)

    def move(self, client: Client, server: Server, oracle: Oracle) -> None:
        """K steps w <- w - η u; after each but the last u <- u + ∇f_j(w; ζ) - ∇f_j(w before; ζ)."""
        client.u.copy_(client.g)
        for k in range(client.num_steps):
            client.w_prev.copy_(client.x)
            client.x.add_(client.u, alpha=-self.eta(client))
            if k < client.num_steps - 1:
                g, g_prev = oracle.gradient_pair(client.x, client.w_prev, oracle.draw())
                client.u.add_(g).sub_(g_prev)
