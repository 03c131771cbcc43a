"""From a client's turn to the aggregation: what it sends is looked at, and passes the stages."""

from fedmpi.aggregation.layout import Moment
from fedmpi.aggregation.stages.base import NotFinite, Stage, apply_stage
from fedmpi.federation.buffers import BUFFERS
from fedmpi.federation.client import Client
from fedmpi.federation.losses import Losses
from fedmpi.federation.parts import Parts


class Passage:
    """Looks at what clients send, and lets it pass the stages.

    Args:
        federation: what gives the stages and the rows.
    """

    def __init__(self, federation: Parts) -> None:
        self._store, self._stages = federation.store, list(federation.stages.values())
        self._kinds, self._left_out = federation.algorithm.kinds, federation.left_out
        self._round_start, self._is_measured = federation.round_start, federation.aggregation.needs_exponents

    def go(self, client: Client, moment: Moment, weight: float, losses: Losses) -> bool:
        """Whether the client, whose turn has ended, counts; it then has passed the stages. `losses`: the `Losses`."""
        store = self._store
        buffers = store.tail.checked(store.work)
        if not (self._stages and self._stage_looks(self._stages[0], moment.rows)):
            losses.check_rows(client, store.region_of(store.work), moment.rows, buffers)
        if len(client.numbers):
            losses.check_numbers(client, len(moment.rows) + len(store.tail.sent.parts))
        if self._left_out.is_on and losses.leave_out_if_faulty(client):
            return False
        if self._stages:
            try:
                self._pass_stages(client, moment, weight, losses)
            except NotFinite:
                losses.check_rows(client, store.region_of(store.work), moment.rows, buffers)
            store.tail.end_stages(store.work)
        return True

    def _stage_looks(self, first: Stage, rows: tuple[str, ...]) -> bool:
        """Whether the first stage finds values that are not finite, of all that is sent."""
        looks = vars(type(first)).get("looks", False) and not (self._left_out.is_on or self._is_measured)
        return looks and bool(rows) and self._store.block.device.type == "cpu"

    def _pass_stages(self, client: Client, moment: Moment, weight: float, losses: Losses) -> None:
        store = self._store
        rows = store.layout.named(store.work) | store.tail.begin_stages(store.work)
        rows = {name: row for name, row in rows.items() if name in (*moment.rows, BUFFERS)}
        start = self._round_start.seen_by_stages if self._round_start is not None else dict
        for number, stage in enumerate(self._stages, 1):
            apply_stage(stage, client.index, weight, moment, self._kinds, rows, start)
            is_last = self._is_measured and number == len(self._stages)
            if is_last or not vars(type(stage)).get("keeps_finite"):  # of the class itself: one derived from it may not
                losses.check_stage(client, store.region_of(store.work), rows, number)
