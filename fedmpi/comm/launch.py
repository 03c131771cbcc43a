"""Whether the processes of a job found each other."""

import os

from fedmpi.errors import UserError

# What the launchers of MPICH and its relatives, Open MPI and SLURM's PMI tell each process about its job.
LAUNCHER_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


def check_launch(link, expected=None):
    """Check that all processes of the job found each other.

    A launcher of another MPI than mpi4py's starts N jobs of one rank each, and all of them would
    train and end well.

    Args:
        link: a `Link`.
        expected: the number of ranks according to the user (``--ranks``), or None.

    Raises:
        UserError: if the numbers differ.
    """
    if expected is not None and expected != link.size:
        raise UserError(
            f"ranks = {expected}: but {link.size} ranks found each other; "
            "start with the mpirun of the MPI that mpi4py uses (python -m mpi4py --mpi-library)"
        )
    for name in LAUNCHER_SIZES:
        started = os.environ.get(name, "")
        if started.isdigit() and int(started) > 1 and link.size == 1:
            raise UserError(
                f"the launcher started {started} processes ({name}) but each of them is alone: "
                "this mpirun belongs to another MPI than mpi4py's (python -m mpi4py --mpi-library)"
            )
