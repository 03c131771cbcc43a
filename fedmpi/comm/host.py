"""The process and its machine: threads, memory allocation, device."""

import contextlib
import ctypes
import math
import os
import pathlib
import sys
import time

import torch

from fedmpi.errors import UserError

# glibc's names for mallopt; see mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4


def keep_freed_memory():
    """Make malloc keep what was freed instead of returning it to the system.

    Training allocates and frees the same activations and gradients at every step; by default each
    large one is mapped and page-faulted anew.
    """
    _mallopt({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1, _M_TOP_PAD: 64 << 20})


def return_freed_memory():
    """Make malloc work as it does by itself once its thresholds have grown to their maximum."""
    _mallopt({_M_MMAP_MAX: 65536, _M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 64 << 20, _M_TOP_PAD: 128 << 10})


def _mallopt(options):
    """Set options of glibc's malloc; nothing where malloc is not glibc's."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    for option, value in options.items():
        mallopt(option, value)


def seconds_since_start():
    """How long this process has been running; 0.0 where /proc does not say it."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])  # field 22 of proc(5): since the machine's start
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


def usable_cores():
    """The numbers of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def core_quota(root=pathlib.Path("/")):
    """How many cores this process's control groups let it use at a time (containers, SLURM); infinite without limit.

    Args:
        root: folder of /proc and /sys (for tests).
    """
    quotas = [math.inf]
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            top = root / "sys/fs/cgroup"
            if controllers:  # version 1
                if "cpu" not in controllers.split(","):
                    continue
                top /= controllers
            groups = pathlib.PurePosixPath(path.lstrip("/"))
            quotas += [_quota_of(top / group) for group in (groups, *groups.parents)]
    return min(quotas)


def _quota_of(group):
    """Cores that one control group allows, by version 2 or 1."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((group / name).read_text(encoding="utf-8") for name in names).split()
            return math.inf if quota in ("max", "-1") else max(1, int(quota) / int(period))
    return math.inf


def share_of_cores(link):
    """Threads for this rank: the node's usable cores divided among its ranks, at least 1.

    A rank that its launcher bound to fewer cores takes those.
    """
    return max(1, min(len(usable_cores()), link.usable_cores // link.local_size))


def pick_device(device, local_rank):
    """The torch device of a rank.

    Args:
        device: "auto" takes the GPU number local_rank mod the number of GPUs if there is one, else
            the CPU; "cuda" insists on a GPU; anything else is taken literally ("cpu", "cuda:1").
        local_rank: the rank's number on its node.

    Raises:
        UserError: if there is no such device.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if num_gpus else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise UserError(f"device = {device}: expected auto, cpu, cuda or cuda:NUMBER") from None
    if chosen.type == "cpu":
        return chosen
    if chosen.type != "cuda" or num_gpus == 0 or (chosen.index or 0) >= num_gpus:
        raise UserError(f"device = {device}: this node has {num_gpus} CUDA devices; use --device cpu or auto")
    chosen = torch.device("cuda", local_rank % num_gpus if chosen.index is None else chosen.index)
    torch.cuda.set_device(chosen)
    return chosen
