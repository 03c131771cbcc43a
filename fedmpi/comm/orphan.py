"""Ranks end with the launcher that started them."""

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time

from fedmpi.comm.process import ancestors

# Processes that start ranks on a node: of MPICH and its relatives, of Open MPI, of SLURM.
LAUNCHERS = ("hydra_pmi_proxy", "prted", "prterun", "orted", "mpirun", "mpiexec", "slurmstepd")
OUTLIVES = 4.0  # seconds by which a rank may outlive its launcher, so that a rank that is about to end can do so
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
    return next((process for process, name in ancestors() if name in LAUNCHERS), None)


def _end_after(watched):
    """Kill this process when another one has ended."""
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.poll()
    time.sleep(OUTLIVES)
    os.kill(os.getpid(), signal.SIGKILL)
