"""A rank's state as rows of one matrix."""

import functools

import torch

from fedmpi.errors import UserError


class RowStore:
    """The vectors of one rank: its clients' rows, the replicated server's rows, and the exchanged block.

    With one client on the rank the exchanged rows exist once: the client works in them, they are
    averaged in place, and they are the server's rows then.
    With several clients they share one set of working rows (a client owns it during its turn), their
    sum gathers in further blocks, and the averages lie in one more; memory for exchanged and scratch
    rows grows with the logarithm of the number of clients only.

    Args:
        algorithm: names the rows (`fedmpi.algorithms.base`).
        dim: d; num_buffers: elements of float buffers, averaged behind the last exchanged row.
        num_local: clients of this rank.
        dtype, device: of every row.
        poison: fill scratch rows with NaN at every turn, so that nobody relies on their past.
        allocate: `allocate(numel, dtype, device) -> [numel]` zeros for the block to be summed over
            the ranks: a link's, which knows the memory where that is cheapest; None: any memory.

    Attributes:
        block: the averages: what the server holds of the exchanged rows, and its float buffers.
        outgoing: of the same shape; what is summed over the ranks. The same memory with one client.
    """

    def __init__(self, algorithm, dim, num_buffers, num_local, dtype, device="cpu", poison=False, allocate=None):
        self.dim = dim
        self._exchanged, self._scratch = algorithm.exchanged, algorithm.scratch
        self._poison = poison
        self._block_size = len(self._exchanged) * dim + num_buffers
        kept, scratch = len(algorithm.client_rows), len(self._scratch)
        zeros = functools.partial(torch.zeros, dtype=dtype, device=device)
        self.outgoing = (allocate or torch.zeros)(self._block_size, dtype=dtype, device=device)
        self._scratch_rows = zeros(scratch, dim)
        self._kept = zeros(num_local, kept, dim)
        self._shared = num_local > 1
        if self._shared:
            self._work = zeros(self._block_size)
            self.block = zeros(self._block_size)
            # _sums[l]: the sum of 2^l clients; the last is the whole sum if all of them take part
            self._sums = [*zeros(num_local.bit_length() - 1, self._block_size), self.outgoing]
            several = len(algorithm.exchanges()) > 1
            self._later = zeros(num_local, self._block_size) if several else None
        else:
            self._work = self.block = self.outgoing
        self._server = zeros(len(algorithm.server_rows), dim)
        self._server_names, self._kept_names = algorithm.server_rows, algorithm.client_rows

    def server_rows(self):
        """Name -> [dim] of the rows that only the server has, alike on every rank."""
        return dict(zip(self._server_names, self._server))

    def averaged_rows(self):
        """Name -> [dim] of the exchanged rows as the last Allreduce left them."""
        return self._named_block(self.block)

    @property
    def buffers(self):
        """[num_buffers] float buffers of the averaged model."""
        return self.block[len(self._exchanged) * self.dim :]

    @property
    def work_buffers(self):
        """[num_buffers] float buffers of the client whose turn it is."""
        return self._work[len(self._exchanged) * self.dim :]

    def client_rows(self, position):
        """Name -> [dim] of all rows of the rank's client number `position`."""
        rows = self._named_block(self._work)
        rows.update(zip(self._scratch, self._scratch_rows))
        rows.update(zip(self._kept_names, self._kept[position]))
        return rows

    def region(self, rows):
        """The slice of the block that holds consecutive `rows`, with the buffers behind the last one."""
        first = self._exchanged.index(rows[0])
        stop = first + len(rows)
        if self._exchanged[first:stop] != tuple(rows):
            raise ValueError(f"{rows}: not consecutive in the exchanged rows {self._exchanged}")
        end = self._block_size if stop == len(self._exchanged) else stop * self.dim
        return slice(first * self.dim, end)

    def begin_turn(self, position, first_in_round, region):
        """Hand the working rows to a client: averages where averaged, its own values where not yet."""
        if self._poison:
            self._scratch_rows.fill_(float("nan"))
        if not self._shared:
            return
        if first_in_round or self._later is None:
            self._work.copy_(self.block)
        else:
            self._work[: region.start].copy_(self.block[: region.start])
            self._work[region.start :].copy_(self._later[position, region.start :])

    def end_turn(self, position, region, weight, turn):
        """Add the client's share to the rank's sum and keep what a later exchange of the round needs.

        Args:
            position: of the client on this rank; turn: how many clients of the rank worked before it.
            region: see `region`; weight: of the client in the sum.
        """
        mine = self._work[region]
        if weight != 1:
            mine.mul_(weight)
        if not self._shared:
            return
        # Pairwise, like a binary counter: level l holds the sum of 2^l clients. Where clients are
        # placed in powers of two, the sum is then the same tree as a reduction over ranks builds.
        level = (turn ^ (turn + 1)).bit_length() - 1  # where the sum of this and earlier clients goes
        for full in range(level - 1):
            mine.add_(self._sums[full][region])
        if level == 0:
            self._sums[0][region].copy_(mine)
        else:
            torch.add(mine, self._sums[level - 1][region], out=self._sums[level][region])
        if self._later is not None:
            self._later[position, region.stop :].copy_(self._work[region.stop :])

    def sum(self, region, num_turns):
        """The contiguous vector to be summed over the ranks, after `num_turns` clients' turns."""
        outgoing = self.outgoing[region]
        if num_turns == 0:
            return outgoing.zero_()
        if not self._shared:
            return outgoing
        levels = [level for level in range(len(self._sums)) if num_turns >> level & 1]
        total = self._sums[levels[0]][region]
        for level in levels[1:]:
            total = self._sums[level][region].add_(total)
        if levels[-1] != len(self._sums) - 1:
            outgoing.copy_(total)
        return outgoing

    def _named_block(self, block):
        rows = block[: len(self._exchanged) * self.dim].view(-1, self.dim)
        return dict(zip(self._exchanged, rows))


def check_rows(algorithm):
    """See that an algorithm's rows are names, each in one place.

    Raises:
        UserError: one line: which declaration, what is expected.
    """
    name, seen = type(algorithm).__name__, set()
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
    if "x" not in (*algorithm.exchanged, *algorithm.server_rows):
        raise UserError(f"{name} has no row 'x', the model: name it in exchanged or server_rows")
