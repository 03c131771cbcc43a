"""What loops call that make the local steps themselves (`fedmpi.own_loop`), between `begin_turn` and `end_turn`."""

from fedmpi.algorithms.base import Algorithm, Exchange
from fedmpi.federation.client import Client
from fedmpi.federation.rounds import Federation


def local_step(federation: Federation, client: Client, step: int) -> None:
    """One local step of the client whose turn it is."""
    client.step_index = step
    federation.algorithm.local_step(client, federation.server_seen_by_clients, client.oracle)
    federation.observer.after_step(federation, client)


def shorten(federation: Federation, client: Client, num_steps: int) -> None:
    """Let a round have fewer local steps; the same must be done for all clients."""
    client.num_steps = num_steps
    federation.show_round(federation.current.shortened(num_steps))


def change_algorithm(federation: Federation, algorithm: Algorithm) -> list[Exchange]:
    """Go on with other settings of the algorithm, also within a round; returns this round's exchanges."""
    federation.algorithm, exchanges = algorithm, algorithm.exchanges()
    due = [exchanges[place] for place in federation.places]
    moment = getattr(federation, "moment", None)
    if moment is not None and moment.round_index == federation.round_index:
        federation.exchange = due[moment.number]
    return due


def keep_start(federation: Federation) -> None:
    """What the server has now is what the next round begins with, if an aggregation or a stage needs that."""
    if federation.round_start is not None:
        federation.round_start.keep()
