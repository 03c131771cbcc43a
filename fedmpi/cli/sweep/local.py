"""The runs of a sweep on this machine, some at a time."""

import collections
import contextlib
import fcntl
import multiprocessing.popen_fork
import os
import pathlib
import resource
import shlex
import signal
import subprocess
import sys
import time

from fedmpi.ground.errors import Stopped, UserError, attempt
from fedmpi.ground.files.own_files import check_regular
from fedmpi.ground.text import printable_line
from fedmpi.runs.folder import outcome

BEGIN = b"fedmpi: run "  # of each log
PATIENCE = 10  # seconds that a job has to end after SIGTERM


def run_all(plan, runs, ranks, at_a_time, launcher, ended):
    """Make some runs of a plan.

    Args:
        plan: a `Plan`. runs: list of `Planned`.
        ranks: of each run. at_a_time: how many runs at once.
        launcher: command that starts ranks, with "{ranks}"; "": each run is one process without it.
        ended: called as `ended(run, exit code, seconds, last line that it printed, CPU seconds of its processes)`.

    Raises:
        UserError: if a run's settings are wrong; the runs that have ended are kept.
        Stopped: if a signal handler of the caller raised it; the running ones have written checkpoints.
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
                ended(job.run, code, time.monotonic() - job.begun, last, job.cpu_seconds)
            time.sleep(0.05)
    except Stopped:
        for job in running:
            job.stop()
        raise
    finally:
        for job in running:
            job.end()


def is_running(plan, run):
    """Whether a job, maybe of a sweep that was killed, is still making a run; see `start_job`."""
    check_regular(_log_path(plan, run))
    with contextlib.suppress(FileNotFoundError), open(_log_path(plan, run), "rb") as log:
        return not _lock(log)
    return False


def _lock(log):
    """Lock an open file; whether no other process holds its lock, as far as the file system knows locks."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def _log_path(plan, run):
    return plan.out / f"{run.name}.log"


def check_log(plan, run):
    """Check that what a run prints may be written: its file is missing or empty, or fedmpi wrote it.

    Raises:
        UserError: if it is something else.
    """
    path = _log_path(plan, run)
    if not check_regular(path, is_changed=True):
        return
    with attempt("read", path), open(path, "rb") as log:
        is_own = log.read(len(BEGIN)) in (b"", BEGIN)
    if not is_own:
        raise UserError(f"{path}: exists, and fedmpi did not write it: move it, or choose another --out")


def start_job(plan, run, ranks, launcher):
    """A run as a process, its output in a file beside its folder.

    The process holds a lock on that file until it ends: the jobs of a sweep that was killed go on running, and
    the sweep that is started after it waits for them. Training itself decides what becomes of the run's folder.

    Raises:
        UserError: if the file cannot be written, or fedmpi did not write it.
    """
    check_log(plan, run)
    log = open(_log_path(plan, run), "a", encoding="utf-8")  # noqa: SIM115 (a `_ForeignJob` keeps it)
    # The second: the job of a killed sweep ended since this one began.
    if not _lock(log) or outcome(plan.folder(run)) in ("complete", "diverged"):
        return _ForeignJob(run, log)
    with log:
        log.truncate(0)
        log.write(f"{BEGIN.decode()}{run.name}\n")
        log.flush()
        return _Job(plan, run, ranks, launcher, log)


class _Log:
    """What a job prints into the file `log`."""

    def last_line(self):
        """The line that says how the job ended: its first error, or else the last line."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[1:]
        errors = [line for line in lines if line.startswith("fedmpi: error")]
        return printable_line(
            next((line for line in [*errors[:1], *reversed(lines)] if line.strip()), "it printed nothing")
        )


class _ForeignJob(_Log):
    """A run that a job of another sweep is making; that sweep may have been killed."""

    def __init__(self, run, log):
        self.run, self.log, self.begun = run, pathlib.Path(log.name), time.monotonic()
        self._file, self.cpu_seconds = log, 0.0

    def poll(self):
        """0 when the job has ended, however it did; None until then."""
        if not self._file.closed:
            if not _lock(self._file):
                return None
            self._file.close()
        return 0

    def stop(self):
        """Do not touch the job, which is another sweep's."""

    def end(self):
        """Do not touch it either."""
        self._file.close()


class _Job(_Log):
    """A run that this sweep makes."""

    def __init__(self, plan, run, ranks, launcher, log):
        self.run, self.log, self.begun = run, pathlib.Path(log.name), time.monotonic()
        self._code = None
        words = [f"--ranks={ranks}", *plan.arguments(run), "--resume=auto"]
        if ranks == 1 and not launcher and sys.platform == "linux":
            from fedmpi.config import build  # noqa: F401  loads torch

            self._process = _Forked(target=_train, args=(words, log.fileno()))
            with contextlib.suppress(OSError):  # no memory for a second process as large as this one
                self._process.start()
                return
        self._process = _start(launcher.replace("{ranks}", str(ranks)), words, log)

    def poll(self):
        """The exit code; None until there is one."""
        if self._code is None:
            self._code = self._process.poll()
        return self._code

    @property
    def cpu_seconds(self):
        """What the processes of the job have used, once it has ended."""
        return self._process.cpu_seconds

    def stop(self):
        """Let the job finish its round and write a checkpoint; every launcher passes this signal on to its ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)
        self._process.wait()

    def end(self):
        """Ask the job to end, and end it by force if it does not."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _cpu_seconds_of_children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Timed:
    """A process whose CPU seconds are those of the processes that a `poll` reaps."""

    cpu_seconds = 0.0

    def poll(self, *flags):
        before = _cpu_seconds_of_children()
        code = super().poll(*flags)
        self.cpu_seconds += _cpu_seconds_of_children() - before
        return code


class _Command(_Timed, subprocess.Popen):
    """A job as a new program."""


class _Child(_Timed, multiprocessing.popen_fork.Popen):
    """A job as a copy of this process; multiprocessing polls all of them, too, whenever another starts."""


def _start(launcher, words, log):
    """A job as a new program."""
    words = [*shlex.split(launcher), sys.executable, "-m", "fedmpi.train", *words]
    try:
        return _Command(words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    except OSError as error:
        raise UserError(f"{words[0]}: cannot be started: {error.strerror}; --launch says how to start") from None


class _Forked(multiprocessing.get_context("fork").Process):
    """A job of one rank as a copy of this process, with the methods of `subprocess.Popen` that a job needs.

    This process has loaded torch for all jobs, once. It has neither initialised MPI nor computed with torch: both do
    not survive a fork.
    """

    _Popen = staticmethod(_Child)

    @property
    def cpu_seconds(self):
        return self._popen.cpu_seconds

    def poll(self):
        """The exit code, negative after a signal; None until there is one."""
        return self.exitcode

    def wait(self, timeout=None):
        """Wait for the end, at most `timeout` seconds, or raise `subprocess.TimeoutExpired`."""
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)


def _train(words, log):
    """What a `_Forked` job does."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, log, log)):
        os.dup2(file, number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup the run ignores it, too
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    from fedmpi.cli.train import main

    main(words)
