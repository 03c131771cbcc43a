"""Sees every message between ranks: each call of MPI that sends, and each use of the memory that a node's ranks share.

What a message carries is what the verb of the link says that has sent it: its argument `kind`, which is looked for in
the stack. A message outside of a verb has to come from one of `PLACES`, and to be small.
"""

import collections
import contextlib
import hashlib
import pathlib
import sys

import numpy as np

from fedmpi.comm.crosses import OWN
from fedmpi.comm.start.mpi_library import MPI as LAZY
from fedmpi.comm.sums import window

PACKAGE = pathlib.Path(window.__file__).parents[2]
# Methods of communicators that send nothing, or nothing of this process's.
QUIET = ("Get_", "Set_", "Is_", "Create_keyval", "Create_errhandler", "Free", "Delete_attr", "Call_errhandler", "Abort")
QUIET += ("Iprobe", "Probe", "Recv", "Compare", "Revoke", "Ack_failed", "Clone")
MAKING = ("Dup", "Split", "Shrink", "Create")  # they return communicators
# Outside of the link's verbs, files of the package (in some, functions) with messages that carry nothing of the data:
# who the ranks are and which are left, keys of shared memory, addresses, and made-up vectors whose way is timed.
PLACES = {
    "comm/sums/topology.py": ("__init__", "_measure_cores", "split"),
    "comm/sums/mpi.py": ("_facts", "allocate_copy", "barrier", "wait_for_survivors"),
    "comm/sums/window.py": ("agreed", "_map_together", "take"),
    "comm/sums/transports/shared.py": ("allocate",),
    "comm/faults/meeting.py": (),
    "comm/faults/neighbour.py": (),
    "comm/faults/rollcall.py": (),
    "comm/faults/survivors.py": (),
    "cli/doctor/facts.py": ("describe_rank",),
    "cli/doctor/speed.py": (),
}
LARGEST = 4096  # bytes of a message outside of the verbs: which of a machine's cores a rank may use
PASSING = {"comm/sums/mpi.py": {"_repeat", "_attempt", "_attempt_once"}}  # what only hands a call on
PASSING["comm/sums/topology.py"] = {"allgather", "allgather_bytes", "first_rank_where", "allreduce", "barrier"}


class Recorder:
    """What the ranks have sent since `clear`.

    Attributes:
        sent: kind -> [messages, bytes] of this rank. wrong: lines about messages that nothing declares.
        contents: [(kind, bytes)] of what was sent, if `keeps`; of numbers that may be letters, these.
        look: function of the bytes of every message, or None.
    """

    def __init__(self, keeps=False):
        self._keeps, self.look = keeps, None
        self.clear()

    def clear(self):
        self.sent, self.wrong, self.contents = collections.defaultdict(lambda: [0, 0]), [], []

    def note(self, call, buffer):
        """Take note of a message: `call` is the method of MPI, or says how memory is shared; `buffer`: what is sent."""
        nbytes = 0 if buffer is None else buffer.nbytes
        if self.look is not None and nbytes:
            self.look(buffer)
        kind, place = _kind_and_place()
        if call == "Iallgather" and place == ("comm/sums/mpi.py", "exchange"):
            kind = "machinery"  # how many numbers of each rank follow
        if kind is None:
            file, function = place
            of_file = PLACES.get(file)
            is_known = of_file is not None and (not of_file or function in of_file)
            if not is_known or (nbytes > LARGEST and file != "cli/doctor/speed.py"):
                self.wrong.append(f"{call} of {nbytes} bytes in {file}, {function}")
            kind = "machinery"
        if kind == OWN:
            self.wrong.append(f"{call} of {nbytes} bytes without a kind in {place[0]}, {place[1]}")
        if nbytes or kind != "machinery":
            self.sent[kind][0] += 1
            self.sent[kind][1] += nbytes
        if self._keeps and nbytes:
            self.contents += [(kind, content) for content in _readings(buffer)]


def _readings(buffer):
    """The bytes of a buffer, and those that its numbers are."""
    content = bytes(buffer.cast("B") if buffer.contiguous else buffer)
    yield content
    for width, kind in ((8, np.float64), (4, np.float32), (8, np.int64), (4, np.int32)):
        if len(content) % width == 0:
            with np.errstate(invalid="ignore"):
                yield np.frombuffer(content, kind).astype(np.uint8).tobytes()


def _kind_and_place():
    """(the kind that the innermost verb names or None, (file, function) outside of the communicators' own calls)."""
    frame, place = sys._getframe(2), None
    while frame is not None:
        file = pathlib.Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE):
            name, function = str(file.relative_to(PACKAGE)), frame.f_code.co_name
            if name.startswith("comm/sums/mpi.py") and function != "_facts" and "kind" in frame.f_locals:
                return frame.f_locals["kind"], place or (name, function)
            if place is None and function not in PASSING.get(name, ()):
                place = name, function
        frame = frame.f_back
    return None, place or ("outside", "the program")


def install(keeps=False):
    """The `Recorder` of this process, in which MPI begins; `keeps`: it has what is sent."""
    from mpi4py import MPI

    recorder = Recorder(keeps)
    _ = LAZY.COMM_WORLD  # MPI has begun

    class Recorded(MPI.Intracomm):
        """A communicator whose messages are recorded."""

    def recorded(name, method):
        def call(self, *arguments, **options):
            recorder.note(name, _buffer(arguments))
            return method(self, *arguments, **options)

        return call

    def making(method):
        def call(self, *arguments, **options):
            made = method(self, *arguments, **options)
            return Recorded(made) if isinstance(made, MPI.Intracomm) and made != MPI.COMM_NULL else made

        return call

    for name in dir(MPI.Intracomm):
        method = getattr(MPI.Intracomm, name)
        if name.startswith(MAKING) and not name.startswith(QUIET):
            setattr(Recorded, name, making(method))
        elif callable(method) and name[0].isupper() and not name.startswith(QUIET):
            setattr(Recorded, name, recorded(name, method))  # those in lower case pickle, and are not used
    LAZY.COMM_WORLD = MPI.COMM_WORLD = Recorded(MPI.COMM_WORLD)
    _watch_memory(recorder)
    return recorder


def _buffer(arguments):
    """The first buffer of a call as a `memoryview`, or None."""
    from mpi4py import MPI

    for argument in arguments:
        buffer = argument[0] if isinstance(argument, list | tuple) and argument else argument
        if buffer is MPI.IN_PLACE:
            continue
        with contextlib.suppress(TypeError, ValueError, BufferError):
            return memoryview(buffer)
    return None


def _watch_memory(recorder):
    """Record what becomes visible in memory that the ranks of a node share."""
    synchronise, take = window.NodeWindow.synchronise, window.NodeCopy.take

    def synchronised(self):
        recorder.note("shared memory", memoryview(self.mine.numpy()))
        return synchronise(self)

    def taken(self, values):
        everyone = self._node.mpi.allgather(hashlib.sha256(np.ascontiguousarray(values.numpy()).tobytes()).hexdigest())
        if len({*everyone}) > 1:
            recorder.wrong.append("shared memory: the values that all ranks have are others on some")
        return take(self, values)

    window.NodeWindow.synchronise, window.NodeCopy.take = synchronised, taken
