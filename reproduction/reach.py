"""Measures of whole curves: rounds until a value is reached, the share of them that is saved, and how a curve wavers.

The mean over the seeds is interpolated between evaluations. Intervals are two deviations by leaving out seeds.
"""

import dataclasses
import math
import statistics

from fedmpi.runs.record import less_is_better

MARGIN = 0.01  # how far below the best of the slower method the level is, as a share of what that method gained


@dataclasses.dataclass(frozen=True)
class Saving:
    """How many rounds a method needs to a level, beside another one.

    Attributes:
        level: that both reach: the best mean of the slower method, less `MARGIN` of what it gained.
        ours, theirs: rounds. share: of their rounds that is saved; negative if more are needed.
        deviation: of the share, by leaving out seeds; None with one seed.
    """

    level: float
    ours: float
    theirs: float
    share: float
    deviation: float | None


def curves(method, metric, seeds):
    """(rounds, seed -> values) of a method at the rounds that all these seeds have evaluated."""
    found = {
        run.settings["seed"]: {line["round"]: line[metric] for line in run.records if metric in line}
        for run in method.runs
        if run.settings["seed"] in seeds
    }
    rounds = sorted(set.intersection(*(set(its) for its in found.values()))) if found else []
    return rounds, {seed: [its[r] for r in rounds] for seed, its in found.items()}


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


def saving(ours, theirs, metric, seeds):
    """The `Saving` of one method against another, or None where too little was evaluated, or a value is not finite.

    Args:
        ours, theirs: `Method`s. seeds: those that both have.
    """
    sign = -1 if less_is_better(metric) else 1
    both = [curves(one, metric, seeds) for one in (ours, theirs)]
    flat = [value for _, its in both for one in its.values() for value in one]
    if any(len(rounds) < 2 for rounds, _ in both) or not all(map(math.isfinite, flat)):
        return None

    def of(some):
        means = [[sign * statistics.fmean(one) for one in zip(*(its[seed] for seed in some))] for _, its in both]
        slower = min(means, key=max)
        level = max(slower) - MARGIN * (max(slower) - slower[0])
        needed = [rounds_to_reach(rounds, mean, level) for (rounds, _), mean in zip(both, means)]
        return Saving(sign * level, *needed, 1 - needed[0] / needed[1], None)

    if len(seeds) < 2:
        return of(seeds)
    shares = [of([seed for seed in seeds if seed != left]).share for left in seeds]
    spread = math.sqrt((len(seeds) - 1) * statistics.pvariance(shares))
    return dataclasses.replace(of(seeds), deviation=spread)


def wavering(method, metric, seeds):
    """Seed -> the sum of all steps of a curve in the wrong direction: the rises of a loss, the falls of an accuracy.

    Seeds with fewer than two evaluations are left out.
    """
    sign = 1 if less_is_better(metric) else -1
    _, its = curves(method, metric, seeds)
    return {seed: sum(max(0.0, sign * (b - a)) for a, b in zip(one, one[1:])) for seed, one in its.items() if one[1:]}
