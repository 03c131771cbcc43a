"""The runs of a sweep on this machine, some at a time."""

import collections
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

from fedmpi.errors import UserError
from fedmpi.runs import is_complete, is_run

PATIENCE = 10  # seconds that a job has to end after SIGTERM


def outcome(folder):
    """ "complete", "diverged", "broken" (it began and did not end) or "missing", of a run folder."""
    if is_complete(folder):
        return "complete"
    if (folder / "diverged.txt").is_file():
        return "diverged"
    return "broken" if folder.exists() else "missing"


def clear(folder):
    """Remove what a broken run left.

    Raises:
        UserError: if the folder is not one of a run.
    """
    if folder.exists() and not is_run(folder):
        raise UserError(f"{folder}: is in the way and not a run folder; move it elsewhere")
    shutil.rmtree(folder, ignore_errors=True)


def run_all(plan, runs, ranks, at_a_time, launcher, ended):
    """Make some runs of a plan.

    Args:
        plan: a `Plan`. runs: list of `Planned`.
        ranks: of each run. at_a_time: how many runs at once.
        launcher: words that start ranks, with "{ranks}"; "" starts one process as it is.
        ended: called as `ended(run, exit code, seconds, last line that it printed)`.

    Raises:
        UserError: if a run's settings are wrong; the runs that have ended are kept.
    """
    waiting, running = collections.deque(runs), []
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                running.append(_Job(plan, waiting.popleft(), ranks, launcher))
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                code, last = job.process.returncode, job.last_line()
                if code == 2:
                    raise UserError(f"run {job.run.name}: {last.removeprefix('fedmpi: error: ')}")
                ended(job.run, code, time.monotonic() - job.begun, last)
            time.sleep(0.05)
    finally:
        for job in running:
            job.end()


class _Job:
    """One run as a process, its output in a file beside its folder."""

    def __init__(self, plan, run, ranks, launcher):
        self.run, self.begun = run, time.monotonic()
        self._log = plan.out / f"{run.name}.log"
        clear(plan.folder(run))
        words = shlex.split(launcher.replace("{ranks}", str(ranks)))
        words += [sys.executable, "-m", "fedmpi.train", f"--ranks={ranks}", *plan.words(run)]
        try:
            with open(self._log, "w", encoding="utf-8") as log:
                self.process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
        except OSError as error:
            raise UserError(f"{words[0]}: cannot be started: {error.strerror}; --launch says how to start") from None

    def last_line(self):
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        ours = [line for line in lines if line.startswith("fedmpi: error")]
        return next((line for line in [*ours[:1], *reversed(lines)] if line.strip()), "it printed nothing")

    def end(self):
        """Ask the job to end, and see that it does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
