"""Whether the papers' claims hold in our results."""

import dataclasses
import itertools
import math
import statistics

from fedmpi.report.curves import usable_runs
from fedmpi.runs.comparison import Spread
from fedmpi.runs.record import less_is_better, title
from fedmpi.text import format_metric

CONFIRMED, NOT_CONFIRMED, NOT_TESTED = "confirmed", "not confirmed", "not tested"
# One seed has no spread, and decides nothing.
ONCE_AHEAD, ONCE_NOT_AHEAD, ONCE_OPEN = "one seed: ahead", "one seed: not ahead", "one seed: undecided"
T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5 % quantiles, 1 to 9 degrees of freedom


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a claim has become on one panel of an experiment.

    Attributes:
        key: of the claim in papers.yaml. panel: its name. state: one of the six words above.
        words: the reason, with the numbers.
    """

    key: str
    panel: str
    state: str
    words: str


def value(run, metric, at=None):
    """A run's last value of a metric, not after round `at`; None if there is none."""
    lines = [line for line in run.records if metric in line and (at is None or line["round"] <= at)]
    return lines[-1][metric] if lines else None


def spread(method, metric, at=None):
    """`Spread` of a metric over the complete runs of a method, or None: nothing measured, or every run diverged."""
    values = [value(run, metric, at) for run in method.runs if run.is_complete] if method else []
    values = tuple(one for one in values if one is not None and math.isfinite(one))
    return Spread(values) if values else None


def further_seed(some):
    """ "± 0.01": within this distance of the mean a further seed lies with 95 % probability, if seeds are normal.

    Args:
        some: a `Spread`, or None.
    """
    if some is None or some.deviation is None:
        return "–"
    num = len(some.values)
    quantile = T[min(num - 1, len(T)) - 1]
    return "± " + format_metric(some.mean, quantile * math.sqrt(1 + 1 / num) * some.deviation).partition(" ± ")[2]


def num_diverged(method):
    """How many runs of a method diverged."""
    return sum(not run.is_complete for run in method.runs)


def outcomes(experiment, results):
    """The `Outcome` of every claim of an experiment on each of its panels.

    Args:
        results: `Results`, or None if it was not run.
    """
    for claim in experiment.claims:
        for panel in [claim["panel"]] if "panel" in claim else list(experiment.panels):
            yield _outcome(experiment, claim, panel, results)


def _outcome(experiment, claim, panel, results):
    """The `Outcome` of one claim, a dict of the experiment's file, on one panel."""
    metric = claim.get("metric", experiment.metric)
    ours = results.method(panel, claim["ahead"]) if results else None
    others = [one for name in claim.get("of", []) if results and (one := results.method(panel, name))]
    goal = claim.get("reaches")
    if ours is None or (goal is None and not others):
        return Outcome(claim["claim"], panel, NOT_TESTED, f"{claim['ahead']} or its rivals were not run at this scale")
    at, end = _rounds(ours, claim)
    mine = spread(ours, metric, at)
    if mine is None and not num_diverged(ours):
        return Outcome(claim["claim"], panel, NOT_TESTED, f"{title(metric)} was not measured")
    if mine is None:
        return Outcome(claim["claim"], panel, NOT_CONFIRMED, f"{ours.label} diverged")
    if goal is not None:
        holds = _has_reached(ours, metric, goal)
        words = f"{ours.label} {mine}; expected {title(metric)} {'<=' if less_is_better(metric) else '>='} {goal:g}"
        return Outcome(claim["claim"], panel, CONFIRMED if holds else NOT_CONFIRMED, words)
    if "than" in claim:
        state, words = _larger_lead(claim, (ours, others[0]), results, metric)
        return Outcome(claim["claim"], panel, state, words)
    verdicts = [_against(ours, other, metric, (at, end)) for other in others]
    not_run = [name for name in claim["of"] if not results.method(panel, name)]
    if claim.get("level"):
        state = _level([one for one, _ in verdicts], len(ours.runs), any(map(num_diverged, (ours, *others))))
    else:
        state = _state([one for one, _ in verdicts], len(ours.runs), not_run or num_diverged(ours))
    words = "" if metric == experiment.metric else f"by {title(metric)}: "
    words += f"{ours.label} {mine}" + (f" ({num_diverged(ours)} diverged)" if num_diverged(ours) else "")
    words += f" at round {at}" if at else ""
    words = [words, *(text for _, text in verdicts), *([f"not run: {', '.join(not_run)}"] if not_run else [])]
    return Outcome(claim["claim"], panel, state, "; ".join(words))


