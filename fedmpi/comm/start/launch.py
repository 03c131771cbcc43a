"""Whether the processes of a job found each other, and what other libraries learn of it."""

import os
import time

from fedmpi.comm.start.mpi_library import MPI, begin, ranks_of_launcher
from fedmpi.comm.start.orphan import started_directly
from fedmpi.comm.start.process import hide_variables, started_by
from fedmpi.ground.errors import UserError

PATIENCE = 2.0  # seconds by which the other processes end later than the first: srun -K kills all when one ends
LONGEST = 100.0  # seconds for which they wait while the first has not ended, as it still loads its program
# Seconds to wait before an abort: a launcher drops output that it has not yet passed on (seen with MPICH's).
OUTPUT_SECONDS = 1.0


def check_launch(link, expected=None):
    """Check that all processes of the job found each other, as many as expected according to ``--ranks`` (or None).

    A launcher of another MPI than mpi4py's, or of torch.distributed, starts N jobs of one rank each, and each of them
    would train alone without an error. The first of such processes raises an error that says so; the others, which
    the launcher ends meanwhile if it can, later, and without a text if the launcher has started another before them on
    their machine.

    Raises:
        UserError: if the numbers differ.
    """
    launcher, started, number = started_by()
    if started > 1 and link.size == 1 == getattr(link, "world_size", 1):  # not COMM_SELF, which is one rank's choice
        if number > 0:
            _let_first_speak(number)
        if number > 0 and started_directly() and _number_here(number) > 0:
            raise UserError("")
        raise UserError(f"{launcher} started {started} processes but each of them is alone: {_remedy(launcher)}")
    if expected is not None and expected != link.size:
        raise UserError(
            f"ranks = {expected}: but {link.size} ranks found each other; "
            "start with the mpirun of the MPI that mpi4py uses (python -m mpi4py --mpi-library)"
        )


def hide_launcher():
    """Where there are several ranks, begin MPI and hide from other libraries that this process is one. Collective.

    Raises:
        UserError: if there is no MPI library.
    """
    if started_by()[1] > 1:
        begin()
        hide_variables()


def _let_first_speak(number):
    """Wait until the processes of lower numbers here have ended: a launcher ends all when one ends with an error."""
    end = time.monotonic() + LONGEST
    time.sleep(PATIENCE)
    while min(ranks_of_launcher()[0], default=number) < number and time.monotonic() < end:
        time.sleep(0.1)


def _number_here(number):
    """The number of this process among those of its machine; `number`, that among all, if the launcher does not say."""
    numbers = (os.environ.get(name, "") for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"))
    return int(next((text for text in numbers if text.isdigit()), number))


def _remedy(launcher):
    """What the user can do, as text."""
    vendor, _ = MPI.get_vendor()
    # srun --mpi=pmi2 sets PMI_SIZE as MPICH's launcher does, which also sets MPI_LOCALNRANKS.
    by_srun = launcher.startswith("srun") or (
        "SLURM_STEP_NUM_TASKS" in os.environ and "MPI_LOCALNRANKS" not in os.environ
    )
    if launcher.startswith("torchrun"):
        return "fedmpi's ranks are those of MPI: start the program with mpirun -np, without torchrun"
    if not by_srun or "Open MPI" in launcher:
        hint = f"this mpirun belongs to another MPI than mpi4py's, {vendor} (python -m mpi4py --mpi-library)"
        variable = launcher.split()[-1][1:-1]
        return hint if started_directly() else f"{hint}, or {variable} comes from an outer job: unset it"
    kind = "pmix" if vendor == "Open MPI" else "pmi2"
    return f"mpi4py uses {vendor}, which needs srun --mpi={kind}, or its own mpirun instead of srun"
