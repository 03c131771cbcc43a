"""MPI itself: it begins when it is first used, not when a module is imported."""

import atexit
import contextlib
import ctypes
import os
import pathlib
import platform
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

from fedmpi.comm.start.orphan import launcher_above
from fedmpi.comm.start.pmi import corrected
from fedmpi.comm.start.process import left_by_worker, open_closed_streams, started_by
from fedmpi.comm.start.shared_memory import prepare_shared_memory
from fedmpi.ground.errors import INTERRUPTED, STOPPED, UserError
from fedmpi.ground.text import short

LIMIT = 1800.0  # seconds in which all ranks must begin MPI
LOOK_EVERY = 1.0  # seconds between two looks at whether other ranks have ended meanwhile
SAYING_SECONDS = 1.0  # after a line, until a process ends: the launcher passes it on meanwhile
STAY_SECONDS = 30.0  # at most, for which a rank that has said what ends them all waits for the others to notice it
LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")  # variables: how many ranks this machine has
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Library:
    """mpi4py's module `MPI`, whose import would begin MPI in this process.

    Attributes:
        process: the number of the process in which MPI began.
    """

    process: int

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of Python, which looks at objects in many ways
            raise AttributeError(name)
        if "process" not in vars(self):
            begin()
        if name == "process":
            return vars(self)[name]
        from mpi4py import MPI as library

        return vars(self).setdefault(name, getattr(library, name))


MPI = _Library()


def begin(limit: float = LIMIT) -> None:
    """Begin MPI, if it has not begun. Collective on all ranks.

    Until all ranks have come, SIGTERM, SIGHUP and Ctrl-C end this process, and so does the limit, with a line.

    Args:
        limit: seconds after which ranks that have not come are given up.

    Raises:
        UserError: if there is no MPI library.
    """
    if "process" in vars(MPI):
        return
    import mpi4py

    if started_by(dict(left_by_worker))[1] > 1:
        problem = "a worker process is no rank, and begins MPI alone"
        _say(f'{problem}: put what only ranks do under if __name__ == "__main__":')
    before = mpi4py.rc.initialize, mpi4py.rc.finalize
    # mpi4py would begin MPI in a call in which no other thread of Python can run, not even to end the process.
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI as library
    except (ImportError, RuntimeError) as error:
        if "libmpi" not in str(error) and "MPI library" not in str(error):
            raise
        hint = "pip install mpich, or load your cluster's module of an MPI"
        raise UserError(f"mpi4py finds no MPI library: {hint} ({short(error)})") from None
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = before
    hangup = signal.getsignal(signal.SIGHUP)
    if threading.current_thread() is threading.main_thread() and hangup is not None:
        signal.signal(signal.SIGHUP, hangup)  # MPICH has loaded UCX, which stops at it for a debugger
    if not library.Is_initialized() and not library.Is_finalized():
        open_closed_streams()
        prepare_shared_memory()
        begin_mpi, level = ctypes.CDLL(library.__file__).MPI_Init_thread, mpi4py.rc.thread_level.upper()
        # With these it would end the process with many lines. Without them it begins alone, which is reported then.
        hidden = {name: os.environ.pop(name) for name in _of_other_launchers(library)}
        try:
            with _watched(limit), corrected():
                begin_mpi(None, None, getattr(library, f"THREAD_{level}"), ctypes.byref(ctypes.c_int()))
        finally:
            os.environ |= hidden
        if before[1] is not False:
            atexit.register(_finalize, library)
        for comm in (library.COMM_SELF, library.COMM_WORLD):
            comm.Set_errhandler(library.ERRORS_RETURN)  # as mpi4py does: errors become exceptions
    vars(MPI)["process"] = os.getpid()


def _of_other_launchers(library):
    """Names of variables of a launcher that the library cannot speak with: another MPI's, or that of an outer job."""
    names, (vendor, version), found = [*os.environ], library.get_vendor(), []
    by_pmix = any(name.startswith("PMIX_SERVER_URI") and _is_served(os.environ[name]) for name in names)
    if vendor == "Open MPI" and version >= (5,):  # speaks PMIx only
        found = ["PMI_"] if by_pmix else ["PMI_", "PMIX_"]
    elif vendor == "MPICH" and "pmix" not in library.Get_library_version():
        found += ["PMI_"] if not _is_open(os.environ.get("PMI_FD", "")) else []
        found += ["PMIX_", "PRTE_"]
    return [name for name in names if name.startswith(tuple(found))]


def _is_served(address):
    """Whether a launcher listens at an address like "prterun-1@0.0;tcp4://127.0.0.1:4000"; true if none here can tell.

    It is not asked: it would take that for a rank.
    """
    host, _, port = address.rpartition("//")[2].partition(";")[0].rpartition(":")
    if host != "127.0.0.1" or not port.isdigit():
        return True
    with contextlib.suppress(OSError):
        lines = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return any(int(line[1].rpartition(":")[2], 16) == int(port) and line[3] == "0A" for line in lines)
    return True


