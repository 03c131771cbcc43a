"""The methods after equal gradients and equal bytes: equal rounds cost one method several times what another pays."""

import math

import numpy as np

from fedmpi.cli.comparison import Spread
from fedmpi.ground.text import Table, format_bytes
from fedmpi.runs.record import less_is_better, title
from reproduction.claims import spread

COSTS = {"gradients": lambda amount: f"{amount:,.0f} gradients", "bytes": lambda amount: f"{format_bytes(amount)} sent"}
TEXT = (
    "The tables above compare after equal rounds. Here each method stops where the cheapest of them ends, counted in "
    "gradients of all clients, or in bytes that a client sends. Between evaluations values are interpolated; a dash: "
    "its first evaluation comes later."
)
SAME = "All methods evaluate as many gradients and send as many bytes in a round: equal rounds are equal cost."


def at_equal_cost(methods, metric, cost):
    """What methods have reached when all have spent what the cheapest of them spends in all.

    Args:
        methods: list of `Method`. metric: its name. cost: "gradients" or "bytes".

    Returns:
        (amount, method's name -> `Spread` over its runs, or None if its first evaluation is later); (None, {}) if fewer
        than two methods have complete runs, or all spend the same, so that equal rounds are equal cost.
    """
    curves = {}
    for method in methods:
        lines = [
            [(line[cost], line[metric]) for line in run.records if metric in line and line.get(cost) is not None]
            for run in method.runs
            if run.is_complete
        ]
        if lines and all(lines):
            curves[method.label] = [tuple(zip(*line)) for line in lines]
    totals = [amounts[-1] for some in curves.values() for amounts, _ in some]
    if len(curves) < 2 or max(totals) <= 1.001 * min(totals):
        return None, {}
    amount = min(totals)
    found = {
        name: tuple(float(np.interp(amount, *curve, left=math.nan)) for curve in some) for name, some in curves.items()
    }
    return amount, {name: Spread(its) if all(map(math.isfinite, its)) else None for name, its in found.items()}


def places(methods, metric, name):
    """[(cost, place of a method, number of methods)] where the methods' costs differ; a place is 1 for the best."""
    found = []
    for cost in COSTS:
        _, values = at_equal_cost(methods, metric, cost)
        if values.get(name):
            sign = 1 if less_is_better(metric) else -1
            ours = sign * values[name].mean
            better = sum(sign * one.mean < ours for one in values.values() if one)
            found.append((cost, better + 1, len(values)))
    return found


def section(experiment, results):
    """Lines of the page: the methods of every panel at equal cost, by each metric that it shows; [] if none."""
    lines, is_compared = [], False
    for metric in experiment.metrics:
        compared = {
            panel: methods
            for panel, methods in results.panels.items()
            if sum(spread(one, metric) is not None for one in methods) > 1
        }
        is_compared |= bool(compared)
        lines += _table(metric, compared)
    if not is_compared:
        return []
    return ["## At equal cost", "", *([TEXT, "", *lines] if lines else [SAME, ""])]


def _table(metric, panels):
    """[table of one metric, in Markdown]; [] if equal rounds are equal cost on every panel."""
    names = dict.fromkeys(one.label for methods in panels.values() for one in methods)
    rows = []
    for panel, methods in panels.items():
        for cost, words in COSTS.items():
            amount, values = at_equal_cost(methods, metric, cost)
            if values:
                cells = [str(values[name]) if values.get(name) else "–" for name in names]
                rows.append([panel, words(amount), *cells])
    return [Table(["where", f"{title(metric)} after", *names], rows).markdown()] if rows else []
