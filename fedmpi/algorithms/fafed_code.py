"""FAFED as in the code that its authors published."""

import dataclasses

from fedmpi.algorithms.base import Client, Oracle, Server
from fedmpi.algorithms.fafed import FAFED
from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class FAFEDCode(FAFED):
    """FAFED as the authors' code computes it: also the last local step before an average moves, with the old A.

    Source: Wu, Huang, Hu, Huang, "Faster Adaptive Federated Learning", AAAI 2023, their code; each of the
    three settings is one difference from Algorithm 2.
    Paper to code: as in `FAFED`.
    Special cases: sync_order "paper", first_step "plain" and prev_grad_scale 1 are FAFED; with β = 1 both
    orders agree. With m_every above 1, m_i is the client's own in between, like v_i with v_every.
    """

    name = "fafed_code"

    sync_order: str = setting(
        "code",
        "at an average: move before it, with the old A (code), or afterwards, with the new A (paper)",
        among=("code", "paper"),
    )
    first_step: str = setting(
        "plain",
        "first move (line 3 of Algorithm 2): plain, as in the paper, or adaptive, divided by A_0",
        among=("plain", "adaptive"),
    )
    prev_grad_scale: float = setting(
        1.0, "factor of the gradient at x_{t-1}; 0.95 in the authors' script for images", least=0
    )
    m_every: int = setting(
        1, "rounds between two averages of m, with sync_order code; above 1, a variant of ours", least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.m_every > 1 and self.sync_order == "paper":
            raise UserError(
                f"algorithm.m_every = {self.m_every}: expected 1, or sync_order code: in the paper's order, the server "
                "moves x along the average of m"
            )

    @property
    def periods(self) -> dict[str, int]:
        return {"m": self.m_every, "v": self.v_every}

    def server_start(self, server: Server) -> None:
        """A_0 as in the paper, then the first move."""
        if self.first_step == "plain":
            return super().server_start(server)
        self._refresh(server)
        server.x.addcdiv_(server.m, server.A, value=-self.eta(server))

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """As in the paper, but for the scale of the older gradient and the last move."""
        g, g_prev = oracle.gradient_pair(client.x, client.x_prev, oracle.draw())
        self._estimate(client, g, g_prev, self.prev_grad_scale)
        if self.sync_order == "code" or not client.is_last_step:
            client.x.addcdiv_(client.m, server.A, value=-self.eta(client))

    def _move(self, server: Server) -> None:
        """In the paper's order alone: the clients have moved."""
        if self.sync_order == "paper":
            super()._move(server)