def _is_open(number):
    """Whether a file that a variable names by its number is open in this process; true if it names none."""
    with contextlib.suppress(OSError):
        return not number.isdigit() or bool(os.fstat(int(number)))
    return False


def _finalize(library):
    """End MPI; not in a forked child, which would end it for its parent. Collective."""
    if os.getpid() == MPI.process and not library.Is_finalized():
        library.Finalize()


@contextlib.contextmanager
def _watched(limit):
    """A context in which a thread ends this process at a signal or at the limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ends, woken = os.pipe()
    os.set_blocking(woken, False)
    before = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)  # written to by Python's handler of any signal
    watch = threading.Thread(target=_watch, args=(ends, limit), name="begin MPI", daemon=True)
    watch.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(woken)
        watch.join()
        os.close(ends)


def _watch(ends, limit):
    _, started, number = started_by()
    until, seen, ended = time.monotonic() + limit, set(), set()
    are_all_here = str(started) in map(os.environ.get, LOCAL_SIZES)
    while (left := until - time.monotonic()) > 0:
        if not select.select([ends], [], [], min(left, LOOK_EVERY))[0]:
            (here, is_known), before = ranks_of_launcher(), ended
            seen |= {*range(started)} if are_all_here else here
            ended = seen - here if is_known and number in here else set()
            if ended and ended == before:  # a launcher that ends all ranks then has had time for it
                _end_without(ended)
            continue
        numbers = os.read(ends, 1)
        if not numbers:
            return  # MPI has begun
        if numbers[0] in ENDING:
            if numbers[0] == signal.SIGINT and started_by()[2] == 0:
                _say("interrupted during the start")
            os._exit(INTERRUPTED if numbers[0] == signal.SIGINT else 128 + numbers[0])
    begun, others = _ranks_here()
    if are_all_here:  # and some of them have ended
        others |= {*range(started)} - begun
    if number == min(begun, default=number):
        who = f"rank {', '.join(map(str, sorted(others)))}" if others else "ranks of other machines"
        problem = f"not all {started} ranks have begun MPI within {limit:g} s: no sign on {platform.node()} of {who}"
        _say(f"error: {problem}: stuck, ended, or without MPI")
    time.sleep(SAYING_SECONDS)
    os._exit(STOPPED)


def ranks_of_launcher():
    """(ranks that this process's launcher has started on this machine and that have not ended, whether these are all).

    /proc says it, but not which ranks the processes of other users are.
    """
    found, are_all, launcher = set(), True, launcher_above()
    with contextlib.suppress(OSError):  # there is none, or it is in another container
        for process in pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            try:
                by, started, number = started_by(_environment(process))
                found |= {number} if by == started_by()[0] and started > 1 else set()
            except OSError as error:  # otherwise it has just ended
                are_all &= not isinstance(error, PermissionError)
    return found, are_all


def _end_without(ended):
    """End this process because some ranks have ended without MPI, for which it waits.

    The first that notices says so. It stays until the others of this machine have noticed, too, because launchers go on
    while a rank loads its program: its socket, whose name no two processes have, says to them that the line is said.
    """
    with socket.socket(socket.AF_UNIX) as said, contextlib.suppress(OSError):
        said.bind(f"\0fedmpi-{launcher_above()}-ended")
        who = f"rank {', '.join(map(str, sorted(ended)))} on {platform.node()}"
        _say(f"error: {who} ended before MPI began, and the others wait: all ranks must begin a federation")
        until = time.monotonic() + STAY_SECONDS
        while len(ranks_of_launcher()[0]) > 1 and time.monotonic() < until:
            time.sleep(LOOK_EVERY / 10)
    time.sleep(SAYING_SECONDS)
    os._exit(1)  # launchers return this code, or that of the rank which has ended


def _environment(process):
    words = pathlib.Path(f"/proc/{process}/environ").read_text(errors="replace").split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def _ranks_here():
    """(ranks of this machine that have loaded MPI, its other ranks), as far as /proc says it."""
    begun, found, launcher = set(), set(), launcher_above()
    for folder in pathlib.Path("/proc").glob("[0-9]*") if launcher else ():
        with contextlib.suppress(OSError, TypeError):  # of another user, or it has ended
            if launcher_above(int(folder.name)) == launcher:
                _, _, number = started_by(_environment(folder.name))
                found.add(number)
                begun |= {number} if "libmpi" in (folder / "maps").read_text(errors="replace") else set()
    return begun, found - begun


def _say(line):
    print(f"fedmpi: {line}", file=sys.stderr, flush=True)
