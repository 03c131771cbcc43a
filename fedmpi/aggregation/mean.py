"""The weighted mean: one sum for the rank, then one over the ranks in the order of the transport."""

import dataclasses
from collections.abc import Iterable
from typing import ClassVar

import torch

from fedmpi.aggregation.base import Aggregation
from fedmpi.aggregation.layout import Layout, Moment
from fedmpi.comm.link import Link


@dataclasses.dataclass(kw_only=True)
class Mean(Aggregation):
    """The mean by one Allreduce of what the clients of each rank add up to."""

    crosses: ClassVar[frozenset[str]] = frozenset({"rows"})
    is_mean: ClassVar[bool] = True
    leaves_out_constants: ClassVar[bool] = True
    keeps_finite: ClassVar[bool] = True

    def open(self, link: Link, layout: Layout, clients: Iterable[int]) -> None:
        super().open(link, layout, clients)
        # _sums[l]: the sum of 2^l clients; the last is the whole sum if all of them take part
        levels = max(0, len(self.clients).bit_length() - 1)
        inner = torch.zeros(levels, layout.numel, dtype=layout.dtype, device=layout.device)
        self._sums = [*inner, self.block]

    def begin(self, moment: Moment, weights: dict[int, float]) -> None:
        super().begin(moment, weights)
        self._turns = 0

    def add(self, client: int, region: torch.Tensor, weight: float) -> None:
        if weight != 1:
            region.mul_(weight)
        turn, place = self._turns, self.moment.region
        self._turns += 1
        if len(self.clients) == 1:  # it works in the block
            return
        # Pairwise, like a binary counter: level l holds the sum of 2^l clients. Where clients are
        # placed in powers of two, the sum is then the same tree as a reduction over ranks builds.
        level = (turn ^ (turn + 1)).bit_length() - 1  # where the sum of this and earlier clients goes
        for full in range(level - 1):
            region.add_(self._sums[full][place])
        if level == 0:
            self._sums[0][place].copy_(region)
        else:
            torch.add(region, self._sums[level - 1][place], out=self._sums[level][place])

    def average(self, out: torch.Tensor) -> None:
        self.link.average(self._total()[: out.numel()], sum(self.weights.values()), out, "rows")

    def reorder_end(self, order: torch.Tensor) -> None:
        for total in self._sums:
            total[len(total) - len(order) :] = total[len(total) - len(order) :][order]

    def _total(self) -> torch.Tensor:
        """The contiguous vector to be summed over the ranks, after the clients' turns."""
        place = self.moment.region
        whole = self.block[place]
        if self._turns == 0:
            return whole.zero_()
        if len(self.clients) == 1:
            return whole
        levels = [level for level in range(len(self._sums)) if self._turns >> level & 1]  # those that hold a sum
        total = self._sums[levels[0]][place]
        for level in levels[1:]:
            total = self._sums[level][place].add_(total)
        if levels[-1] != len(self._sums) - 1:
            whole.copy_(total)
        return whole
