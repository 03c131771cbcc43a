"""How programs begin and end: of several ranks (`ranks`), of one process (`single`); their options (`parser`)."""

import os
import sys

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


def say_starting(arguments):
    """Print a line on rank 0 before torch is loaded and MPI begins, which takes seconds; none above a help text."""
    if is_first_rank() and not any(word.startswith(("--help", "--list", "--print")) for word in arguments):
        from fedmpi.comm.job.output import make_output_safe, write_past_launcher

        make_output_safe()
        write_past_launcher()  # a reader may be gone after this line
        print(f"fedmpi {__version__} is starting", flush=True)


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
