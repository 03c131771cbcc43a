"""Means and spreads over seeds: curves by round, final values, what it took to reach a target."""

import collections
import dataclasses
import math
import re
import statistics

from fedmpi.cli.comparison import Spread
from fedmpi.ground.errors import UserError
from fedmpi.runs.record import AXES, LEVEL, is_beside, less_is_better

MOST_POINTS = 240  # of a curve; more are averaged in groups of neighbours


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """One round of a curve: the runs' mean, and their lowest and highest."""

    x: float
    mean: float
    low: float
    high: float


def metrics_of(methods):
    """All metrics of some methods: training loss, metrics that are no losses, other losses, the loss in local steps."""
    names = dict.fromkeys(name for method in methods for run in method.runs for name in run.metrics)
    return sorted(names, key=lambda name: (name == "loss", name != "train_loss", "loss" in name))


def shown_metrics(methods):
    """Those of `metrics_of` that a page shows: the other average of a metric, over samples or clients, only if the two
    are farther apart in some method than its seeds are."""
    names = metrics_of(methods)
    return [name for name in names if not is_beside(name) or _are_apart(methods, name.rpartition("_")[0], name)]


def _are_apart(methods, name, other):
    pairs = [(final(method, name), final(method, other)) for method in methods]
    known = [(usual, beside) for usual, beside in pairs if beside]
    return any(u is None or abs(u.mean - b.mean) > max(u.deviation or 0, LEVEL) for u, b in known)


def usable_runs(method):
    """The runs that means are taken over, one per seed: the complete ones, or all of them while none is complete."""
    runs = [*method.seeds.values()]
    return [run for run in runs if run.is_complete] or runs


def curve(method, axis, metric):
    """A method's curve of a metric against one of `AXES`: a list of `CurvePoint`, empty if nothing was measured.

    It ends where the shortest of its runs ends, so that every mean is over the same runs.
    """
    runs, at_round = usable_runs(method), collections.defaultdict(list)
    for run in runs:
        for record in run.records:
            if _is_number(record.get(metric)) and _is_number(record.get(axis)):
                at_round[record["round"]].append((record[axis], record[metric]))
    points = []
    for _, pairs in sorted(at_round.items()):
        if len(pairs) < len(runs):
            continue
        xs, values = zip(*pairs)
        points.append(CurvePoint(statistics.fmean(xs), statistics.fmean(values), min(values), max(values)))
    return _thin_out(points)


def final(method, key):
    """`Spread` over `usable_runs` of the last value of a metric or an amount; or None."""
    values = [run.final(key) for run in usable_runs(method)]
    values = tuple(value for value in values if value is not None)
    return Spread(values) if values else None


def best_of(methods, metric):
    """(number of the method that ended with the best finite mean or None, how many such means there are)."""
    spreads = {number: final(method, metric) for number, method in enumerate(methods)}
    means = {number: spread.mean for number, spread in spreads.items() if spread and math.isfinite(spread.mean)}
    choose = min if less_is_better(metric) else max
    return choose(means, key=means.get, default=None), len(means)


def clearly_best(methods, metric):
    """The number of the best method if its lead over each other one is larger than the spread of the lead; or None.

    Leads are differences between runs of the same seed; there must be at least two of them.
    """
    best, number = best_of(methods, metric)
    if best is None or number < 2:
        return None
    spreads = [final(method, metric) for method in methods]
    others = [n for n, spread in enumerate(spreads) if n != best and spread and math.isfinite(spread.mean)]
    leads = [lead(methods[best], methods[n], metric) for n in others]
    return best if all(map(is_clear, leads)) else None


def lead(method, other, metric):
    """By how much a method is better than another one, seed by seed: a list of numbers."""
    own_values, theirs = (_by_seed(compared, metric) for compared in (method, other))
    sign = -1 if less_is_better(metric) else 1
    return [sign * (own_values[seed] - theirs[seed]) for seed in own_values if seed in theirs]


