"""A rank that ends while links are open: the others would wait for it forever, so all ranks end, or the job does."""

import atexit
import builtins
import contextlib
import ctypes
import dataclasses
import functools
import gc
import operator
import os
import sys
import threading
import time

from fedmpi.comm.faults.abort import abort
from fedmpi.comm.faults.marks import mark
from fedmpi.comm.faults.meeting import say_gone
from fedmpi.comm.faults.rollcall import GRACE, RollCall
from fedmpi.comm.start.launch import OUTPUT_SECONDS
from fedmpi.comm.start.mpi_library import MPI
from fedmpi.ground.errors import INTERRUPTED, Diverged, UserError


@dataclasses.dataclass(frozen=True)
class _Opened:
    """What is needed of an open link when this rank ends; not its memory, which ends with a loop that is dropped."""

    rank: int
    roll_call: RollCall | None  # None: there are no other ranks
    progress: list  # see `Link`


_opened = []  # `_Opened`s
_replaced = []  # (module, name, our function, what was there) while links are open
_exit_code = None  # with which sys.exit was called
_process = None  # that has opened them; its forked children may end
_lock, _thread = threading.Lock(), None  # the thread that opens links, or has opened them


def check_others():
    """Check that no other thread has links open, or opens one, for their messages would mix. Not collective.

    The job ends if those of an open link are half done.

    Raises:
        UserError: if another thread has one.
    """
    global _thread
    for opened in _waited_for():
        opened.roll_call.check_finished()
    with _lock:
        current = threading.current_thread()
        if _thread not in (None, current) and _thread.is_alive():
            raise UserError(
                f"thread {current.name} begins a federation while thread {_thread.name} has one: expected one thread "
                "of a rank that runs federations, one after the other or step by step"
            )
        _thread = current


def guard_exits(link):
    """From now on, until `forget`, this rank does not end alone. Not collective."""
    global _exit_code
    _exit_code = None
    _install()
    _opened.append(_Opened(link.rank, link.roll_call, link.progress))
    mark("open", True)


def forget(link):
    """Let this rank end from now on. Not collective."""
    global _thread
    if link.roll_call is not None:
        link.roll_call.neighbour.leave()
    _opened[:] = [opened for opened in _opened if opened.progress is not link.progress]
    if not _opened and os.getpid() == _process:
        _thread = None
        _uninstall()
        mark("open", False)


def _install():
    global _process
    if _replaced:
        return
    _process = os.getpid()
    atexit.unregister(_end_together)
    atexit.register(_end_together)  # for good: this rank tells those that begin another federation that it has ended
    _replace(sys, "excepthook", _end_by_error)
    _replace(sys, "exit", _exit)
    for name in ("exit", "quit"):  # are there unless Python was started with -S
        if hasattr(builtins, name):
            _replace(builtins, name, _quit)
    _replace(os, "_exit", _exit_at_once)
    with contextlib.suppress(LookupError, AttributeError, TypeError):  # another Python
        _replace(MPI.Comm, "Abort", _abort_at_once)


def _replace(place, name, function):
    """Put `function`, whose first argument is what was there, in the place of a function of a module or class.

    It takes the same arguments, and calls what was there: a later function may still call it when no link is open.
    """
    before = getattr(place, name)

    @functools.wraps(before)
    def ours(*arguments, **keywords):
        return function(before, *arguments, **keywords)

    _set(place, name, ours)
    _replaced.append((place, name, ours, before))


def _set(place, name, value):
    """setattr, also for a class of C such as mpi4py's, which Python otherwise does not let change."""
    if isinstance(place, type):
        gc.get_referents(vars(place))[0][name] = value
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(place))
    else:
        setattr(place, name, value)


def _uninstall():
    for place, name, ours, before in _replaced:
        if getattr(place, name, None) is ours:  # if not, a later one calls it
            _set(place, name, before)
    _replaced.clear()


def _exit(leave, status=None, /):
    """sys.exit, which remembers its code: at exit, Python does not say with which one it ends."""
    global _exit_code
    _exit_code = 0 if status is None else status & 255 if isinstance(status, int) else 1
    leave(status)


def _quit(leave, /, code=None):
    """exit and quit of Python's prompt, which remember their code, too."""
    _exit(leave, code)


