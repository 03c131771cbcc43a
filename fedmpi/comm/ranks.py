"""The ranks of a job: how many there are, what they do, and who is left."""

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class RanksLost(Exception):
    """Ranks were lost during a sum; raised on all that are left, which repeat the round (see `Ranks.survive`)."""


class Ranks:
    """The ranks of a job, as seen by one of them. The methods are collective unless they say otherwise.

    Attributes:
        rank, size: this rank's number and the number of ranks.
        local_rank, local_size: the same among the ranks of this node. usable_cores: of the node; free_cores: of these.
        num_nodes: that the ranks are on. oversubscribed: whether this node has more ranks than cores.
        members: of the ranks that are left, the numbers with which they were started; lost: those of the others.
        lost_in: lost rank -> the phase in which it was lost.
        survives: whether `survive` was called. clients: the numbers of each started rank's clients, after `watch`.
        phase: what the ranks do currently, see `enter`.
        progress: [local steps that this rank has made, those since its last average], for the message if it ends early.
        how_to_resume: function without arguments, see `can_be_resumed`.
        while_waiting: function without arguments, called now and then while this rank waits for others.
    """

    phase = "the preparation"
    members: Sequence[int] = (0,)
    lost: Sequence[int] = ()
    clients: Sequence[Sequence[int]] = ()
    survives = False
    lost_in: Mapping[int, str] = types.MappingProxyType({})
    rank, size = 0, 1
    local_rank, local_size = 0, 1
    num_nodes, usable_cores, free_cores, oversubscribed = 1, 1, 1, False
    how_to_resume: Callable[[], str] = staticmethod(lambda: "")
    while_waiting: Callable[[], None] = staticmethod(lambda: None)

    def watch(self, limit: float, clients: Sequence[Sequence[int]] = ()) -> None:
        """From now on, end the job if the ranks wait for others longer than `limit` seconds, and name those.

        Args:
            clients: the numbers of each rank's clients, for the message; () if they are not known yet.
        """

    def enter(self, phase: str) -> None:
        """Say what the ranks do from now on, as text, for the message about ranks that do not arrive. Not collective.

        It is the only place that changes `phase`.
        """
        self.phase = phase

    def can_be_resumed(self, how: Callable[[], str]) -> None:
        """Say how: a function without arguments -> how the user can resume the run, or "", for the same message."""
        self.how_to_resume = how

    def call(self, number: int, place: int = 0) -> None:
        """Ask all other ranks to come to their meeting with this number; they hear it in `called`. Not collective.

        Args:
            place: the local step at which they are to meet, if it is to be the same on all ranks.
        """

    def called(self) -> tuple[int, int]:
        """(number, place) of the last meeting to which other ranks have called this one; -1: none. Not collective."""
        return -1, 0

    def survive(self) -> None:
        """From now on, the ranks that are left go on when others are lost.

        A sum then raises `RanksLost`; any other collective is repeated among the ranks that are left. Blocks must be
        allocated by the transport "allreduce", and `alltoallv` must not be called any more.
        """

    def lost_clients(self) -> frozenset[int]:
        """The clients of the ranks that are lost. Not collective."""
        return frozenset(client for rank in self.lost for client in self.clients[rank])

    def num_present(self, num_clients: int) -> int:
        """How many of all clients are not lost. Not collective."""
        return num_clients - len(self.lost_clients())


def lowest_true(flags: npt.NDArray[Any]) -> int | None:
    """The first row of a [size, 1] array that is not 0, or None."""
    return int(np.argmax(flags[:, 0])) if flags.any() else None


def describe_clients(clients: Iterable[int]) -> str:
    """Clients' numbers as text: "client 3", "clients 3 to 5", "clients 1, 4"."""
    numbers = sorted(clients)
    if len(numbers) == 1:
        return f"client {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"clients {numbers[0]} to {numbers[-1]}"
    return f"clients {', '.join(map(str, numbers))}"
