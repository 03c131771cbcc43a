"""Whether the papers' claims hold in our results.

A method is compared with a rival seed by seed, over the seeds that it and all rivals of the claim have. It is clearly
ahead, or behind, if its mean lead or lag over the seeds is larger than the standard deviation of that lead. A method
that diverged with a seed lost that seed; with such a seed, who wins every seed is clearly ahead, and otherwise nobody.
"""

import dataclasses
import itertools
import math
import statistics

import scipy.stats

from fedmpi.cli.comparison import Spread
from fedmpi.ground.text import format_metric
from fedmpi.runs.record import less_is_better, title
from reproduction.leads import common_seeds, direction, is_decided, leads_of
from reproduction.reach import curves, saving, wavering

CONFIRMED, CONTRADICTED, NOT_TESTED = "confirmed", "contradicted", "not tested"
UNDECIDED = "undecided"  # clearly ahead of some rivals at most, and clearly behind none
# One seed has no spread, and decides nothing.
ONCE_AHEAD, ONCE_NOT_AHEAD, ONCE_OPEN = "one seed: ahead", "one seed: not ahead", "one seed: undecided"
ONCE_REACHED, ONCE_NOT_REACHED = "one seed: reached", "one seed: not reached"
BEGINNING = 1 / 3  # of the rounds: the share is ours, fixed after we had seen the curves


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a claim has become on one panel of an experiment.

    Attributes:
        key: of the claim in papers.yaml. panel: its name. state: one of the nine words above, or of those in
            `reproduction.strength`.
        words: the reason, with the numbers.
        seeds: how many seeds the outcome is from: those that all methods of the claim have.
        leads: (rival, its leads by seed) of a comparison. margin: of a claim that methods are level, by how much they
            may differ; else 0. numbers: what the leads say as text; see `reproduction.strength`.
    """

    key: str
    panel: str
    state: str
    words: str
    seeds: int = 0
    leads: tuple = ()
    margin: float = 0.0
    numbers: str = ""


def value(run, metric, at=None):
    """A run's last value of a metric, not after round `at`; None if there is none."""
    lines = [line for line in run.records if metric in line and (at is None or line["round"] <= at)]
    return lines[-1][metric] if lines else None


def late(run, metric, end=math.inf):
    """The mean of a run's values of a metric in the last tenth of its rounds until `end`; None if there is none."""
    lines = [line for line in run.records if metric in line and line["round"] <= end]
    values = [line[metric] for line in lines if line["round"] > 0.9 * min(end, run.records[-1]["round"])]
    return statistics.fmean(values or [lines[-1][metric]]) if lines else None


def best(run, metric, end=math.inf):
    """The best of a run's values of a metric until round `end`; None if there is none."""
    values = [line[metric] for line in run.records if metric in line and line["round"] <= end]
    return (min if less_is_better(metric) else max)(values, default=None)


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
    distance = quantile(num - 1) * math.sqrt(1 + 1 / num) * some.deviation
    return "± " + format_metric(some.mean, distance).partition(" ± ")[2]


def quantile(freedom):
    """The 97.5 % quantile of Student's t with so many degrees of freedom."""
    return float(scipy.stats.t.ppf(0.975, freedom))


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
    metric, rivals = claim.get("metric", experiment.metric), claim.get("of", [])
    ours, leads = results.method(panel, claim["ahead"]) if results else None, ()
    others = [one for name in rivals if results and (one := results.method(panel, name))]
    if ours is None or (rivals and not others):
        state, words, seeds = NOT_TESTED, "not run", 0
    elif "reaches" in claim:
        state, words, seeds = _reaching(ours, metric, claim["reaches"])
    elif "than" in claim:
        state, words, seeds, *leads = _larger_lead(claim, (ours, others[0]), results, metric)
    elif "worse_than" in claim:
        state, words, seeds, *leads = _worse(claim, ours, panel, results, metric)
    elif "saves" in claim:
        state, words, seeds, *leads = _sooner(claim, ours, others, metric)
    elif claim.get("calmer"):
        state, words, seeds, *leads = _calmer(claim, ours, others, metric)
    else:
        state, words, seeds, *leads = _ahead(claim, ours, others, metric)
    if state == NOT_TESTED:
        words = claim["ahead"] + (f" against {', '.join(rivals)}" if rivals else "") + f": {words}"
    else:
        best_of = f"best {title(metric)} so far" if claim.get("best_so_far") else title(metric)
        words = f"{best_of} {arrow(metric)}: {words}"
    return Outcome(claim["claim"], panel, state, words, seeds, tuple(leads), claim.get("level", 0.0))


def arrow(metric):
    """ "↑" if larger values of a metric are better, "↓" if smaller ones are."""
    return "↓" if less_is_better(metric) else "↑"


