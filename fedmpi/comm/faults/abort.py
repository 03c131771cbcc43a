"""The end of a job by one rank."""

import contextlib
import ctypes
import os
import subprocess
import time

from fedmpi.comm.faults.neighbour import exit_at_once, leave_all
from fedmpi.comm.start.mpi_library import MPI
from fedmpi.comm.start.orphan import launcher_name

RETURNS = 3  # seconds in which MPI_Abort ends this process after it has returned
PATIENCE = 1  # seconds that it gets before the ranks of srun are ended in another way


def abort(code):
    """End the whole job at once with an exit code, also ranks that wait inside a collective. Not collective.

    MPI_Abort ends this process by exit(code), which first calls what libraries have registered with atexit. That can
    take so long that MPICH's launcher kills this rank like all others, and returns the signal's number 9 as the exit
    code of the job. So a handler is registered that ends the process before the others run.

    Args:
        code: 1 to 255. A forked child, which has no part in MPI, ends alone.
    """
    if os.getpid() != MPI.process:
        exit_at_once(code)
    leave_all(code)
    with contextlib.suppress(OSError, AttributeError):  # the C library is another one
        library = ctypes.CDLL(None)
        # Handlers run in reverse order, so this one is the first.
        library.__cxa_atexit(library._exit, ctypes.c_void_p(code), None)
    _end_step_later()
    MPI.COMM_WORLD.Abort(code)  # of another one, MPICH's ends this process only, and leaves the rest to its launcher
    time.sleep(RETURNS)  # MPICH's returns before it takes effect
    exit_at_once(code)


def _end_step_later():
    """Start a process that ends the ranks which srun has started, if MPI_Abort does not do it first.

    MPICH's does not return, and ends nothing, while a rank on another node is stopped (seen with srun --mpi=pmi2).
    Once SLURM's kill did not reach that node: the rank is continued first, so that two requests would have to be lost.
    """
    if launcher_name() == "slurmstepd" and {"SLURM_JOB_ID", "SLURM_STEP_ID"} <= {*os.environ}:
        step = '"$SLURM_JOB_ID.$SLURM_STEP_ID"'
        command = f"sleep {PATIENCE}; scancel --signal=CONT {step}; sleep 1; exec scancel --signal=KILL {step}"
        with contextlib.suppress(OSError):
            subprocess.Popen(["sh", "-c", command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
