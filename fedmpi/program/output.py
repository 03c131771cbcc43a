"""Output that never ends a program: whatever its encoding, and also when nobody reads it any more."""

import contextlib
import os
import pathlib
import re
import stat
import sys

LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun")
# Options of launchers that label the output or write it elsewhere: it must pass through them.
OUTPUT_OPTIONS = re.compile(r"-+(l|prepend\S*|outfile\S*|errfile\S*|output\S*|tag\S*|timestamp\S*|xml)")


def make_output_last():
    """Let standard output and standard error swallow what cannot be written.

    Letters that the locale's encoding does not have are escaped. What goes to a closed pipe, a closed terminal or a
    full disk is dropped.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  until the process ends
        elif not isinstance(stream, _Lasting):
            with contextlib.suppress(AttributeError, ValueError, OSError):  # a stream of somebody else's
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, _Lasting(stream))


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


class _Lasting:
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
    """The number of the process that passes on this one's output, the outermost launcher of this node; or None."""
    process, found = os.getppid(), None
    with contextlib.suppress(OSError, ValueError, IndexError):
        while process > 1:
            text = pathlib.Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
            name, _, rest = text.partition("(")[2].rpartition(")")
            if name in LAUNCHERS:
                found = process
            process = int(rest.split()[1])
        words = pathlib.Path(f"/proc/{found}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
        return None if any(map(OUTPUT_OPTIONS.fullmatch, words)) else found
    return None
