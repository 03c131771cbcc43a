"""Who is missing when ranks wait too long: those that wait say so to each other.

Nothing is sent before the limit. Then a rank that waits sends HERE to all others, and every other rank that waits
does the same when it receives one. A rank that sends nothing for some seconds is not waiting: it is stopped, stuck
or slow. The job ends then, or goes on without that rank: a rank of its machine kills its process.
"""

import contextlib
import functools
import sys
import threading
import time

import numpy as np

from fedmpi.comm.faults.abort import abort
from fedmpi.comm.faults.mitigation import why_unavailable
from fedmpi.comm.faults.neighbour import Neighbour, describe_end, exit_at_once
from fedmpi.comm.start.launch import OUTPUT_SECONDS
from fedmpi.comm.start.mpi_library import MPI
from fedmpi.ground.machine.processes import describe_process, is_stopped, kill_process

GRACE = 3.0  # seconds in which all ranks that wait are heard
LISTEN_AFTER, LISTEN_EVERY = 0.5, 0.05  # seconds of waiting before a rank looks for messages, and between two looks
HERE, GONE = 1, 0
# Tags of the messages: HERE or GONE; what a rank that ends says of itself; the number of a meeting within a round.
WORD, LEAVES, MEETING = 0, 1, 2
TIMED_OUT = 75  # exit code: a temporary failure, worth another attempt (EX_TEMPFAIL of sysexits.h)


