"""A rank's vectors as rows of contiguous blocks: its clients' own, the server's, and those that are summed."""

import functools

import torch

from fedmpi.aggregation.layout import Layout
from fedmpi.aggregation.mean import Mean
from fedmpi.algorithms.base import KINDS, Algorithm
from fedmpi.comm.solo import SoloLink
from fedmpi.federation.buffers import BUFFERS, SentBuffers
from fedmpi.ground.errors import UserError


class RowStore:
    """The vectors of one rank: its clients' rows, the replicated server's rows, and the exchanged block.

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
        block: the averages: what the server holds of the exchanged rows; behind them float buffers are summed.
        outgoing: of the same shape; what is summed over the ranks. The same memory with one client.
        buffers: [num_buffers] float buffers of the averaged model. work_buffers: those of the client whose turn it is.
        sent: the `SentBuffers`.
        wide: where buffers of a float32 model that need it are summed in float64.
    """

    def __init__(self, algorithm, dim, buffers, num_local, dtype, device="cpu", poison=False, aggregation=None):
        self.dim = dim
        self._exchanged, self._scratch = algorithm.exchanged, algorithm.scratch
        self._poison = poison
        self.sent = buffers or SentBuffers(torch.empty(0, dtype=dtype, device=device))
        self._block_size = len(self._exchanged) * dim + self.sent.sizes[0]
        self.wide, self._wide_turn = torch.zeros(2, self.sent.sizes[1], dtype=torch.float64, device=device)
        num_own, num_scratch = len(algorithm.client_rows), len(self._scratch)
        zeros = functools.partial(torch.zeros, dtype=dtype, device=device)
        if aggregation is None:
            aggregation = Mean()
            layout = Layout(self._exchanged, dim, self._block_size, dtype, device)
            aggregation.open(SoloLink(), layout, range(num_local))
        self.aggregation = aggregation
        self.outgoing = aggregation.block
        self._scratch_rows = zeros(num_scratch, dim)
        self._own_rows = zeros(num_local, num_own, dim)
        self._shared = num_local > 1
        if self._shared:
            self._work = zeros(self._block_size)
            self.block = zeros(self._block_size)
            several = len(algorithm.exchanges()) > 1
            self._pending = zeros(num_local, self._block_size) if several else None
        else:
            self._work = self.block = self.outgoing
            self._pending = None
        self.buffers = self.sent.agreed.clone()
        self.work_buffers = torch.zeros_like(self.buffers) if self._shared else self.buffers
        self._pending_buffers = [] if self._pending is None else [self.buffers.clone() for _ in range(num_local)]
        self._server = zeros(len(algorithm.server_rows), dim)
        self._start_copy, self._start_block = None, None  # memory for what is called like it
        # Rows and buffers as a round began with them, and memory for the buffers behind rows that are only read.
        self._start, self._start_buffers, self._start_behind = None, None, None
        self.region, self._begins_round = slice(0, 0), True
        self._server_names, self._own_names = algorithm.server_rows, algorithm.client_rows
        self._kept = []  # what `new_rows` has made

    def server_rows(self):
        """Name -> [dim] of the rows that only the server has, the same on every rank."""
        return dict(zip(self._server_names, self._server))

    def averaged_rows(self):
        """Name -> [dim] of the exchanged rows as the last Allreduce left them."""
        return self._named_block(self.block)

    def client_rows(self, position):
        """Name -> [dim] of all rows of the rank's client number `position`."""
        rows = self._named_block(self._work)
        rows.update(zip(self._scratch, self._scratch_rows))
        rows.update(zip(self._own_names, self._own_rows[position]))
        return rows

    def begin_exchange(self, rows, first_in_round):
        """Prepare the turns of the clients that take part in an exchange.

        Args:
            rows: consecutive names in `exchanged` of what will be averaged; () if nothing will.
            first_in_round: whether clients begin with the averages; otherwise rows that are still to be averaged
                in this round are as the client left them.
        """
        self.region = self._find_region(rows)
        self._begins_round = first_in_round
        if self.wide.numel():
            self.wide.zero_()

    def begin_turn(self, position):
        """Hand the working rows to the rank's client number `position`."""
        if self._poison:
            self._scratch_rows.fill_(float("nan"))
        if not self._shared:
            return
        if self._begins_round or self._pending is None:
            self._work.copy_(self.block)
            self.work_buffers.copy_(self.buffers)
        else:
            start = self.region.start  # rows before it were averaged in this round, the others are still the client's
            self._work[:start].copy_(self.block[:start])
            self._work[start:].copy_(self._pending[position, start:])
            self.work_buffers.copy_(self._pending_buffers[position])

    def turn(self):
        """The contiguous part of the working rows that the client whose turn it is sends, so far."""
        return self._work[self._region_sent()]

    def begin_stages(self):
        """Name -> what stages see of the working rows: exchanged rows, and the float buffers as one more of them.

        Buffers that no client has changed are 0 in it: a mask may have infinite values.
        """
        if not self._has_buffers:
            return self._named_block(self._work)
        self.sent.put_constants(self._behind_rows(self._work), is_zero=True)
        return self._with_buffers(self._work)

    def end_stages(self):
        """After the stages, the buffers that no client has changed are as they were."""
        if self._has_buffers:
            self.sent.put_constants(self._behind_rows(self._work))

    def checked_buffers(self):
        """Position -> values of the client's float buffers that have to be finite; it packs what is sent of them."""
        if not self.sent.parts:
            return {}
        self.sent.pack(self.work_buffers, (self._behind_rows(self._work), self._wide_turn))
        return self.sent.checked(self.work_buffers) if self._has_buffers else {}

    def send(self, flags):
        """Send the buffers that a client of any rank has changed, too; see `SentBuffers.send`."""
        orders = self.sent.send(flags) if flags else None
        if orders is not None:
            narrow, wide = (order.to(self.block.device) for order in orders)
            self.aggregation.reorder_end(narrow)
            self.wide = self.wide[wide]
            for rows in self._kept:
                rows[BUFFERS].copy_(rows[BUFFERS][narrow])

    def _region_sent(self):
        """The region without the buffers that are left out."""
        leaves_out = self._has_buffers and self.aggregation.leaves_out_constants
        unsent = self.sent.sizes[0] - self.sent.sent_sizes[0] if leaves_out else 0
        return slice(self.region.start, self.region.stop - unsent)

    def _rows_of(self, block):
        """All exchanged rows in a block."""
        return block[: len(self._exchanged) * self.dim]

    def _behind_rows(self, block):
        """Where float buffers are summed."""
        return block[len(self._exchanged) * self.dim :]

    @property
    def _has_buffers(self):
        """Whether the current exchange averages the buffers."""
        return 0 < self.region.stop == self._block_size

    def end_turn(self, position, client, is_left_out=False):
        """Give a client's rows to the aggregation, and store those that a later exchange of the round needs.

        `position` is its place among those of this rank, `client` its number. `is_left_out`: whether the aggregation
        learns only that they are missing.
        """
        give = self.aggregation.skip if is_left_out else self.aggregation.take
        give(client, self._work[self.region])
        if self.wide.numel() and not is_left_out:
            self.wide.add_(self._wide_turn, alpha=self.aggregation.weights[client])
        if self._pending is not None:
            self._pending_buffers[position].copy_(self.work_buffers)
            self._pending[position, self.region.stop :].copy_(self._work[self.region.stop :])

    def average(self):
        """Put the averages over the participants of all ranks into `block`. Collective on the link.

        Buffers of a wider type are averaged by themselves, always by their mean.
        """
        aggregation = self.aggregation
        aggregation.fill(self.block[self._region_sent()])
        if not self.sent.parts or not self._has_buffers:
            return
        wide = self.wide[: self.sent.sent_sizes[1]]
        if wide.numel():
            aggregation.link.average(wide, sum(aggregation.weights.values()), wide)
        self.sent.unpack((self._behind_rows(self.block), self.wide), self.buffers)

    def need_start(self):
        """From now on, there is memory for what a round begins with. Collective."""
        rows = self._rows_of(self.block)
        self._start = self.aggregation.link.allocate_copy(rows.numel(), rows.dtype, rows.device)
        self._start_buffers, self._start_behind = self.buffers.clone(), self._behind_rows(self.block).clone()

    @property
    def kept_start(self):
        """({name: row}, float buffers) that the current round began with, once `keep_start` was called; or None."""
        return None if self._start is None else (self._named_block(self._start.vector), self._start_buffers)

    def keep_start(self):
        """The rows and buffers are now those that a round begins with. Collective."""
        self._start.take(self._rows_of(self.block))
        self._start_buffers.copy_(self.buffers)

    def start_rows(self, is_copy=True):
        """Name -> [dim] what the round began with, as stages see it: exchanged rows and float buffers.

        It is a copy until the next call; without `is_copy`, it may be read only. Of buffers that no client has changed,
        stages see 0, see `begin_stages`.
        """
        rows, behind = self._start.vector, self._start_behind
        if is_copy:
            if self._start_copy is None:
                self._start_copy = torch.empty_like(self.block)
            rows, behind = self._rows_of(self._start_copy).copy_(rows), self._behind_rows(self._start_copy)
        self.sent.put(self._start_buffers, behind)
        self.sent.put_constants(behind, is_zero=True)
        return self._named_block(rows) | ({BUFFERS: behind} if behind.numel() else {})

    def start_block(self, zeros):
        """What the round began with, as aggregations see it, like `block`: a copy until the next call.

        `zeros`: names of rows that are 0 in it.
        """
        if self._start_block is None:
            self._start_block = torch.empty_like(self.block)
        self._rows_of(self._start_block).copy_(self._start.vector)
        self.sent.put(self._start_buffers, self._behind_rows(self._start_block))
        for name, row in self._named_block(self._start_block).items():
            if name in zeros:
                row.zero_()
        return self._start_block

    def new_rows(self):
        """Name -> zeros for each exchanged row and the float buffers, in memory of their own; buffers stay in order."""
        rows = self._with_buffers(torch.zeros_like(self.block))
        self._kept += [rows] * (BUFFERS in rows)
        return rows

    @property
    def nbytes(self):
        """Bytes of all its rows and sums; also if they are on the device "meta", without memory."""
        values = [*vars(self).values(), *vars(self.aggregation).values()]
        values += [self.sent.agreed, getattr(self._start, "vector", None)]
        held = [part for value in values for part in (value if isinstance(value, list) else [value])]
        return sum({id(tensor): tensor.nbytes for tensor in held if isinstance(tensor, torch.Tensor)}.values())

    def _find_region(self, rows):
        """The slice of the block that holds consecutive `rows`, with the buffers if it ends with the last row."""
        if not rows:
            return slice(0, 0)
        first = self._exchanged.index(rows[0])
        stop = first + len(rows)
        if self._exchanged[first:stop] != tuple(rows):
            raise ValueError(f"{rows}: not consecutive in the exchanged rows {self._exchanged}")
        end = self._block_size if stop == len(self._exchanged) else stop * self.dim
        return slice(first * self.dim, end)

    def _with_buffers(self, block):
        """Name -> the exchanged rows in a block, and the float buffers behind them, if there are any."""
        behind = self._behind_rows(block)
        return self._named_block(block) | ({BUFFERS: behind} if behind.numel() else {})

    def _named_block(self, block):
        return dict(zip(self._exchanged, self._rows_of(block).view(-1, self.dim)))


