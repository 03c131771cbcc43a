"""The runs of a sweep on this machine, some at a time."""

import collections
import contextlib
import fcntl
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time

from fedmpi.config.resume import has_checkpoint
from fedmpi.errors import UserError
from fedmpi.runs.folder import is_run, outcome

PATIENCE = 10  # seconds that a job has to end after SIGTERM


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
        launcher: command that starts ranks, with "{ranks}"; "": each run is one process without it.
        ended: called as `ended(run, exit code, seconds, last line that it printed)`.

    Raises:
        UserError: if a run's settings are wrong; the runs that have ended are kept.
    """
    waiting, running = collections.deque(runs), []
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                running.append(start_job(plan, waiting.popleft(), ranks, launcher))
            for job in [job for job in running if job.poll() is not None]:
                running.remove(job)
                code, last = job.poll(), job.last_line()
                if isinstance(job, _ForeignJob) and outcome(plan.folder(job.run)) == "broken":
                    waiting.append(job.run)
                    continue
                if code == 2:
                    raise UserError(f"run {job.run.name}: {last.removeprefix('fedmpi: error: ')}")
                ended(job.run, code, time.monotonic() - job.begun, last)
            time.sleep(0.05)
    finally:
        for job in running:
            job.end()


def start_job(plan, run, ranks, launcher):
    """A run as a process, its output in a file beside its folder.

    The process holds a lock on that file until it ends: the jobs of a sweep that was killed go on running, and
    the sweep that is started after it waits for them; it must not clear a folder that a job still writes to.
    """
    log = open(plan.out / f"{run.name}.log", "a", encoding="utf-8")  # noqa: SIM115 (a `_ForeignJob` keeps it)
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _ForeignJob(run, log)
    except OSError:  # a file system without locks
        pass
    if outcome(plan.folder(run)) in ("complete", "diverged"):  # the job of a killed sweep ended since this one began
        return _ForeignJob(run, log)
    with log:
        log.truncate(0)
        return _Job(plan, run, ranks, launcher, log)


class _Log:
    """What a job prints into the file `log`."""

    def last_line(self):
        """The line that says how the job ended: its first error, or else the last line."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("fedmpi: error")]
        return next((line for line in [*errors[:1], *reversed(lines)] if line.strip()), "it printed nothing")


class _ForeignJob(_Log):
    """A run that a job of another sweep is making; that sweep may have been killed."""

    def __init__(self, run, log):
        self.run, self.log, self.begun = run, pathlib.Path(log.name), time.monotonic()
        self._file = log

    def poll(self):
        """0 when the job has ended, however it did; None until then."""
        if not self._file.closed:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            except OSError:  # a file system without locks
                pass
            self._file.close()
        return 0

    def end(self):
        """Do not touch the job, which is another sweep's."""
        self._file.close()


class _Job(_Log):
    """A run that this sweep makes."""

    def __init__(self, plan, run, ranks, launcher, log):
        self.run, self.log, self.begun = run, pathlib.Path(log.name), time.monotonic()
        goes_on = has_checkpoint(plan.folder(run))
        if not goes_on:
            clear(plan.folder(run))
        words = shlex.split(launcher.replace("{ranks}", str(ranks)))
        words += [sys.executable, "-m", "fedmpi.train", f"--ranks={ranks}", *plan.arguments(run)]
        words += ["--resume=auto"] if goes_on else []
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise UserError(f"{words[0]}: cannot be started: {error.strerror}; --launch says how to start") from None

    def poll(self):
        """The exit code; None until there is one."""
        return self._process.poll()

    def end(self):
        """Ask the job to end, and end it by force if it does not."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
