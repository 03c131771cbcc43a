"""Rows that are averaged in every so many rounds, where the others are averaged in each."""

import functools
from collections.abc import Callable, Mapping

from fedmpi.algorithms.base import Client, Exchange, Oracle, Server

Then = Callable[[Server], None]


def in_periods(
    rows: tuple[str, ...], every: Mapping[str, int], then: Mapping[str, Then], otherwise: Then | None = None
) -> tuple[Exchange, ...]:
    """An exchange of the rows that are averaged in each round, after the local steps, and one for each other period.

    Args:
        rows: of all of them, in the order of `Algorithm.exchanged`.
        every: name of a row -> rounds between two of its averages; 1, or no entry: they are averaged in each round.
        then: name of a row -> what follows the exchange that has it. otherwise: what follows the first exchange if
            no such row is in it.

    >>> [(e.rows, e.due is None) for e in in_periods(("x", "m", "v"), {"m": 3, "v": 3}, {})]
    [(('x',), True), (('m', 'v'), False)]
    """

    def make(period: int) -> Exchange:
        members = tuple(row for row in rows if every.get(row, 1) == period)
        follows = next((then[row] for row in members if row in then), None)
        if period == 1:
            return Exchange(members, then=follows or otherwise)
        return Exchange(members, nothing, follows, due=functools.partial(is_due, period))

    later = dict.fromkeys(every[row] for row in rows if every.get(row, 1) > 1)
    return tuple(map(make, (1, *later)))


def nothing(client: Client, server: Server, oracle: Oracle) -> None:
    """The work of an exchange that sends what the local steps have left."""


def is_due(period: int, server: Server) -> bool:
    """Whether the current round is one of those whose number, from 1, is a multiple of `period`."""
    return (server.round_index + 1) % period == 0
