"""SCAFFOLD: control variates that cancel client drift."""

import dataclasses

import torch

from fedmpi.algorithms.base import Algorithm, Client, Oracle, Server
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class SCAFFOLD(Algorithm):
    """Local SGD whose steps are corrected by c - c_i, the estimated drift of the client.

    Source: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled
    Averaging for Federated Learning", ICML 2020, arXiv:1910.06378, Algorithm 1.
    Paper to code: y_i -> client.x; c_i -> client.c_i; x -> server.x_start; c -> server.c;
    Δc_i -> delta_c; η_l -> step_size; η_g -> server_step_size; K -> num_steps.
    Invariants: c is the mean of c_i over all clients, absent ones too, after every round; with
    option II the new c_i is the mean of the client's local gradients.
    Special cases: with identical clients or with one client it is FedAvg, because c_i = c.
    """

    step_size: float = setting(0.1, "η_l, step size of the local steps", above=0)
    server_step_size: float = setting(1.0, "η_g, how far the server moves to the average; 1 is the average", above=0)
    option: str = setting(
        "II",
        "new c_i: I, the gradient of all the client's data at x; II, the path travelled / (K η_l)",
        among=("I", "II"),
    )
    c0: str = setting(
        "zero", "c_i before the first round: zero, or the gradient of the initial minibatch", among=("zero", "gradient")
    )

    exchanged = ("x", "delta_c")
    kinds = {"delta_c": "difference"}
    server_rows = ("x_start", "c")
    client_rows = ("c_i",)
    downlink = ("x", "c")

    @property
    def exchanged_at_start(self) -> tuple[str, ...]:
        return ("delta_c",) if self.c0 == "gradient" else ()

    def start(self, client: Client, server: Server, oracle: Oracle) -> None:
        """c_i = 0, or ∇f_i(x_0; B_0)."""
        if self.c0 == "gradient":
            client.delta_c.copy_(oracle.gradient(client.x, oracle.draw_first()))

    def server_start(self, server: Server) -> None:
        """c = mean(c_i)."""
        server.x_start.copy_(server.x)
        if self.c0 == "gradient":
            server.c.copy_(server.delta_c)

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """y_i <- y_i - η_l (∇f_i(y_i; ξ) - c_i + c)."""
        g = oracle.gradient(client.x, oracle.draw())
        client.x.add_(g.sub_(client.c_i).add_(server.c), alpha=-self.eta(client))

    def upload(self, client: Client, server: Server, oracle: Oracle) -> None:
        """Δc_i = c_i⁺ - c_i."""
        if self.option == "I":
            g = oracle.gradient(server.x_start, oracle.whole())
            torch.sub(g, client.c_i, out=client.delta_c)
        else:
            # c_i⁺ - c_i = (x - y_i) / (K η_l) - c
            torch.sub(server.x_start, client.x, out=client.delta_c)
            client.delta_c.div_(client.num_steps * self.eta(client)).sub_(server.c)

    def sent(self, client: Client, server: Server) -> None:
        """c_i <- c_i + Δc_i as it was sent, so that c stays the mean of c_i."""
        client.c_i.add_(client.delta_c)

    def server_step(self, server: Server) -> None:
        """x <- x + η_g (mean(y_i) - x), c <- c + |S|/N mean(Δc_i).

        |S|/N is the participants' share in the weight of all clients: c moves by it times the mean of Δc_i.
        """
        server.x_start.lerp_(server.x, self.server_step_size)
        server.x.copy_(server.x_start)
        server.c.add_(server.delta_c, alpha=server.participation)