def _larger_lead(claim, pair, results, metric):
    """(state, words) of a claim that a method's lead over another is larger on one panel than on another.

    Both leads are those at the last round that both panels have; where a method is behind, it has no lead.

    Args:
        pair: the two `Method`s on the claim's panel.
    """
    elsewhere = [results.method(claim["than"], one.label) for one in pair]
    if None in elsewhere:
        return NOT_TESTED, f"{claim['than']} was not run at this scale"
    if any(map(num_diverged, (*pair, *elsewhere))):
        return NOT_CONFIRMED, "a run diverged"
    at = min(max(run.records[-1]["round"] for one in some for run in one.runs) for some in (pair, elsewhere))
    here, there = (_leads(*some, metric, (at, at)) for some in (pair, elsewhere))
    seeds = [seed for seed in here if seed in there]
    if not seeds:
        return NOT_TESTED, "no seed in common"
    more = [here[seed] - there[seed] for seed in seeds]
    lead, other_lead = (Spread(tuple(leads[seed] for seed in seeds)) for leads in (here, there))
    ahead, clear = lead.mean > 0 and statistics.fmean(more) > 0, _is_clear(more)
    note = "" if clear else f" ({'one seed' if len(more) == 1 else 'the difference is less than its spread'})"
    words = (
        f"lead of {pair[0].label} over {pair[1].label} at round {at}: {lead}; on {claim['than']}: {other_lead}{note}"
    )
    return _state([(ahead, clear)], len(more), is_open=False), words


def _is_clear(leads):
    """Whether the mean of some leads is larger than their standard deviation, in either direction."""
    return len(leads) > 1 and abs(statistics.fmean(leads)) > statistics.stdev(leads)


def _level(verdicts, seeds, has_diverged):
    """The state of a claim that a method is level with others; see `_state`."""
    if has_diverged:
        return NOT_CONFIRMED
    if seeds == 1:
        return ONCE_OPEN
    return NOT_CONFIRMED if any(clear for _, clear in verdicts) else CONFIRMED


def _state(verdicts, seeds, is_open):
    """The state of a claim that a method is ahead of others.

    Args:
        verdicts: (whether it is ahead, whether the lead or lag is larger than its spread) for each of the others.
        seeds: how many it has. is_open: whether a rival was not run, or a run of its own diverged.
    """
    if seeds == 1:
        return ONCE_AHEAD if all(ahead for ahead, _ in verdicts) and not is_open else ONCE_NOT_AHEAD
    return CONFIRMED if all(ahead and clear for ahead, clear in verdicts) and not is_open else NOT_CONFIRMED


def _rounds(method, claim):
    """(round at which the method of a claim is measured, that of the others): None is the last one."""
    ends = [run.records[-1]["round"] for run in method.runs if run.is_complete]
    if "at_share" not in claim or not ends:
        return None, None
    return round(claim["at_share"] * max(ends)), max(ends)


def _has_reached(method, metric, goal):
    """Whether every run of a method ends with a metric as good as `goal`, or better."""
    sign = -1 if less_is_better(metric) else 1
    values = [value(run, metric) for run in method.runs]
    return not num_diverged(method) and all(one is not None and sign * one >= sign * goal for one in values)


def _against(ours, other, metric, rounds):
    """((whether a method is ahead of another, whether by more than the spread of the lead over the seeds), as text).

    Args:
        rounds: (round at which ours is measured, the other's); None: the last one.
    """
    theirs = spread(other, metric, rounds[1])
    diverged = num_diverged(other)
    if theirs is None:
        return (True, True), f"ahead of {other.label} (diverged)"
    leads = list(_leads(ours, other, metric, rounds).values())
    if not leads:
        return (False, False), f"no seed in common with {other.label}"
    mean = statistics.fmean(leads)
    clear = _is_clear(leads)
    how = "ahead of" if mean > 0 else "behind" if mean < 0 else "level with"
    if mean and not clear:
        how += " (less than the spread)" if len(leads) > 1 else " (one seed)"
    note = f", {diverged} diverged" if diverged else ""
    note += f" at round {rounds[1]}" if rounds[1] else ""
    return (mean > 0, clear), f"{how} {other.label} {theirs}{note}"


def _leads(ours, other, metric, rounds):
    """Seed -> by how much ours is better, for every seed that both have; see `_against`."""
    sign = -1 if less_is_better(metric) else 1
    mine, theirs = (
        {run.settings["seed"]: value(run, metric, at) for run in usable_runs(one)}
        for one, at in zip((ours, other), rounds)
    )
    both = [seed for seed in mine if None not in (mine[seed], theirs.get(seed))]
    leads = {seed: sign * (mine[seed] - theirs[seed]) for seed in both}
    return {seed: lead for seed, lead in leads.items() if math.isfinite(lead)}


def ordering(methods, metric, values):
    """Methods' names from best to worst, like "FAFED > FedAMS = FedAvg".

    Args:
        values: name -> number; names without one are left out.
    """
    sign = 1 if less_is_better(metric) else -1
    names = sorted((name for name in methods if name in values), key=lambda name: sign * values[name])
    signs = [" = " if values[one] == values[other] else " > " for one, other in itertools.pairwise(names)]
    return "".join(itertools.chain(*zip(names, [*signs, ""])))
