"""What happens before round 0: the initial estimates."""

from collections.abc import Callable
from typing import Any

from fedmpi.algorithms.base import Exchange
from fedmpi.comm.ranks import RanksLost
from fedmpi.federation.parts import Parts
from fedmpi.federation.state import go_back, kept_state, work_alone


def make_initial_estimates(federation: Parts, run_exchange: Callable[[Exchange, int], Any]) -> None:
    """Make the initial estimates of all clients, averaged if the algorithm exchanges any. Collective.

    The float buffers stay as they were: only some start exchanges would average them.

    Args:
        run_exchange: `Federation.run_exchange`.
    """
    algorithm, buffers, kept = federation.algorithm, federation.store.buffers.clone(), kept_state(federation)
    while True:
        try:
            federation.enter_round(federation.plan.start)
            rows, numbers = algorithm.exchanged_at_start, algorithm.numbers_at_start
            if rows or numbers:
                run_exchange(Exchange(rows, algorithm.start, algorithm.server_start, numbers=numbers), 0)
            else:
                work_alone(federation, lambda client, server: algorithm.start(client, server, client.oracle))
                federation.use_averages(algorithm.server_start, range(federation.plan.num_clients))
            break
        except RanksLost:
            go_back(federation, kept)
    federation.store.buffers.copy_(buffers)
    work_alone(federation, algorithm.client_start)
