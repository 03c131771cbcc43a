"""A rank's vectors as rows of contiguous blocks: its clients' own, the server's, and those that are summed."""

import functools
from typing import Any

import torch

from fedmpi.aggregation.base import Aggregation
from fedmpi.aggregation.layout import Layout
from fedmpi.aggregation.sending import Sending
from fedmpi.algorithms.base import Algorithm
from fedmpi.algorithms.check import most_numbers
from fedmpi.comm.solo import SoloLink
from fedmpi.federation.beside import Beside
from fedmpi.federation.buffers import SentBuffers
from fedmpi.federation.tail import Tail

NUMBERS = "numbers"  # their name in the layout of what is beside the rows


class RowStore:
    """The vectors of one rank: its clients' rows, the replicated server's rows, and the blocks of exchanged rows.

    With one client on the rank the exchanged rows exist once: the client works in them, they are
    averaged in place, and they are the server's rows then.
    Several clients share one set of working rows, which is a client's own during its turn; partial sums and
    the averages are in further blocks. Memory for exchanged and scratch rows grows only with the logarithm of the
    number of clients, unless the algorithm averages more than once a round: then each client needs a block.

    Args:
        algorithm: names the rows (`fedmpi.algorithms.base`).
        dim: d. buffers: the `SentBuffers`, which are averaged with the last exchanged row; None: there are none.
        num_local: clients of this rank.
        dtype, device: of every row.
        poison: fill scratch rows with NaN at every turn, so that code which relies on old contents is found.
        aggregation: an `Aggregation` that is open; None: the mean over the clients of this rank alone.

    Attributes:
        layout: the `Layout` of a block: exchanged rows one after the other, float buffers behind them.
        work: the block of the client whose turn it is. block: the server's, the averages. With one client, the same.
        region: what the current exchange averages of a block.
        tail: the `Tail`, all about the float buffers. beside: the `Beside`: numbers, and buffers of a wider type.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        dim: int,
        buffers: SentBuffers | None,
        num_local: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        poison: bool = False,
        aggregation: Aggregation | None = None,
    ) -> None:
        zeros = functools.partial(torch.zeros, dtype=dtype, device=device)
        sent = buffers or SentBuffers(zeros(0))
        if aggregation is None:
            layout = layout_of(algorithm, dim, sent, dtype, device)
            aggregation, _ = Sending().opened(SoloLink(), layout, range(num_local))
        self.aggregation, self.layout, self._poison = aggregation, aggregation.layout, poison
        numel = self.layout.numel
        self._is_shared = num_local > 1
        keeps = self._is_shared and len(algorithm.exchanges()) > 1
        self._scratch_names, self._scratch = algorithm.scratch, zeros(len(algorithm.scratch), dim)
        self._own_names, self._own = algorithm.client_rows, zeros(num_local, len(algorithm.client_rows), dim)
        self.work = zeros(numel) if self._is_shared else aggregation.block
        self.block = zeros(numel) if self._is_shared else aggregation.block
        self._unsent = zeros(num_local, numel) if keeps else None  # of each client, what it sends later in the round
        self.beside = Beside(aggregation.beside, num_local, device)
        self.tail = Tail(sent, self.layout, num_local, keeps, self.beside)
        self._server_names, self._server = algorithm.server_rows, zeros(len(algorithm.server_rows), dim)
        self.region, self._is_first = slice(0, 0), True

    @property
    def buffers(self) -> torch.Tensor:
        """[num_buffers] float buffers of the averaged model."""
        return self.tail.values

    def server_rows(self) -> dict[str, torch.Tensor]:
        """Name -> [dim] of the rows that only the server has, the same on every rank."""
        return dict(zip(self._server_names, self._server))

    def averaged_rows(self) -> dict[str, torch.Tensor]:
        """Name -> [dim] of the exchanged rows as the last Allreduce left them."""
        return self.layout.named(self.block)

    def client_rows(self, position: int) -> dict[str, torch.Tensor]:
        """Name -> [dim] of all rows of the rank's client number `position`."""
        rows = self.layout.named(self.work)
        rows.update(zip(self._scratch_names, self._scratch))
        rows.update(zip(self._own_names, self._own[position]))
        return rows

    def begin_exchange(self, rows: tuple[str, ...], is_first: bool, count: int = 0) -> None:
        """Prepare the turns of the clients that take part in an exchange.

        Args:
            rows: consecutive names in `exchanged` of what will be averaged; () if none will.
            is_first: whether it is the first of its round: clients then begin with the averages. Otherwise rows that
                are still to be averaged in this round are as the client left them.
            count: of the numbers that will be averaged.
        """
        stop = 0 if is_first else self.region.stop  # of the rows that this round has averaged
        self.region, self._is_first = self.layout.place_of(rows) if rows else slice(stop, stop), is_first
        averages_buffers = bool(rows) and self.region.stop == self.layout.numel
        self.tail.begin_exchange(averages_buffers)
        self.beside.begin_exchange(count, self.tail.sent.sizes[1] if averages_buffers else 0)

    def begin_turn(self, position: int) -> None:
        """Hand the working rows to the rank's client number `position`."""
        if self._poison:
            self._scratch.fill_(float("nan"))
        self.beside.begin_turn()
        if not self._is_shared:
            return
        if self._is_first or self._unsent is None:
            self.work.copy_(self.block)
            self.tail.begin_turn(None)
        else:
            start = self.region.start  # rows before it were averaged in this round, the others are still the client's
            self.work[:start].copy_(self.block[:start])
            self.work[start:].copy_(self._unsent[position, start:])
            self.tail.begin_turn(position)

    def kept_for_later(self) -> list[torch.Tensor]:
        """What clients have left for later exchanges of the round."""
        return [] if self._unsent is None else [self._unsent, *self.tail.kept]

    def region_of(self, block: torch.Tensor) -> torch.Tensor:
        """The region of a block, without float buffers that no client has changed."""
        num_unsent = self.tail.num_unsent if self.aggregation.leaves_out_constants else 0
        return block[self.region.start : self.region.stop - num_unsent]

    def end_turn(self, position: int, client: int, is_left_out: bool = False) -> None:
        """Give a client's region to the aggregation, and store what a later exchange of the round needs.

        `position` is its place among those of this rank, `client` its number. `is_left_out`: whether the aggregation
        learns only that it is missing.
        """
        if self.region.stop > self.region.start:
            give = self.aggregation.skip if is_left_out else self.aggregation.take
            give(client, self.work[self.region])
        self.beside.end_turn(client, is_left_out)
        self.tail.end_turn(position)
        if self._unsent is not None:
            self._unsent[position, self.region.stop :].copy_(self.work[self.region.stop :])

    def average(self) -> None:
        """Let the aggregation make the averages of the current exchange. Collective."""
        self.beside.average(self.tail.num_unsent_wide)
        out = self.region_of(self.block)
        if self.region.stop > self.region.start:
            self.aggregation.spoil(out)
            self.aggregation.average(out)
        self.tail.take_averages(self.block)


def layout_of(
    algorithm: Algorithm,
    dim: int,
    sent: SentBuffers,
    dtype: torch.dtype,
    device: torch.device | str,
    local_steps: int = 1,
    parameters: tuple[Any, Any, Any] = ((), (), ()),
) -> Layout:
    """The `Layout` of what clients send.

    Args:
        local_steps: the largest number of a client in a round. parameters: segments, names and shapes, see `Layout`.
            For the others see `RowStore`.

    Raises:
        UserError: if the algorithm declares its numbers in a wrong way.
    """
    names, beside, num_numbers = algorithm.exchanged, None, most_numbers(algorithm, local_steps)
    if num_numbers + sent.sizes[1]:
        row = (NUMBERS,) if num_numbers else ()
        kinds = dict.fromkeys(row, "number")
        beside = Layout(row, num_numbers, num_numbers + sent.sizes[1], torch.float64, device, kinds=kinds)
    kinds = {row: algorithm.kinds.get(row, "point") for row in names}
    return Layout(names, dim, len(names) * dim + sent.sizes[0], dtype, device, *parameters, kinds, beside)
