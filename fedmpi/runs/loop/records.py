"""The records of a run; if its rank 0 is lost, the lowest rank that is left writes them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from fedmpi.comm.link import Link
from fedmpi.ground.files.run_files import RECORDS
from fedmpi.runs.lock import RunLock
from fedmpi.runs.loop.part import Now, OwnPart
from fedmpi.runs.loop.run import Run
from fedmpi.runs.recorder import Recorder

LEFT_OUT = "left_out"  # in a record: the clients that this round's averages are made without (``--faulty leave_out``)
LOST = "lost"  # in a record: the clients that were lost and are absent from this round on


class Records(OwnPart):
    """Writes a record after every round, and what was measured of the result.

    Args:
        link, folder: the `Link`, and the path of the run folder. recorder: on rank 0, None elsewhere.
        make: function of the folder's `RunLock`: a recorder that takes the place of a lost one.
        settings: of the run, which that one writes.
    """

    def __init__(
        self,
        link: Link,
        folder: pathlib.Path,
        recorder: Recorder | None,
        make: Callable[[RunLock], Recorder],
        settings: dict[str, Any],
    ) -> None:
        self._link, self._folder, self._recorder, self._make, self._settings = link, folder, recorder, make, settings
        self._recent: list[tuple[dict[str, Any], Mapping[str, float]]] = []
        self._lost: frozenset[int] = frozenset()

    def begin(self, run: Run) -> None:
        self._federation = run.federation

    def recorder(self) -> Recorder | None:
        """The recorder on the rank that is 0 now, None elsewhere. Not collective."""
        if self._recorder is None and self._link.rank == 0:
            self._recorder = self._take_over()
        return self._recorder

    def after_round(self, now: Now) -> None:
        """Write the record of the round, or remember it."""
        record, federation = now.record, self._federation
        newly_lost, self._lost = federation.lost - self._lost, federation.lost
        recorder = self.recorder()  # if this rank has become rank 0, it first writes what is missing
        if newly_lost:
            record |= {LOST: sorted(newly_lost)}
        if left_out := federation.left_out.clients:
            record |= {LEFT_OUT: sorted(left_out)}
        now.recorded = now.metrics
        self._recent = [*self._recent[-1:], (record, now.metrics)]
        if recorder is not None:
            recorder.round(record, now.metrics)

    def end(self, now: Now) -> None:
        """Write what was measured of the result, if the last record has not all of it."""
        recorder = self.recorder()
        if recorder is not None and (now.tables or now.metrics is not now.recorded):
            recorder.result(now.metrics, now.tables)

    def _take_over(self) -> Recorder:
        """A recorder that goes on after the last whole record, with those that rank 0 may not have written."""
        path = self._folder / RECORDS
        position = path.read_bytes().rfind(b"\n") + 1
        recorder = self._make(RunLock(self._folder))
        recorder.begin(self._settings, position, recorder.last_round())
        for record, metrics in self._recent:
            if record["round"] > recorder.last.get("round", 0):
                recorder.round(record, metrics)
        return recorder
