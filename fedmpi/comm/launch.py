"""Whether the processes of a job found each other, and that none outlives its launcher."""

import contextlib
import ctypes
import os
import pathlib
import select
import signal
import sys
import threading
import time

from fedmpi.errors import UserError

# What the launchers of MPICH and its relatives, Open MPI and SLURM's PMI tell each process about its job.
LAUNCHER_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")

# Processes that start ranks on a node: of MPICH and its relatives, of Open MPI, of SLURM.
LAUNCHERS = ("hydra_pmi_proxy", "prted", "prterun", "orted", "mpirun", "mpiexec", "slurmstepd")
OUTLIVES = 4.0  # seconds by which a rank may outlive its launcher, so that one that is ending can end
_PR_SET_PDEATHSIG = 1  # see prctl(2)


def end_with_launcher():
    """Let this process end when the launcher that started it on this node has ended, however that was; on Linux.

    A launcher that is killed cannot end its ranks, and those would train on without it.
    """
    if not sys.platform.startswith("linux"):
        return
    launcher = _launcher()
    if launcher is None:
        return
    with contextlib.suppress(OSError, AttributeError):
        watched = os.pidfd_open(launcher)
        # A stopped process cannot watch: Linux continues it when its parent ends.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT))
        threading.Thread(target=_end_after, args=(watched,), name="launcher", daemon=True).start()


def _launcher():
    """The process that started this one as a rank, directly or through scripts; None if there is none."""
    process = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while process > 1:
            stat = pathlib.Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
            name, _, rest = stat.partition("(")[2].rpartition(")")
            if name in LAUNCHERS:
                return process
            process = int(rest.split()[1])
    return None


def _end_after(watched):
    """Kill this process when another one has ended."""
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.poll()
    time.sleep(OUTLIVES)
    os.kill(os.getpid(), signal.SIGKILL)


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
