"""Output that cannot end a program: neither by a character that cannot be encoded, nor because nobody reads it."""

import contextlib
import ctypes
import logging
import os
import pathlib
import re
import stat
import sys

from fedmpi.comm.start.process import open_closed_streams
from fedmpi.ground.errors import cannot
from fedmpi.ground.machine.processes import ancestors

# Programs that pass on the output of the ranks which they start.
LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun")
PIDFD_GETFD = 438  # number of the call on Linux, see pidfd_getfd(2)
# Options of launchers that label the output or write it elsewhere: it must pass through them.
OUTPUT_OPTIONS = re.compile(r"-+(l|prepend\S*|outfile\S*|errfile\S*|output\S*|tag\S*|timestamp\S*|xml)")


class _ToStandardError(logging.Handler):
    """Prints what the package logs on what is standard error at that time."""

    def emit(self, record):
        print(f"fedmpi: {record.getMessage()}", file=sys.stderr, flush=True)


_PRINTING = _ToStandardError()


def print_log():
    """From now on, print what the package logs on standard error, as programs do, and nowhere else."""
    logger = logging.getLogger("fedmpi")
    logger.addHandler(_PRINTING)
    logger.propagate = False


def make_output_safe():
    """Make writing to standard output and standard error never fail.

    Characters that the locale's encoding lacks are escaped. What is written to a closed pipe, a closed terminal or a
    full disk is dropped.
    """
    open_closed_streams()
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name) or open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  for good
        if not isinstance(stream, _SafeStream):
            with contextlib.suppress(AttributeError, ValueError, OSError):  # another library's stream
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, _SafeStream(stream))


def write_past_launcher():
    """Write to the pipes and files that the launcher writes to, not through it, if that is possible.

    A launcher dies of a pipe whose reader is gone (``mpirun ... | head -1``), and MPICH's of a full disk, and its job
    with it.
    """
    launcher = _launcher()
    for number in (1, 2) if launcher else ():
        with contextlib.suppress(OSError):
            if os.isatty(number) or stat.S_ISFIFO(os.fstat(number).st_mode):
                there = _open_again(launcher, number)
                if not os.isatty(there):
                    os.dup2(there, number)
                os.close(there)


def _open_again(process, number):
    """A number of this process for what another one writes to; of a file, both go on behind what either has written.

    It leads nowhere if that one was started without such an output, and uses the number for something of its own: Open
    MPI's mpirun returns 1 if ranks' output does not go there.
    """
    folder = f"/proc/{process}/fd"
    path, mode = f"{folder}/{number}", os.stat(f"{folder}/{number}").st_mode
    target = os.readlink(path)
    if target.startswith("anon_inode:") or (target.startswith("pipe:") and _reads(folder, target)):
        return os.open(os.devnull, os.O_WRONLY)
    if stat.S_ISFIFO(mode):
        there = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # fails, and does not wait, without a reader
        os.set_blocking(there, True)
        return there
    if not stat.S_ISREG(mode) and not stat.S_ISCHR(mode):
        return -1
    return ctypes.CDLL(None).syscall(PIDFD_GETFD, os.pidfd_open(process), number, 0)  # -1 if it is not allowed


def _reads(folder, target):
    """Whether a process has opened a pipe for reading; `folder` is its /proc/PID/fd, `target` what links there say."""
    found = False
    for number in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # it has been closed meanwhile
            is_it = os.readlink(f"{folder}/{number}") == target
            found |= is_it and bool(os.lstat(f"{folder}/{number}").st_mode & stat.S_IRUSR)
    return found


def check_output():
    """Check that all that was printed is written, or that nobody reads it.

    Raises:
        UserError: if it is not: the disk is full.
    """
    if lost := getattr(sys.stdout, "lost", None):
        raise cannot("write", "standard output", lost)


class _SafeStream:
    """A text stream whose `write` and `flush` do not fail.

    Attributes:
        lost: the error after which everything is dropped, but for a missing reader; or None.
    """

    def __init__(self, stream):
        self._stream, self.lost = stream, None

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, text):
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines):
        for line in lines:
            self.write(line)

    def flush(self):
        with self._dropping():
            self._stream.flush()

    @contextlib.contextmanager
    def _dropping(self):
        """Drop what cannot be written, and everything after it."""
        try:
            yield
        except ValueError:  # closed
            pass
        except OSError as error:
            self.lost = None if isinstance(error, BrokenPipeError) else error
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


def _launcher():
    """The number of the process that passes on this one's output: the outermost launcher on this node; or None."""
    found = [process for process, name in ancestors() if name in LAUNCHERS]
    if not found:
        return None
    with contextlib.suppress(OSError):
        command = pathlib.Path(f"/proc/{found[-1]}/cmdline").read_text(encoding="utf-8", errors="replace")
        return None if any(map(OUTPUT_OPTIONS.fullmatch, command.split("\0"))) else found[-1]
    return None