def is_clear(leads):
    """Whether the mean of some leads is larger than their standard deviation; a single lead has none."""
    return len(leads) > 1 and statistics.fmean(leads) > statistics.stdev(leads)


def _by_seed(method, metric):
    values = {run.settings.get("seed", 0): run.final(metric) for run in usable_runs(method)}
    return {seed: value for seed, value in values.items() if value is not None and math.isfinite(value)}


def clients_at_end(method):
    """metric -> each client's last value, the mean over the runs that recorded as many clients; {} if none did."""
    runs = [run.clients for run in usable_runs(method) if run.clients]
    means = {}
    for metric, first in (runs[0] if runs else {}).items():
        same = [run[metric] for run in runs if len(run.get(metric, ())) == len(first)]
        means[metric] = [statistics.fmean(values) for values in zip(*same)]
    return means


def client_metric(methods):
    """The first metric of several clients that is no loss, or the first loss; None if no run recorded their results."""
    at_end = [item for method in methods for item in clients_at_end(method).items()]
    names = list(dict.fromkeys(name for name, values in at_end if sum(value == value for value in values) > 1))
    return next((name for name in names if "loss" not in name), names[0] if names else None)


@dataclasses.dataclass(frozen=True)
class Target:
    """A value that a metric should reach, from below or from above."""

    metric: str
    value: float
    from_above: bool

    @classmethod
    def parse(cls, text):
        """A target from text like "accuracy=0.85", "train_loss<=0.3".

        Raises:
            UserError: one line, if it is something else.
        """
        parts = re.fullmatch(r"\s*(\w+)\s*(<=|>=|=|<|>)\s*([-+.\deE]+)\s*", text)
        try:
            metric, relation, value = parts.groups()
            return cls(metric, float(value), less_is_better(metric) if relation == "=" else "<" in relation)
        except (AttributeError, ValueError):
            raise UserError(f"--target {text}: expected a metric and a value, like accuracy=0.85") from None

    def in_words(self, title):
        """As text; `title` is a function of a metric's name."""
        return f"{title(self.metric)} {'≤' if self.from_above else '≥'} {self.value:g}"

    def amounts(self, run):
        """axis -> the amount at which a run reaches the target, None if it does not.

        Between the first evaluation that reaches it and the one before, the metric is taken to be a straight line.
        """
        evaluated, before = [record for record in run.records if _is_number(record.get(self.metric))], {}
        for record in evaluated:
            value = record[self.metric]
            if value <= self.value if self.from_above else value >= self.value:
                start = before.get(self.metric, value)
                share = 1 if start == value else (self.value - start) / (value - start)
                from_here = {axis: before.get(axis, record[axis]) for axis in AXES if axis in record}
                return {axis: begin + share * (record[axis] - begin) for axis, begin in from_here.items()}
            before = record
        return None

    def grid(self, method):
        """The rounds between two evaluations of the metric; None if there are not two."""
        rounds = [record["round"] for run in usable_runs(method) for record in run.records if self.metric in record]
        return min((b - a for a, b in zip(rounds, rounds[1:]) if b > a), default=None)

    def cost(self, method):
        """(number of seeds that reach it, axis -> `Spread` of the amounts at which they do)."""
        reached = [amounts for run in method.seeds.values() if (amounts := self.amounts(run)) is not None]
        spreads = {axis: tuple(record[axis] for record in reached if axis in record) for axis in AXES}
        return len(reached), {axis: Spread(values) for axis, values in spreads.items() if values}


def _is_number(value):
    return value is not None and value - value == 0  # neither missing, nor infinite, nor nan


def _thin_out(points):
    """At most about MOST_POINTS points, each the mean of several neighbours."""
    size = -(-len(points) // MOST_POINTS)
    if size <= 1:
        return points
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        CurvePoint(
            *(statistics.fmean(getattr(point, field) for point in group) for field in ("x", "mean", "low", "high"))
        )
        for group in groups
    ]
