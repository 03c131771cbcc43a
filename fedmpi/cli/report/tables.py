"""Tables of a comparison: final values, the cost of a target, the runs; as text, Markdown, CSV."""

import csv
import itertools
import math
import statistics

from fedmpi.cli.comparison import setting_in_words
from fedmpi.cli.report.curves import (
    clearly_best,
    client_metric,
    clients_at_end,
    curve,
    final,
    metrics_of,
    shown_metrics,
    usable_runs,
)
from fedmpi.ground.files.own_files import replacing
from fedmpi.ground.text import Table, as_cell, format_count, format_quantity, short
from fedmpi.runs.record import AXES, field, label

MOST_CLIENTS, MOST_METHODS = 20, 8  # of a table of every client
MOST_CLASSES, MOST_NAMES = 20, 5  # of a table of test cases; classes named of a client


def final_table(problem):
    """What each method ended with: mean ± standard deviation over its seeds; the last column has the settings that
    differ, if any do."""
    methods, metrics, title = problem.methods, shown_metrics(problem.methods), problem.title
    metrics = [name for name in metrics if name != "loss"] or metrics  # what was evaluated says more
    printed = [name for name in metrics if any(_printed(method, name) for method in methods)]
    details = differing_settings(problem)
    header = ["method", "runs", *map(title, metrics), *(f"{title(name)} in the paper" for name in printed)]
    rows = []
    for method, words in zip(methods, details):
        spreads = [final(method, name) for name in metrics]
        row = [method.label, _runs_in_words(method), *(str(spread) if spread else "–" for spread in spreads)]
        row += [_printed(method, name) or "–" for name in printed]
        row += [_cost(final(method, axis), axis) for axis in AXES]
        rows.append(row + ([words] if any(details) else []))
    header += [label(axis) for axis in AXES] + (["settings"] if any(details) else [])
    best = {(clearly_best(methods, name), column) for column, name in enumerate(metrics, 2)}
    return Table(header, rows, frozenset(cell for cell in best if cell[0] is not None))


def differing_settings(problem):
    """For each method, as text, the settings of its algorithm that have another value in another method."""
    values = {}
    for method in problem.methods:
        for key, value in method.settings.items():
            if key.startswith("algorithm.") and not key.startswith("algorithm.schedule_"):
                values.setdefault(key, []).append(value)
    differing = [key for key, of_key in values.items() if any(value != of_key[0] for value in of_key)]
    return [
        ", ".join(
            words
            for key in differing
            if key in method.settings and (words := setting_in_words(key, method.settings[key])) not in method.label
        )
        for method in problem.methods
    ]


def silo_table(problem):
    """Results of each client: mean, worst, best and spread (standard deviation) over the clients; None if unknown."""
    rows, title = [], problem.title
    for method in problem.methods:
        names = next((run.client_names for run in method.runs if run.client_names), [])
        for metric, values in clients_at_end(method).items():
            names = _padded(names, len(values))
            known = {client: value for client, value in enumerate(values) if value == value}
            if len(known) > 1:
                worst = (max if field(metric).less_is_better else min)(known, key=known.get)
                best = (min if field(metric).less_is_better else max)(known, key=known.get)
                spread = statistics.pstdev(known.values())
                numbers = [statistics.fmean(known.values()), known[worst], known[best], spread]
                who = f"client {worst}" + (f", {names[worst]}" if names[worst] else "")
                rows.append([method.label, title(metric), str(len(known)), *(f"{n:.4f}" for n in numbers), who])
    header = ["method", "of each client", "clients", "mean", "worst", "best", "spread", "worst is"]
    return Table(header, rows) if rows else None


def client_table(problem):
    """A row per client with its last value of the main metric, a column per method; None without values, or with more
    than `MOST_CLIENTS` clients or `MOST_METHODS` methods."""
    metric = client_metric(problem.methods)
    values = [clients_at_end(method).get(metric, []) for method in problem.methods]
    number = max(map(len, values), default=0)
    if not 1 < number <= MOST_CLIENTS or len(values) > MOST_METHODS:
        return None
    names = next((run.client_names for method in problem.methods for run in method.runs if run.client_names), [])
    names = _padded(names, number)
    padded = [[*column, *[math.nan] * number] for column in values]
    rows = [
        [
            f"{client} {name}".strip(),
            *("–" if math.isnan(column[client]) else f"{column[client]:.4f}" for column in padded),
        ]
        for client, name in enumerate(names)
    ]
    header = [f"{problem.title(metric)} of client", *(method.label for method in problem.methods)]
    return Table(header, rows)


