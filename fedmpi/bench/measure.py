"""Timing: contestants in turn (A B A B ...), the slowest rank counts, medians and quartiles."""

import contextlib
import ctypes
import dataclasses
import datetime
import os
import platform
import resource
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from mpi4py import MPI

from fedmpi.comm.host import keep_freed_memory, return_freed_memory, usable_cores

SHORTEST_TURN = 0.05  # seconds; shorter work is repeated within a turn
MOST_REPEATS = 64  # a power of 4


@dataclasses.dataclass
class Contestant:
    """Something to be timed.

    Attributes:
        name: unique among its rivals.
        run: what is timed; collective if any of it is.
        keeps_memory: whether malloc keeps freed memory during its turn (`fedmpi.comm.host`).
        before: called before every turn, untimed.
    """

    name: str
    run: Callable
    keeps_memory: bool = True
    before: Callable = lambda: None


class Times:
    """Seconds of one contestant, by cycle; the slowest rank's."""

    def __init__(self, seconds):
        self.seconds = np.asarray(seconds)

    @property
    def median(self):
        return float(np.median(self.seconds))

    @property
    def quartiles(self):
        return tuple(float(q) for q in np.quantile(self.seconds, (0.25, 0.75)))

    def __add__(self, other):
        return Times(self.seconds + other.seconds)

    def __truediv__(self, other):
        """Ratios within each cycle: what slows the machine down for a while slows both."""
        return Times(self.seconds / (other.seconds if isinstance(other, Times) else other))


def contest(link, contestants, seconds, least=5, most=200):
    """Time contestants against each other. Collective on the link.

    Every contestant runs once to warm up, and a few times to see how often it fits into a turn; then
    they take turns until `seconds` have passed, at least `least` times each. One whose warm-up took
    longer than all of `seconds` does not run again: the warm-up is its only time.

    Returns:
        dict of name -> `Times` of one run, on every rank alike.
    """
    first = {c.name: link.allgather([_turn(link, c, 1)]).max() for c in contestants}
    rivals = [c for c in contestants if first[c.name] <= seconds or len(contestants) == 1]
    repeats = [_repeats(link, contestant) for contestant in rivals]

    def cycle():
        return [_turn(link, contestant, number) for contestant, number in zip(rivals, repeats)]

    spent = [cycle()]
    cycles = int(np.clip(seconds / link.allgather([sum(spent[0])]).max(), least, most)) if rivals else 1
    spent = np.array(spent + [cycle() for _ in range(cycles - 1)]) / repeats
    slowest = link.allgather(spent.ravel()).max(0).reshape(spent.shape)
    keep_freed_memory()
    times = {contestant.name: Times(column) for contestant, column in zip(rivals, slowest.T)}
    return {name: times.get(name, Times([once])) for name, once in first.items()}


def _repeats(link, contestant):
    """How often it runs within a turn: until that takes SHORTEST_TURN."""
    number = 1
    while number < MOST_REPEATS and link.allgather([_turn(link, contestant, number)]).max() < SHORTEST_TURN:
        number *= 4
    return number


def _turn(link, contestant, number):
    (keep_freed_memory if contestant.keeps_memory else return_freed_memory)()
    contestant.before()
    link.barrier()
    begun = time.perf_counter()
    for _ in range(number):
        contestant.run()
    return time.perf_counter() - begun


def forget_peak_memory():
    """Begin a new measurement for `peak_memory`, where the system can (Linux): what malloc keeps is given back."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def peak_memory():
    """Largest resident size of this process in bytes."""
    try:
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def describe_machine(link):
    """What the numbers were measured on, as a dict of texts and numbers."""
    return {
        "date": datetime.datetime.now(datetime.UTC if sys.version_info >= (3, 11) else datetime.timezone.utc).isoformat(  # noqa: UP017
            timespec="seconds"
        ),
        "processor": _processor(),
        "cores": len(usable_cores()),
        "ranks": link.size,
        "nodes": link.num_nodes,
        "threads per rank": torch.get_num_threads(),
        "oversubscribed": link.oversubscribed,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mpi": MPI.Get_library_version().split("\n")[0].split("\0")[0].strip(),
        "command": f"python -m fedmpi.bench {' '.join(sys.argv[1:])}".strip(),
        "load": round(os.getloadavg()[0], 1),
    }


def _processor():
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return names[0]
    except (OSError, IndexError):
        return platform.processor() or platform.machine()
