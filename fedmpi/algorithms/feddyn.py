"""FedDyn: a penalty of every client that moves until all clients' minima are the server's."""

import dataclasses

from fedmpi.algorithms.base import Algorithm, Client, Oracle, Server
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class FedDyn(Algorithm):
    """Local SGD on f_i plus a linear and a quadratic term, which the client changes after every round.

    Source: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic
    Regularization", ICLR 2021, arXiv:2111.04263, Algorithm 1.
    Paper to code: θ_k -> client.x; ∇L_k -> -α client.h_i; θ^{t-1} -> server.x_start; h^t -> -α server.h;
    α -> proximal_weight.
    Invariant: h is the mean of h_i over all clients, absent ones too, after every round.
    Special case: where all stand still, x is a minimum of the mean loss, however unlike the clients are.

    Differs from the paper: K local SGD steps instead of an exact inner solution. The authors' code divides α by the
    client's share in all samples, takes the plain mean of the participants, and clips gradients to a norm of 10
    (the run's setting clip_norm).

    What is sent is the client's move, so that h_i and h change by the same values, also behind stages and codecs.
    """

    step_size: float = setting(0.1, "η, step size of the local steps", above=0)
    proximal_weight: float = setting(0.1, "α, weight of ½ ‖x_i - x‖² and of the linear term", above=0)

    kinds = {"x": "difference"}
    server_rows = ("x_start", "h")
    client_rows = ("h_i",)
    downlink = ("x",)

    def server_start(self, server: Server) -> None:
        """h = 0."""
        server.x_start.copy_(server.x)

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """x_i <- x_i - η (∇f_i(x_i; ξ) + α (x_i - x + h_i))."""
        g, alpha = oracle.gradient(client.x, oracle.draw()), self.proximal_weight
        g.add_(client.x, alpha=alpha).sub_(server.x_start, alpha=alpha).add_(client.h_i, alpha=alpha)
        client.x.add_(g, alpha=-self.eta(client))

    def upload(self, client: Client, server: Server, oracle: Oracle) -> None:
        """The client's move, x_i - x."""
        client.x.sub_(server.x_start)

    def sent(self, client: Client, server: Server) -> None:
        """h_i <- h_i + x_i - x, as it was sent."""
        client.h_i.add_(client.x)

    def server_step(self, server: Server) -> None:
        """h <- h + |S|/N mean(x_i - x), x <- mean(x_i) + h."""
        server.h.add_(server.x, alpha=server.participation)
        server.x_start.add_(server.x).add_(server.h)
        server.x.copy_(server.x_start)
