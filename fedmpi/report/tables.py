"""Tables of a comparison: final values, the cost of a target, the runs; as text, Markdown, CSV."""

import csv
import dataclasses

from fedmpi.report.curves import AXES, best_of, curve, final, metrics_of, title
from fedmpi.report.units import count, metric

COSTS = {"round": "rounds", "bytes": "sent per client", "gradients": "gradients", "seconds": "time"}


@dataclasses.dataclass(frozen=True)
class Table:
    """Words in rows and columns.

    Attributes:
        header: list of str. rows: lists of as many.
        best: (row, column) of the cells that hold the best value of their column.
    """

    header: list
    rows: list
    best: frozenset = frozenset()

    def markdown(self):
        """The table in Markdown, best values in bold."""
        rows = [[self._bold(r, c, cell) for c, cell in enumerate(row)] for r, row in enumerate(self.rows)]
        lines = [self.header, ["---"] + ["---:"] * (len(self.header) - 1), *rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"

    def text(self):
        """The table for a terminal."""
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows)]
        lines = []
        for row in (self.header, *self.rows):
            cells = [cell.ljust(w) if c == 0 else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths))]
            lines.append(("  " + "  ".join(cells)).rstrip())
        return "\n".join(lines)

    def _bold(self, row, column, cell):
        return f"**{cell}**" if (row, column) in self.best else cell


def final_table(problem):
    """What each method ended with: mean ± standard deviation over its seeds."""
    methods, metrics = problem.methods, metrics_of(problem.methods)
    metrics = [name for name in metrics if name != "loss"] or metrics  # what was evaluated says more
    printed = [name for name in metrics if any(_printed(method, name) for method in methods)]
    header = ["method", "runs", *map(title, metrics), *(f"{title(name)} in the paper" for name in printed)]
    rows = []
    for method in methods:
        spreads = [final(method, name) for name in metrics]
        row = [method.label, _runs_in_words(method), *(metric(s) if s else "–" for s in spreads)]
        row += [_printed(method, name) or "–" for name in printed]
        rows.append(row + [_cost(final(method, axis), axis) for axis in COSTS])
    return Table(header + list(COSTS.values()), rows, frozenset(_best(methods, metrics, 2)))


def target_table(problem, target):
    """What it took each method to reach a target: mean, and lowest to highest over its seeds."""
    rows, means = [], {}
    for number, method in enumerate(problem.methods):
        reached, costs = target.cost(method)
        rows.append([method.label, f"{reached} of {len(method.runs)}"])
        rows[-1] += [_cost(costs.get(axis), axis, with_range=True) for axis in COSTS]
        if reached == len(method.runs):
            means[number] = {axis: spread.mean for axis, spread in costs.items()}
    best = set()
    for column, axis in enumerate(COSTS, 2):
        known = {number: costs[axis] for number, costs in means.items() if axis in costs}
        if known and len(problem.methods) > 1:
            best.add((min(known, key=known.get), column))
    return Table(["method", "reached by", *COSTS.values()], rows, frozenset(best))


def run_table(problem):
    """Every run: its folder, seed, and how it ended."""
    rows = [
        [str(run.path), method.label, str(run.settings.get("seed", "?")), _state(run)]
        for method in problem.methods
        for run in method.runs
    ]
    return Table(["run", "method", "seed", "state"], rows)


def write_curves(path, problems):
    """All curves as CSV: a line per method, metric and point, means over the runs that got there."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["problem", "method", "metric", "against", "at", "mean", "lowest", "highest"])
        for problem in problems:
            for method in problem.methods:
                for name in metrics_of([method]):
                    for axis in AXES:
                        for point in curve(method, axis, name):
                            values = (point.x, point.mean, point.low, point.high)
                            lines.writerow([problem.label, method.label, name, axis, *(f"{v:.9g}" for v in values)])


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
                        lines.writerow([problem.label, method.label, name, *words, len(spread.values)])


def _runs_in_words(method):
    complete, diverged = sum(run.is_complete for run in method.runs), sum(bool(run.diverged) for run in method.runs)
    words = str(complete) if complete == len(method.runs) else f"{complete} of {len(method.runs)}"
    return f"{words}, {diverged} diverged" if diverged else words


def _cost(spread, axis, with_range=False):
    return "–" if spread is None else count(axis, spread, with_range)


def _best(methods, metrics, first_column):
    """(row, column) of the best mean of each metric, if there is a choice."""
    for column, name in enumerate(metrics, first_column):
        best, num_methods = best_of(methods, name)
        if num_methods > 1:
            yield best, column


def _printed(method, metric_name):
    """The value that the paper prints for a method, if the runs' preset says so."""
    value = method.runs[0].paper.get("printed", {}).get(metric_name, {}).get(method.settings.get("algorithm"))
    return "" if value is None else str(value)


def _state(run):
    rounds = run.num_rounds()
    progress = f"{run.records[-1]['round']:,.0f}" + (f" of {rounds:,}" if rounds else "") + " rounds"
    if run.diverged:
        return f"diverged after {progress}: {run.diverged}"
    return f"complete, {progress}" if run.is_complete else f"unfinished, {progress}"
