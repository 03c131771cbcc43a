"""`open_link`: the ranks meet, and none of them waits forever for one that is stuck or ends."""

import functools
import numbers
import sys
import threading
import time

import numpy as np
import torch
from mpi4py import MPI

from fedmpi.comm.abort import abort
from fedmpi.comm.agreement import agree
from fedmpi.comm.launch import OUTPUT_SECONDS
from fedmpi.comm.mpi import MPILink
from fedmpi.comm.rollcall import GRACE, TIMED_OUT
from fedmpi.errors import UserError
from fedmpi.membership.exits import forget, guard_exits, guard_rank

TIMEOUT = 1800.0  # seconds, at every door
PAUSE = 0.001  # seconds between two looks whether all ranks have come


def open_link(comm=None, timeout=TIMEOUT):
    """The `Link` of an mpi4py communicator, or of all ranks. Collective.

    Until `close_link`, the job ends with one line and an exit code that is not 0 if a rank makes the others wait for
    longer than `timeout` seconds, or ends; see `fedmpi.membership.exits`.

    Raises:
        UserError: if `comm` or `timeout` is not what is expected.
    """
    is_number = isinstance(timeout, numbers.Real) and 0 < timeout <= threading.TIMEOUT_MAX - GRACE
    given, timeout = timeout, timeout if is_number else TIMEOUT
    ranks = MPI.COMM_WORLD if comm is None else comm
    if not MPI.Is_finalized() and isinstance(ranks, MPI.Intracomm) and ranks != MPI.COMM_NULL:
        _meet(ranks, timeout)
    link = MPILink(comm)
    link.watch(timeout)
    guard_exits(link)
    agree(link, lambda: _check_timeout(given, is_number))
    return link


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
            "if they find a launcher's variables): it would average what fedmpi averages; see docs/own_loop.md"
        )


@functools.cache
def _key():
    """Under which a communicator has one of fedmpi's own, on which ranks that end say so: see `guard_rank`."""
    return MPI.Comm.Create_keyval()


def _meet(comm, timeout):
    """Wait for all ranks of a communicator; end the job if one has ended, or does not come. Collective on `comm`."""
    if comm.size == 1:
        return
    own, status = comm.Get_attr(_key()), MPI.Status()
    request, until = (own or comm).Ibarrier(), time.monotonic() + timeout + GRACE
    while not request.Test():
        time.sleep(PAUSE)
        if own is not None and own.Iprobe(status=status):
            own.Recv(code := np.empty(1), status.source)
            how = f" with exit code {code[0]:.0f}" if code[0] >= 0 else ""
            what = f"rank {status.source} ended{how}, while other ranks begin a federation"
            _end_opening(comm, f"{what}: all ranks must begin equally many", int(code[0]) if code[0] > 0 else 1)
        elif time.monotonic() > until:
            what = f"not all ranks have begun a federation within {timeout:g} s"
            hint = "some have ended, are stuck, or do not call fedmpi as often as the others"
            _end_opening(comm, f"{what}: {hint}", TIMED_OUT)
    if own is None:
        comm.Set_attr(_key(), own := comm.Dup())
        guard_rank(own)


def _end_opening(comm, line, code):
    time.sleep(min(2 * OUTPUT_SECONDS * comm.rank, GRACE))  # a lower rank ends this one meanwhile, if it is here
    print(f"fedmpi: error: {line}", file=sys.stderr, flush=True)
    time.sleep(OUTPUT_SECONDS)
    abort(comm, code)