def _by_seed(method, metric, at=None, end=math.inf, is_best=False):
    """Seed -> a method's last value until round `at`, or the mean of the last tenth of its rounds until `end`.

    With `is_best` the best value until `end`. None if it diverged, or the value is not finite.
    """

    def measured(run):
        if is_best:
            return best(run, metric, end)
        return late(run, metric, end) if at is None else value(run, metric, at)

    found = {run.settings["seed"]: (run, measured(run)) for run in method.runs}
    return {
        seed: its if run.is_complete and math.isfinite(its) else None
        for seed, (run, its) in found.items()
        if its is not None or not run.is_complete
    }


def _reaching(ours, metric, goal):
    """(state, words, number of seeds) of a claim that every run of a method ends as good as `goal`, or better."""
    values = list(_by_seed(ours, metric, math.inf).values())
    if not values:
        return NOT_TESTED, f"{title(metric)} was not measured", 0
    sign = -1 if less_is_better(metric) else 1
    holds = all(one is not None and sign * one >= sign * goal for one in values)
    states = (ONCE_REACHED, ONCE_NOT_REACHED) if len(values) == 1 else (CONFIRMED, CONTRADICTED)
    words = f"{_with_mean(ours, values)}; expected {'<=' if less_is_better(metric) else '>='} {goal:g}"
    return states[0 if holds else 1], words, len(values)


def _sooner(claim, ours, others, metric):
    """(state, words, number of seeds, leads) of a claim that a method saves a share of the rounds to others' values.

    The lead with a seed is the share of the rounds that is saved, less the claimed one.
    """
    mine, *theirs = [curves(one, metric) for one in (ours, *others)]
    seeds = common_seeds([mine, *theirs])
    if not seeds:
        return NOT_TESTED, f"{title(metric)} was not evaluated at two rounds with a common seed", 0
    words, found = [], []
    for other, its in zip(others, theirs):
        made = {seed: saving(mine[seed], its[seed], metric) for seed in seeds if mine[seed] and its[seed]}
        shares = {seed: made[seed].share if seed in made else mine[seed] and 1.0 for seed in seeds}
        claimed = {seed: its[seed] and claim["saves"] for seed in seeds}
        found.append((other.label, leads_of(shares, claimed, seeds, is_less_better=False)))
        words.append(_rounds_saved(ours, other, [*made.values()], [its[seed] for seed in seeds]))
    words += [f"expected at least {100 * claim['saves']:g} %"] if claim["saves"] else []
    return _over_all(claim, found, [*dict.fromkeys(words)], seeds, any(mine[seed] is None for seed in seeds))


def _rounds_saved(ours, other, made, theirs):
    """What some `Saving`s of a method over another are on average, as text; theirs: curves, None where it diverged."""
    lost = theirs.count(None)
    if not made:
        return f"{(other if lost == len(theirs) else ours).label} diverged"
    level, mine, needed = (statistics.fmean(getattr(one, key) for one in made) for key in ("level", "ours", "theirs"))
    share = Spread(tuple(100 * one.share for one in made))
    words = f"to {level:.4f} {ours.label} needs {mine:.1f} rounds and {other.label} {needed:.1f}"
    words += f" ({lost} of {len(theirs)} diverged)" if lost else ""
    return f"{words}: {share.mean:.0f} %{'' if share.deviation is None else f' ± {share.deviation:.0f} %'} saved"


def _calmer(claim, ours, others, metric):
    """(state, words, number of seeds, leads) of a claim that a curve takes smaller steps the wrong way at first."""
    end = math.floor(BEGINNING * _last_round([ours, *others]) + 1e-9)
    found = [curves(one, metric, end) for one in (ours, *others)]
    seeds = common_seeds(found)
    if not seeds:
        return NOT_TESTED, f"two evaluations until round {end} of no common seed", 0
    sums = [{seed: its[seed] and wavering(its[seed][1], metric) for seed in seeds} for its in found]
    found = [(one.label, leads_of(sums[0], its, seeds, is_less_better=True)) for one, its in zip(others, sums[1:])]
    if all(value == 0 for its in sums for value in its.values()):
        # It was a comparison all the same: its p counts in Holm's correction of the others.
        words = f"no method has an evaluation until round {end} that is worse than the one before"
        return NOT_TESTED, words, len(seeds), *found
    words = ", ".join(_with_mean(one, list(its.values())) for one, its in zip((ours, *others), sums))
    words = f"sum of the steps in the wrong direction until round {end}: {words}"
    return _over_all(claim, found, [words], seeds, None in sums[0].values())


