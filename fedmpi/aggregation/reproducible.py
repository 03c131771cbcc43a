"""The weighted mean in the order of one tree over the clients' numbers: the same bits wherever the clients are."""

import dataclasses
from typing import ClassVar

import torch

from fedmpi.aggregation.base import Aggregation
from fedmpi.aggregation.layout import Moment
from fedmpi.comm.summation_order import Placement

ALIGNMENT = 16  # elements; every slot begins on a cache line


@dataclasses.dataclass(kw_only=True)
class Reproducible(Aggregation):
    """The mean with bits that do not depend on the number of ranks, on which rank has which client, nodes or MPI.

    See `fedmpi.comm.summation_order`. A rank keeps a partial sum for each largest subtree that it holds alone.
    """

    crosses: ClassVar[frozenset[str]] = frozenset({"partial sums"})
    is_reproducible: ClassVar[bool] = True
    is_mean: ClassVar[bool] = True
    leaves_out_constants: ClassVar[bool] = True
    keeps_finite: ClassVar[bool] = True

    def allocate(self, numel: int) -> torch.Tensor:
        """The first partial sum."""
        self._placement = Placement(self.clients_of_ranks)
        stride = max(1, -(-numel // ALIGNMENT)) * ALIGNMENT
        everything = super().allocate(self._placement.num_slots * stride)
        self._slots = [everything[begin : begin + numel] for begin in range(0, everything.numel(), stride)]
        return self._slots[0] if self._slots else everything

    def begin(self, moment: Moment, weights: dict[int, float]) -> None:
        super().begin(moment, weights)
        if weights:
            turns, self._partials = self._placement.plan(tuple(sorted(weights)))
            self._turns = turns[self.link.members[self.link.rank]]

    def add(self, client: int, region: torch.Tensor, weight: float) -> None:
        if weight != 1:
            region.mul_(weight)
        sums = {name: self._slots[slot][self.moment.region] for name, slot in self._turns.slots.items()}
        if client not in sums:
            sums[client] = region
        elif len(self.clients) > 1:  # a rank's only client works in the slot
            sums[client].copy_(region)
        for a, b in self._turns.steps[client]:
            sums[a].add_(sums[b])

    def skip(self, client: int, region: torch.Tensor) -> None:
        self.add(client, region.zero_(), 1.0)  # the tree stays as it was planned

    def average(self, out: torch.Tensor) -> None:
        vectors, link = [slot[self.moment.region][: out.numel()] for slot in self._slots], self.link
        partials = self._partials.renumbered(link.members) if link.lost else self._partials
        link.combine(vectors, partials, sum(self.weights.values()), out, "partial sums")

    def reorder_end(self, order: torch.Tensor) -> None:
        for slot in self._slots:
            slot[len(slot) - len(order) :] = slot[len(slot) - len(order) :][order]
