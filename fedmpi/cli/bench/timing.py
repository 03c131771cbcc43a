"""Timing: cases alternate (A B A B ...), the slowest rank counts, medians and quartiles."""

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import torch

from fedmpi.ground.machine.memory import keep_freed_memory, return_freed_memory

MIN_TURN_SECONDS = 0.05  # shorter work is repeated within a turn
MAX_REPEATS = 64  # a power of 4


@dataclasses.dataclass
class Case:
    """Something to be timed.

    Attributes:
        name: unique among the cases that are timed together.
        run: the timed function; every rank calls it equally often, so it may be collective.
        keeps_memory: whether malloc keeps freed memory during its turn (`fedmpi.ground.machine.memory`).
    """

    name: str
    run: Callable
    keeps_memory: bool = True


class Times:
    """Seconds of one case on the slowest rank, one number per cycle."""

    def __init__(self, seconds):
        self.seconds = np.asarray(seconds)

    @property
    def median(self):
        return float(np.median(self.seconds))

    @property
    def quartiles(self):
        return tuple(float(q) for q in np.quantile(self.seconds, (0.25, 0.75)))

    def __truediv__(self, other):
        """Ratios within each cycle, so that a disturbance of the machine affects both sides."""
        return Times(self.seconds / (other.seconds if isinstance(other, Times) else other))


def time_cases(link, cases, seconds, min_cycles=5, max_cycles=200):
    """Time cases against each other: name -> `Times` of one run, the same on every rank. Collective on the link.

    Every case runs once to warm up, and a few times to find how many runs fit into a turn. Then the
    cases take turns until `seconds` have passed. A case whose warm-up took longer than `seconds`
    does not run again: the warm-up is its only time.
    """
    warm_up = {case.name: link.allgather([_turn(link, case, 1)]).max() for case in cases}
    repeated = [case for case in cases if warm_up[case.name] <= seconds or len(cases) == 1]
    repeats = [_repeats(link, case) for case in repeated]

    def cycle():
        return [_turn(link, case, number) for case, number in zip(repeated, repeats)]

    spent = [cycle()]
    num_cycles = 1
    if repeated:
        num_cycles = int(np.clip(seconds / link.allgather([sum(spent[0])]).max(), min_cycles, max_cycles))
    spent = np.array(spent + [cycle() for _ in range(num_cycles - 1)]) / repeats  # [num_cycles, num_cases]
    slowest = link.allgather(spent.ravel()).max(0).reshape(spent.shape)
    keep_freed_memory()
    times = {case.name: Times(column) for case, column in zip(repeated, slowest.T)}
    return {name: times.get(name, Times([once])) for name, once in warm_up.items()}


def _repeats(link, case):
    """Number of runs in a turn: as many as take MIN_TURN_SECONDS."""
    number = 1
    while number < MAX_REPEATS and link.allgather([_turn(link, case, number)]).max() < MIN_TURN_SECONDS:
        number *= 4
    return number


def _turn(link, case, number):
    """Seconds that `number` runs take on this rank."""
    (keep_freed_memory if case.keeps_memory else return_freed_memory)()
    wait_for_gpu()
    link.barrier()
    begin = time.perf_counter()
    for _ in range(number):
        case.run()
    wait_for_gpu()
    return time.perf_counter() - begin


def moment():
    """The present moment, for `seconds_between`: of this rank's GPU, once it has computed what was begun so far.

    Nothing waits for a GPU, so that computations on it overlap with Python as they do without a clock.
    """
    if not torch.accelerator.is_available():
        return time.perf_counter()
    event = torch.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first, second):
    """Seconds between two moments; if there is a GPU, after `wait_for_gpu`."""
    return second - first if isinstance(first, float) else first.elapsed_time(second) / 1000


def wait_for_gpu():
    """Wait until this rank's GPU has computed all that was begun; without a GPU there is nothing to wait for."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
