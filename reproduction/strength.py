"""How strong an outcome is: p and interval of each lead, Holm's correction, the length of the runs, and guessing."""

import dataclasses
import functools
import math
import statistics

import scipy.stats

from fedmpi.runs.record import less_is_better, title
from reproduction.claims import CONFIRMED, CONTRADICTED, NOT_TESTED, UNDECIDED, outcomes, quantile, spread
from reproduction.experiment import FOLDER, find_experiments, state_of
from reproduction.leads import direction
from reproduction.results import paths, read_results

# At full length by the mild rule alone: p is not small enough, or the seeds are too few.
AHEAD, BEHIND = "ahead", "behind"
HOLDS, FAILS = "indicative: holds", "indicative: does not hold"  # of runs that were shortened or reduced
LEVEL, FEWEST_SEEDS = 0.05, 3  # of a claim that is confirmed or contradicted
GUESSING = {"accuracy": 0.1, "auc": 0.5}  # of ten classes, and of scores without information
MARGIN = 0.05  # the best method must be better than guessing by so much, of a perplexity by this share of it


def p_value(leads):
    """Two-sided p of a paired t test that the mean lead is zero; None of fewer than two leads, or of equal ones."""
    if len(leads) < 2 or not statistics.stdev(leads):
        return None
    return 2 * _p_above(leads, 0.0, abs(statistics.fmean(leads)))


def p_of_level(leads, margin):
    """p of two one-sided t tests that the mean lead is at least `margin` away from zero; None of fewer than two leads.

    Source: Schuirmann, "A Comparison of the Two One-Sided Tests Procedure and the Power Approach", 1987.
    """
    if len(leads) < 2:
        return None
    mean = abs(statistics.fmean(leads))
    return _p_above(leads, mean, margin) if statistics.stdev(leads) else float(mean >= margin)


def _p_above(leads, low, high):
    """p of a one-sided t test of means that are `high - low` apart, with the spread of some leads."""
    t = (high - low) * math.sqrt(len(leads)) / statistics.stdev(leads)
    return float(scipy.stats.t.sf(t, len(leads) - 1))


def interval(leads):
    """(lower, upper) end of the 95 % interval of the mean of at least two leads, if they are normal."""
    half = quantile(len(leads) - 1) * statistics.stdev(leads) / math.sqrt(len(leads))
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
    """The p of what an `Outcome` says; None if it has none.

    That a method is ahead of all rivals, or level with all, has the largest p of them. That one of k is ahead of it has
    the smallest, times k.
    """
    leads = [its for _, its in outcome.leads if len(its) > 1 and all(map(math.isfinite, its))]
    if outcome.state == CONTRADICTED:
        behind = [_p_or_sure(its) for its in leads if direction(its) < 0 or outcome.margin]
        return min(1.0, len(outcome.leads) * min(behind)) if behind else None
    if outcome.margin:
        return max((p_of_level(its, outcome.margin) for its in leads), default=None)
    return max(map(_p_or_sure, leads), default=None)


def _p_or_sure(leads):
    """`p_value`; of leads that are all the same 0, or 1 if they are none."""
    p = p_value(leads)
    return p if p is not None else 0.0 if leads[0] else 1.0


def ps_of_paper(folder, paper):
    """(name of an experiment, scale) -> p of each of its outcomes, None where there is none, of a paper's experiments.

    `folder`: of the results. They are computed again only if a file has changed.
    """
    experiments = tuple(find_experiments([paper]))
    files = [path for one in experiments for scale in one.scales for path in paths(folder, one, scale)]
    files += [FOLDER / f"{one.name}.yaml" for one in experiments]
    return _ps_of_paper(folder, paper, tuple(map(state_of, files)))


@functools.lru_cache(maxsize=16)
def _ps_of_paper(folder, paper, states):
    found = {}
    for one in find_experiments([paper]):
        for scale in one.scales:
            if results := read_results(folder, one, scale):
                found[one.name, scale] = [p_of(its) for its in outcomes(one, results)]
    return found


def graded(experiment, found, scale, results, of_paper=None):
    """`Outcome`s of one experiment and scale by the strength of what they rest on; `numbers` says p and interval.

    Args:
        found: all of the experiment. results: its `Results`.
        of_paper: what `ps_of_paper` returns: each p is corrected for the number of all at this scale, or, beyond the
            small one, at all larger ones. None: for those of the experiment.
    """
    comparable = {key: ps for key, ps in (of_paper or {}).items() if (key[1] == "small") == (scale == "small")}
    others = [p for key, ps in comparable.items() if key != (experiment.name, scale) for p in ps if p is not None]
    planned = list(outcomes(experiment, results.only(experiment.seeds))) if experiment.seeds else found
    final, first = (_graded_all(experiment, its, scale, results, others) for its in (found, planned))
    return [_with_planned(one, before, len(experiment.seeds)) for one, before in zip(final, first)]


def _with_planned(one, before, number):
    """An `Outcome` that says what the seeds that were planned alone give, if further ones have changed it."""
    if one.seeds <= before.seeds or one.state == before.state or before.state == NOT_TESTED:
        return one
    return dataclasses.replace(one, words=f"{one.words}; with the {number} seeds that were planned: {before.state}")


def _graded_all(experiment, found, scale, results, others):
    ps = [p_of(one) for one in found]
    corrected = iter(holm([*(p for p in ps if p is not None), *others]))
    return [
        _graded(experiment, one, scale, results, p if p is None else (p, next(corrected))) for one, p in zip(found, ps)
    ]


def _graded(experiment, one, scale, results, p):
    state, words = one.state, one.words
    is_sure = one.seeds >= FEWEST_SEEDS and (not one.leads or (p is not None and p[1] < LEVEL))
    if state != NOT_TESTED and (reason := _guesses(experiment, results, one.panel)):
        state, words = NOT_TESTED, f"{words}; {reason}"
    elif scale == "small":
        state = {CONFIRMED: HOLDS, CONTRADICTED: FAILS}.get(state, state)
    elif not is_sure:
        state = {CONFIRMED: UNDECIDED if one.margin else AHEAD, CONTRADICTED: BEHIND}.get(state, state)
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
    return 1 if state in (CONFIRMED, AHEAD, HOLDS) else -1 if state in (CONTRADICTED, BEHIND, FAILS) else 0
