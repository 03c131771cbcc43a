"""The model's float buffers, which lie behind the exchanged rows of a block and are averaged with the last of them."""

import torch

from fedmpi.aggregation.base import Aggregation
from fedmpi.aggregation.layout import Layout
from fedmpi.federation.buffers import BUFFERS, SentBuffers


class Tail:
    """A rank's float buffers: of the averaged model, and of the client whose turn it is.

    Args:
        sent: the `SentBuffers`: which are averaged, and their places. layout: the `Layout` of a block.
        num_local: clients of this rank. keeps: whether each of several has its own until the next round, and not only
            in its turn.

    Attributes:
        values: [num_buffers] of the averaged model. work: of the client whose turn it is; the same memory if it is the
            only one.
        num_unsent: elements at the end of the current region that no client has changed.
        kept: of each of several clients, until the next round.
        wide: where buffers of a float32 model that need it are summed in float64.
    """

    def __init__(self, sent: SentBuffers, layout: Layout, num_local: int, keeps: bool) -> None:
        self.sent, self._layout = sent, layout
        self.values = sent.agreed.clone()
        self.work = torch.zeros_like(self.values) if num_local > 1 else self.values
        self.wide, self._wide_turn = torch.zeros(2, sent.sizes[1], dtype=torch.float64, device=layout.device)
        self.kept = [self.values.clone() for _ in range(num_local)] if keeps else []
        self._is_averaged, self.num_unsent = False, 0
        self._kept_rows: list[dict[str, torch.Tensor]] = []  # what `new_rows` has made

    def begin_exchange(self, is_averaged: bool) -> None:
        """Whether the next exchange averages the buffers, too."""
        self._is_averaged = is_averaged
        self._count()
        if self.wide.numel():
            self.wide.zero_()

    def _count(self) -> None:
        self.num_unsent = self.sent.sizes[0] - self.sent.sent_sizes[0] if self._is_averaged else 0

    def begin_turn(self, position: int | None) -> None:
        """A client begins with the averages (None), or with its own as it left them; for one of several of a rank."""
        self.work.copy_(self.values if position is None else self.kept[position])

    def checked(self, block: torch.Tensor) -> dict[int, torch.Tensor]:
        """Position -> values of the client's buffers that have to be finite; what is sent is put into `block`."""
        if not self.sent.parts:
            return {}
        self.sent.pack(self.work, (self._layout.behind(block), self._wide_turn))
        return self.sent.checked(self.work) if self._is_averaged else {}

    def end_turn(self, position: int, weight: float | None) -> None:
        """Add what is summed in float64, unless the client is left out (None), and keep what it needs later."""
        if self.wide.numel() and weight is not None:
            self.wide.add_(self._wide_turn, alpha=weight)
        if self.kept:
            self.kept[position].copy_(self.work)

    def average(self, block: torch.Tensor, aggregation: Aggregation) -> None:
        """Take the averages that lie behind the rows of `block`. Collective on the aggregation's link.

        Buffers of a wider type are averaged by themselves, always by their mean.
        """
        if not self.sent.parts or not self._is_averaged:
            return
        wide = self.wide[: self.sent.sent_sizes[1]]
        if wide.numel():
            aggregation.link.average(wide, sum(aggregation.weights.values()), wide, "buffers")
        self.sent.unpack((self._layout.behind(block), self.wide), self.values)

    def send(self, flags: list[int], aggregation: Aggregation) -> None:
        """From now on, send the buffers that a client of any rank has changed, too; see `SentBuffers.send`."""
        orders = self.sent.send(flags) if flags else None
        self._count()
        if orders is not None:
            narrow, wide = (order.to(self.values.device) for order in orders)
            aggregation.reorder_end(narrow)
            self.wide = self.wide[wide]
            for rows in self._kept_rows:
                rows[BUFFERS].copy_(rows[BUFFERS][narrow])

    def begin_stages(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """What stages see of the buffers in `block`: one more row.

        Buffers that no client has changed are 0 in it: a mask may have infinite values.
        """
        if not self._is_averaged:
            return {}
        self.sent.put_constants(self._layout.behind(block), is_zero=True)
        return self.as_row(block)

    def end_stages(self, block: torch.Tensor) -> None:
        """After the stages, the buffers that no client has changed are as they were."""
        if self._is_averaged:
            self.sent.put_constants(self._layout.behind(block))

    def as_row(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """{their name: what lies behind the rows of a block}, if there are any."""
        behind = self._layout.behind(block)
        return {BUFFERS: behind} if behind.numel() else {}

    def new_rows(self) -> dict[str, torch.Tensor]:
        """Name -> zeros for each exchanged row and the buffers, in memory of their own; buffers stay in order."""
        block = self.values.new_zeros(self._layout.numel)
        rows = self._layout.named(block) | self.as_row(block)
        self._kept_rows += [rows] * (BUFFERS in rows)
        return rows
