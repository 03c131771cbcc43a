"""What a round began with, for the aggregations, codecs and stages that need it."""

from collections.abc import Mapping

import torch

from fedmpi.federation.buffers import BUFFERS
from fedmpi.federation.private import PrivateParts
from fedmpi.federation.rows import RowStore


class RoundStart:
    """The exchanged rows and the float buffers as the current round began with them. Collective, as is `keep`.

    Args:
        store: the `RowStore`. private: the `PrivateParts`, whose coordinates are the same on all ranks in it.
        zeros: names of rows that are 0 in what aggregations see: differences.

    Attributes:
        rows: name -> [dim]. buffers: [num_buffers].
    """

    def __init__(self, store: RowStore, private: PrivateParts, zeros: set[str]) -> None:
        self._store, self._layout, self._private, self._zeros = store, store.layout, private, zeros
        of_rows = self._layout.rows_of(store.block)
        self._copy = store.aggregation.link.allocate_copy(of_rows.numel(), of_rows.dtype, of_rows.device)
        self.buffers, self._behind = store.buffers.clone(), self._layout.behind(store.block).clone()
        self._for_stages: torch.Tensor | None = None  # memory for what each of them sees
        self._for_aggregation: torch.Tensor | None = None
        self._is_kept = False  # for the next round

    @property
    def rows(self) -> dict[str, torch.Tensor]:
        return self._layout.named(self._copy.vector)

    def begin_exchange(self, number: int) -> None:
        """In a round's first exchange (0), what the server has now is its start, unless `keep` was called before."""
        if number == 0 and not self._is_kept:
            self.keep()
        self._is_kept = False

    def keep(self) -> None:
        """What the server has now is what the next round begins with, also if a loop changes rows before it does."""
        self._copy.take(self._store.averages())
        self.buffers.copy_(self._store.buffers)
        self._private.clear(self.rows, self.buffers)
        self._is_kept = True

    def restore(self, rows: Mapping[str, torch.Tensor], buffers: torch.Tensor) -> None:
        """The same, with copies of what `rows` and `buffers` were."""
        for name, row in rows.items():
            self.rows[name].copy_(row)
        self.buffers.copy_(buffers)
        self._is_kept = True

    def seen_by_stages(self, is_copy: bool = True) -> dict[str, torch.Tensor]:
        """Name -> [dim] exchanged rows and float buffers.

        It is a copy until the next call; without `is_copy`, it may be read only. Of buffers that no client has changed,
        stages see 0, see `Tail.begin_stages`.
        """
        rows, behind, sent = self._copy.vector, self._behind, self._store.tail.sent
        if is_copy:
            if self._for_stages is None:
                self._for_stages = torch.empty_like(self._store.block)
            rows = self._layout.rows_of(self._for_stages).copy_(rows)
            behind = self._layout.behind(self._for_stages)
        sent.put(self.buffers, behind)
        sent.put_constants(behind, is_zero=True)
        return self._layout.named(rows) | ({BUFFERS: behind} if behind.numel() else {})

    def give(self) -> None:
        """Give the aggregation the current region, if it or its codec needs that: a copy until the next call."""
        aggregation = self._store.aggregation
        if not (aggregation.needs_start or aggregation.codec):
            return
        if self._for_aggregation is None:
            self._for_aggregation = torch.empty_like(self._store.block)
        block = self._for_aggregation
        self._layout.rows_of(block).copy_(self._copy.vector)
        self._store.tail.sent.put(self.buffers, self._layout.behind(block))
        for name, row in self._layout.named(block).items():
            if name in self._zeros:
                row.zero_()
        aggregation.start = block[self._store.region]
