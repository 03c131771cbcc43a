"""How the ranks of a communicator meet before they use it, and hear of those that have ended."""

import contextlib
import functools
import time

import numpy as np

from fedmpi.comm.start.mpi_library import MPI

_own_comms = []  # our own duplicates of the communicators on which ranks have met
_sent = []  # requests of messages, which hold their memory


@functools.cache
def _key():
    """The key of an attribute of communicators: their duplicate."""
    return MPI.Comm.Create_keyval()


def wait_for_all(comm, seconds):
    """Wait for all ranks of a communicator. Collective on `comm`.

    Ranks that have met before also hear of one that has ended since.

    Args:
        comm: an mpi4py communicator; None: COMM_WORLD. If it is none, or MPI is finalized, nothing happens.
        seconds: after which ranks that have not come are given up.

    Returns:
        None if all are here; (the rank that has ended, its exit code), or (None, None) if it is too late.
    """
    comm = MPI.COMM_WORLD if comm is None else comm
    if MPI.Is_finalized() or not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL or comm.size == 1:
        return None
    own, status, until = comm.Get_attr(_key()), MPI.Status(), time.monotonic() + seconds
    request = (own or comm).Ibarrier()
    while not request.Test():
        time.sleep(0.001)  # the other ranks may need this core
        if own is not None and own.Iprobe(status=status):
            own.Recv(code := np.empty(1), status.source)
            return status.source, int(code[0])
        if time.monotonic() > until:
            return None, None
    if own is None:
        comm.Set_attr(_key(), own := comm.Dup())
        own.Set_errhandler(MPI.ERRORS_RETURN)
        _own_comms.append(own)
    return None


def say_gone(code):
    """Tell the ranks that have met this one that it ends with an exit code (-1: unknown). Not collective."""
    for comm in () if MPI.Is_finalized() else _own_comms:
        for rank in set(range(comm.size)) - {comm.rank}:
            with contextlib.suppress(MPI.Exception):
                _sent.append(comm.Isend(np.array([code], np.float64), rank))
