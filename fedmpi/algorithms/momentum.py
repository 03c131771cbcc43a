"""Momentum that the server computes and the clients use, with and without control variates.

Letters of all four methods: x_i -> client.x; x^r -> server.x_start; g^r -> g; β -> fresh_weight, of the NEW gradient;
η -> step_size; γ -> server_step_size, an absolute rate: x <- x - γ g. `fedmpi.theory` has the theorems' β, γ and η.
"""

import dataclasses

import torch

from fedmpi.algorithms.base import Algorithm, Client, Exchange, Oracle, Server
from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class _Momentum(Algorithm):
    """The common part of the four methods: their hyper-parameters and the server's step."""

    step_size: float = setting(0.1, "η, step size of the local steps", above=0)
    server_step_size: float | None = setting(None, "γ, server step size; default: ηK, the plain average", above=0)
    fresh_weight: float = setting(0.1, "β, weight of the fresh gradient", least=0, most=1)

    def move(self, server: Server) -> None:
        """g = mean(x - x_i) / (ηK), x <- x - γ g."""
        path_length = self.eta(server) * server.num_steps
        torch.sub(server.x_start, server.x, out=server.g).div_(path_length)
        server.x_start.sub_(server.g, alpha=self.server_step_size or path_length)
        server.x.copy_(server.x_start)


def _form() -> str:
    return setting(
        "original",
        "original; or reparameterised: g / β, βη and βγ take the place of g, η and γ, and the two step sizes that you "
        "set are βη and βγ",
        among=("original", "reparameterised"),
    )


def _c0() -> str:
    return setting(
        "gradient",
        "c_i before the first round: the gradient of the initial minibatch, or zero",
        among=("gradient", "zero"),
    )


@dataclasses.dataclass(frozen=True)
class FedAvgM(_Momentum):
    """FedAvg along a mixture of the client's gradient and the last round's mean direction; also called FedCM.

    Not the "FedAvgM" in which only the server has momentum.

    Source: Cheng, Huang, Wu, Yuan, "Momentum Benefits Non-IID Federated Learning Simply and Provably",
    arXiv:2306.16504 (2023), Algorithm 1; form "reparameterised": its Eqs. (31)-(33).
    Paper to code: see the top of this module; reparameterised: ĝ, η̂, γ̂ -> g, step_size, server_step_size.
    Invariants: g^{r+1} = β (mean local gradient) + (1-β) g^r = (x^r - x^{r+1}) / γ.
    Special cases: β = 1 is FedAvg with η_g = γ / (ηK); β = 0 never moves; both forms have the same
    iterates if η̂ = βη and γ̂ = βγ.
    """

    name = "fedavg_m"
    also_called = ("fedcm",)

    form: str = _form()

    server_rows = ("x_start", "g")
    downlink = ("x",)  # clients recover g = (x^r - x^{r+1}) / γ

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_form(self.form, self.fresh_weight)

    def server_start(self, server: Server) -> None:
        """g = 0."""
        server.x_start.copy_(server.x)

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """x_i <- x_i - η (β ∇f_i(x_i; ξ) + (1-β) g); reparameterised, without the first β."""
        g = oracle.gradient(client.x, oracle.draw())
        if self.form == "original":
            g.mul_(self.fresh_weight)
        client.x.add_(g.add_(server.g, alpha=1 - self.fresh_weight), alpha=-self.eta(client))

    def server_step(self, server: Server) -> None:
        """g and x of the next round."""
        self.move(server)


