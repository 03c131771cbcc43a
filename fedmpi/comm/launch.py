"""Whether the processes of a job found each other."""

import os
import time

from fedmpi.comm.mpi_library import MPI
from fedmpi.errors import UserError

# Who started the process -> (variable with the number of processes started, variable with the number of this one). The
# innermost launcher comes first: ranks of an mpirun inside a SLURM job also inherit SLURM's variables from its daemon.
LAUNCHERS = {
    "the launcher": ("PMI_SIZE", "PMI_RANK"),  # MPICH and its relatives, srun --mpi=pmi2
    "mpirun of Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
}
PATIENCE = 1.0  # seconds by which the other processes end later than the first: srun -K kills all when one ends
# Seconds to wait before an abort: a launcher drops output that it has not yet passed on (seen with MPICH's).
OUTPUT_SECONDS = 1.0


def check_launch(link, expected=None):
    """Check that all processes of the job found each other.

    A launcher of another MPI than mpi4py's starts N jobs of one rank each, and each of them would train alone without
    an error. The first of such processes raises an error that says so, the others one without a text.

    Args:
        link: a `Link`.
        expected: the number of ranks according to the user (``--ranks``), or None.

    Raises:
        UserError: if the numbers differ.
    """
    launcher, started, number = started_by()
    if started > 1 and link.size == 1 == getattr(link, "world_size", 1):  # not COMM_SELF, which is one rank's choice
        if number > 0:
            time.sleep(PATIENCE)
            raise UserError("")
        raise UserError(f"{launcher} started {started} processes but each of them is alone: {_remedy(launcher)}")
    if expected is not None and expected != link.size:
        raise UserError(
            f"ranks = {expected}: but {link.size} ranks found each other; "
            "start with the mpirun of the MPI that mpi4py uses (python -m mpi4py --mpi-library)"
        )


def started_by():
    """(the launcher of this process, how many processes it started, the number of this one)."""
    for launcher, names in LAUNCHERS.items():
        size, number = (os.environ.get(name, "") for name in names)
        if size.isdigit():
            return f"{launcher} ({names[0]})", int(size), int(number) if number.isdigit() else 0
    return "no launcher", 1, 0


def _remedy(launcher):
    """What the user can do, as text."""
    vendor, _ = MPI.get_vendor()
    # srun --mpi=pmi2 sets PMI_SIZE as MPICH's launcher does, which also sets MPI_LOCALNRANKS.
    by_srun = launcher.startswith("srun") or (
        "SLURM_STEP_NUM_TASKS" in os.environ and "MPI_LOCALNRANKS" not in os.environ
    )
    if not by_srun or "Open MPI" in launcher:
        return f"this mpirun belongs to another MPI than mpi4py's, {vendor} (python -m mpi4py --mpi-library)"
    kind = "pmix" if vendor == "Open MPI" else "pmi2"
    return f"mpi4py uses {vendor}, which needs srun --mpi={kind}, or its own mpirun instead of srun"
