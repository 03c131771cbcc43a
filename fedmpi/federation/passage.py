"""From a client's turn to the aggregation: what it sends is looked at, and passes the stages."""

from fedmpi.aggregation.stages.base import NotFinite, apply_stage
from fedmpi.federation.buffers import BUFFERS


class Passage:
    """Looks at what clients send, and lets it pass the stages.

    Args:
        store: a `RowStore`. stages: name -> `Stage`. kinds: name -> kind of the rows that are no points.
        leaves_out: whether a client with values that are not finite is left out, see `Sending.faulty`.
    """

    def __init__(self, store, stages, kinds, leaves_out):
        self._store, self._stages, self._kinds, self._leaves_out = store, list(stages.values()), kinds, leaves_out

    def go(self, client, moment, weight, losses):
        """Whether the client, whose turn has ended, counts; it then has passed the stages. `losses`: the `Losses`."""
        store, buffers = self._store, self._store.checked_buffers()
        if not (self._stages and self._stage_looks(moment.rows)):
            losses.check_rows(client, store.turn(), moment.rows, buffers)
        if self._leaves_out and losses.leave_out_if_faulty(client):
            return False
        if self._stages:
            try:
                self._pass_stages(client, moment, weight, losses)
            except NotFinite:
                losses.check_rows(client, store.turn(), moment.rows, buffers)
            store.end_stages()
        return True

    def _stage_looks(self, rows):
        """Whether the first stage finds values that are not finite, of all that is sent."""
        looks = vars(type(self._stages[0])).get("looks", False) and not self._leaves_out
        sees_all = all(self._kinds.get(row) != "number" for row in rows)
        return looks and bool(rows) and sees_all and self._store.block.device.type == "cpu"

    def _pass_stages(self, client, moment, weight, losses):
        rows = self._store.begin_stages()
        sent = {name: row for name, row in rows.items() if name in (*moment.rows, BUFFERS)}
        for number, stage in enumerate(self._stages, 1):
            apply_stage(stage, client.index, weight, moment, self._kinds, sent, self._store.start_rows)
            if not vars(type(stage)).get("keeps_finite"):  # of the class itself: one that derives from it may not
                losses.check_stage(client, self._store.turn(), sent, number)
