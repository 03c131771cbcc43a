"""The cores of this machine: which this process may use, how many are free, and how many threads a rank takes."""

import contextlib
import math
import os
import pathlib
import platform
import time
from collections.abc import Collection, Iterator
from typing import Any

from fedmpi.ground.machine.groups import control_groups

BY_LOAD = "free cores"  # begins the reason of `choose_threads` if other processes have decided
VARIABLES = ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK")  # that the user, or the job script, has set
SHORTEST = 0.05  # seconds in which work is compared; the kernel counts in hundredths


def processor_name() -> str:
    """The model of this machine's processor, with its numbers, if there are any: different models can share a name."""
    with contextlib.suppress(OSError, KeyError):
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
        values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
        numbers = [
            f"{key.removeprefix('cpu ')} {values[key]}" for key in ("cpu family", "model", "stepping") if key in values
        ]
        return values["model name"] + (f" ({', '.join(numbers)})" if numbers else "")
    return platform.processor() or platform.machine()


def usable_cores(process: int = 0) -> list[int]:
    """The numbers of the cores that a process, 0: this one, may run on.

    Raises:
        OSError: if there is no such process here.
    """
    return sorted(os.sched_getaffinity(process)) if hasattr(os, "sched_getaffinity") else [*range(online_cores())]


def online_cores() -> int:
    """How many cores the machine has, whatever limits this process."""
    return os.cpu_count() or 1


def count_at_a_time(cores: Collection[int]) -> int:
    """How many of some cores the control groups let this process use at a time."""
    return int(min(len(cores), core_quota()))


def cores_of_job() -> int:
    """How many cores of this machine this job may use at a time, as system, control groups and scheduler say it."""
    return min([count_at_a_time(usable_cores()), *(number for _, number in _given_by_schedulers())])


def run_on(cores: Collection[int]) -> None:
    """Let this process run on some cores only, where the system can say so."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def core_quota(root: pathlib.Path = pathlib.Path("/")) -> float:
    """How many cores this process's control groups let it use at a time (containers, SLURM); infinite without limit.

    `root`: folder of /proc and /sys (for tests).
    """
    quotas = [math.inf]
    for version, group in control_groups("cpu", root):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        with contextlib.suppress(OSError, ValueError):  # no such group, or no limit ("max")
            quota, period = " ".join((group / name).read_text(encoding="utf-8") for name in names).split()
            quotas += [max(1, int(quota) / int(period))] if int(quota) > 0 else []
    return min(quotas)


def _work_so_far() -> tuple[float, float, dict[int, tuple[int, int]]]:
    """(time, CPU time of this process, core -> [ticks without work, all ticks]), to compare with later ones."""
    ticks = {}
    with contextlib.suppress(OSError, ValueError):
        for line in pathlib.Path("/proc/stat").read_text(encoding="ascii").splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and name != "cpu":
                numbers = [int(field) for field in fields[:8]]
                ticks[int(name[3:])] = numbers[3] + numbers[4], sum(numbers)
    return time.perf_counter(), time.process_time(), ticks


_measured = [_work_so_far()]


def work_since_start(cores: Collection[int]) -> tuple[float, float]:
    """(cores that this process kept busy, how many of `cores` had no work), on average; (0, all) if unknown.

    The time begins when this module is loaded, and anew with each call.
    """
    began, worked, before = _measured.pop()
    _measured.append(_work_so_far())
    now, work, after = _measured[0]
    if now - began < SHORTEST:
        return 0.0, float(len(cores))
    idle = 0.0
    for core in cores:
        (idle_before, all_before), (idle_after, all_after) = (ticks.get(core, (0, 0)) for ticks in (before, after))
        idle += (idle_after - idle_before) / (all_after - all_before) if all_after > all_before else 1.0
    return max(0.0, work - worked) / (now - began), idle


def choose_threads(link: Any, given: int | None = None, by_load: bool = True) -> tuple[int, str]:
    """(number of threads for this rank, what has decided it as text; "" for its share of all cores).

    A variable overrides the share, which is the smallest of: the cores to which the launcher bound this rank; and, each
    divided among the node's ranks: the usable cores, the quota of a container, the cores that a scheduler says the job
    has here, and those that other processes left free while the ranks started.

    Args:
        given: the number of the settings (``--threads``), which overrides all; or None.
        by_load: whether other processes count.
    """
    if given:
        return given, "setting threads"
    # PBS Pro sets both to the threads, or else to the cores, of a group of ranks: more than a rank's if it has several.
    by_pbs = {"NCPUS", "PBS_JOBID"} <= {*os.environ} and os.environ["NCPUS"] == os.environ.get("OMP_NUM_THREADS")
    for name in VARIABLES[by_pbs:]:
        number = os.environ.get(name, "").split(",")[0]
        if number.isdecimal() and int(number) > 0:
            return int(number), name
    quota = core_quota()
    limits = {f"quota of the node: {quota:g} cores" if quota < link.usable_cores + 1 else "": link.usable_cores}
    limits |= {f"{name}={number}": number for name, number in _given_by_schedulers()}
    limits |= {f"{BY_LOAD}: {link.free_cores} of {link.usable_cores}": link.free_cores} if by_load else {}
    limits = {reason: number // link.local_size for reason, number in limits.items()}
    limits |= {f"bound to {len(usable_cores())} of {link.usable_cores} cores": len(usable_cores())}
    limits |= {"NCPUS": int(os.environ["NCPUS"])} if by_pbs and os.environ["NCPUS"].isdecimal() else {}
    reason = min(limits, key=lambda reason: max(1, limits[reason]))
    return max(1, limits[reason]), reason


def _given_by_schedulers() -> Iterator[tuple[str, int]]:
    """Yield (variable, cores of this machine that the job has according to it), as schedulers set them."""
    environment = dict(os.environ)
    if "LSB_BIND_CPU_LIST" not in environment:  # with it, LSF binds each slot to its cores
        words, here = environment.get("LSB_MCPU_HOSTS", "").split(), platform.node().partition(".")[0]
        slots = {host.partition(".")[0]: number for host, number in zip(words[::2], words[1::2])}
        environment["LSB_MCPU_HOSTS"] = slots.get(here, "")
    for name in ("SLURM_CPUS_ON_NODE", "PBS_NUM_PPN", "LSB_MCPU_HOSTS"):
        if environment.get(name, "").isdecimal() and int(environment[name]) > 0:
            yield name, int(environment[name])


def library_threads() -> set[int]:
    """The numbers of threads that torch takes by itself: as many as usable cores, with hyperthreads or without."""
    cores, siblings = usable_cores(), set()
    for core in cores:
        with contextlib.suppress(OSError):
            siblings.add(pathlib.Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text())
    return {len(cores), len(siblings)}
