"""Who is missing when ranks wait too long: those that wait say so to each other.

Nothing is sent before the limit. Then a rank that waits sends HERE to all others, and every other rank that waits
does the same when it sees one. Who has not after some seconds is not waiting: it is stopped, stuck, or slow.
"""

import contextlib
import os
import sys
import threading
import time

import numpy as np
from mpi4py import MPI

from fedmpi.comm.abort import abort

GRACE = 3.0  # seconds in which all ranks that wait are heard
LISTEN_AFTER, LISTEN_EVERY = 0.5, 0.05  # seconds of waiting before a rank looks for messages, and between two looks
OUTPUT_SECONDS = 1.0  # a launcher drops output that it has not yet passed on when the job aborts
HERE, GONE = 1, 0
TIMED_OUT = 75  # exit code: a temporary failure, worth another attempt (EX_TEMPFAIL of sysexits.h)


class RollCall:
    """Watches the waits of one rank and ends the job if one takes too long. Collective, as is `close`.

    Args:
        comm: an mpi4py intracommunicator; duplicated.
        limit: seconds after which a wait is too long.
        describe: started rank -> words about it, for the message.
        explain: called for the message; returns what ranks do before they arrive where this one waits, and how
            to go on.

    Attributes:
        lost: ranks that are lost: nobody waits for them.
    """

    def __init__(self, comm, limit, describe, explain):
        self._comm = comm.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)  # calls that meet a lost rank raise exceptions
        self.lost = set()
        self._limit, self._describe, self._explain = limit, describe, explain
        self._waiting, self._sent = set(), []
        self._inside_since, self._is_open = None, threading.Event()
        threading.Thread(target=self._watch_mpi, name="timeout", daemon=True).start()

    def wait(self, request, pause):
        """Wait until `request` is complete.

        Args:
            pause: called between two tests of the request.
        """
        if request.Test():
            return
        began = time.monotonic()
        listened, called = began + LISTEN_AFTER, None
        try:
            while not request.Test():
                pause()
                now = time.monotonic()
                if now - listened < LISTEN_EVERY:
                    continue
                listened = now
                self._listen()
                if called is None and (self._waiting or now - began > self._limit):
                    called = now
                    self._say(HERE)
                elif called is not None and now - called > GRACE:
                    self._end(now - called)
        finally:
            if called is not None:
                self._say(GONE)

    @contextlib.contextmanager
    def inside_mpi(self):
        """While a call of MPI waits by itself: if that takes too long, the process ends without knowing for whom."""
        self._inside_since = time.monotonic()
        yield
        self._inside_since = None

    def close(self):
        """Free the communicator."""
        self._is_open.set()
        self._comm.Free()

    def _watch_mpi(self):
        """In a thread of its own."""
        while not self._is_open.wait(1):
            since = self._inside_since
            if since is not None and time.monotonic() - since > self._limit + GRACE:
                self._report("one or more ranks")
                os._exit(TIMED_OUT)

    def _listen(self):
        message = np.empty(1, np.int8)
        for rank in self._others():
            with contextlib.suppress(MPI.Exception):
                while self._comm.Iprobe(source=rank):
                    self._comm.Recv(message, source=rank)
                    (self._waiting.add if message[0] == HERE else self._waiting.discard)(rank)
        self._waiting -= self.lost

    def _say(self, word):
        message = np.array([word], np.int8)
        for rank in self._others():
            with contextlib.suppress(MPI.Exception):
                self._sent.append((message, self._comm.Isend(message, dest=rank)))

    def _others(self):
        return [rank for rank in range(self._comm.size) if rank != self._comm.rank and rank not in self.lost]

    def _end(self, since_call):
        """End the job; the lowest rank that waits names those that do not."""
        waiting = sorted({self._comm.rank, *self._waiting})
        if waiting[0] != self._comm.rank and since_call < 3 * GRACE:
            return
        missing = [self._describe(rank) for rank in self._others() if rank not in waiting]
        self._report(", ".join(missing) or "any message, though all ranks wait")
        time.sleep(OUTPUT_SECONDS)
        abort(self._comm, TIMED_OUT)

    def _report(self, who):
        phase, way_on = self._explain()
        print(
            f"fedmpi: error: no sign of {who} for {self._limit:g} s, in {phase}: stopped, stuck or too slow "
            f"(--timeout {self._limit:g}){way_on}",
            file=sys.stderr,
            flush=True,
        )
