"""Which clients a rank holds, and which of them take part in a round."""

import math

from fedmpi.errors import UserError
from fedmpi.streams import generator


def spread(num_clients, num_ranks):
    """The clients of each rank: consecutive numbers, counts that differ by at most one.

    Returns:
        list of `range`, one per rank.

    Raises:
        UserError: if there are fewer clients than ranks.
    """
    if num_clients < num_ranks:
        raise UserError(
            f"clients = {num_clients}: expected at least one client per rank, and {num_ranks} ranks were started: "
            f"start at most {num_clients} ranks or ask for more clients"
        )
    edges = [num_clients * rank // num_ranks for rank in range(num_ranks + 1)]
    return [range(a, b) for a, b in zip(edges, edges[1:])]


def draw_participants(num_clients, participation, seed, round_index):
    """The clients of a round: max(1, ⌊participation N⌋) of N without replacement, sorted.

    Every rank draws the same from the stream (seed, "participants", round): no message is needed.
    """
    num = max(1, math.floor(participation * num_clients + 1e-9))
    if num >= num_clients:
        return list(range(num_clients))
    drawn = generator(seed, "participants", round_index).choice(num_clients, num, replace=False)
    return sorted(int(c) for c in drawn)
