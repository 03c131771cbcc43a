"""Checkpoints within a round, for rounds that take minutes: when a signal has come, and every so many minutes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from fedmpi.comm.job.signals import StopSignals
from fedmpi.federation.turns import Turns
from fedmpi.runs.checkpoints.within import LONG, CheckpointWithin
from fedmpi.runs.loop.meeting import at_once, meeting
from fedmpi.runs.loop.part import Now, OwnPart
from fedmpi.runs.loop.run import Run


class WithinRound(OwnPart):
    """Lets all ranks meet within a round, each at a local step of its own, to write its state.

    Args:
        signals: the `StopSignals`. checkpoint: the `CheckpointWithin`.
        minutes: between checkpoints; 0: at signals only.
        stop: function of a signal's name, called when the state is written; it does not return.
    """

    def __init__(
        self, signals: StopSignals, checkpoint: CheckpointWithin, minutes: float, stop: Callable[[str], object]
    ) -> None:
        self._signals, self._checkpoint, self._minutes, self._stop = signals, checkpoint, minutes, stop
        self._turns, self._number = Turns(self._look), 0  # of the next meeting
        self._began = self._signalled = 0.0
        self._is_over = False  # whether this round cannot be left any more

    def begin(self, run: Run) -> None:
        self._link, self._federation = run.link, run.federation
        if self._link.survives:
            return  # without a lost rank, a round begins again
        self._federation.observer, self._federation.reports.hold_meeting = self._turns, self._meet
        self._link.while_waiting = self._call_if_signalled
        self._saved = time.monotonic()

    def before_round(self, number: int) -> None:
        self._began = self._saved = time.monotonic()  # what was before the round is kept by other checkpoints
        self._is_over = False

    def after_round(self, now: Now) -> None:
        self._turns.keeps = time.monotonic() - self._began >= LONG

    def _look(self) -> None:
        """After a local step: meet the other ranks if that is wanted."""
        if self._is_over or time.monotonic() - self._began < LONG:
            return
        if self._is_wanted() or self._link.called()[0] >= self._number:
            self._link.call(self._number)
            self._federation.reports.ask(self._federation.round_index)

    def _is_wanted(self) -> bool:
        now = time.monotonic()
        if self._signals.bits:
            self._signalled = self._signalled or now
            return now - self._signalled >= LONG  # the round may end before
        return self._minutes > 0 and now - self._saved >= 60 * self._minutes

    def _call_if_signalled(self) -> None:
        """This rank waits for the others at the end of the round: they come if it calls them."""
        if self._signals.bits and not self._is_over and self._is_wanted():
            self._link.call(self._number)

    def _meet(self) -> None:
        """All ranks are here. Collective."""
        self._number += 1
        state = functools.partial(self._turns.state, self._federation)
        steps = meeting(state, self._signals.bits, self._checkpoint, self._stop)
        is_known, _ = at_once(self._link, steps)
        self._is_over = not is_known or bool(self._signals.bits)
        self._saved = time.monotonic()
