"""The order of reproducible sums: one tree over the clients' numbers, wherever the clients are."""

import random

import pytest

from fedmpi.comm.summation_order import Placement, tree


def added(terms, steps):
    """How terms become one by steps, as text."""
    terms = dict(terms)
    for a, b in steps:
        terms[a] = f"({terms[a]}+{terms.pop(b)})"
    (total,) = terms.values()
    return total


def added_by_ranks(placement, participants):
    """The same, as the ranks of a placement do it; fails if one needs more slots than it has."""
    turns, partials = placement.plan(participants)
    held = []
    for of_rank, its_turns in zip(placement.clients, turns):
        slots = {}
        for client in (client for client in of_rank if client in participants):
            work = str(client)
            if client in its_turns.slots:
                slots[its_turns.slots[client]] = work
            for a, b in its_turns.steps[client]:
                other = slots[its_turns.slots[b]] if b in its_turns.slots else work
                slots[its_turns.slots[a]] = f"({slots[its_turns.slots[a]]}+{other})"
        assert all(slot < placement.num_slots for slot in slots)
        held.append(slots)
    return added({name: held[rank][slot] for name, (rank, slot) in partials.holders.items()}, partials.steps)


def test_the_tree_is_over_numbers():
    assert added({c: str(c) for c in range(6)}, tree(tuple(range(6)))) == "(((0+1)+(2+3))+(4+5))"
    assert added({c: str(c) for c in (1, 4, 6, 7)}, tree((1, 4, 6, 7))) == "(1+(4+(6+7)))"


@pytest.mark.parametrize("num_clients", range(1, 8))
def test_every_placement_adds_in_the_same_order(num_clients):
    draw = random.Random(num_clients)
    for trial in range(20):
        clients = list(range(num_clients))
        if trial % 2:
            draw.shuffle(clients)
        cuts = sorted(draw.sample(range(1, num_clients), draw.randrange(num_clients)))
        placement = Placement([clients[a:b] for a, b in zip([0, *cuts], [*cuts, num_clients])])
        for subset in range(1, 2**num_clients):
            present = tuple(c for c in range(num_clients) if subset >> c & 1)
            assert added_by_ranks(placement, present) == added({c: str(c) for c in present}, tree(present))


def test_a_rank_of_many_clients_needs_few_slots():
    """Consecutive clients: the logarithm of their number."""
    assert Placement([range(64)]).num_slots == 6
    assert Placement([range(37), range(37, 100)]).num_slots <= 9
    assert Placement([[client] for client in range(64)]).num_slots == 1
