"""`open_link`: the ranks meet, and none of them waits forever for one that is stuck or ends."""

import contextlib
import numbers
import os
import platform
import sys
import threading
import time

import torch

from fedmpi.comm.agreement import agree
from fedmpi.comm.faults.abort import abort
from fedmpi.comm.faults.meeting import wait_for_all
from fedmpi.comm.faults.neighbour import exit_at_once
from fedmpi.comm.faults.rollcall import GRACE, TIMED_OUT
from fedmpi.comm.job.exits import check_others, forget, guard_exits
from fedmpi.comm.start.launch import OUTPUT_SECONDS, check_launch
from fedmpi.comm.start.mpi_library import MPI, begin
from fedmpi.comm.start.orphan import end_with_launcher
from fedmpi.comm.start.process import started_by
from fedmpi.comm.sums.mpi import MPILink
from fedmpi.ground.errors import UserError
from fedmpi.ground.machine.cores import usable_cores
from fedmpi.ground.text import Log

log = Log(__name__)

TIMEOUT = 1800.0  # seconds, at every door
TAKEN = 0.3  # of the time of the cores; a line says so if other processes use more of it


def open_link(comm=None, timeout=TIMEOUT, check=check_launch):
    """The `Link` of an mpi4py communicator, or of all ranks. Collective.

    Until `close_link`, the job ends with one line and an exit code that is not 0 if a rank makes the others wait for
    longer than `timeout` seconds, or ends; see `fedmpi.comm.job.exits`. A rank ends when its launcher has ended.

    Args:
        check: called with the link; a UserError that it raises ends this process with one line and exit code 2.

    Raises:
        UserError: if `comm` or `timeout` is not what is expected.
    """
    end_with_launcher(os.getpid())
    is_number = isinstance(timeout, numbers.Real) and 0 < timeout <= threading.TIMEOUT_MAX - GRACE
    given, timeout = timeout, timeout if is_number else TIMEOUT
    try:
        check_others()
    except UserError as error:
        if started_by()[1] <= 1:
            raise
        time.sleep(2 * OUTPUT_SECONDS * (started_by()[2] > 0))  # as below
        # Other ranks may wait for this one's other thread, if MPI has begun.
        _end_at_once(error, abort if "process" in vars(MPI) else exit_at_once)
    try:
        begin(timeout + GRACE)
    except UserError as error:  # every rank meets it, and none has a link yet
        time.sleep(2 * OUTPUT_SECONDS * (started_by()[2] > 0))  # rank 0 ends this one meanwhile, if it is here
        _end_at_once(error)
    missing = wait_for_all(comm, timeout + GRACE)
    if missing is not None:
        _end_opening(timeout, *missing)
    link = MPILink(comm)
    try:
        check(link)
    except UserError as error:
        _end_at_once(error)  # so that a launcher can end the others before they say it, too
    _warn_if_bound_to_taken_cores(link)
    link.watch(timeout)
    guard_exits(link)
    agree(link, lambda: _check_timeout(given, is_number), tells=True)
    return link


def _end_at_once(error, end=exit_at_once):
    if str(error):
        print(f"fedmpi: error: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    end(2)


def _warn_if_bound_to_taken_cores(link):
    """Print a line on a node's first rank if its ranks are bound to cores on which other processes run.

    Open MPI binds the ranks of each job to the machine's first cores: two jobs share them while others are free.
    """
    cores, busy = link.topology.cores, link.topology.busy
    if link.local_rank or busy < TAKEN * len(cores):
        return
    with contextlib.suppress(OSError):  # the parent is in another container
        if len(usable_cores(os.getppid())) > len(cores):
            which = f"core{'s' * (len(cores) > 1)} {', '.join(map(str, cores))}"
            problem = f"the launcher has bound the ranks on {platform.node()} to {which}, where other processes run"
            log.warning(f"{problem}: start with mpirun --bind-to none")


def _check_timeout(given, is_number):
    if not is_number:
        raise UserError(f"timeout = {given!r}: expected a number of seconds > 0")


def close_link(link):
    """Free what a link has; this rank may end from now on. Collective."""
    forget(link)
    link.close()


def check_alone():
    """Raise UserError if `torch.distributed` averages over several ranks, too. Not collective."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise UserError(
            f"torch.distributed is initialised with {distributed.get_world_size()} ranks (accelerate and Trainer do so "
            "if they find a launcher's variables): it would average what fedmpi averages: see docs/fine_tuning.md"
        )


def _end_opening(timeout, rank, code):
    """End the job: a rank has ended with a code, or (None) some ranks have not come in time."""
    problem = f"not all ranks have begun a federation within {timeout:g} s"
    hint = "some have ended, are stuck, or do not call fedmpi as often as the others"
    if rank is not None:
        problem = f"rank {rank} ended{f' with exit code {code}' * (code >= 0)}, while other ranks begin a federation"
        hint, code = "all ranks must begin equally many", max(code, 1)
    time.sleep(min(2 * OUTPUT_SECONDS * started_by()[2], GRACE))  # a lower rank ends this one meanwhile, if it is here
    print(f"fedmpi: error: {problem}: {hint}", file=sys.stderr, flush=True)
    time.sleep(OUTPUT_SECONDS / 5)  # after os._exit(0) on a rank, MPICH's launcher soon ends all with exit code 0
    abort(code or TIMED_OUT)
