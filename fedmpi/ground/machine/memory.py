"""How much memory this process may still take: what the machine has left, and the limits of its job."""

import contextlib
import ctypes
import os
import pathlib
import resource
import sys
from collections.abc import Iterator

from fedmpi.ground.machine.groups import control_groups

# glibc's names for mallopt; see mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4


def available_memory(num_ranks: int = 1, root: pathlib.Path = pathlib.Path("/")) -> int | None:
    """Bytes that each of this job's ranks on this machine may still take without swapping; None if nothing says it.

    The smallest of: the machine's available memory, what is left in this process's control groups (containers, SLURM),
    the memory that SLURM gave the job, each divided among the ranks; and the process's own limit (ulimit -v).
    `root`: folder of /proc and /sys (for tests).
    """
    left = [number // num_ranks for number in (*_left_on_machine(root), *_left_in_groups(root))]
    with contextlib.suppress(OSError):
        size, resident, *_ = map(int, (root / "proc/self/statm").read_text(encoding="ascii").split())
        left += [limit // num_ranks - resident * resource.getpagesize() for limit in _given_by_slurm()]
        own_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        left += [own_limit - size * resource.getpagesize()] * (own_limit != resource.RLIM_INFINITY)
    return max(0, min(left)) if left else None


def _left_on_machine(root: pathlib.Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        yield from (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _left_in_groups(root: pathlib.Path) -> Iterator[int]:
    """Bytes that are left below each limit of this process's control groups, of version 2 or 1."""
    names = {2: ("memory.max", "memory.current", "inactive_file")}
    names[1] = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    for version, folder in control_groups("memory", root):
        limit, used, cache = names[version]
        with contextlib.suppress(OSError, ValueError):  # no such group, or no limit ("max")
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield left + int(stat.get(cache, 0))  # pages of files are given up when memory is needed


def _given_by_slurm() -> Iterator[int]:
    """Bytes that SLURM gave this job on this machine; nothing outside of SLURM, or for all of the machine's memory."""
    with contextlib.suppress(KeyError, ValueError):
        yield from filter(None, [int(os.environ["SLURM_MEM_PER_NODE"]) << 20])
    with contextlib.suppress(KeyError, ValueError):
        yield int(os.environ["SLURM_MEM_PER_CPU"]) * int(os.environ["SLURM_CPUS_ON_NODE"]) << 20


def reset_peak_memory() -> None:
    """Set `peak_memory` back to what is in use now: malloc returns freed memory first."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_memory() -> int:
    """Largest resident size of this process in bytes, since the last `reset_peak_memory`."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["VmHWM"].split()[0]) * 1024


def keep_freed_memory() -> None:
    """Make malloc keep what was freed instead of returning it to the system.

    Training allocates and frees the same activations and gradients at every step. By default malloc takes the memory of
    each large tensor from the system anew, which costs a page fault per page.
    """
    _mallopt({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1, _M_TOP_PAD: 64 << 20})


def return_freed_memory() -> None:
    """Make malloc work as it does by itself once its thresholds have grown to their maximum."""
    _mallopt({_M_MMAP_MAX: 65536, _M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 64 << 20, _M_TOP_PAD: 128 << 10})


def _mallopt(options: dict[int, int]) -> None:
    """Set options of glibc's malloc; nothing where malloc is not glibc's."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    for option, value in options.items():
        mallopt(option, value)
