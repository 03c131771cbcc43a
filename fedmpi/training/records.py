"""The records of a run whose rank 0 may be lost: then the lowest rank that is left writes them. Not collective."""

from fedmpi.ground.files.run_files import RECORDS
from fedmpi.runs.lock import RunLock
from fedmpi.runs.recorder import Recorder
from fedmpi.runs.trackers.base import make_trackers

LEFT_OUT = "left_out"  # in a record: the clients that this round's averages are made without (``--faulty leave_out``)
LOST = "lost"  # in a record: the clients that were lost and are absent from this round on


class Records:
    """The recorder, and what another rank needs to take its place.

    Args:
        job: the `Job`. folder: path of the run folder. recorder: on rank 0, None elsewhere.
    """

    def __init__(self, job, folder, recorder):
        self._job, self._folder, self._recorder = job, folder, recorder
        self._recent, self._lost = [], frozenset()

    def recorder(self):
        """The recorder on the rank that is 0 now, None elsewhere."""
        if self._recorder is None and self._job.link.rank == 0:
            self._recorder = self._take_over()
        return self._recorder

    def round(self, record, metrics):
        """Write one round, or remember it; see `Recorder.round`."""
        lost = self._job.federation.lost
        newly_lost, self._lost = lost - self._lost, lost
        recorder = self.recorder()  # if this rank has become rank 0, it first writes what is missing
        if newly_lost:
            record = {**record, LOST: sorted(newly_lost)}
        if left_out := self._job.federation.left_out.clients:
            record = {**record, LEFT_OUT: sorted(left_out)}
        self._recent = [*self._recent[-1:], (record, metrics)]
        if recorder is not None:
            recorder.round(record, metrics)

    def _take_over(self):
        """A recorder that goes on after the last whole record, with those that rank 0 may not have written."""
        path = self._folder / RECORDS
        position = path.read_bytes().rfind(b"\n") + 1
        trackers = make_trackers(self._job.config.run.track)
        recorder = Recorder(RunLock(self._folder), self._job.num_rounds, trackers)
        recorder.begin(self._job.settings, position, recorder.last_round())
        for record, metrics in self._recent:
            if record["round"] > recorder.last.get("round", 0):
                recorder.round(record, metrics)
        return recorder
