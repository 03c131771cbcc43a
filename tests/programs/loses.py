"""fedmpi.train whose ranks die or stop, or whose clients are absent by plan: the variables DIE, STOP, ABSENT and LATE.

DIE: "RANK@EVENT:NUMBER ...": the rank dies when the event occurs for the NUMBERth time. Events: "turn" (a
client begins to work), "losses", "sum", "masks" (before they are added), "words" (before whole numbers are summed),
"inside" (such a sum has begun), "open" (of masks), "agree", "shrink", "evaluation", "record" (before one is written),
"save", "model" (before it is built).
STOP: the same for ranks that stop (SIGSTOP).
ABSENT: "CLIENT@ROUND:END ...": the client takes part in no round from that one on, counted from 0, up to END; the
start is round -1.
USED: a folder, in which each rank notes the hash of every key and nonce of masks; it ends if one is used twice, also by
its earlier processes.
LATE: "RANK:SECONDS": in waits of more than a second the rank looks only every so many seconds at what has happened.
"""

import collections
import hashlib
import os
import pathlib
import signal
import time

from mpi4py import MPI

import fedmpi.training.build
from fedmpi.aggregation import Aggregation, hidden_sums
from fedmpi.aggregation.hidden_sums import HiddenSums
from fedmpi.comm.faults.rollcall import RollCall
from fedmpi.comm.faults.survivors import Survivors
from fedmpi.comm.sums import mpi
from fedmpi.comm.sums.mpi import MPILink
from fedmpi.federation.losses import Reports
from fedmpi.federation.participation import Plan
from fedmpi.federation.rows import RowStore
from fedmpi.runs.recorder import Recorder
from fedmpi.train import main
from fedmpi.training import parts
from fedmpi.training.evaluation import Evaluation

RANK = MPI.COMM_WORLD.rank
SIGNALS = {
    tuple(word.split("@")): number
    for name, number in (("DIE", signal.SIGKILL), ("STOP", signal.SIGSTOP))
    for word in os.environ.get(name, "").split()
}
ABSENT = [tuple(map(int, word.replace("@", ":").split(":"))) for word in os.environ.get("ABSENT", "").split()]
seen = collections.Counter()


def dies_at(owner, name, event):
    """Let this rank die or stop before it calls a function for the time that DIE says."""
    function = getattr(owner, name)

    def call(*args, **options):
        seen[event] += 1
        if number := SIGNALS.get((str(RANK), f"{event}:{seen[event]}")):
            os.kill(os.getpid(), number)
        return function(*args, **options)

    setattr(owner, name, call)


def dies_inside(add):
    """`add_integers` in which this rank dies when its part of the sum has been given to MPI."""

    def call(ranks, block):
        seen["inside"] += 1
        if number := SIGNALS.get((str(RANK), f"inside:{seen['inside']}")):
            ranks.wait = lambda request: os.kill(os.getpid(), number)
        return add(ranks, block)

    return call


class Noted(hidden_sums.Stream):
    """A stream whose key has not had the nonce before on this rank, in no process."""

    def __init__(self, key, nonce):
        file = pathlib.Path(os.environ["USED"], f"rank-{RANK}")
        one = hashlib.sha256(key + nonce.to_bytes(8, "big")).hexdigest()
        if one in (file.read_text().split() if file.exists() else ()):
            MPI.COMM_WORLD.Abort(77)
        with open(file, "a") as noted:
            noted.write(one + "\n")
        super().__init__(key, nonce)


def present(draw):
    """Participants as drawn, without those that are absent by plan; if nobody is left, all that are not absent."""

    def participants(num_clients, participation, seed, round_index):
        absent = {client for client, since, end in ABSENT if since <= round_index < end}
        drawn = draw(num_clients, participation, seed, round_index)
        return sorted({*drawn} - absent or {*range(num_clients)} - absent)

    return participants


def present_at_start(start):
    """A `Plan.start` without the clients that are absent then."""
    return lambda plan, lost=frozenset(): start(plan, lost | {client for client, since, _ in ABSENT if since < 0})


def late(wait, seconds):
    """A `RollCall.wait` that sleeps for some seconds between two looks, after the first second."""

    def wait_late(roll_call, request, pause):
        began = time.monotonic()
        wait(roll_call, request, lambda: pause() if time.monotonic() - began < 1 else time.sleep(seconds))

    return wait_late


for owner, name, event in [
    (RowStore, "begin_turn", "turn"),
    (Reports, "exchange", "losses"),
    (Aggregation, "spoil", "sum"),
    (HiddenSums, "add", "masks"),
    (MPILink, "add_integers", "words"),
    (HiddenSums, "open", "open"),
    (Survivors, "_agree", "agree"),
    (Survivors, "_shrink", "shrink"),
    (Evaluation, "__call__", "evaluation"),
    (Recorder, "round", "record"),
    (parts, "save", "save"),
    (fedmpi.training.build, "build_model", "model"),
]:
    dies_at(owner, name, event)
mpi.add_integers = dies_inside(mpi.add_integers)
if "USED" in os.environ:
    hidden_sums.Stream = Noted
fedmpi.training.build.draw_participants = present(fedmpi.training.build.draw_participants)
Plan.start = present_at_start(Plan.start)
late_rank, _, seconds = os.environ.get("LATE", "").partition(":")
if str(RANK) == late_rank:
    RollCall.wait = late(RollCall.wait, float(seconds))

if __name__ == "__main__":
    main()
