"""Output that cannot end a program: neither by a character that cannot be encoded, nor because nobody reads it."""

import contextlib
import logging
import os
import pathlib
import re
import stat
import sys

from fedmpi.comm.process import ancestors

# Programs that pass on the output of the ranks which they start.
LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun")
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
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  until the process ends
        elif not isinstance(stream, _SafeStream):
            with contextlib.suppress(AttributeError, ValueError, OSError):  # another library's stream
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, _SafeStream(stream))


def write_past_launcher():
    """Write to the pipes that the launcher writes to, not through it, if that is possible.

    A launcher dies of a pipe whose reader is gone (``mpirun ... | head -1``), and its job with it.
    """
    launcher = _launcher()
    for number in (1, 2) if launcher else ():
        path = f"/proc/{launcher}/fd/{number}"
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.stat(path).st_mode) and stat.S_ISFIFO(os.fstat(number).st_mode):
                there = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # fails, and does not wait, without a reader
                os.set_blocking(there, True)
                os.dup2(there, number)
                os.close(there)


class _SafeStream:
    """A text stream whose `write` and `flush` do not fail."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, text):
        with _dropping(self._stream):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines):
        for line in lines:
            self.write(line)

    def flush(self):
        with _dropping(self._stream):
            self._stream.flush()


@contextlib.contextmanager
def _dropping(stream):
    """Drop what cannot be written, and everything after it."""
    try:
        yield
    except ValueError:  # closed
        pass
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
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
