"""Ranks end with the launcher that started them."""

import contextlib
import ctypes
import functools
import os
import select
import signal
import sys
import threading
import time

from fedmpi.ground.machine.processes import ancestors

# Processes that start ranks on a node: of MPICH and its relatives, of Open MPI, of SLURM.
LAUNCHERS = ("hydra_pmi_proxy", "prted", "prterun", "orted", "mpirun", "mpiexec", "slurmstepd")
NO_CONTAINER = "pid:[4026531836]"  # the namespace of other processes, see PROC_PID_INIT_INO of Linux
OUTLIVES = 4.0  # seconds by which a rank may outlive its launcher, so that a rank that is about to end can do so
_PR_SET_PDEATHSIG = 1  # see prctl(2)


@functools.cache
def end_with_launcher(process):
    """Let this process end when the launcher that started it on this node has ended, however that was; on Linux.

    A launcher that is killed cannot end its ranks, and those would train on without it. Of two calls for one `process`,
    its number, the second does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    launcher = launcher_above()
    if launcher is None:
        return
    with contextlib.suppress(OSError, AttributeError):
        watched = os.pidfd_open(launcher)
        # A stopped process cannot watch: Linux continues it when its parent ends.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT))
        threading.Thread(target=_end_after, args=(watched,), name="launcher", daemon=True).start()


def launcher_above(process=None):
    """The process that started one (by default this one) as a rank, directly or not; None if there is none."""
    return next((above for above, name in ancestors(process) if name in LAUNCHERS), None)


def launcher_name():
    """The name of the process that started this one as a rank; "" if there is none."""
    return next((name for _, name in ancestors() if name in LAUNCHERS), "")


def container():
    """The number of the container in which this process and its launcher are, as text; "" if they are in none."""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
        if namespace != NO_CONTAINER and launcher_above():
            return namespace[5:-1]
    return ""


def started_directly():
    """Whether a launcher started this process, and not a Python program that may be a rank itself."""
    names = [name for _, name in ancestors()]
    first = next((position for position, name in enumerate(names) if name in LAUNCHERS), None)
    return first is not None and not any(name.startswith("python") for name in names[:first])


def _end_after(watched):
    """Kill this process when another one has ended."""
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.poll()
    time.sleep(OUTLIVES)
    os.kill(os.getpid(), signal.SIGKILL)