class RollCall:
    """Watches the waits of one rank and ends the job if one takes too long. Collective, as is `close`.

    Args:
        comm: an mpi4py intracommunicator; duplicated.
        limit: seconds after which a wait is too long; may be changed later, on all ranks.
        describe: function(started rank) -> text about it, for the message.
        explain: function without arguments -> (phase that the ranks are in, how to resume), texts for the message.

    Attributes:
        lost: ranks that are lost, for which the others no longer wait.
        goes_on: whether ranks that do not answer are killed, if that is possible, instead of ending the job.
        unfinished: the kind of an error that has left messages of this rank half done, or "".
    """

    unfinished = ""

    def __init__(self, comm, limit, describe, explain):
        self._comm = comm.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)  # calls in which a rank is lost raise exceptions
        self.lost, self.goes_on = set(), False
        self._processes = np.empty((comm.size, 3), np.int64)
        comm.Allgather(np.array(describe_process(), np.int64), self._processes)
        self.limit, self._describe, self._explain = limit, describe, explain
        self._leaving = {}  # rank -> what it has said of itself before it ends
        self._waiting = set()  # other ranks that have said HERE and not GONE
        self._looked, self._called = 0.0, (-1, 0)  # see `called`
        self.while_waiting = lambda: None  # see `Ranks`
        self._sent = []  # messages with their requests: MPI needs their memory until they are delivered
        self._inside_since, self._call, self._patience = None, None, 0.0
        self.neighbour = Neighbour(comm, self._processes, self._describe_ended, abort)
        _watched().append(self)

    def wait(self, request, pause):
        """Wait until `request` is complete; `pause()` is called between two tests of it."""
        if request.Test():
            return
        began = time.monotonic()
        listened, called, has_killed = began + LISTEN_AFTER, None, False
        try:
            while not request.Test():
                pause()
                now = time.monotonic()
                if now - listened < LISTEN_EVERY:
                    continue
                listened = now
                self.while_waiting()
                another_goes_on = self._listen()
                if called is None and (self._waiting or now - began > self.limit):
                    called = now
                    self._say(HERE)
                elif called is not None and another_goes_on:
                    called = now + self.limit  # it is not missing, and what ended its wait ends this one, too
                elif called is not None and now - called > GRACE:
                    if not self.goes_on or has_killed or not self._can_kill(self._missing()):
                        self._end(now - called)
                    elif self._is_first_here() or now - called > 2 * GRACE:
                        self._kill(self._missing())
                        has_killed, called = True, now + self.limit  # MPI reports it; if not, the job ends
        finally:
            if called is not None:
                self._say(GONE)

    def check_finished(self):
        """End the job if messages of this rank are half done: the other ranks wait for what cannot be repeated."""
        if self.unfinished:
            print(
                f"fedmpi: error on rank {self._comm.rank}: {self.unfinished} has interrupted the exchange of messages "
                "with the other ranks, and the program went on: expected that it ends",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(OUTPUT_SECONDS)
            abort(1)

    @contextlib.contextmanager
    def inside_mpi(self):
        """A context for a blocking call of MPI.

        If it takes too long, the process ends, and its message cannot name the missing rank.
        """
        self._inside_since = time.monotonic()
        try:
            yield
        finally:
            self._inside_since = None

    def say_leaving(self, facts):
        """Say to the other ranks that this one ends, with [n] numbers about it: see `hear_leaving`. Not collective.

        Returns False if MPI is finalized, so that nothing can be said.
        """
        if MPI.Is_finalized():
            return False
        facts = np.array(facts, np.float64)
        self._leaving[self._comm.rank] = facts
        self._sent += [(facts, self._comm.Isend(facts, dest=rank, tag=LEAVES)) for rank in self._others()]
        return True

    def hear_leaving(self, until):
        """Wait until `until` (of `time.monotonic`) for all other ranks to say that they end, too. Not collective.

        Returns (rank -> the facts of those that end, this one included; whether these are all).
        """
        while True:
            for rank in self._others():
                if rank not in self._leaving and self._comm.Iprobe(source=rank, tag=LEAVES):
                    facts = np.empty_like(self._leaving[self._comm.rank])
                    self._comm.Recv(facts, source=rank, tag=LEAVES)
                    self._leaving[rank] = facts
            are_all = len(self._leaving) == self._comm.size
            if are_all or time.monotonic() > until:
                return self._leaving, are_all
            time.sleep(0.01)

    def call(self, number, place):
        """See `Ranks.call`."""
        message = np.array([number, place], np.int64)
        self._sent += [(message, self._comm.Isend(message, dest=rank, tag=MEETING)) for rank in self._others()]

    def called(self):
        """See `Ranks.called`; looks for messages at most every `LISTEN_EVERY` seconds."""
        now = time.monotonic()
        if now - self._looked >= LISTEN_EVERY:
            self._looked, message = now, np.empty(2, np.int64)
            while self._comm.Iprobe(source=MPI.ANY_SOURCE, tag=MEETING):
                self._comm.Recv(message, source=MPI.ANY_SOURCE, tag=MEETING)
                self._called = max(self._called, tuple(message.tolist()))
        return self._called

    def close(self):
        """Free the communicator."""
        self.neighbour.close()
        request = self._comm.Ibarrier()  # until then a launcher may not notice that a rank has ended
        while not request.Test():
            time.sleep(0.001)
        _watched().remove(self)
        self._comm.Free()

    def _look_inside_mpi(self):
        """End the process if a call inside of `inside_mpi` takes too long; called every second."""
        since = self._inside_since
        if since != self._call:
            self._call, self._patience = since, self.limit + GRACE
        if since is None or time.monotonic() - since <= self._patience:
            return
        if not self.goes_on or self._patience > self.limit + GRACE:
            self._report("one or more ranks")
            exit_at_once(TIMED_OUT)
        self._kill([rank for rank in self._others() if is_stopped(*self._processes[rank].tolist())])
        self._patience *= 2  # another rank may have killed them before this one looked

    def _listen(self):
        """Receive what others have said; whether one of them no longer waits, though it is not lost."""
        message, waited = np.empty(1, np.int8), set(self._waiting)
        for rank in self._others():
            with contextlib.suppress(MPI.Exception):
                while self._comm.Iprobe(source=rank, tag=WORD):
                    self._comm.Recv(message, source=rank, tag=WORD)
                    (self._waiting.add if message[0] == HERE else self._waiting.discard)(rank)
        self._waiting -= self.lost
        return bool(waited - self._waiting - self.lost)

    def _say(self, word):
        message = np.array([word], np.int8)
        for rank in self._others():
            with contextlib.suppress(MPI.Exception):
                self._sent.append((message, self._comm.Isend(message, dest=rank, tag=WORD)))

    def _others(self):
        return [rank for rank in range(self._comm.size) if rank != self._comm.rank and rank not in self.lost]

    def _end(self, since_call):
        """End the job; the lowest rank that waits names those that do not. The others give it time to do so."""
        if min(self._waiting, default=self._comm.size) < self._comm.rank and since_call < 3 * GRACE:
            return
        missing = [self._describe(rank) for rank in self._missing()]
        self._report(", ".join(missing) or "any message, though all ranks wait")
        time.sleep(OUTPUT_SECONDS)
        abort(TIMED_OUT)

    def _describe_ended(self, rank, status):
        """The line about a rank whose process has ended; "" if MPI itself reports it, to a job that may go on."""
        if self.goes_on or why_unavailable() is None:
            return ""
        who, when, hint = f"rank {rank}", "", ""
        with contextlib.suppress(ReferenceError):  # the link was dropped
            who, (phase, hint) = self._describe(rank), self._explain()
            when = f" during {phase}"
        end = f"its process ended{describe_end(status)}{when}"
        return f"error on {who}: {end}, without a Python error (exit, exec, a crash, or out of memory){hint}"

    def _missing(self):
        """Ranks that do not wait."""
        return [rank for rank in self._others() if rank not in self._waiting]

    def _is_first_here(self):
        """Whether this rank is the lowest on its machine of those that wait; the others kill only if it does not."""
        return all(rank > self._comm.rank for rank in self._waiting if self._is_here(rank))

    def _is_here(self, rank):
        """Whether a rank is on this one's machine."""
        return self._processes[rank, 0] == self._processes[self._comm.rank, 0]

    def _can_kill(self, ranks):
        """Whether each of the ranks has a machine on which another one waits, and there are any."""
        machines = {self._processes[rank, 0] for rank in (self._comm.rank, *self._waiting)} - {0}
        return bool(ranks) and all(self._processes[rank, 0] in machines for rank in ranks)

    def _kill(self, ranks):
        """Kill those of this machine, which are lost then, also if they are stopped and would go on later."""
        here = [rank for rank in ranks if self._is_here(rank)]
        if here:
            self._report(", ".join(map(self._describe, here)), goes_on=True)
        for rank in here:
            kill_process(*self._processes[rank].tolist())

    def _report(self, who, goes_on=False):
        phase, hint = self._explain()
        kind, hint = ("", "; killed, and the others continue") if goes_on else ("error: ", hint)
        print(
            f"fedmpi: {kind}no sign of {who} for {self.limit:g} s during {phase}: stopped, stuck, or slower than "
            f"the timeout of {self.limit:g} s allows{hint}",
            file=sys.stderr,
            flush=True,
        )


@functools.cache
def _watched():
    """The roll calls that are not closed, of which a thread looks at the calls of MPI every second."""
    roll_calls = []

    def look():
        while True:
            time.sleep(1)
            for roll_call in list(roll_calls):
                roll_call._look_inside_mpi()

    threading.Thread(target=look, name="timeout", daemon=True).start()
    return roll_calls
