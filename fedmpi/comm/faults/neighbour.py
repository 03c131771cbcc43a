"""Each rank watches the next one on its machine, which may end without a word: by C's exit, exec, or a crash.

MPICH's launcher takes a rank that has ended with exit code 0 and without MPI_Finalize for the end of the job: it kills
the others and returns 0. It learns of the end by the rank's connection to it, and a connection stays open while another
process has it, too. So each rank holds that of the rank that it watches, and has time to end the job with a line.
"""

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy as np

from fedmpi.comm.start.launch import OUTPUT_SECONDS
from fedmpi.comm.start.mpi_library import MPI
from fedmpi.comm.start.orphan import launcher_name
from fedmpi.ground.machine.processes import exit_status

exit_at_once = os._exit  # as it is: links that are open replace it
MAIL_SECONDS = 5.0  # that a file descriptor may need from one rank to another
BACKUP_SECONDS = 3.0  # that MPI_Abort gets from a thread beside one that may be inside MPI
_UCRED = struct.Struct("3i")  # process, user, group; see unix(7)

_open = []  # `Neighbour`s


class Neighbour:
    """Watches the next rank on this machine and ends the job if it ends before it says so. Collective on `comm`.

    Args:
        comm: an mpi4py intracommunicator. processes: [size, 3] of its ranks, see `describe_process`.
        describe: function(rank, how it has ended) -> the line, or "" if its end is none of this one's business.
        end: function(exit code) that ends the job.
    """

    def __init__(self, comm, processes, describe, end):
        self._describe, self._end, self._process, self._ends = describe, end, os.getpid(), False
        self._held = []  # file descriptors that are closed with this
        own, mailbox = comm.rank, _open_mailbox()
        addresses = np.empty(comm.size, np.int64)
        comm.Allgather(np.array([_number_of(mailbox)], np.int64), addresses)
        here = [rank for rank in range(comm.size) if processes[rank, 0] == processes[own, 0] and addresses[rank] >= 0]
        if mailbox is None or len(here) == 1 or not processes[own, 0]:
            return
        position = here.index(own)
        before, self._rank = here[position - 1], here[(position + 1) % len(here)]
        with mailbox, contextlib.suppress(OSError):
            read, self._said = os.pipe()
            self._held.append(self._said)
            try:
                _send(mailbox, int(addresses[before]), [read, *_connection_to_launcher()])
            finally:
                os.close(read)
            self._received = _receive(mailbox, int(processes[self._rank, 1]))
            self._held += self._received
            self._begin(int(processes[self._rank, 1]), self._received[0])
        _open.append(self)

    def _begin(self, process, heard):
        self._stop, self._woken = os.pipe()
        self._held += [self._stop, self._woken]
        self._held.append(watched := os.pidfd_open(process))
        poll = select.poll()
        for number in (self._stop, heard, watched):
            poll.register(number, select.POLLIN)
        self._thread = threading.Thread(target=self._watch, args=(poll, process, heard), name="neighbour", daemon=True)
        self._thread.start()

    def leave(self, code=0):
        """Say that this rank may end from now on, and end no job because of another. Not collective.

        Args:
            code: with which this rank ends the job; 0: it does not.
        """
        if self._ends or os.getpid() != self._process:
            return
        self._ends = True
        with contextlib.suppress(OSError, AttributeError):  # the other has ended; there is none
            os.write(self._said, bytes([code & 255]))

    def close(self):
        """Watch no more, and free what is held. Not collective."""
        self.leave()
        if os.getpid() != self._process or self not in _open:
            return
        _open.remove(self)
        if hasattr(self, "_thread"):
            os.write(self._woken, b".")
            if threading.current_thread() is not self._thread:
                self._thread.join()
        for number in self._held:
            os.close(number)

    def _watch(self, poll, process, heard):
        ready = dict(poll.poll())
        if self._stop in ready:
            return
        said = os.read(heard, 1) if heard in ready else b""
        if said:
            code = said[0]
            time.sleep(BACKUP_SECONDS * (code > 0))  # MPI_Abort ends all ranks meanwhile
        else:
            code = self._say_end(exit_status(process))
        if code == 0 or self._ends:
            return
        backup = threading.Timer(BACKUP_SECONDS, exit_at_once, [code])
        backup.daemon = True
        backup.start()
        self._hold_longer()
        self._end(code)

    def _say_end(self, how):
        """Print the line about an end without a word, and return the exit code for the job; 0 if it goes on."""
        line = "" if MPI.Is_finalized() else self._describe(self._rank, how)
        if self._ends or not line:
            return 0
        print(f"fedmpi: {line}", file=sys.stderr, flush=True)
        time.sleep(OUTPUT_SECONDS)  # a launcher that has noticed it, too, ends the job meanwhile with its own code
        return 128 - how if how is not None and how < 0 else how or 1

    def _hold_longer(self):
        """Let a process hold the other's connection while this one ends: its end must not reach the launcher first."""
        with contextlib.suppress(OSError):
            nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            subprocess.Popen(["sleep", f"{BACKUP_SECONDS:g}"], pass_fds=self._received[1:], **nothing)


def leave_all(code):
    """What this rank does before it ends the job itself: the others only check that it does."""
    for neighbour in _open:
        neighbour.leave(code)


def describe_end(status):
    """In words, a status of `exit_status`: "" if it is unknown."""
    if status is None:
        return ""
    return f" with exit code {status}" if status >= 0 else f" by signal {-status} ({signal.Signals(-status).name})"


def _open_mailbox():
    """A socket with an address of the kernel's choice, which nobody else can take before; None without Linux's."""
    if not sys.platform.startswith("linux"):
        return None
    with contextlib.suppress(OSError, AttributeError):
        mailbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        mailbox.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        mailbox.settimeout(MAIL_SECONDS)
        mailbox.bind("")
        return mailbox
    return None


def _number_of(mailbox):
    """The address, which is a zero byte and five hexadecimal digits, as a number; -1 without a mailbox."""
    return -1 if mailbox is None else int(mailbox.getsockname()[1:], 16)


def _send(mailbox, address, numbers):
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, np.array(numbers, np.int32).tobytes())
    mailbox.sendmsg([b"."], [rights], 0, b"\0%05x" % address)


def _receive(mailbox, process):
    """The file descriptors that a process has sent; what others send is closed."""
    until = time.monotonic() + MAIL_SECONDS
    space = socket.CMSG_SPACE(2 * np.int32().nbytes) + socket.CMSG_SPACE(_UCRED.size)
    while time.monotonic() < until:
        _, messages, _, _ = mailbox.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
        found = {kind: data for level, kind, data in messages if level == socket.SOL_SOCKET}
        numbers = np.frombuffer(found.get(socket.SCM_RIGHTS, b""), np.int32).tolist()
        sender = found.get(socket.SCM_CREDENTIALS, b"")
        if len(sender) == _UCRED.size and _UCRED.unpack(sender)[0] == process and numbers:
            return numbers
        for number in numbers:
            os.close(number)
    raise OSError("nothing came")


def _connection_to_launcher():
    """[the file descriptor by which MPICH's launcher learns of this rank's end]; [] under another launcher."""
    number = os.environ.get("PMI_FD", "")
    if number.isdigit() and launcher_name() == "hydra_pmi_proxy":
        with contextlib.suppress(OSError):
            os.fstat(int(number))
            return [int(number)]
    return []
