"""The order in which clients' rows are added where the bits of a sum must not depend on who holds them.

The order is a binary tree over the clients' numbers: 0 + 1, 2 + 3, ..., then such pairs, and so on; absent
clients are left out. A partial sum is named by the lowest client in it, and a step (a, b) adds the sum named b
to the sum named a. Each rank takes the steps among its own clients while they work; what is then left is one
partial sum for each largest subtree within a rank, so few if a rank's clients have consecutive numbers.
"""

import dataclasses
import functools
import heapq


@functools.lru_cache(maxsize=256)
def tree(clients):
    """The steps, in order, after which the lowest of `clients` names the sum over all of them.

    Args:
        clients: a tuple of different numbers >= 0.

    >>> tree((0, 1, 2, 3, 4))
    ((0, 1), (2, 3), (0, 2), (0, 4))
    >>> tree((1, 2, 3))
    ((2, 3), (1, 2))
    """
    steps, level = [], {client: client for client in sorted(clients)}  # subtree's number on its level -> its name
    while len(level) > 1:
        above = {}
        for number, name in level.items():
            left = above.setdefault(number // 2, name)
            if left != name:
                steps.append((left, name))
        level = above
    return tuple(steps)


def split(steps, owner):
    """(owner -> steps among sums of that owner alone, the other steps), both in order.

    `owner`: name -> who holds it: a rank or a node.
    """
    inner, outer = {}, []
    mixed = set()  # names of sums that by then contain a sum of another owner
    for a, b in steps:
        if owner[a] == owner[b] and not mixed & {a, b}:
            inner.setdefault(owner[a], []).append((a, b))
        else:
            outer.append((a, b))
            mixed.add(a)
    return inner, outer


@dataclasses.dataclass(frozen=True)
class Partials:
    """The partial sums that ranks hold, and how they become one.

    Attributes:
        holders: name -> (rank, slot): who holds it, in which of its vectors.
        steps: in order; root: name of the sum over all.
    """

    holders: dict
    steps: tuple
    root: int

    def renumbered(self, members):
        """The same where the ranks that are left, `members`, are numbered 0, 1, ...; no other one holds any."""
        holders = {name: (members.index(rank), slot) for name, (rank, slot) in self.holders.items()}
        return dataclasses.replace(self, holders=holders)


@dataclasses.dataclass(frozen=True)
class Turns:
    """What a rank does after the turns of its clients.

    Attributes:
        slots: client -> number of the vector into which its rows go; those that have none are added to another.
        steps: client -> the steps to take after its turn.
    """

    slots: dict
    steps: dict


class Placement:
    """Which rank holds which clients, and what follows from it for a sum. Every rank makes the same one.

    Args:
        clients: for each rank, the numbers of its clients in the order of their turns.

    Attributes:
        num_slots: vectors that a rank needs for its partial sums; the same on every rank.
    """

    def __init__(self, clients):
        self.clients = [tuple(of_rank) for of_rank in clients]
        self._rank_of = {client: rank for rank, of_rank in enumerate(self.clients) for client in of_rank}
        all_turns = self.plan(tuple(sorted(self._rank_of)))
        self.num_slots = 1 + max((slot for turns in all_turns[0] for slot in turns.slots.values()), default=0)

    @functools.lru_cache(maxsize=16)  # noqa: B019  a placement lives as long as its federation
    def plan(self, participants):
        """(the `Turns` of each rank, the `Partials` after them) of an exchange of some clients, a tuple."""
        inner, outer = split(tree(participants), self._rank_of)
        present = set(participants)
        turns = [
            _turns([client for client in of_rank if client in present], inner.get(rank, ()))
            for rank, of_rank in enumerate(self.clients)
        ]
        consumed = {b for steps in inner.values() for _, b in steps}
        holders = {
            client: (self._rank_of[client], turns[self._rank_of[client]].slots[client])
            for client in participants
            if client not in consumed
        }
        return turns, Partials(holders, tuple(outer), min(participants))


def _turns(clients, steps):
    """The `Turns` of a rank whose participating clients, in their order, are to be added by `steps`."""
    position = {client: number for number, client in enumerate(clients)}
    done = dict(position)  # name -> position of the turn after which the sum is complete
    after = {client: [] for client in clients}
    for a, b in steps:
        done[a] = max(done[a], done[b])
        after[clients[done[a]]].append((a, b))
    slots, free = {}, list(range(len(clients)))
    for client in clients:
        # A client whose rows are at once added to another sum, by the first step after its turn, needs no slot.
        if not any(b == client for _, b in after[client][:1]):
            slots[client] = heapq.heappop(free)
        for _, b in after[client]:
            if b in slots:
                heapq.heappush(free, slots[b])
    return Turns(slots, after)
