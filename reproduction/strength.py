"""How strong an outcome is: p and interval of each lead, Holm's correction, the length of the runs, and guessing."""

import dataclasses
import math
import statistics

from fedmpi.runs.record import less_is_better, title
from reproduction.claims import CONFIRMED, NOT_CONFIRMED, NOT_TESTED, T, spread

AHEAD = "ahead"  # at full length by the mild rule alone: p is not small enough, or the seeds are too few
HOLDS, FAILS = "indicative: holds", "indicative: does not hold"  # of runs that were shortened or reduced
LEVEL, FEWEST_SEEDS = 0.05, 3  # of a confirmed claim
GUESSING = {"accuracy": 0.1, "auc": 0.5}  # of ten classes, and of scores without information
MARGIN = 0.05  # the best method must be better than guessing by so much, of a perplexity by this share of it


def p_value(leads):
    """Two-sided p of a paired t test that the mean lead is zero; None of fewer than two leads, or of equal ones.

    The distribution function of Student's t with whole degrees of freedom has a closed form:
    Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    if len(leads) < 2 or not statistics.stdev(leads):
        return None
    freedom = len(leads) - 1
    t = abs(statistics.fmean(leads)) * math.sqrt(len(leads)) / statistics.stdev(leads)
    theta = math.atan(t / math.sqrt(freedom))
    is_odd = freedom % 2
    term, total = (math.cos(theta), 0.0) if is_odd else (1.0, 0.0)
    for number in range(is_odd, freedom - 1 + is_odd, 2):
        total += term if number < freedom - 1 else 0.0
        term *= (number + 1) / (number + 2) * math.cos(theta) ** 2
    inside = 2 / math.pi * (theta + math.sin(theta) * total) if is_odd else math.sin(theta) * total
    return 1 - inside


def interval(leads):
    """(lower, upper) end of the 95 % interval of the mean of at least two leads, if they are normal."""
    half = T[min(len(leads) - 1, len(T)) - 1] * statistics.stdev(leads) / math.sqrt(len(leads))
    return statistics.fmean(leads) - half, statistics.fmean(leads) + half


def holm(values):
    """p values corrected for their number: the probability of one or more errors among them stays below the level.

    Source: Holm, "A Simple Sequentially Rejective Multiple Test Procedure", 1979.
    """
    corrected, largest = [1.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = corrected[place] = min(1.0, max(largest, (len(values) - rank) * values[place]))
    return corrected


def p_of(outcome):
    """The p of an `Outcome`: the largest of those of its rivals, as it must be ahead of each; None if it has none."""
    found = []
    for _, leads in outcome.leads:
        if len(leads) > 1 and all(map(math.isfinite, leads)):
            p = p_value(leads)
            found.append(p if p is not None else 0.0 if leads[0] else 1.0)  # all leads are the same
    return max(found, default=None)


def graded(experiment, found, scale, results):
    """`Outcome`s of one experiment and scale by the strength of what they rest on; `numbers` says p and interval.

    Args:
        found: all of the experiment, so that p is corrected for their number. results: its `Results`.
    """
    ps = [p_of(one) for one in found]
    corrected = iter(holm([p for p in ps if p is not None]))
    return [
        _graded(experiment, one, scale, results, p if p is None else (p, next(corrected))) for one, p in zip(found, ps)
    ]


def _graded(experiment, one, scale, results, p):
    state, words = one.state, one.words
    if state != NOT_TESTED and (reason := _guesses(experiment, results, one.panel)):
        state, words = NOT_TESTED, f"{words}; {reason}"
    elif scale == "small":
        state = {CONFIRMED: HOLDS, NOT_CONFIRMED: FAILS}.get(state, state)
    elif state == CONFIRMED and (one.seeds < FEWEST_SEEDS or (one.leads and (p is None or p[1] >= LEVEL))):
        state = AHEAD
    numbers = "; ".join(_lead(name, leads) for name, leads in one.leads if len(leads) > 1)
    numbers += f"; p {p[0]:.2g}, corrected {p[1]:.2g}" if p and numbers else ""
    return dataclasses.replace(one, state=state, words=words, numbers=numbers)


def _lead(name, leads):
    """ "0.0124 [0.00602, 0.0188] over FedAvg"."""
    if not all(map(math.isfinite, leads)):
        return f"a run over {name} diverged"
    low, high = interval(leads)
    return f"{statistics.fmean(leads):.3g} [{low:.3g}, {high:.3g}] over {name}"


def _guesses(experiment, results, panel):
    """Why a panel says nothing: its best method is as good as guessing; or ""."""
    for metric, guess in (GUESSING | experiment.guessing).items():
        means = [its.mean for method in results.panels.get(panel, []) if (its := spread(method, metric))]
        if means and less_is_better(metric) and min(means) > (1 - MARGIN) * guess:
            return f"near guessing: the best {title(metric)} is {min(means):.0f}, guessing has {guess:g}"
        if means and not less_is_better(metric) and max(means) < guess + MARGIN:
            return f"near guessing: the best {title(metric)} is {max(means):.3f}, guessing has {guess:g}"
    return ""


def agreement(found):
    """A sentence on how often the small scale says the same as the largest one, where several seeds made both; or "".

    Args:
        found: name of an experiment -> its `Row`s (`reproduction.summary`).
    """
    states = {}
    for name, rows in found.items():
        for row in rows:
            if row.seeds > 1 and row.state != NOT_TESTED:
                states.setdefault((name, row.number), {})[row.scale] = row.state
    pairs = [(its["small"], list(its.values())[-1]) for its in states.values() if "small" in its and len(its) > 1]
    same = sum(_sign(one) == _sign(other) for one, other in pairs)
    return f"The small scale says the same as a larger one in {same} of {len(pairs)} comparisons." if pairs else ""


def _sign(state):
    return 1 if state in (CONFIRMED, AHEAD, HOLDS) else -1 if state in (NOT_CONFIRMED, FAILS) else 0
