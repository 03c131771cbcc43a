"""Processes of this machine, on Linux: which is which, which started which, and whether one is stopped."""

import contextlib
import hashlib
import os
import pathlib
import platform
import signal
import time
from collections.abc import Iterator

MACHINE_BYTES = 7  # of a hash, so that it is a positive int64
_STATE, _PARENT, _START, _CODE = 0, 1, 19, 49  # fields of /proc/PID/stat after the name, see proc(5)


def describe_process() -> tuple[int, int, int]:
    """(machine, number, start) that identify this process, as whole numbers; only equal machines can send a signal.

    The machine is 0 if the system does not say it: such a process gets no signal.
    """
    stat, booted = stat_of(os.getpid()), boot()
    if stat is None or not booted:  # nothing else tells apart two containers with one name on two machines
        return 0, os.getpid(), 0
    machine = f"{booted} {os.readlink('/proc/self/ns/pid')} {platform.node()}"
    return int.from_bytes(hashlib.blake2b(machine.encode(), digest_size=MACHINE_BYTES).digest(), "little"), *stat[1:]


def kill_process(machine: int, process: int, start: int) -> None:
    """Kill a process of this machine; nothing, if it is another machine's or has ended."""
    if _is_here(machine, process, start):
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def is_stopped(machine: int, process: int, start: int) -> bool:
    """Whether a process of this machine is stopped, or waits for a disk."""
    state, *_ = stat_of(process) or ("",)
    return _is_here(machine, process, start) and state in ("T", "t", "D")


def _is_here(machine: int, process: int, start: int) -> bool:
    stat = stat_of(process)
    return machine == describe_process()[0] != 0 and stat is not None and stat[1:] == (process, start)


def seconds_since_start() -> float:
    """How long this process has been running; 0.0 where /proc does not say it."""
    stat = stat_of(os.getpid())
    return time.clock_gettime(time.CLOCK_BOOTTIME) - stat[2] / os.sysconf("SC_CLK_TCK") if stat else 0.0


def boot() -> str:
    """Which start of this machine it is, as text; "" if the system does not say it."""
    with contextlib.suppress(OSError):
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def ancestors(process: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield (number, name) of the processes above one, by default this one, its parent first; on Linux."""
    if process is None:
        process = os.getppid()
    else:
        below = _read_stat(process)
        process = 0 if below is None else int(below[1][_PARENT])
    while process > 0 and (found := _read_stat(process)) is not None:
        name, fields = found
        yield process, name
        process = int(fields[_PARENT])


def stat_of(process: int) -> tuple[str, int, int] | None:
    """(state, number, start in ticks of the clock) of a process; None if there is none, or on another system."""
    found = _read_stat(process)
    return None if found is None else (found[1][_STATE], process, int(found[1][_START]))


def exit_status(process: int) -> int | None:
    """The exit code of a process that has ended, or minus its signal; None if its parent was faster, or it runs on."""
    found = _read_stat(process)
    if found is None or found[1][_STATE] != "Z":
        return None
    status = int(found[1][_CODE])
    return -(status & 127) or status >> 8


def _read_stat(process: int) -> tuple[str, list[str]] | None:
    """(name, the fields after it) in /proc/PID/stat; None if there is no such file."""
    try:
        text = pathlib.Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    return name, rest.split()
