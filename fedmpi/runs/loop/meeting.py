"""A meeting of all ranks within a round: they say whether their states are known, write them, and end if asked to."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

from fedmpi.comm.job.signals import stopping_signal
from fedmpi.comm.link import Link
from fedmpi.runs.checkpoints.within import CheckpointWithin

Steps = Generator[list[float], Any, Any]  # of what all ranks gather next; the result is sent to it


def meeting(
    state: Callable[[], Mapping[str, Any] | None],
    bits: int,
    checkpoint: CheckpointWithin,
    stop: Callable[[str], object],
    place: int = 0,
    later: int = 0,
) -> Generator[list[float], Any, tuple[bool, int]]:
    """The steps of a meeting; returns whether all states were known, and the largest `later` of all ranks.

    Args:
        state: function without arguments: this rank's state; None if it is not known now.
        bits: of the signals that have come to this rank. stop: function of a signal's name, which does not return.
        place: the local step after which the state was taken: states of different ones do not belong together.
        later: the first local step after which this rank could take it the next time.
    """
    own = state()
    everyone: Any = yield [own is not None, bits, place, later]
    later = int(everyone[:, 3].max())
    if own is None or not everyone[:, 0].all() or (everyone[:, 2] != place).any():
        return False, later
    is_written = yield from checkpoint.write(own)
    joined = 0
    for of_rank in everyone[:, 1].astype(int).tolist():
        joined |= of_rank
    signal = stopping_signal(joined)
    if signal and is_written:
        stop(signal)
    return True, later


def at_once(link: Link, steps: Steps) -> Any:
    """What steps return, with nothing between them. Collective."""
    try:
        values = next(steps)
        while True:
            values = steps.send(link.allgather(values, "checkpoints"))
    except StopIteration as end:
        return end.value


class Later:
    """Steps that are made between others of a loop's, one after the other.

    Args:
        link: a `Link`. steps: what the ranks gather, see `Steps`.
    """

    def __init__(self, link: Link, steps: Steps) -> None:
        self._link, self._steps = link, steps
        self._gathering = link.begin_allgather(next(steps), "checkpoints")

    def go_on(self, waits: bool = False) -> bool:
        """Make the steps that can be made now, or all if it `waits` for the other ranks; whether that were all."""
        try:
            while (everyone := self._gathering.wait() if waits else self._gathering.poll()) is not None:
                self._gathering = self._link.begin_allgather(self._steps.send(everyone), "checkpoints")
        except StopIteration:
            return True
        return False
