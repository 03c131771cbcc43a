"""The parts of a run that save its state: checkpoints, and the end by a signal."""

from __future__ import annotations

from collections.abc import Callable

from fedmpi.comm.job.signals import StopSignals, stopping_signal
from fedmpi.ground.errors import AgreedUserError
from fedmpi.ground.text import Log
from fedmpi.runs.checkpoints.writer import Checkpoints
from fedmpi.runs.loop.part import Now, OwnPart
from fedmpi.runs.loop.run import Run

log = Log(__name__)


class Saving(OwnPart):
    """Writes a checkpoint when one is due.

    Args:
        checkpoints: the `Checkpoints`. may_fail: whether the run comes to its end if the last one cannot be written.

    Attributes:
        is_due: whether one is due after this round.
    """

    def __init__(self, checkpoints: Checkpoints, may_fail: bool = False) -> None:
        self._checkpoints, self._may_fail, self.is_due = checkpoints, may_fail, False

    def begin(self, run: Run) -> None:
        self._run = run

    def request(self) -> int:
        return int(self._checkpoints.request())

    def after_round(self, now: Now) -> None:
        self.is_due = self._checkpoints.is_due()

    def after_parts(self, now: Now) -> None:
        if self.is_due:
            self._checkpoints.begin()

    def end(self, now: Now) -> None:
        try:
            self._checkpoints.write_now()
        except AgreedUserError as error:
            if not self._may_fail:
                raise
            if self._run.link.rank == 0:
                log.warning(f"{error}: the last checkpoint is not written")


class Stopping(OwnPart):
    """Ends the process after a round if a rank was sent a signal.

    Args:
        signals: the `StopSignals`. stop: function of the signal's name, which saves the state and does not return.

    Attributes:
        signal: the name of a signal that has come, or "".
    """

    def __init__(self, signals: StopSignals, stop: Callable[[str], object]) -> None:
        self._signals, self._stop, self.signal = signals, stop, ""

    def begin(self, run: Run) -> None:
        self._run = run

    def request(self) -> int:
        return int(self._signals.bits)

    def after_round(self, now: Now) -> None:
        self.signal = stopping_signal(self._run.federation.requests) or ""

    def after_parts(self, now: Now) -> None:
        if self.signal and not now.is_last:
            self._stop(self.signal)