def _larger_lead(claim, pair, results, metric):
    """(state, words, number of seeds) of a claim that a method's lead over another is larger than on another panel.

    Both leads are those in the last tenth of the rounds that both panels have; where a method is behind, it has none.

    Args:
        pair: the two `Method`s on the claim's panel.
    """
    elsewhere = [_method_elsewhere(claim, claim["than"], one.label, results) for one in pair]
    if None in elsewhere:
        return NOT_TESTED, f"{claim['than']} was not run", 0
    end = min(filter(None, map(_last_round, (pair, elsewhere))), default=math.inf)
    values = [_by_seed(one, metric, end=end, is_best=claim.get("best_so_far")) for one in (*pair, *elsewhere)]
    seeds = common_seeds(values)
    if not seeds:
        return NOT_TESTED, "no seed in common", 0
    for number, one in enumerate(pair):
        if any(its[seed] is None for its in values[number::2] for seed in seeds):
            fails = UNDECIDED if number else CONTRADICTED  # without the rival's value there is no lead to compare
            return ONCE_NOT_AHEAD if len(seeds) == 1 else fails, f"{one.label} diverged", len(seeds)
    here, there = (leads_of(*some, seeds, less_is_better(metric)) for some in (values[:2], values[2:]))
    more = [one - other for one, other in zip(here, there)]
    lead, other_lead = Spread(tuple(here)), Spread(tuple(there))
    words = f"lead of {pair[0].label} over {pair[1].label} at the end of {end} rounds: {lead}; "
    words += f"on {claim['than']}: {other_lead}"
    is_behind = lead.mean < 0 and is_decided(here)
    if is_behind:
        words += "; it is clearly behind, so that there is no lead to compare"
    elif lead.mean < 0 and other_lead.mean < 0:
        words += "; no lead on either"
    elif len(seeds) > 1 and not is_decided(more):
        words += "; the difference is less than its spread"
    sign = direction(more) if lead.mean > 0 else min(direction(more), 0)  # a method that is behind has no lead
    state = _state([(sign, is_decided(more))], len(seeds), has_failed=is_behind)
    return state, words, len(seeds), (pair[1].label, here) if is_behind else (f"that on {claim['than']}", more)


def _method_elsewhere(claim, panel, name, results):
    """The `Method` of a panel of the experiment that a claim names, or of its own one; None if it was not run."""
    its = results.elsewhere.get(claim["experiment"]) if "experiment" in claim else results
    return its.method(panel, name) if its else None


def _worse(claim, ours, panel, results, metric):
    """(state, words, number of seeds) of a claim that a method ends worse on a panel than on another one."""
    other = _method_elsewhere(claim, claim["worse_than"], ours.label, results)
    if other is None:
        return NOT_TESTED, f"{claim['worse_than']} was not run", 0
    here, there = (_by_seed(one, metric) for one in (ours, other))
    seeds = common_seeds([here, there])
    if not seeds:
        return NOT_TESTED, "no seed in common", 0
    losses = leads_of(there, here, seeds, less_is_better(metric))
    sign = direction(losses)
    how = {1: "worse than", -1: "better than", 0: "level with"}[sign]
    words = f"{panel}: {_with_mean(ours, [here[seed] for seed in seeds])}; {how} {claim['worse_than']}: "
    words += _with_mean(other, [there[seed] for seed in seeds])
    if len(seeds) > 1 and sign and not is_decided(losses):
        words += " by less than the spread"
    state = _state([(sign, is_decided(losses))], len(seeds), has_failed=False)
    return state, words, len(seeds), (claim["worse_than"], losses)


def _ahead(claim, ours, others, metric):
    """(state, words, number of seeds) of a claim that a method is ahead of others, or level with them."""
    at, end = _rounds(ours, claim)
    is_best = claim.get("best_so_far", False)
    mine, *theirs = [
        _by_seed(one, metric, where, is_best=is_best) for one, where in [(ours, at), *((one, end) for one in others)]
    ]
    seeds = common_seeds([mine, *theirs])
    if not seeds and "all_at_share" in claim:
        return NOT_TESTED, f"no evaluation up to round {claim['all_at_share'] * _last_round([ours, *others]):g}", 0
    if not seeds:
        lacking = [one.label for one, its in zip((ours, *others), (mine, *theirs)) if not its]
        of = f" of {', '.join(lacking)}" if len(lacking) <= len(others) else ""
        return NOT_TESTED, f"{title(metric)}{of} was not measured" if lacking else "no seed in common", 0
    words = [_with_mean(ours, [mine[seed] for seed in seeds], at)]
    found = [(one.label, leads_of(mine, its, seeds, less_is_better(metric))) for one, its in zip(others, theirs)]
    for other, its, (_, leads) in zip(others, theirs, found):
        words.append(_against(other, leads, [its[seed] for seed in seeds], end))
    return _over_all(claim, found, words, seeds, any(mine[seed] is None for seed in seeds))