@dataclasses.dataclass(frozen=True)
class FedAvgMVR(_Momentum):
    """FedAvg-M with variance reduction: the old direction is corrected on the fresh sample.

    Source: Cheng, Huang, Wu, Yuan, "Momentum Benefits Non-IID Federated Learning Simply and Provably",
    arXiv:2306.16504 (2023), Algorithm 3.
    Paper to code: see the top of this module; x^{r-1}, the global model of the previous round -> server.x_prev.
    Special cases: β = 1 is FedAvg with η_g = γ / (ηK), whatever g^0.

    g is averaged once, before the first round, and from then on computed on all ranks.
    """

    name = "fedavg_m_vr"

    exchanged = ("g", "x")
    kinds = {"g": "gradient"}
    exchanged_at_start = ("g",)
    server_rows = ("x_start", "x_prev")
    downlink = ("x",)  # clients recover g = (x^r - x^{r+1}) / γ and remember x^{r-1}

    def exchanges(self) -> tuple[Exchange, ...]:
        """x only."""
        return (Exchange(("x",), then=self.server_step),)

    def start(self, client: Client, server: Server, oracle: Oracle) -> None:
        """g^0 = mean ∇f_i(x^0; B_0)."""
        client.g.copy_(oracle.gradient(client.x, oracle.draw_first()))

    def server_start(self, server: Server) -> None:
        """x^{-1} = x^0."""
        server.x_start.copy_(server.x)
        server.x_prev.copy_(server.x)

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """x_i <- x_i - η (∇f_i(x_i; ξ) + (1-β)(g - ∇f_i(x^{r-1}; ξ)))."""
        g, g_prev = oracle.gradient_pair(client.x, server.x_prev, oracle.draw())
        g.add_(client.g, alpha=1 - self.fresh_weight).sub_(g_prev, alpha=1 - self.fresh_weight)
        client.x.add_(g, alpha=-self.eta(client))

    def server_step(self, server: Server) -> None:
        """g and x of the next round; this round's x becomes x^{r-1}."""
        server.x_prev.copy_(server.x_start)
        self.move(server)


@dataclasses.dataclass(frozen=True)
class SCAFFOLDM(_Momentum):
    """SCAFFOLD along a mixture of the corrected gradient and the last round's mean direction.

    Source: Cheng, Huang, Wu, Yuan, "Momentum Benefits Non-IID Federated Learning Simply and Provably",
    arXiv:2306.16504 (2023), Algorithm 2; form "reparameterised": its Eqs. (31)-(33).
    Paper to code: see the top of this module; c_i -> client.c_i; c -> server.c; c_i⁺ - c_i -> delta_c.
    Invariant: c is the mean of c_i over all clients, absent ones too, after every round.
    Special cases: β = 1 is SCAFFOLD, option II, with η_g = γ / (ηK); one local step and full
    participation is FedAvg-M.

    c_i⁺ is the mean of the plain local gradients; the path travelled (option II) is wrong for β < 1.
    """

    name = "scaffold_m"

    form: str = _form()
    c0: str = _c0()

    exchanged = ("x", "delta_c")
    kinds = {"delta_c": "difference"}
    server_rows = ("x_start", "g", "c")
    client_rows = ("c_i",)
    downlink = ("x", "c")  # clients recover g = (x^r - x^{r+1}) / γ

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_form(self.form, self.fresh_weight)

    @property
    def exchanged_at_start(self) -> tuple[str, ...]:
        return ("delta_c",) if self.c0 == "gradient" else ()

    def start(self, client: Client, server: Server, oracle: Oracle) -> None:
        """c_i = ∇f_i(x^0; B_0), or 0."""
        _start_control_variate(self.c0, client, oracle)

    def server_start(self, server: Server) -> None:
        """g = 0, c = mean(c_i)."""
        server.x_start.copy_(server.x)
        if self.c0 == "gradient":
            server.c.copy_(server.delta_c)

    def download(self, client: Client, server: Server) -> None:
        """delta_c sums the local gradients from 0."""
        client.delta_c.zero_()

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """x_i <- x_i - η (β (∇f_i(x_i; ξ) - c_i + c) + (1-β) g); reparameterised, without the first β."""
        g = oracle.gradient(client.x, oracle.draw())
        client.delta_c.add_(g)
        g.sub_(client.c_i).add_(server.c)
        if self.form == "original":
            g.mul_(self.fresh_weight)
        client.x.add_(g.add_(server.g, alpha=1 - self.fresh_weight), alpha=-self.eta(client))

    def upload(self, client: Client, server: Server, oracle: Oracle) -> None:
        """c_i⁺ = mean of the local gradients."""
        _finish_control_variate(client)

    def sent(self, client: Client, server: Server) -> None:
        """c_i <- c_i + (c_i⁺ - c_i) as it was sent, so that c stays the mean of c_i."""
        client.c_i.add_(client.delta_c)

    def server_step(self, server: Server) -> None:
        """g and x of the next round; c <- c + |S|/N mean(c_i⁺ - c_i)."""
        self.move(server)
        server.c.add_(server.delta_c, alpha=server.participation)