def cases_table(problem):
    """Numbers of test cases: a row per client, a column per class, "none" where a client's tests lack a class.

    Of more than `MOST_CLASSES` classes or `MOST_CLIENTS` clients, the clients whose tests lack some, and which. Of
    several runs, which may have divided the data in different ways, the first. None if no run recorded them.
    """
    runs = [(method, run) for method in problem.methods for run in usable_runs(method) if run.cases]
    if not runs:
        return None
    method, run = runs[0]
    classes, rows = run.cases
    same = all(other.cases == run.cases for _, other in runs)
    of = "" if same else f" ({method.label}, seed {run.settings.get('seed', 0)})"
    titles = [f"{client} {name}".strip() for client, name in enumerate(_padded(run.client_names, len(rows)))]
    if len(classes) <= MOST_CLASSES and len(rows) <= MOST_CLIENTS:
        cells = [
            [who, *(format_count(number) if number else "none" for number in row)] for who, row in zip(titles, rows)
        ]
        return Table([f"test cases of client{of}", *classes], cells)
    lacking = [(who, row, [name for name, number in zip(classes, row) if not number]) for who, row in zip(titles, rows)]
    cells = [
        [
            who,
            format_count(sum(row)),
            str(len(names)),
            f"{', '.join(names[:MOST_NAMES])}{', ...' * (len(names) > MOST_NAMES)}",
        ]
        for who, row, names in lacking
        if names
    ]
    header = [f"client{of}", "test cases", "classes without", "which"]
    return Table(header, cells[:MOST_CLIENTS]) if cells else None


def _padded(names, number):
    """As many names of clients as there are clients; what a folder's file has may be of another number."""
    return [*names, *[""] * number][:number]


def target_table(problem, target):
    """How much it took each method to reach a target, between two evaluations along a straight line: mean, and lowest
    to highest over its seeds."""
    rows, means, ranges = [], {}, {}
    for number, method in enumerate(problem.methods):
        reached, costs = target.cost(method)
        rows.append([method.label, f"{reached} of {len(method.seeds)}", f"{target.grid(method) or '–'}"])
        rows[-1] += [_cost(costs.get(axis), axis, with_range=True) for axis in AXES]
        if reached == len(method.seeds):
            ranges[number] = costs
            means[number] = {axis: spread.mean for axis, spread in costs.items()}
    best = set()
    for column, axis in enumerate(AXES, 3):
        known = {number: costs[axis] for number, costs in means.items() if axis in costs}
        first = min(known, key=known.get, default=None)
        others = [ranges[number][axis] for number in known if number != first]
        of_first = ranges[first][axis].values if others else ()
        if len(of_first) > 1 and max(of_first) < min(min(spread.values) for spread in others):
            best.add((first, column))
    return Table(["method", "reached by", "evaluated every", *map(label, AXES)], rows, frozenset(best))


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
    with replacing(path, b"problem,method,metric,") as part, open(part, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["problem", "method", "metric", "against", "at", "mean", "lowest", "highest"])
        for problem in problems:
            for method in problem.methods:
                for name, axis in itertools.product(metrics_of([method]), AXES):
                    words = [*map(as_cell, (problem.label, method.label, name)), axis]
                    for point in curve(method, axis, name):
                        values = (point.x, point.mean, point.low, point.high)
                        lines.writerow([*words, *(f"{value:.9g}" for value in values)])


def write_finals(path, problems):
    """Final values as CSV: a line per method and quantity."""
    with replacing(path, b"problem,method,quantity,") as part, open(part, "w", newline="", encoding="utf-8") as file:
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
    runs = method.seeds.values()
    complete, diverged = sum(run.is_complete for run in runs), sum(bool(run.diverged) for run in runs)
    words = str(complete) if complete == len(runs) else f"{complete} of {len(runs)}"
    return f"{words}, {diverged} diverged" if diverged else words


def _cost(spread, axis, with_range=False):
    if spread is None:
        return "–"
    low, high = (min(spread.values), max(spread.values)) if with_range else (None, None)
    return format_quantity(field(axis).unit, spread.mean, low, high)


def _printed(method, metric_name):
    """The value that the paper prints for a method, or "" if the runs' preset gives none."""
    value = method.runs[0].paper.get("printed", {}).get(metric_name, {}).get(method.settings.get("algorithm"))
    return "" if value is None else short(value, 100)


def _state(run):
    rounds = run.num_rounds()
    of_all = f" of {format_count(rounds)}" if rounds else ""
    progress = f"{format_count(run.records[-1]['round'])}{of_all} rounds"
    if run.diverged:
        return f"diverged after {progress}: {run.diverged}"
    return f"complete, {progress}" if run.is_complete else f"unfinished, {progress}"
