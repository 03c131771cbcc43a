"""What hears of a federation's rounds while they run: traces, and checkpoints within a round."""

from typing import Any

from fedmpi.federation.client import Client


class Observer:
    """Each method does nothing unless a subclass has its own. `federation`: the `Federation`. Not collective."""

    def begin_exchange(self, federation: Any, number: int) -> None:
        """Before the aggregation begins a round's exchange number `number`."""

    def after_step(self, federation: Any, client: Client) -> None:
        """After the local step `client.step_index` of the client whose turn it is."""

    def end_turn(self, federation: Any, client: Client) -> None:
        """After the last local step of a client, before what it has is made what it sends."""

    def after_round(self, federation: Any) -> None:
        """After the start (`round_index` is -1 then), and after a round's last average."""
