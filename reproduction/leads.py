"""By how much a method is better than another with each seed, and whether it is clearly so."""

import math
import statistics

from fedmpi.cli.report.curves import is_clear


def common_seeds(values):
    """The seeds that all of some dicts by seed have."""
    return [seed for seed in values[0] if all(seed in its for its in values)]


def leads_of(mine, theirs, seeds, is_less_better):
    """By how much a method is better than another, seed by seed; infinite where one of them diverged.

    Args:
        mine, theirs: seed -> value, None where it diverged.
    """
    sign, lost = (-1, math.inf) if is_less_better else (1, -math.inf)
    pairs = [(mine[seed], theirs[seed]) for seed in seeds]
    pairs = [tuple(lost if one is None else one for one in pair) for pair in pairs]
    return [0.0 if one == other else sign * (one - other) for one, other in pairs]


def direction(leads):
    """1 if some leads say that a method is ahead, -1 if behind, 0 if level."""
    if all(map(math.isfinite, leads)):
        total = statistics.fmean(leads)
    else:
        total = sum((lead > 0) - (lead < 0) for lead in leads)
    return (total > 0) - (total < 0)


def is_decided(leads):
    """Whether a method is clearly ahead, or clearly behind."""
    if all(map(math.isfinite, leads)):
        return is_clear(leads) or is_clear([-lead for lead in leads])
    return len(leads) > 1 and (min(leads) > 0 or max(leads) < 0)
