"""What a report contains besides curves: results of each client, ROC curves, and what a varied setting does."""

import math
from types import SimpleNamespace

from fedmpi.cli.comparison import distinguishes_methods
from fedmpi.cli.report.curves import client_metric, clients_at_end, final, metrics_of, usable_runs
from fedmpi.cli.report.tables import cases_table, client_table, silo_table
from fedmpi.ground.files.run_files import ROC
from fedmpi.ground.text import Table
from fedmpi.runs import baselines
from fedmpi.runs.record import HELD_OUT, less_is_better, title


def further_parts(problem, style):
    """Yield (heading, list of `Table`, figure) of each further part for which a problem's runs have data."""
    from fedmpi.cli.report.further_figures import draw_heat, draw_roc, draw_setting, draw_silos

    methods, metric = problem.methods, client_metric(problem.methods)
    tables = [table for table in (silo_table(problem), client_table(problem)) if table is not None]
    if tables:
        tables += [cases] if (cases := cases_table(problem)) is not None else []
        clients = {number: clients_at_end(method) for number, method in enumerate(methods)}
        values = {number: of_method.get(metric, []) for number, of_method in clients.items()}
        values = {number: results for number, results in values.items() if any(value == value for value in results)}
        yield "Clients", tables, draw_silos(methods, metric, values, style, problem.title(metric))
    points = {number: curve for number, method in enumerate(methods) if (curve := roc_curve(method))}
    if points:
        yield "ROC curve on the test set", [], draw_roc(methods, points, style)
    for method in methods:
        for run in usable_runs(method):
            yield from _baselines(run, method.label, style)
        for name, (names, rows) in next((run.tables for run in usable_runs(method) if run.tables), {}).items():
            yield f"{name} of {method.label}", [], draw_heat(names, rows, style)
    for key, measured, lines in varied_settings(problem):
        heading = f"What {key.rpartition('.')[2].replace('_', ' ')} does"
        yield heading, [], draw_setting(key, measured, lines, style)


def _baselines(run, label, style):
    """The part about what a run is compared with, if it was made with --baselines."""
    from fedmpi.cli.report.further_figures import draw_heat, draw_silos

    content = baselines.read(run.path)
    if content.get("pending", True):
        return
    rows = {row["method"]: row for row in content["rows"] if "clients" in row}
    values = {number: row["clients"] for number, row in enumerate(rows.values())}
    figure = draw_silos([SimpleNamespace(label=name) for name in rows], content["metric"], values, style)
    tables = [baselines.baseline_table(content), Table(["in the table", "means"], baselines.notes(content))]
    which = f"{label}, seed {run.settings.get('seed', 0)}"
    yield f"Baselines of {which}: {baselines.gain_in_words(content)}", tables, figure
    for name, row in rows.items():
        if "matrix" in row:
            names = [baselines.name_of(content, silo) for silo in range(len(row["clients"]))]
            axes = (f"tests of ({title(content['metric'])})", f"model of ({name})")
            figure = draw_heat(names, row["matrix"], style, axes)
            yield f"The {name} model of each silo on the tests of each silo", [], figure


def roc_curve(method):
    """The ROC curve of a method's first run that has one: a list of (false positives, true positives), or []."""
    for run in usable_runs(method):
        try:
            lines = (run.path / ROC).read_text(encoding="utf-8").splitlines()[1:]
            points = [tuple(float(part) for part in line.split(",")) for line in lines]
            if points and all(len(point) == 2 and min(point) >= 0 and max(point) <= 1 for point in points):
                return points
        except (OSError, ValueError):
            continue
    return []


def varied_settings(problem):
    """[(key, metric, algorithm -> [(value, `Spread`)])] of the numbers that runs vary, as in a sweep.

    A key is included if some algorithm was run with at least three values of it. Of methods with the same value, which
    differ in other settings, the best counts. The metric is one on held-out data, if there is one.
    """
    names = [name for name in metrics_of(problem.methods) if name != "loss"]
    names = [name for name in names if name.startswith(HELD_OUT)] or names
    metric = next((name for name in names if "loss" not in name), names[0] if names else None)
    keys = dict.fromkeys(key for method in problem.methods for key in method.settings if distinguishes_methods(key))
    found = [(key, metric, _by_value(problem.methods, key, metric)) for key in keys] if metric else []
    return [(key, metric, lines) for key, metric, lines in found if lines]


def _by_value(methods, key, metric):
    """algorithm -> [(value, `Spread`)] of a key with at least three values, in ascending order."""
    choose, lines = min if less_is_better(metric) else max, {}
    for method in methods:
        value, spread = method.settings.get(key), final(method, metric)
        is_number = type(value) in (int, float) and math.isfinite(value)
        if is_number and spread is not None and math.isfinite(spread.mean):
            of_value = lines.setdefault(str(method.settings.get("algorithm")), {})
            of_value[value] = choose(of_value.get(value, spread), spread, key=lambda candidate: candidate.mean)
    return {name: sorted(of_value.items()) for name, of_value in lines.items() if len(of_value) >= 3}
