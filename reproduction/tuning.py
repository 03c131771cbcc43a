"""Choosing the methods' settings: every method's grid on held-out training data, with the same budget for each."""

import math

from fedmpi.cli.comparison import Spread
from fedmpi.cli.sweep.choice import may_choose, usual_metric
from fedmpi.ground.errors import UserError
from fedmpi.ground.text import table
from fedmpi.runs.folder import outcome, read_run
from fedmpi.runs.record import HELD_OUT, less_is_better
from reproduction.csv_files import read_rows, write_tables
from reproduction.results import FACTS, grid_path
from reproduction.running import make, plan_runs, provenance

HOLDOUT = "0.1"  # share of every client's training data
COLUMNS = ("panel", "method", "settings", "metric", "mean", "deviation", "runs", "diverged", "seeds", "chosen", *FACTS)


def tune(experiment, scale, seeds, results, how):
    """Run the grids of an experiment, write the whole of them, and print what is best for each method.

    Args:
        scale: str, small or full. seeds: list of int, or None for the file's. results: folder of the CSV files.
        how: a `How`.

    Raises:
        UserError: if the experiment has no grids for the scale, a run's settings are wrong, no run measured the metric,
            or nothing can be chosen for a method.
    """
    tuning, points = experiment.tuning(scale), experiment.tuning_points(scale)
    metric = tuning.get("metric")
    held_out = metric is None or metric.startswith(HELD_OUT)
    for point in points:
        point.settings.setdefault("holdout", HOLDOUT if held_out else "0")
    seeds = seeds or tuning.get("seeds", [0])
    folder = "tuning" if scale == "small" else f"tuning-{scale}"
    planning = plan_runs({}, points, seeds, how.out / experiment.name / folder, how)
    make(planning, how)
    rows = _rows(planning, tuning["grids"], points, seeds, metric)
    path = grid_path(results, experiment.name, scale)
    write_tables((path, COLUMNS, rows))
    shown = [[row["method"], row["settings"], f"{row['mean']:.4f}"] for row in rows if row["chosen"]]
    if shown:
        print(table([["method", "best settings", rows[0]["metric"]], *shown]))
    print(f"the whole grid: {path}")
    lacking = [method for method in tuning["grids"] if method not in [one[0] for one in shown]]
    if lacking:
        raise UserError(
            f"{experiment.name}: nothing was chosen for {', '.join(lacking)}: a run of every point diverged or did not "
            "end: try other values in the grid"
        )


def read_grid(path):
    """The rows of an experiment's grids as dicts of text; [] if there is no such file.

    Raises:
        UserError: if the file is damaged.
    """
    return read_rows(path, COLUMNS)


def _rows(planning, grids, points, seeds, metric):
    """The rows of the CSV file: one per point; the best one of each method is marked as chosen."""
    plan, by_point = planning.plan, {}
    for run in plan.runs:
        point, _ = planning.points[run.name]
        by_point.setdefault(id(point), []).append(plan.folder(run))
    ended = [read_run(path) for paths in by_point.values() for path in paths if outcome(path) == "complete"]
    if not ended:
        raise UserError(f"{plan.out}: no run is complete; its .log files contain what the runs printed")
    metric = metric or usual_metric(ended)
    measured = dict.fromkeys(name for run in ended for name in run.metrics if may_choose(name))
    if metric not in measured:
        raise UserError(f"tune.metric: {metric}: no run measured it: expected one of {', '.join(measured)}")
    rows = [_row(point, by_point[id(point)], grids[point.method], seeds, metric) for point in points]
    sign = 1 if less_is_better(metric) else -1
    whole = [all(outcome(path) == "complete" for path in by_point[id(point)]) for point in points]
    for method in dict.fromkeys(row["method"] for row in rows):
        its = [row for row, is_whole in zip(rows, whole) if is_whole and row["method"] == method]
        usable = [row for row in its if row["mean"] != "" and math.isfinite(row["mean"])]
        if usable:
            min(usable, key=lambda row: sign * row["mean"])["chosen"] = "yes"
    return rows


def _row(point, paths, names, seeds, metric):
    """The row of one point, whose run folders are `paths`; `names` are the settings that were tried."""
    runs = [read_run(path) for path in paths if outcome(path) == "complete"]
    values = tuple(value for run in runs if (value := run.final(metric)) is not None)
    spread = Spread(values) if values else None
    known = provenance(paths[0])
    known["cpu_seconds"] = round(sum(provenance(path).get("cpu_seconds") or 0 for path in paths), 2)
    return {
        "panel": point.panel,
        "method": point.method,
        "settings": ", ".join(f"{name.rpartition('.')[2]} {point.settings[name]}" for name in names),
        "metric": metric,
        "mean": spread.mean if spread else "",
        "deviation": spread.deviation if spread and spread.deviation is not None else "",
        "runs": len(paths),
        "diverged": sum(outcome(path) == "diverged" for path in paths),
        "seeds": " ".join(map(str, seeds)),
        "chosen": "",
    } | {name: known.get(name, "") for name in FACTS}
