"""Local SGD whose moves are rescaled: by how far a client can have gone, or by how unlike the moves are."""

import dataclasses

import torch

from fedmpi.algorithms.base import Algorithm, Client, Exchange, Oracle, Server
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class FedNova(Algorithm):
    """Local SGD whose moves are averaged per unit of length, so that who makes more steps does not count more.

    Source: Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization", NeurIPS 2020, arXiv:2007.07481, Eq. (6).
    Paper to code: x_i -> client.x; τ_i -> num_steps; ‖a_i‖_1 -> `length`; d_i -> -client.x / η as it is sent;
    η -> step_size; ρ -> momentum; μ -> proximal_weight.
    Special case: with equal numbers of steps, momentum 0 and μ = 0, it is FedAvg.

    τ_eff is the mean of ‖a_i‖_1, or that of τ_i if μ > 0, as in the authors' code; there and here the momentum begins
    with 0 in every round. With ρ and μ together, that code puts the proximal term into the momentum, too, and counts it
    in another way; here ‖a_i‖_1 is that of the step below. That code's momentum of the server is not here.
    """

    step_size: float = setting(0.1, "η, step size of the local steps", above=0)
    momentum: float = setting(
        0.0, "ρ, momentum of the local steps, which begins with 0 in every round", least=0, below=1
    )
    proximal_weight: float = setting(0.0, "μ, weight of ½ ‖x_i - x‖² in the clients' objective", least=0)

    kinds = {"x": "difference"}
    server_rows = ("x_start",)
    downlink = ("x",)

    @property
    def scratch(self) -> tuple[str, ...]:
        return ("m",) if self.momentum else ()

    def exchanges(self) -> tuple[Exchange, ...]:
        """x, and beside it what τ_eff is the mean of."""
        return (Exchange(("x",), then=self.server_step, numbers=1),)

    def server_start(self, server: Server) -> None:
        """Keep x of the round's start."""
        server.x_start.copy_(server.x)

    def download(self, client: Client, server: Server) -> None:
        """m = 0."""
        if self.momentum:
            client.m.zero_()

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """m <- ρ m + ∇f_i(x_i; ξ), x_i <- x_i - η (m + μ (x_i - x))."""
        g, eta = oracle.gradient(client.x, oracle.draw()), self.eta(client)
        step = client.m.mul_(self.momentum).add_(g) if self.momentum else g
        if self.proximal_weight:
            client.x.lerp_(server.x_start, eta * self.proximal_weight)
        client.x.add_(step, alpha=-eta)

    def upload(self, client: Client, server: Server, oracle: Oracle) -> None:
        """(x_i - x) / ‖a_i‖_1."""
        length = self.length(client.num_steps, self.eta(client))
        client.x.sub_(server.x_start).div_(length)
        client.numbers[0] = client.num_steps if self.proximal_weight else length

    def length(self, num_steps: int, eta: float) -> float:
        """‖a_i‖_1, the sum of the weights with which the gradients of `num_steps` steps of size `eta` are in a move."""
        of_last = total = 0.0
        for _ in range(num_steps):
            of_last = self.momentum * of_last + 1
            total = (1 - eta * self.proximal_weight) * total + of_last
        return total

    def server_step(self, server: Server) -> None:
        """x <- x + τ_eff mean((x_i - x) / ‖a_i‖_1)."""
        server.x_start.add_(server.x.mul_(server.numbers[0]))
        server.x.copy_(server.x_start)


@dataclasses.dataclass(frozen=True)
class FedExP(Algorithm):
    """Local SGD; the server moves beyond the average, the farther the more the clients' moves differ.

    Source: Jhunjhunwala, Wang, Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023,
    arXiv:2301.09604, Algorithm 1.
    Paper to code: w_i -> client.x; w -> server.x_start; Δ_i -> -client.x as it is sent; η_l -> step_size; ε -> epsilon.
    Special cases: clients with equal moves, and one client, make FedAvg, because η_g is then 1.

    Differs from the paper: it recommends to evaluate the mean of the last two iterates; here it is the last one. The
    authors' code has N ε in the place of ε, N the number of participants, and multiplies ε by the square of the factor
    by which the step size falls.
    If a part of the model is private, its moves count in the clients' norms.
    """

    step_size: float = setting(0.1, "η_l, step size of the local steps", above=0)
    epsilon: float = setting(1e-3, "ε, added to the squared norm of the mean move", above=0)

    kinds = {"x": "difference"}
    server_rows = ("x_start",)
    downlink = ("x",)

    def exchanges(self) -> tuple[Exchange, ...]:
        """x, and beside it the squared norm of the client's move."""
        return (Exchange(("x",), then=self.server_step, numbers=1),)

    def server_start(self, server: Server) -> None:
        """Keep x of the round's start."""
        server.x_start.copy_(server.x)

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """x_i <- x_i - η_l ∇f_i(x_i; ξ)."""
        client.x.add_(oracle.gradient(client.x, oracle.draw()), alpha=-self.eta(client))

    def upload(self, client: Client, server: Server, oracle: Oracle) -> None:
        """The client's move, and its squared norm."""
        client.x.sub_(server.x_start)
        client.numbers[0] = _square(client.x)

    def server_step(self, server: Server) -> None:
        """x <- x + η_g mean(x_i - x), η_g = max(1, mean(‖x_i - x‖²) / (2 (‖mean(x_i - x)‖² + ε)))."""
        if server.num_participants > 1:
            ratio = server.numbers[0] / (2 * (_square(server.x) + self.epsilon))
            server.x.mul_(ratio.clamp(min=1))
        server.x_start.add_(server.x)
        server.x.copy_(server.x_start)


def _square(row: torch.Tensor) -> torch.Tensor:
    """‖row‖², 0-d, float64."""
    return torch.linalg.vector_norm(row).double().square()
