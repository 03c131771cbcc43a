"""Measures of whole curves: rounds until a value is reached, the share of them that is saved, and how a curve wavers.

All are of one seed; between evaluations a curve is interpolated.
"""

import dataclasses
import itertools
import math

from fedmpi.runs.record import less_is_better

MARGIN = 0.01  # how far below the best of the slower method the level is, as a share of what that method gained


@dataclasses.dataclass(frozen=True)
class Saving:
    """How many rounds a method needs to a level with one seed, beside another one.

    Attributes:
        level: that both reach: the best value of the slower method, less `MARGIN` of what it gained.
        ours, theirs: rounds. share: of their rounds that is saved; negative if more are needed.
    """

    level: float
    ours: float
    theirs: float
    share: float


def curves(method, metric, end=math.inf):
    """Seed -> (rounds, values) of each run of a method with two evaluations or more until round `end`.

    None if it diverged, or a value is not finite.
    """
    found = {}
    for run in method.runs:
        lines = [line for line in run.records if metric in line and line["round"] <= end]
        rounds, values = [line["round"] for line in lines], [line[metric] for line in lines]
        if not run.is_complete or not all(map(math.isfinite, values)):
            found[run.settings["seed"]] = None
        elif len(lines) > 1:
            found[run.settings["seed"]] = rounds, values
    return found


def rounds_to_reach(rounds, values, level):
    """The first round at which a curve that should grow is at `level`, linear between evaluations, or None.

    At the first evaluation nothing is known of earlier rounds, so that its round is given: an upper bound.
    """
    for number, (r, value) in enumerate(zip(rounds, values)):
        if value >= level:
            if number == 0:
                return float(r)
            before, low = rounds[number - 1], values[number - 1]
            return before + (r - before) * (level - low) / (value - low)
    return None


def saving(ours, theirs, metric):
    """The `Saving` of one curve against another.

    Args:
        ours, theirs: (rounds, values) with the same seed, of two evaluations or more; see `curves`.
    """
    sign = -1 if less_is_better(metric) else 1
    both = [(rounds, [sign * value for value in values]) for rounds, values in (ours, theirs)]
    _, slower = min(both, key=lambda one: max(one[1]))
    level = max(slower) - MARGIN * (max(slower) - slower[0])
    needed = [rounds_to_reach(*one, level) for one in both]
    return Saving(sign * level, *needed, 1 - needed[0] / needed[1])


def wavering(values, metric):
    """The sum of all steps of a curve in the wrong direction: the rises of a loss, the falls of an accuracy."""
    sign = 1 if less_is_better(metric) else -1
    return sum(max(0.0, sign * (after - before)) for before, after in itertools.pairwise(values))