def _exit_at_once(leave, /, status):
    """os._exit, which also ends the other ranks while links are open: launchers take the code 0 for success."""
    _end_unfinished("os._exit", status)
    leave(status)


def _abort_at_once(leave, comm, /, errorcode=0):
    """MPI_Abort, which does not end an unfinished job as if it were a success: its code is 0 if none is given."""
    with contextlib.suppress(TypeError):
        if operator.index(errorcode) & 255 == 0:
            _end_unfinished("MPI_Abort", errorcode)
    leave(comm, errorcode)


def _end_unfinished(function, status):
    """End the job if links are open and this rank calls a function that ends its process with a status."""
    opened = [link for link in _opened if not (link.roll_call and link.roll_call.goes_on)]
    with contextlib.suppress(TypeError):  # it says itself what is wrong with the status
        code = operator.index(status) & 255
        is_mine = opened and os.getpid() == _process and not MPI.Is_finalized()
        if is_mine and (opened[-1].roll_call is not None or code == 0):
            last = opened[-1]
            line = f"error on rank {last.rank}: {function}({code}) was called{_after(*last.progress)}"
            _end(f"{line}, and the job is not finished" if code == 0 else line, code or 1)


def _end_by_error(report, kind, error, trace):
    """sys.excepthook, which also ends the other ranks while links are open."""
    if not _waited_for():
        report(kind, error, trace)
    elif issubclass(kind, UserError | Diverged):
        # One line: one rank prints an `AgreedUserError`, and rank 0 another error of all ranks.
        is_printed = getattr(error, "is_printed", True)
        if not is_printed or (kind in (UserError, Diverged) and _opened[-1].rank > 0):
            time.sleep(2 * OUTPUT_SECONDS)
        _end(f"error: {error}" if is_printed else "", 2 if issubclass(kind, UserError) else 1)
    else:
        report(kind, error, trace)
        line = f"error on rank {_opened[-1].rank}: {kind.__name__}{_after(*_opened[-1].progress)}"
        _end(line, INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)


def _end_together():
    """At exit with links open: end with all ranks, if they come here within some seconds; if not, end the job."""
    others = _waited_for()
    for link in others:
        link.roll_call.neighbour.leave()
    mark("open", False)
    code = -1 if _exit_code is None else _exit_code
    if not all(link.roll_call.say_leaving([*link.progress, code]) for link in others):
        return  # MPI is finalized
    if not others and os.getpid() == _process:
        say_gone(code)
    until = time.monotonic() + GRACE
    heard = [(link, *link.roll_call.hear_leaving(until)) for link in others]
    for link in others:
        link.roll_call.neighbour.close()
    alone = [(link, leaving) for link, leaving, are_all in heard if not are_all]
    if alone:
        _end_alone(*max(alone, key=lambda pair: pair[0].progress[0]))
    most = max((int(facts[1]) for link, leaving, _ in heard if link.rank == 0 for facts in leaving.values()), default=0)
    if any(link.rank == 0 and link.progress[0] for link in others):
        outcome = f"the last {most} steps were not averaged" if most else "all steps were averaged"
        _print(f"the program ended without fed.finish(): {outcome}")


def _end_alone(link, leaving):
    """End the job: ranks go on that have not heard of these. The lowest of these prints the line."""
    ends = []
    for rank, (*progress, code) in sorted(leaving.items()):
        ends.append(f"rank {rank} ended{_after(*progress)}" + (f" with exit code {code:.0f}" if code >= 0 else ""))
    if link.rank > min(leaving):
        time.sleep(2 * OUTPUT_SECONDS)  # that one ends this one meanwhile
    line = f"error: {', '.join(ends)}, while other ranks continue: call fed.finish() on all ranks before they end"
    _end(line, _exit_code or 1)


def _waited_for():
    """The open links on which other ranks may wait for this one."""
    return [link for link in _opened if link.roll_call is not None and os.getpid() == _process]


def _after(steps, since_average):
    return f" after {steps:.0f} steps" if steps else ""


def _end(line, code):
    """Print a line, if there is one, and end the job."""
    if line:
        _print(line)
    time.sleep(OUTPUT_SECONDS)
    abort(code)


def _print(line):
    print(f"fedmpi: {line}", file=sys.stderr, flush=True)
