"""How programs begin and end: of several ranks (`ranks`), of one process (`single`); their options (`parser`)."""

import os
import sys
import threading

from fedmpi.comm.start.process import started_by
from fedmpi.ground.version import __version__


def _say_interrupted(kind, error, trace):
    """For `sys.excepthook`: one line for all ranks about Ctrl-C while a program is being loaded."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif is_first_rank():
        print("fedmpi: interrupted during the start", file=sys.stderr, flush=True)


def is_first_rank():
    """Whether this process is rank 0, by the launcher's variables: MPI has not begun yet."""
    return started_by()[2] == 0


_doing = [""]  # what the start of this process does now
_is_over = threading.Event()  # whether it is over, for good: a program may prepare several runs


def say_starting(arguments):
    """Print a line on rank 0 before torch is loaded and MPI begins, which takes seconds; none above a help text.

    From then on, a line each second says what is being done (see `doing`), until rounds begin.
    """
    if is_first_rank() and not any(word.startswith(("--help", "--list", "--print")) for word in arguments):
        from fedmpi.comm.job.output import make_output_safe, write_past_launcher

        make_output_safe()
        write_past_launcher()  # a reader may be gone after this line
        print(f"fedmpi {__version__} is starting", flush=True)
        doing("load PyTorch")
        threading.Thread(target=_say_doing, name="fedmpi-starting", daemon=True).start()


def doing(activity):
    """Name what the start does from now on; None: the start is over. Not collective."""
    if activity is None:
        _is_over.set()
    else:
        _doing[0] = activity


def _say_doing():
    """Print what is being done, each second until the start is over."""
    seconds = 0
    while not _is_over.wait(1):
        seconds += 1
        print(f"  {seconds} s: {_doing[0]}", flush=True)


def is_own_program():
    """Whether this process is ``python -m fedmpi...`` or ``fedmpi ...``, not a user's program."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    return os.path.basename(sys.argv[0]) == "fedmpi" or bool(module and module.name.startswith("fedmpi."))


if is_own_program():
    sys.excepthook = _say_interrupted
    # Threads of OpenMP spin while they wait for work. GNU's do so for milliseconds, which takes the cores from other
    # ranks and programs: on 2 busy cores a rank with 2 threads needed 5.6 s where 1.3 to 3.6 s were enough with this.
    # It is read when torch is loaded.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