def check_rows(algorithm):
    """Check that an algorithm's rows are names, each in one place, and that it defines its local step, if it has any.

    Raises:
        UserError: one line: which declaration, what is expected.
    """
    name, seen = type(algorithm).__name__, set()
    has_none = getattr(type(algorithm), "local_step", None) is Algorithm.local_step
    if has_none and None in (exchange.work for exchange in algorithm.exchanges()):
        raise UserError(f"algorithm {name}: expected that it defines local_step, its local step")
    for kind in ("exchanged", "server_rows", "client_rows", "scratch"):
        rows = getattr(algorithm, kind)
        if not isinstance(rows, tuple) or not all(isinstance(row, str) for row in rows):
            raise UserError(f"{name}.{kind} = {rows!r}: expected a tuple of names, like ('x', 'm') or ('x',)")
        again = seen.intersection(rows) or {row for row in rows if rows.count(row) > 1}
        if again:
            raise UserError(
                f"{name}.{kind} = {rows!r}: {min(again)} is named already; expected each row once in exchanged, "
                "server_rows, client_rows and scratch together"
            )
        seen.update(rows)
    for row, kind in algorithm.kinds.items():
        if kind not in KINDS:
            raise UserError(f"{name}.kinds: row {row} is {kind!r}: expected one of {', '.join(KINDS)}")
    if "x" not in (*algorithm.exchanged, *algorithm.server_rows):
        raise UserError(f"{name} has no row 'x', the model: name it in exchanged or server_rows")
