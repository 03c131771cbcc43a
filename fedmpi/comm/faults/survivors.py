"""The ranks that are left when others are lost: Open MPI's user-level failure mitigation (ULFM)."""

import contextlib
import time

import numpy as np

from fedmpi.comm.faults.mitigation import why_unavailable
from fedmpi.comm.ranks import RanksLost
from fedmpi.comm.start.mpi_library import MPI


def is_loss(error):
    """Whether MPI raised an error because another rank has died."""
    if why_unavailable() is not None or not isinstance(error, MPI.Exception):
        return False  # other MPIs have no such classes
    return error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)


class Survivors:
    """A communicator that shrinks to the ranks that are left. Collective, as is `attempt`.

    Args:
        comm: an mpi4py intracommunicator; duplicated.
        waiter: a `Waiter`: the ranks may wait long for one that is stuck.

    Attributes:
        comm: of the ranks that are left. members: their numbers in the communicator that was given.
    """

    def __init__(self, comm, waiter):
        self.comm, self._waiter = comm.Dup(), waiter
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.members = list(range(comm.size))

    def attempt(self, action):
        """What `action()`, a collective call on `comm`, returns; on every rank that is left or on none.

        Raises:
            RanksLost: on every rank that is left, if a rank was lost; `comm` is then smaller.
        """
        result, error = None, None
        try:
            result = action()
        except MPI.Exception as met:
            error = met
            self.comm.Revoke()  # ranks that wait for this one inside the call are released
        if self._agree(error is None):
            return result
        before, self.comm = self.comm, self._shrink()
        group, left = before.Get_group(), self.comm.Get_group()
        positions = MPI.Group.Translate_ranks(left, list(range(left.size)), group)
        self.members = [self.members[position] for position in positions]
        if error is not None and len(self.members) == before.size:
            raise error
        raise RanksLost

    def is_alone(self):
        """Whether all other ranks are known to have died, also those that `attempt` has not noticed. Not collective."""
        for _ in range(20):  # Open MPI takes note of deaths only in calls such as this one, not always in the first
            with contextlib.suppress(MPI.Exception):
                self.comm.Iprobe()
            time.sleep(0.01)
        return self.comm.size - self.comm.Get_failed().size == 1

    def _agree(self, succeeded):
        """Whether all ranks have succeeded and none is lost; the same on every rank that is left."""
        flag = np.array([succeeded], np.int32)
        try:
            self._waiter(self.comm.Iagree(flag))
            return flag[0] == 1
        except MPI.Exception:  # on every rank that is left, if one is lost that they had not all noticed
            return False

    def _shrink(self):
        with self._waiter.inside_mpi():
            comm = self.comm.Shrink()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        return comm


class Surviving:
    """A transport whose sums the ranks that are left notice to have failed. Collective.

    Args:
        transport: a `Transport`.
        attempt: `attempt(action)`, which raises `RanksLost` on all ranks that are left, if others are lost.
    """

    def __init__(self, transport, attempt):
        self._transport, self._attempt = transport, attempt

    def average(self, block, divisor, out):
        """See `Transport.average`."""
        self._attempt(lambda: self._transport.average(block, divisor, out))
