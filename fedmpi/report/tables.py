"""Tables of a comparison: final values, the cost of a target, the runs; as text, Markdown, CSV."""

import csv

from fedmpi.presets.reading import short
from fedmpi.report.curves import best_of, curve, final, metrics_of
from fedmpi.runs.record import AXES, field, label, title
from fedmpi.text import Table, as_cell, format_count, format_quantity


def final_table(problem):
    """What each method ended with: mean ± standard deviation over its seeds."""
    methods, metrics = problem.methods, metrics_of(problem.methods)
    metrics = [name for name in metrics if name != "loss"] or metrics  # what was evaluated says more
    printed = [name for name in metrics if any(_printed(method, name) for method in methods)]
    header = ["method", "runs", *map(title, metrics), *(f"{title(name)} in the paper" for name in printed)]
    rows = []
    for method in methods:
        spreads = [final(method, name) for name in metrics]
        row = [method.label, _runs_in_words(method), *(str(spread) if spread else "–" for spread in spreads)]
        row += [_printed(method, name) or "–" for name in printed]
        rows.append(row + [_cost(final(method, axis), axis) for axis in AXES])
    return Table(header + [label(axis) for axis in AXES], rows, frozenset(_best(methods, metrics, 2)))


def target_table(problem, target):
    """How much it took each method to reach a target: mean, and lowest to highest over its seeds."""
    rows, means = [], {}
    for number, method in enumerate(problem.methods):
        reached, costs = target.cost(method)
        rows.append([method.label, f"{reached} of {len(method.runs)}"])
        rows[-1] += [_cost(costs.get(axis), axis, with_range=True) for axis in AXES]
        if reached == len(method.runs):
            means[number] = {axis: spread.mean for axis, spread in costs.items()}
    best = set()
    for column, axis in enumerate(AXES, 2):
        known = {number: costs[axis] for number, costs in means.items() if axis in costs}
        if known and len(problem.methods) > 1:
            best.add((min(known, key=known.get), column))
    return Table(["method", "reached by", *map(label, AXES)], rows, frozenset(best))


def run_table(problem):
    """Every run: its folder, seed, and how it ended."""
    rows = [
        [short(run.path), method.label, str(run.settings.get("seed", "?")), _state(run)]
        for method in problem.methods
        for run in method.runs
    ]
    return Table(["run", "method", "seed", "state"], rows)


def write_curves(path, problems):
    """All curves as CSV: a line per method, metric and point, with means over the runs."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["problem", "method", "metric", "against", "at", "mean", "lowest", "highest"])
        for problem in problems:
            for method in problem.methods:
                for name in metrics_of([method]):
                    for axis in AXES:
                        for point in curve(method, axis, name):
                            values = (point.x, point.mean, point.low, point.high)
                            lines.writerow(
                                [
                                    *map(as_cell, (problem.label, method.label, name)),
                                    axis,
                                    *(f"{v:.9g}" for v in values),
                                ]
                            )


def write_finals(path, problems):
    """Final values as CSV: a line per method and quantity."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["problem", "method", "quantity", "mean", "standard deviation", "lowest", "highest", "runs"])
        for problem in problems:
            for method in problem.methods:
                for name in [*metrics_of([method]), *AXES]:
                    spread = final(method, name)
                    if spread is not None:
                        values = (spread.mean, spread.deviation, min(spread.values), max(spread.values))
                        words = ["" if v is None else f"{v:.9g}" for v in values]
                        lines.writerow([*map(as_cell, (problem.label, method.label, name)), *words, len(spread.values)])


def _runs_in_words(method):
    complete, diverged = sum(run.is_complete for run in method.runs), sum(bool(run.diverged) for run in method.runs)
    words = str(complete) if complete == len(method.runs) else f"{complete} of {len(method.runs)}"
    return f"{words}, {diverged} diverged" if diverged else words


def _cost(spread, axis, with_range=False):
    if spread is None:
        return "–"
    low, high = (min(spread.values), max(spread.values)) if with_range else (None, None)
    return format_quantity(field(axis).unit, spread.mean, low, high)


def _best(methods, metrics, first_column):
    """(row, column) of the best mean of each metric, if there is a choice."""
    for column, name in enumerate(metrics, first_column):
        best, num_methods = best_of(methods, name)
        if num_methods > 1:
            yield best, column


def _printed(method, metric_name):
    """The value that the paper prints for a method, or "" if the runs' preset gives none."""
    value = method.runs[0].paper.get("printed", {}).get(metric_name, {}).get(method.settings.get("algorithm"))
    return "" if value is None else str(value)


def _state(run):
    rounds = run.num_rounds()
    of_all = f" of {format_count(rounds)}" if rounds else ""
    progress = f"{format_count(run.records[-1]['round'])}{of_all} rounds"
    if run.diverged:
        return f"diverged after {progress}: {run.diverged}"
    return f"complete, {progress}" if run.is_complete else f"unfinished, {progress}"
