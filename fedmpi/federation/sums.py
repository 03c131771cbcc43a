"""How the rows of a rank's clients are added, first on the rank and then over the ranks."""

import numpy as np
import torch

from fedmpi.comm.link import SoloLink
from fedmpi.comm.summation_order import Placement

ALIGNMENT = 16  # elements; every slot begins on a cache line


def make_sums(link, clients):
    """The sums of one rank as the link's `reduction` says. Collective on the link.

    Args:
        clients: numbers of this rank's clients, in the order of their turns.
    """
    if link.reduction == "plain":
        return RunningSums(len(clients), link)
    ends = link.allgather([len(clients)])[:, 0].astype(int).cumsum()
    of_ranks = np.split(link.allgatherv(list(clients)).astype(int), ends[:-1])
    return TreeSums(clients, Placement([of_rank.tolist() for of_rank in of_ranks]), link)


class RunningSums:
    """One sum for the rank, then one over the ranks in the order of the transport.

    Args:
        num_local: clients of this rank. link: sums over the ranks; None: there are no others.

    Attributes:
        outgoing: [block_size] what is summed over the ranks; with one client, the block that it works in.
    """

    def __init__(self, num_local, link=None):
        self._num_local, self.link = num_local, link or SoloLink()
        self._region, self._turns = slice(0, 0), 0
        # A copy of the rank's sum, from which the sum over the ranks is repeated if a rank is lost meanwhile.
        self._saved, self._is_saved = None, False

    def allocate(self, numel, dtype, device):
        """Get the memory for blocks of `numel`. Collective on the link."""
        self.outgoing = self.link.allocate(numel, dtype, device)
        # _sums[l]: the sum of 2^l clients; the last is the whole sum if all of them take part
        inner = torch.zeros(self._num_local.bit_length() - 1, numel, dtype=dtype, device=device)
        self._sums = [*inner, self.outgoing]

    def begin(self, region, participants):
        """Prepare the sum of the slice `region` of the blocks over the clients numbered `participants`."""
        self._region, self._turns, self._is_saved = region, 0, False

    def add(self, position, mine):
        """Add the region of the rank's client number `position`, which may be overwritten."""
        turn, region = self._turns, self._region
        self._turns += 1
        if self._num_local == 1:
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

    def total(self):
        """The contiguous vector to be summed over the ranks, after the clients' turns."""
        outgoing = self.outgoing[self._region]
        if self._turns == 0:
            return outgoing.zero_()
        if self._num_local == 1:
            return outgoing
        levels = [level for level in range(len(self._sums)) if self._turns >> level & 1]  # those that hold a sum
        total = self._sums[levels[0]][self._region]
        for level in levels[1:]:
            total = self._sums[level][self._region].add_(total)
        if levels[-1] != len(self._sums) - 1:
            outgoing.copy_(total)
        return outgoing

    def average(self, divisor, out, present):
        """out = (sum over the participants of all ranks) / divisor, of the first elements. Collective on the link.

        Args:
            present: the participants of the ranks that are left.

        Raises:
            RanksLost: on all ranks that are left, if others are lost; it may be called again.
        """
        if not self.link.survives:
            self.link.average(self.total()[: out.numel()], divisor, out)
            return
        outgoing = self.outgoing[self._region][: out.numel()]
        if self._saved is None:
            self._saved = torch.empty_like(self.outgoing)
        saved = self._saved[: outgoing.numel()]
        if not self._is_saved:
            # A rank without participants adds zeros, and may have the averages there: see `undo`.
            saved.copy_(outgoing if self._turns == 0 else self.total()[: out.numel()])
            self._is_saved = True
        elif self._turns > 0:
            outgoing.copy_(saved)
        if self._turns == 0:
            outgoing.zero_()
        self.link.average(outgoing, divisor, out)

    def undo(self):
        """Restore the averages of a rank without participants, if all others' participants were lost in `average`."""
        if self._is_saved and self._turns == 0:
            outgoing = self.outgoing[self._region]
            outgoing.copy_(self._saved[: outgoing.numel()])

    def reorder_end(self, order):
        """Put the last elements of all partial sums into another order, [n] positions among them."""
        for total in self._sums:
            total[len(total) - len(order) :] = total[len(total) - len(order) :][order]


class TreeSums:
    """Sums in the order of one tree over the clients' numbers, the same bits wherever the clients are.

    See `fedmpi.comm.summation_order`. A rank keeps a partial sum for each largest subtree that it holds alone.

    Args:
        clients: of this rank, in the order of their turns. placement: a `Placement`. link: sums over the ranks.

    Attributes:
        outgoing: [block_size] the first partial sum; with one client, the block that it works in.
    """

    def __init__(self, clients, placement, link):
        self._clients, self._placement, self.link = list(clients), placement, link
        self._turns = None
        self._region, self._participants = slice(0, 0), ()
        self._total = None  # result of a sum that may have to be repeated, so that the partial sums stay

    def allocate(self, numel, dtype, device):
        """Get the memory for blocks of `numel`. Collective on the link."""
        stride = max(1, -(-numel // ALIGNMENT)) * ALIGNMENT
        everything = self.link.allocate(self._placement.num_slots * stride, dtype, device)
        self._slots = [everything[begin : begin + numel] for begin in range(0, everything.numel(), stride)]
        self.outgoing = self._slots[0] if self._slots else everything

    def begin(self, region, participants):
        """Prepare the sum of the slice `region` of the blocks over the clients numbered `participants`."""
        self._region = region
        self._participants = tuple(sorted(participants))
        if participants:
            turns, _ = self._placement.plan(self._participants)
            self._turns = turns[self.link.members[self.link.rank]]

    def add(self, position, mine):
        """Add the region of the rank's client number `position`, which may be overwritten."""
        client, turns = self._clients[position], self._turns
        sums = {name: self._slots[slot][self._region] for name, slot in turns.slots.items()}
        if client not in sums:
            sums[client] = mine
        elif len(self._clients) > 1:  # a rank's only client works in the slot
            sums[client].copy_(mine)
        for a, b in turns.steps[client]:
            sums[a].add_(sums[b])

    def average(self, divisor, out, present):
        """See `RunningSums.average`."""
        vectors = [slot[self._region][: out.numel()] for slot in self._slots]
        link, present = self.link, tuple(sorted(present))
        if not link.survives:
            link.combine(vectors, self._placement.plan(self._participants)[1], divisor, out)
            return
        partials = self._placement.after_loss(self._participants, present, link.members)
        if self._total is None:
            self._total = torch.empty_like(self.outgoing)
        total = self._total[: out.numel()]
        link.combine(vectors, partials, divisor, total)
        out.copy_(total)

    def undo(self):
        """A sum that fails leaves the averages as they were."""

    def reorder_end(self, order):
        """See `RunningSums.reorder_end`."""
        for slot in self._slots:
            slot[len(slot) - len(order) :] = slot[len(slot) - len(order) :][order]
