"""How a rank waits for MPI: it spins, or, on a node with more ranks than cores, yields its core and sleeps."""

import contextlib
import functools
import itertools
import os
import time

# How a rank waits on an oversubscribed node: at first it yields its core between two tests of the request, later it
# sleeps between them, longer and longer (seconds).
TESTS_BEFORE_SLEEPS, SHORTEST_SLEEP, LONGEST_SLEEP = 100, 1e-5, 5e-4
QUICK_TESTS = 1000  # of a request that is likely to be complete soon, before the clock is looked at


class Waiter:
    """Waits for MPI's requests.

    Attributes:
        oversubscribed: whether the node has more ranks than cores. Waiting inside MPI spins, which then
            takes the cores from the ranks that others wait for: yield or sleep between tests instead.
        may_block: whether ranks may also use MPI's blocking collectives, because no node is oversubscribed. It is the
            same on all ranks: MPI does not match the blocking call of one with the nonblocking call of another.
        roll_call: the `RollCall` that ends waits which take too long, or None.
    """

    def __init__(self):
        self.oversubscribed, self.may_block, self.roll_call = False, True, None

    def __call__(self, request):
        """Wait until `request` is complete."""
        pause = functools.partial(next, _pauses() if self.oversubscribed else itertools.repeat(None))
        if self.roll_call is not None:
            for _ in range(0 if self.oversubscribed else QUICK_TESTS):
                if request.Test():
                    return
            self.roll_call.wait(request, pause)
        elif not self.oversubscribed:
            request.Wait()
        else:
            while not request.Test():
                pause()

    def inside_mpi(self):
        """A context for a blocking call of MPI."""
        return contextlib.nullcontext() if self.roll_call is None else self.roll_call.inside_mpi()


def _pauses():
    """Make the pauses of one wait on an oversubscribed node: yield the core, or sleep."""
    for _ in range(TESTS_BEFORE_SLEEPS - 1):
        yield os.sched_yield()
    sleep = SHORTEST_SLEEP
    while True:
        yield time.sleep(sleep)
        sleep = min(1.3 * sleep, LONGEST_SLEEP)
