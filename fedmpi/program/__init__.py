"""How programs begin and end: of several ranks (`ranks`), of one process (`single`); their options (`parser`)."""

import os
import sys


def _say_interrupted(kind, error, trace):
    """For `sys.excepthook`: one line for all ranks about Ctrl-C while a program is being loaded."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif all(os.environ.get(name, "0") == "0" for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")):
        print("fedmpi: interrupted during the start", file=sys.stderr, flush=True)


def _is_own_program():
    """Whether this process is ``python -m fedmpi...`` or ``fedmpi-...``, not a user's program."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    return os.path.basename(sys.argv[0]).startswith("fedmpi-") or (module and module.name.startswith("fedmpi."))


if _is_own_program():
    sys.excepthook = _say_interrupted
    # Threads of OpenMP spin while they wait for work. GNU's do so for milliseconds, which takes the cores from other
    # ranks and programs: on 2 busy cores a rank with 2 threads needed 5.6 s where 1.3 to 3.6 s were enough with this.
    # It is read when torch is loaded.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
