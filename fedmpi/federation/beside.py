"""What is averaged in float64 beside the rows: an exchange's numbers, and buffers of a wider type than the rows."""

import dataclasses

import torch

from fedmpi.aggregation.base import Aggregation
from fedmpi.aggregation.layout import Moment


class Beside:
    """A rank's second, small block: first numbers, then buffers that are summed in float64.

    It has an aggregation of its own, of the same class as that of the rows, which it passes like these. An exchange
    with fewer numbers than the largest one has the last of them, so that what is sent is one piece.

    Args:
        aggregation: open, see `Aggregation.beside`; None: there is nothing beside the rows. num_local: clients of this
            rank. device: of the block.

    Attributes:
        aggregation: the same. most_numbers: of the exchange with most of them. region: what the current exchange
            averages of the block.
        numbers: [k] of the current exchange, of the client whose turn it is. averages: [k] what becomes of them; the
            same memory if the client is the only one.
        work, wide: [n] the buffers, of this client and averaged.
    """

    def __init__(self, aggregation: Aggregation | None, num_local: int, device: torch.device | str) -> None:
        self.aggregation = aggregation
        if aggregation is None or num_local > 1:
            numel = 0 if aggregation is None else aggregation.layout.numel
            self._work, self._block = torch.zeros(2, numel, dtype=torch.float64, device=device)
        else:
            self._work = self._block = aggregation.block
        self.most_numbers = 0 if aggregation is None else aggregation.layout.dim * len(aggregation.layout.rows)
        self.work, self.wide = self._work[self.most_numbers :], self._block[self.most_numbers :]
        self._averaged = (-1, -1)
        self.begin_exchange(0, 0)

    def begin_exchange(self, count: int, num_wide: int) -> None:
        """Whether the next exchange averages anything: `count` numbers, and as many elements of the buffers."""
        if (count, num_wide) == self._averaged:
            return  # the same views
        self._averaged = count, num_wide
        self.region = slice(self.most_numbers - count, self.most_numbers + num_wide)
        numbers = slice(self.region.start, self.most_numbers)
        self.numbers, self.averages = self._work[numbers], self._block[numbers]

    @property
    def used(self) -> list[Aggregation]:
        """The aggregation, if the current exchange averages anything here."""
        is_used = self.aggregation is not None and self.region.stop > self.region.start
        return [self.aggregation] if is_used else []  # type: ignore[list-item]

    def begin(self, moment: Moment, weights: dict[int, float]) -> None:
        """Begin the aggregation's exchange; `moment` is that of the rows, with the serial number of this one.

        Raises:
            UserError: see `Aggregation.begin`.
        """
        for aggregation in self.used:
            rows = aggregation.layout.rows if len(self.numbers) else ()
            aggregation.start = torch.zeros_like(self._block[self.region])
            aggregation.begin(dataclasses.replace(moment, rows=rows, region=self.region), weights)

    def begin_turn(self) -> None:
        """A client begins with zeros."""
        if len(self.numbers):
            self.numbers.zero_()

    def end_turn(self, client: int, is_left_out: bool) -> None:
        """Give what a client has to the aggregation, see `RowStore.end_turn`."""
        for aggregation in self.used:
            give = aggregation.skip if is_left_out else aggregation.take
            give(client, self._work[self.region])

    def average(self, num_unsent: int) -> None:
        """Let the aggregation make the averages, without elements at the end that no client has changed. Collective."""
        for aggregation in self.used:
            last = self.region.stop - (num_unsent if aggregation.leaves_out_constants else 0)
            out = self._block[self.region.start : last]
            if out.numel():
                aggregation.spoil(out)
                aggregation.average(out)

    def reorder(self, order: torch.Tensor) -> None:
        """Put the buffers' elements into another order, [n] positions among them."""
        if self.aggregation is not None and len(order):
            self.aggregation.reorder_end(order)

    def new_rows(self) -> dict[str, torch.Tensor]:
        """Name -> zeros for what the block has, in memory of their own."""
        assert self.aggregation is not None
        return self.aggregation.layout.named(torch.zeros_like(self._block))
