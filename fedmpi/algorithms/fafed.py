"""FAFED: adaptive steps, scaled by one matrix that all clients share."""

import dataclasses

import torch

from fedmpi.algorithms.base import Algorithm, Client, Exchange, Oracle, Server
from fedmpi.algorithms.periods import in_periods, is_due
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class FAFED(Algorithm):
    """Variance-reduced momentum under one shared adaptive matrix; x, m and v averaged every q steps.

    Source: Wu, Huang, Hu, Huang, "Faster Adaptive Federated Learning", AAAI 2023, Algorithm 2.
    Paper to code: x_{t,i} -> client.x; x_{t-1,i} -> client.x_prev; m_{t,i}, v_{t,i} -> client.m,
    client.v; A_t (diagonal) -> server.A; η_t -> step_size; α_t -> fresh_weight;
    β -> second_moment_decay; ρ -> epsilon.
    Invariant: mean x_{t+1} = mean x_t - η mean m_t / A_t at every t, averaged or not.
    Special cases: A = 1 at all times is STEM; one client with q = 1 is adaptive STORM; β = 1 keeps A_0.

    adaptive_matrix: the paper allows other v_t in diag(√v_t + ρ), the same for all clients. "global" and
    "adagrad_norm" use ‖g‖² instead of g²: every coordinate of their v has the same value. "adagrad_norm"
    sums ‖g‖² instead of averaging it.

    In the paper's order the last local step of a round does not move: the server moves x for all
    clients, with the new A (lines 10-12), so after a round server.x is x_{t+1}. x_{t-1,i} is the
    client's own iterate and is never averaged. `fedmpi.theory.fafed` has the settings of its Theorem 2.

    With v_every above 1 it is a variant of ours: v is averaged, and A refreshed, in every so many rounds; in between,
    v_i is the client's own, and the server moves with the A that it has.
    """

    step_size: float = setting(0.003, "η_t, step size of every move", above=0)
    fresh_weight: float = setting(0.1, "α_t, weight of the fresh gradient in m", least=0, most=1)
    fresh_weight_scale: float | None = setting(None, "c: replaces fresh_weight by α_{t+1} = min(1, c η_t²)", above=0)
    second_moment_decay: float = setting(0.9, "β, weight of the old second moment", least=0, most=1)
    epsilon: float = setting(0.01, "ρ, added to the root of the averaged second moment", above=0)
    adaptive_matrix: str = setting(
        "diagonal",
        "v is a decaying mean of g² per coordinate (diagonal), or of ‖g‖² (global), or the sum of ‖g‖² (adagrad_norm)",
        among=("diagonal", "global", "adagrad_norm"),
    )
    v_every: int = setting(1, "rounds between two averages of v; above 1, a variant of ours", least=1)

    clock = "iteration"
    kinds = {"m": "gradient", "v": "square"}
    server_rows = ("A",)
    client_rows = ("x_prev",)

    @property
    def periods(self) -> dict[str, int]:
        """Name of a moment -> rounds between two averages of it."""
        return {"m": 1, "v": self.v_every}

    @property
    def exchanged(self) -> tuple[str, ...]:
        if set(self.periods.values()) == {1}:
            return ("x", "m", "v")
        return (*self.exchanged_at_start, "x")  # those that skip rounds lie before the others

    @property
    def exchanged_at_start(self) -> tuple[str, ...]:
        m, v = self.periods.values()
        return ("v", "m") if m == 1 < v else ("m", "v")

    def exchanges(self) -> tuple[Exchange, ...]:
        """x, m and v; with periods, v apart, and before the server's move."""
        return in_periods(self.exchanged, self.periods, {"v": self.server_step}, otherwise=self.move_without_v)

    def start(self, client: Client, server: Server, oracle: Oracle) -> None:
        """Lines 1-2: m_i = ∇f_i(x_0; B_0), v_i = its square; both are averaged next."""
        g = oracle.gradient(client.x, oracle.draw_first())
        client.m.copy_(g)
        client.v.copy_(self._square(g))
        client.x_prev.copy_(client.x)

    def server_start(self, server: Server) -> None:
        """Lines 2-3: A_0 = √v̄_0 + ρ, x_1 = x_0 - η_0 m̄_0 (without A_0, as printed)."""
        self._refresh(server)
        server.x.add_(server.m, alpha=-self.eta(server))

    def download(self, client: Client, server: Server) -> None:
        """After an absence x_prev is stale: reset it to x, so that the correction vanishes."""
        if client.was_absent:
            client.x_prev.copy_(client.x)

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """Lines 5-7 and 14: estimate with two gradients on the same sample, then move."""
        g, g_prev = oracle.gradient_pair(client.x, client.x_prev, oracle.draw())
        self._estimate(client, g, g_prev)
        if not client.is_last_step:
            client.x.addcdiv_(client.m, server.A, value=-self.eta(client))

    def _estimate(self, client: Client, g: torch.Tensor, g_prev: torch.Tensor, scale: float = 1) -> None:
        """Lines 5-7: m_i <- g + (1 - α)(m_i - g⁻), then v_i, and x_{t-1,i} = x_{t,i}; `scale` is a factor of g⁻."""
        client.m.sub_(g_prev, alpha=scale)
        alpha = self.alpha(client, self.fresh_weight, self.fresh_weight_scale)
        torch.add(g, client.m, alpha=1 - alpha, out=client.m)
        if self.adaptive_matrix == "adagrad_norm":
            client.v.add_(self._square(g))
        else:
            client.v.lerp_(self._square(g), 1 - self.second_moment_decay)  # v_i <- β v_i + (1 - β) g²
        client.x_prev.copy_(client.x)

    def server_step(self, server: Server) -> None:
        """Lines 10-12: v̄, then A, then x̄ - η m̄ / A."""
        self._refresh(server)
        self._move(server)

    def move_without_v(self, server: Server) -> None:
        """Line 12 alone, where v̄ does not come in this round."""
        if not is_due(self.v_every, server):
            self._move(server)

    def _move(self, server: Server) -> None:
        """Line 12: x̄ - η m̄ / A."""
        server.x.addcdiv_(server.m, server.A, value=-self.eta(server))

    def _square(self, g: torch.Tensor) -> torch.Tensor:
        """g² per coordinate, overwriting g; or ‖g‖², a 0-d tensor."""
        return g.square_() if self.adaptive_matrix == "diagonal" else torch.dot(g, g)

    def _refresh(self, server: Server) -> None:
        """A = √v̄ + ρ: the root of the average; ρ is added after the root."""
        torch.sqrt(server.v, out=server.A).add_(self.epsilon)