def _over_all(claim, found, words, seeds, has_failed):
    """(state, words, number of seeds, leads) of a claim that a method is ahead of others, or level with them.

    Args:
        found: (rival, its leads by seed). has_failed: whether the method diverged with a seed.
    """
    missing = [name for name in claim["of"] if name not in dict(found)]
    words = "; ".join([*words, f"not run: {', '.join(missing)}"] if missing else words)
    signs = [(direction(leads), is_decided(leads)) for _, leads in found]
    if "level" in claim:
        has_diverged = has_failed or not all(math.isfinite(lead) for _, leads in found for lead in leads)
        is_near = not has_diverged and all(abs(statistics.fmean(leads)) < claim["level"] for _, leads in found)
        state = _level(is_near, len(seeds), has_diverged or any(clear for _, clear in signs), is_open=bool(missing))
        return state, f"{words}; level within {claim['level']:g}", len(seeds), *found
    return _state(signs, len(seeds), has_failed, is_open=bool(missing)), words, len(seeds), *found


def _level(is_near, seeds, is_apart, is_open):
    """The state of a claim that a method is level with others; see `_state`.

    Args:
        is_near: whether no mean lead is as large as the margin. is_apart: whether one is clear, or a method diverged.
    """
    if seeds == 1:
        return ONCE_OPEN
    if not is_near:
        return CONTRADICTED if is_apart else UNDECIDED
    return UNDECIDED if is_open else CONFIRMED


def _state(signs, seeds, has_failed, is_open=False):
    """The state of a claim that a method is ahead of others.

    Args:
        signs: (1 if it is ahead, -1 if behind, whether clearly) for each of the others.
        has_failed: whether it cannot be ahead: a run of its own diverged. is_open: whether a rival was not run.
    """
    if seeds == 1:
        return ONCE_AHEAD if all(sign > 0 for sign, _ in signs) and not is_open else ONCE_NOT_AHEAD
    if has_failed or any(sign < 0 and clear for sign, clear in signs):
        return CONTRADICTED
    return CONFIRMED if all(sign > 0 and clear for sign, clear in signs) and not is_open else UNDECIDED


def _last_round(methods):
    """The last evaluated round of some methods; 0 if there is none."""
    return max((run.records[-1]["round"] for one in methods for run in one.runs if run.records), default=0)


def _rounds(method, claim):
    """(round at which the method of a claim is measured, that of the others): None is the last one."""
    ends = [run.records[-1]["round"] for run in method.runs if run.is_complete and run.records]
    if not ends or not {"at_share", "all_at_share"} & set(claim):
        return None, None
    if "all_at_share" in claim:
        at = math.floor(claim["all_at_share"] * max(ends) + 1e-9)
        return at, at
    return round(claim["at_share"] * max(ends)), max(ends)


def _against(other, leads, values, at):
    """How a method compares with another one, as text; see `_with_mean`."""
    sign = direction(leads)
    how = {1: "ahead of", -1: "behind", 0: "level with" if not any(leads) else "neither ahead of nor behind"}[sign]
    words = f"{how} {_with_mean(other, values, at)}"
    if len(leads) == 1 or not sign or is_decided(leads):
        return words
    return words + (" by less than the spread" if all(map(math.isfinite, leads)) else ", but not with every seed")


def _with_mean(method, values, at=None):
    """A method with the mean of its values, as text like "FAFED 0.5000 ± 0.0100 (1 of 3 diverged) at round 20".

    Args:
        values: one per seed, None where it diverged. at: the round, or None for the last one.
    """
    ended = tuple(one for one in values if one is not None)
    lost = len(values) - len(ended)
    words = f"{method.label} {Spread(ended)}" if ended else f"{method.label} (diverged)"
    words += f" ({lost} of {len(values)} diverged)" if lost and ended else ""
    if at is None:
        return words
    lines = [line for run in method.runs for line in run.records if line["round"] <= at and "gradients" in line]
    gradients = f" ({max(line['gradients'] for line in lines):,} gradients)" if lines else ""
    return f"{words} at round {at}{gradients}"


def ordering(methods, metric, values):
    """Methods' names from best to worst, like "FAFED > FedAMS = FedAvg".

    Args:
        values: name -> number; names without one are left out.
    """
    sign = 1 if less_is_better(metric) else -1
    names = sorted((name for name in methods if name in values), key=lambda name: sign * values[name])
    signs = [" = " if values[one] == values[other] else " > " for one, other in itertools.pairwise(names)]
    return "".join(itertools.chain(*zip(names, [*signs, ""])))