@dataclasses.dataclass(frozen=True)
class SCAFFOLDMVR(_Momentum):
    """SCAFFOLD-M with variance reduction: the old direction is corrected on the fresh sample.

    Source: Cheng, Huang, Wu, Yuan, "Momentum Benefits Non-IID Federated Learning Simply and Provably",
    arXiv:2306.16504 (2023), Algorithm 4.
    Paper to code: see the top of this module; x^{r-1} -> server.x_prev; c_i -> client.c_i; c -> server.c.
    Invariant: c is the mean of c_i over all clients, absent ones too, after every round.
    Special cases: β = 1 is SCAFFOLD, option II, with η_g = γ / (ηK); one local step and full
    participation is FedAvg-M-VR.
    """

    name = "scaffold_m_vr"

    c0: str = _c0()

    exchanged = ("x", "delta_c")
    kinds = {"delta_c": "difference"}
    server_rows = ("x_start", "x_prev", "g", "c")
    client_rows = ("c_i",)
    downlink = ("x", "c")  # clients recover g = (x^r - x^{r+1}) / γ and remember x^{r-1}

    @property
    def exchanged_at_start(self) -> tuple[str, ...]:
        return ("delta_c",) if self.c0 == "gradient" else ()

    def start(self, client: Client, server: Server, oracle: Oracle) -> None:
        """c_i = ∇f_i(x^0; B_0), or 0."""
        _start_control_variate(self.c0, client, oracle)

    def server_start(self, server: Server) -> None:
        """x^{-1} = x^0, g^0 = c^0 = mean(c_i)."""
        server.x_start.copy_(server.x)
        server.x_prev.copy_(server.x)
        if self.c0 == "gradient":
            server.c.copy_(server.delta_c)
            server.g.copy_(server.delta_c)

    def download(self, client: Client, server: Server) -> None:
        """delta_c sums the local gradients from 0."""
        client.delta_c.zero_()

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """x_i <- x_i - η (∇f_i(x_i; ξ) - β (c_i - c) + (1-β)(g - ∇f_i(x^{r-1}; ξ)))."""
        g, g_prev = oracle.gradient_pair(client.x, server.x_prev, oracle.draw())
        client.delta_c.add_(g)
        g.sub_(client.c_i, alpha=self.fresh_weight).add_(server.c, alpha=self.fresh_weight)
        g.add_(server.g, alpha=1 - self.fresh_weight).sub_(g_prev, alpha=1 - self.fresh_weight)
        client.x.add_(g, alpha=-self.eta(client))

    def upload(self, client: Client, server: Server, oracle: Oracle) -> None:
        """c_i⁺ = mean of the local gradients (at x_i only)."""
        _finish_control_variate(client)

    def sent(self, client: Client, server: Server) -> None:
        """c_i <- c_i + (c_i⁺ - c_i) as it was sent, so that c stays the mean of c_i."""
        client.c_i.add_(client.delta_c)

    def server_step(self, server: Server) -> None:
        """g and x of the next round, x^{r-1}; c <- c + |S|/N mean(c_i⁺ - c_i)."""
        server.x_prev.copy_(server.x_start)
        self.move(server)
        server.c.add_(server.delta_c, alpha=server.participation)


def _check_form(form: str, fresh_weight: float) -> None:
    """Raise UserError if β = 0 in the reparameterised form, which divides g by β."""
    if form == "reparameterised" and fresh_weight == 0:
        raise UserError("algorithm.fresh_weight = 0: form = reparameterised needs a number > 0 (g is divided by it)")


def _start_control_variate(c0: str, client: Client, oracle: Oracle) -> None:
    """∇f_i(x^0; B_0), which is averaged and becomes c_i; or nothing: c_i = 0."""
    if c0 == "gradient":
        client.delta_c.copy_(oracle.gradient(client.x, oracle.draw_first()))


def _finish_control_variate(client: Client) -> None:
    """delta_c, so far the sum of the local gradients, becomes c_i⁺ - c_i."""
    client.delta_c.div_(client.num_steps).sub_(client.c_i)
