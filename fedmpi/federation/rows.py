"""A rank's vectors as rows of contiguous blocks: its clients' own, the server's, and those that are summed."""

import functools
from collections.abc import Collection

import torch

from fedmpi.aggregation.base import Aggregation
from fedmpi.aggregation.sending import Sending
from fedmpi.algorithms.base import Algorithm
from fedmpi.algorithms.check import skipping_rows
from fedmpi.comm.solo import SoloLink
from fedmpi.federation.beside import Beside
from fedmpi.federation.buffers import SentBuffers
from fedmpi.federation.layout import layout_of
from fedmpi.federation.tail import Tail


class RowStore:
    """The vectors of one rank: its clients' rows, the replicated server's rows, and the blocks of exchanged rows.

    With one client on the rank the exchanged rows exist once: the client works in them, they are
    averaged in place, and they are the server's rows then.
    Several clients share one set of working rows, which is a client's own during its turn; partial sums and
    the averages are in further blocks. Memory for exchanged and scratch rows grows only with the logarithm of the
    number of clients, unless the algorithm averages more than once a round: then each client needs a block.
    Rows that skip rounds are a client's own in between: with one client on the rank, the server has others then.

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
        self.skipping = skipping_rows(algorithm)  # they are the first of a block
        self._skipped = zeros(0 if self._is_shared else len(self.skipping), dim)  # the server's, if a client has others
        self.region, self._is_first = slice(0, 0), True
        self._rows: tuple[str, ...] = ()  # of the current exchange
        self._done: set[str] = set()  # rows that the round has averaged before it

    @property
    def buffers(self) -> torch.Tensor:
        """[num_buffers] float buffers of the averaged model."""
        return self.tail.values

    def server_rows(self) -> dict[str, torch.Tensor]:
        """Name -> [dim] of the rows that only the server has, the same on every rank."""
        return dict(zip(self._server_names, self._server))

    def averaged_rows(self) -> dict[str, torch.Tensor]:
        """Name -> [dim] of the exchanged rows as the last Allreduce left them."""
        return self.layout.named(self.block) | dict(zip(self.skipping, self._skipped))

    def averages(self) -> torch.Tensor:
        """The same as one vector; it may be that in which a client works."""
        rows = self.layout.rows_of(self.block)
        return torch.cat([self._skipped.view(-1), rows[self._skipped.numel() :]]) if len(self._skipped) else rows

    def skipped_rows(self, position: int) -> dict[str, torch.Tensor]:
        """Name -> [dim] of the rows that skip rounds, as the rank's client number `position` keeps them."""
        rows = self.layout.named(self.work if self._unsent is None else self._unsent[position])
        return {name: rows[name] for name in self.skipping}

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
                have not been averaged in this round are as the client left them.
            count: of the numbers that will be averaged.
        """
        self._done = set() if is_first else self._done | {*self._rows}
        self._rows, self.region, self._is_first = rows, self.layout.place_of(rows), is_first
        averages_buffers = bool(rows) and self.region.stop == self.layout.numel
        self.tail.begin_exchange(averages_buffers)
        self.beside.begin_exchange(count, self.tail.sent.sizes[1] if averages_buffers else 0)

    def begin_turn(self, position: int, skipped: Collection[str] = (), is_new: bool = True) -> None:
        """Hand the working rows to the rank's client number `position`.

        Args:
            skipped: of the rows that skip rounds, those that the client begins a round with as it left them.
            is_new: whether the turn begins; otherwise it goes on, with rows that are there already.
        """
        if self._poison:
            self._scratch.fill_(float("nan"))
        self.beside.begin_turn()
        averaged = set(self.layout.rows).difference(skipped) if self._is_first else self._done
        if not self._is_shared:
            for name, row in zip(self.skipping, self._skipped) if self.skipping and is_new else ():
                if name in averaged:
                    self.work[self.layout.place_of((name,))].copy_(row)
            return
        if len(averaged) == len(self.layout.rows) or self._unsent is None:
            self.work.copy_(self.block)
        else:
            for name in self.layout.rows:
                place = self.layout.place_of((name,))
                self.work[place].copy_((self.block if name in averaged else self._unsent[position])[place])
        self.tail.begin_turn(None if self._is_first or self.layout.rows[-1] in averaged else position)

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
        if self._unsent is not None and not is_left_out:
            for name in self.layout.rows:
                if name not in self._done and name not in self._rows:
                    place = self.layout.place_of((name,))
                    self._unsent[position, place].copy_(self.work[place])

    def average(self) -> None:
        """Let the aggregation make the averages of the current exchange. Collective."""
        self.beside.average(self.tail.num_unsent_wide)
        out = self.region_of(self.block)
        if self.region.stop > self.region.start or self.aggregation.needs_exponents:
            self.aggregation.spoil(out)
            self.aggregation.average(out)
            if len(self._skipped):
                self._skipped.view(-1)[self.region].copy_(self.block[: self._skipped.numel()][self.region])
        self.tail.take_averages(self.block)
