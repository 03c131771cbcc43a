"""The process and its machine: cores, threads, memory allocation. The device: `fedmpi.comm.device`."""

import ctypes
import os
import sys

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


def usable_cores():
    """The numbers of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def share_of_cores(link):
    """Threads for this rank: the node's usable cores divided among its ranks, at least 1.

    A rank that its launcher bound to fewer cores takes those.
    """
    return max(1, min(len(usable_cores()), link.usable_cores // link.local_size))
