"""The process and its machine: cores, threads, memory allocation. The device: `fedmpi.comm.device`."""

import contextlib
import ctypes
import math
import os
import pathlib
import platform
import sys
import time

# glibc's names for mallopt; see mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4


def keep_freed_memory():
    """Make malloc keep what was freed instead of returning it to the system.

    Training allocates and frees the same activations and gradients at every step. By default malloc takes the memory of
    each large tensor from the system anew, which costs a page fault per page.
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


def processor_name():
    """The model of this machine's processor, with its numbers, if there are any: different models can share a name."""
    with contextlib.suppress(OSError, KeyError):
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
        values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
        numbers = [
            f"{key.removeprefix('cpu ')} {values[key]}" for key in ("cpu family", "model", "stepping") if key in values
        ]
        return values["model name"] + (f" ({', '.join(numbers)})" if numbers else "")
    return platform.processor() or platform.machine()


def usable_cores():
    """The numbers of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def run_on(cores):
    """Let this process run on some cores only, where the system can say so."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def core_quota(root=pathlib.Path("/")):
    """How many cores this process's control groups let it use at a time (containers, SLURM); infinite without limit.

    Args:
        root: folder of /proc and /sys (for tests).
    """
    quotas = [math.inf]
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            groups = pathlib.PurePosixPath(path.lstrip("/"))
            for top in {f"/sys/fs/cgroup/{controllers}", *_mounts(root, is_version_1=bool(controllers))}:
                quotas += [_quota_of(root / top[1:] / group) for group in (groups, *groups.parents)]
    return min(quotas)


def _mounts(root, is_version_1):
    """Where the control groups of a version that limit cores are mounted, under whatever names."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/mounts").read_text(encoding="utf-8").splitlines():
            _, folder, kind, options, *_ = line.split()
            if kind == ("cgroup" if is_version_1 else "cgroup2") and (not is_version_1 or "cpu" in options.split(",")):
                yield folder


def _quota_of(group):
    """Cores that one control group allows, by version 2 or 1."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((group / name).read_text(encoding="utf-8") for name in names).split()
            return math.inf if quota in ("max", "-1") else max(1, int(quota) / int(period))
    return math.inf


def seconds_without_core():
    """How long the threads of this process have been ready to run and had no core, added up; None if unknown.

    Linux counts it, also the time for which a control group's quota is used up.
    """
    found = []
    for path in pathlib.Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
            found.append(int(path.read_text(encoding="ascii").split()[1]) / 1e9)
    return sum(found) if found else None


def choose_threads(link, given=None):
    """(number of threads for this rank, what has decided it as text; "" for its share of the cores).

    A variable overrides the share: the node's usable cores divided among its ranks, or the cores to which the launcher
    bound this rank, if these are fewer.

    Args:
        given: the user's number (``--threads``), which overrides both; or None.
    """
    if given:
        return given, "--threads"
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        number = os.environ.get(name, "").split(",")[0]
        if number.isdecimal() and int(number) > 0:
            return int(number), name
    return max(1, min(len(usable_cores()), link.usable_cores // link.local_size)), ""


def library_threads():
    """The numbers of threads that torch takes by itself: as many as usable cores, with hyperthreads or without."""
    cores, siblings = usable_cores(), set()
    for core in cores:
        with contextlib.suppress(OSError):
            siblings.add(pathlib.Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text())
    return {len(cores), len(siblings)}
