"""What is told of a federation's rounds while they run: for traces, and for checkpoints within a round."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedmpi.federation.client import Client
    from fedmpi.federation.rounds import Federation


class Observer:
    """Each method does nothing unless a subclass has its own. Not collective."""

    def begin_exchange(self, federation: Federation, number: int) -> None:
        """Before the aggregation begins a round's exchange number `number`."""

    def after_step(self, federation: Federation, client: Client) -> None:
        """After the local step `client.step_index` of the client whose turn it is."""

    def after_round(self, federation: Federation) -> None:
        """After the start (`round_index` is -1 then), and after a round's last average."""
