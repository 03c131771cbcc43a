"""Scaffnew: control variates that are known from the moves alone."""

import dataclasses

from fedmpi.algorithms.base import Algorithm, Client, Exchange, Oracle, Server
from fedmpi.ground.settings import setting
from fedmpi.ground.streams import generator


@dataclasses.dataclass(frozen=True)
class Scaffnew(Algorithm):
    """Local SGD whose steps are corrected by h_i, which sums up how far the client was from the averages.

    Source: Mishchenko, Malinovsky, Stich, Richtárik, "ProxSkip: Yes! Local Gradient Steps Provably Lead to
    Communication Acceleration! Finally!", ICML 2022, arXiv:2202.09357, Algorithm 2.
    Paper to code: x_i, x̂_i -> client.x; γ -> step_size; p -> probability; h_i -> client.c_i - server.c.
    Invariant: c is the mean of c_i over all clients, absent ones too: the mean of h_i is 0.
    Special cases: with p = 1/K, the default, and K local steps of all, it is SCAFFOLD with option II, which sends twice
    as much; p = 0 is FedAvg.

    The paper draws before every step whether it averages, with probability p. With one local step a round,
    average_chance is that p: the number of local steps between two averages is geometric, and the same for all clients.
    The default, 1, averages every round, after K steps. In between, a client keeps x_i, which takes a row of memory,
    and the model may have no float buffers, like those of batch norm, because they are averaged in every round.
    Absent clients are not in the paper: they keep c_i, as in SCAFFOLD.

    What is sent is the client's move, so that c_i and c change by the same values, also behind stages and codecs.
    """

    also_called = ("proxskip",)

    step_size: float = setting(0.1, "γ, step size of the local steps", above=0)
    average_chance: float = setting(
        1.0, "chance that a round averages; below 1, all clients share a coin", above=0, most=1
    )
    coin_seed: int = setting(0, "another coin, if average_chance is below 1", least=0)
    probability: float | None = setting(
        None,
        "p: h_i changes by p/γ (x - x_i); default: average_chance / K, K the largest number of a client's local steps",
        least=0,
        most=1,
    )

    kinds = {"x": "difference"}
    server_rows = ("x_start", "c")
    client_rows = ("c_i",)
    downlink = ("x",)  # clients that were never absent know c from it

    def exchanges(self) -> tuple[Exchange, ...]:
        """Local steps, with an average if the coin says so."""
        if self.average_chance == 1:
            return super().exchanges()
        return (Exchange(("x",), then=self.server_step, due=self.averages), Exchange((), due=self.goes_on))

    def averages(self, server: Server) -> bool:
        """Whether the round ends with an average: the coin, which is the same on all ranks."""
        if self.average_chance == 1:
            return True
        return generator(self.coin_seed, "average", server.round_index).random() < self.average_chance

    def goes_on(self, server: Server) -> bool:
        """Whether clients go on with their own x_i."""
        return not self.averages(server)

    def server_start(self, server: Server) -> None:
        """h_i = 0."""
        server.x_start.copy_(server.x)

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """x_i <- x_i - γ (∇f_i(x_i; ξ) - h_i) with h_i = c_i - c."""
        g = oracle.gradient(client.x, oracle.draw())
        client.x.add_(g.sub_(client.c_i).add_(server.c), alpha=-self.eta(client))

    def upload(self, client: Client, server: Server, oracle: Oracle) -> None:
        """The client's move, x_i - x, if it is averaged."""
        if self.averages(server):
            client.x.sub_(server.x_start)

    def sent(self, client: Client, server: Server) -> None:
        """c_i <- c_i - c - p/γ (x_i - x), with the move as it was sent."""
        if self.averages(server):
            client.c_i.sub_(server.c).sub_(client.x, alpha=self._rate(server))

    def server_step(self, server: Server) -> None:
        """c <- c + |S|/N mean(c_i⁺ - c_i), so that h_i <- h_i + p/γ (mean(x_j) - x_i); x <- mean(x_i)."""
        share, rate = server.participation, self._rate(server)
        server.c.mul_(1 - share).sub_(server.x, alpha=share * rate)
        server.x_start.add_(server.x)
        server.x.copy_(server.x_start)

    def _rate(self, server: Server) -> float:
        """p/γ."""
        probability = self.average_chance / server.most_steps if self.probability is None else self.probability
        return probability / self.eta(server)
