"""The lock of a run folder: one job at a time writes to it, on whichever node it runs. Not collective.

Two means, because neither holds everywhere: `flock`, which the system releases when its owner ends, and the owner's
name in the same file, rewritten every few seconds, for file systems on which nodes do not see each other's `flock`.
"""

import contextlib
import fcntl
import functools
import json
import os
import pathlib
import platform
import secrets
import stat
import threading
import time
import weakref
from typing import Any

from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import LOCK, check_regular
from fedmpi.ground.machine.processes import boot, stat_of
from fedmpi.ground.text import Log, short

log = Log(__name__)

REFRESH = 5.0  # seconds between two writes of the owner's name
LIFETIME = 40.0  # seconds after which an owner on another node that does not write any more has ended
OUTLIVES = 10.0  # seconds by which the ranks of a killed job may outlive it
SETTLES = 1.0  # seconds after which of two jobs that took the lock of a dead one at once, one has lost it
LONGEST = 1000  # bytes of the owner's name
FOREIGN: dict[str, Any] = {"": "what is there is no owner's name"}
JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "FLUX_JOB_ID")

_locks: weakref.WeakSet["RunLock"] = weakref.WeakSet()


class RunLock:
    """The lock of a run folder, held by this process until `release` or its end.

    Args:
        folder: `pathlib.Path` of the folder; may be changed when the folder is renamed.

    Raises:
        UserError: if another job holds it, with one line that names that job; a job that is ending is waited for.
        OSError: if the folder cannot be written.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        path = folder / LOCK
        check_regular(path, is_changed=True)
        self._file: int = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._owner: dict[str, Any] = {**_this_process(), "token": secrets.token_hex(8), "count": 0}
        self._is_lost, self._written = False, 0.0
        if _flock(self._file) is None:
            _say_without_locks(folder.parent)
        try:
            is_certain = self._wait()
            self._write()
            if not is_certain:
                time.sleep(SETTLES)
                self.check()
        except BaseException:
            os.close(self._file)
            raise
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="lock", daemon=True)
        self._thread.start()
        _let_children_go()
        _locks.add(self)

    def _wait(self) -> bool:
        """Return when no other job holds the lock; whether this is certain.

        Raises:
            UserError: if one does.
        """
        began = since = time.monotonic()
        first = last = self._read()
        said = False
        while True:
            flocked, owner, now = _flock(self._file), self._read(), time.monotonic()
            if owner != last:
                last, since = owner, now
            is_here = (owner.get("host"), owner.get("boot")) == _this_node()
            if flocked is not False and (not owner or (is_here and (flocked or not _lives(owner)))):
                return flocked is not None
            lives = flocked is False or is_here or (owner != first and now - since < 1.5 * REFRESH)
            if lives and now - began > OUTLIVES:
                raise UserError(f"run folder {self.folder}: {_describe(owner)} is still writing to it; {_ADVICE}")
            if owner == FOREIGN and flocked is not False and now - since > SETTLES:
                raise UserError(f"{self.folder / LOCK}: fedmpi did not write it: move it to another folder")
            if not lives and now - since > LIFETIME:
                return False
            if not said and now - began > 2:
                wait = OUTLIVES if lives else LIFETIME
                log.warning(
                    f"waiting up to {wait:.0f} s to see whether {_describe(owner)} still writes to {self.folder}"
                )
                said = True
            time.sleep(0.1)

    def check(self) -> None:
        """Check that this process still holds the lock.

        Raises:
            UserError: if another job has taken it: it saw no sign of this one, which was suspended or cut off.
        """
        owner = self._read()
        if owner and owner.get("token") != self._owner["token"]:
            raise UserError(f"run folder {self.folder}: {_describe(owner)} has taken it over; {_ADVICE}")

    @property
    def is_doubtful(self) -> bool:
        """Whether `check` may raise: it did, or this process was suspended and has not written its name since."""
        return self._is_lost or time.monotonic() - self._written > 2 * REFRESH

    def release(self) -> None:
        """Give the lock back."""
        if self._file < 0:
            return
        self._ends.set()
        self._thread.join()  # it must not write to a file that gets this one's number
        with contextlib.suppress(OSError, UserError):
            self.check()
            os.ftruncate(self._file, 0)
        self._close()

    def _close(self) -> None:
        os.close(self._file)
        self._file = -1

    def _read(self) -> dict[str, Any]:
        """The owner, a dict; {} if there is none."""
        text = _read_again(self.folder / LOCK, self._file)
        if not text.strip(b"\0 \n"):
            return {}
        try:
            owner = json.loads(text)
            return owner if isinstance(owner, dict) and "token" in owner else FOREIGN
        except (ValueError, RecursionError):
            return FOREIGN

    def _write(self) -> None:
        self._owner["count"] += 1
        os.pwrite(self._file, json.dumps(self._owner).encode().ljust(LONGEST), 0)
        os.fsync(self._file)  # NFS sends it to the server only now
        self._written = time.monotonic()

    def _refresh(self) -> None:
        while not self._ends.wait(REFRESH):
            try:
                self.check()
                self._write()
            except UserError:
                self._is_lost = True
                return
            except OSError:  # tried again
                continue


_ADVICE = "wait until it ends, or choose another --name"


def _flock(file: int) -> bool | None:
    """Whether this process has the `flock` of a file now; None on a file system without it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


@functools.cache
def _say_without_locks(folder: pathlib.Path) -> None:
    log.warning(f"{folder}: this file system has no locks: two jobs notice each other within {LIFETIME:.0f} s")


def _read_again(path: pathlib.Path, file: int) -> bytes:
    """What is in a file now: opened again, because NFS looks at the server only then."""
    with contextlib.suppress(OSError):
        again = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if stat.S_ISREG(os.fstat(again).st_mode):
                return os.read(again, LONGEST)
        finally:
            os.close(again)
    return os.pread(file, LONGEST, 0)


def _this_node() -> tuple[str, str]:
    """(its name, which start of it this is)."""
    return platform.node(), boot()


def _this_process() -> dict[str, Any]:
    host, booted = _this_node()
    job = next((os.environ[name] for name in JOB_VARIABLES if os.environ.get(name)), "")
    began = time.strftime("%Y-%m-%d %H:%M:%S")
    pid = os.getpid()
    return {"host": host, "boot": booted, "pid": pid, "start": _start_of(pid), "job": job[:50], "began": began}


def _start_of(pid: Any) -> str:
    """When a process of this node started, in ticks of its clock; "" if it does not run."""
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        state, _, start = stat_of(int(pid)) or ("X", 0, 0)
        return "" if state in "ZX" else str(start)  # one that has ended may still be listed
    return ""


def _lives(owner: dict[str, Any]) -> bool:
    """Whether an owner on this node still runs, where `flock` does not say it."""
    return bool(owner.get("start")) and _start_of(owner.get("pid")) == owner["start"]


def _describe(owner: dict[str, Any]) -> str:
    """The owner as text, for a line."""
    if not owner or "pid" not in owner:
        return "another job"
    job = f"job {short(owner.get('job'), 100)} (" if owner.get("job") else "another job ("
    where = f"process {short(owner['pid'], 20)} on {short(owner.get('host'), 100)}"
    return f"{job}{where}, since {short(owner.get('began'), 30)})"


@functools.cache
def _let_children_go() -> None:
    """From now on, forked processes do not hold the locks: a loader's worker may outlive this process."""
    os.register_at_fork(after_in_child=lambda: [lock._close() for lock in _locks if lock._file >= 0])
