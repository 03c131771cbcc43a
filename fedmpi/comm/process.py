"""Processes of this machine, on Linux: which is which, and whether one is stopped."""

import contextlib
import hashlib
import os
import pathlib
import platform
import signal

MACHINE_BYTES = 7  # of a hash, so that it is a positive int64
_STATE, _START = 0, 19  # fields of /proc/PID/stat behind the name, see proc(5)


def describe_process():
    """(machine, process, start) of this process as whole numbers; two processes of one machine can signal each other.

    The machine is 0 where the system does not say it: such a process is not signalled.
    """
    stat = _stat(os.getpid())
    if stat is None:
        return 0, os.getpid(), 0
    booted = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    machine = f"{booted} {os.readlink('/proc/self/ns/pid')} {platform.node()}"
    return int.from_bytes(hashlib.blake2b(machine.encode(), digest_size=MACHINE_BYTES).digest(), "little"), *stat[1:]


def kill_process(machine, process, start):
    """Kill a process of this machine; nothing, if it is another machine's or has ended."""
    if _is_here(machine, process, start):
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def is_stopped(machine, process, start):
    """Whether a process of this machine is stopped, or waits for a disk."""
    return _is_here(machine, process, start) and _stat(process)[_STATE] in "TtD"


def _is_here(machine, process, start):
    stat = _stat(process)
    return machine == describe_process()[0] != 0 and stat is not None and stat[1:] == (process, start)


def _stat(process):
    """(state, process, start) of a process; None if there is none, or on another system than Linux."""
    try:
        text = pathlib.Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[_STATE], process, int(fields[_START])
