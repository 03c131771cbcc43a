"""Choosing the methods' settings: every method's grid on held-out training data, with the same budget for each."""

import dataclasses
import math

from fedmpi.cli.comparison import Spread
from fedmpi.cli.sweep.choice import may_choose, usual_metric
from fedmpi.ground.errors import UserError
from fedmpi.ground.text import table
from fedmpi.runs.folder import outcome, read_run
from fedmpi.runs.record import HELD_OUT, less_is_better
from reproduction.claims import late
from reproduction.csv_files import read_rows, write_tables
from reproduction.results import FACTS, STATES, algorithm_text, grid_path, is_made_with, keep_old
from reproduction.running import command_of, make, plan_runs, provenance

HOLDOUT = "0.1"  # share of every client's training data
COLUMNS = ("panel", "method", "settings", "metric", "mean", "deviation", "runs", "diverged", "seeds", "chosen", *FACTS)
WITH = "with"  # a column: all settings of the algorithm; files from before it was there lack it
LONG = 20  # rounds: of longer runs, a value from one evaluation alone is worth a line


def tune(experiment, scale, seeds, results, how, adds=False):
    """Run the grids of an experiment, write the whole of them, and print what is best for each method.

    The CSV file is written when a run has ended, so that it always has all that has.

    Args:
        scale: str. seeds: list of int, or None for the file's. results: folder of the CSV files. how: a `How`.
        adds: whether points that the CSV file has, made with the same settings and seeds, are kept.

    Raises:
        UserError: if the experiment has no grids for the scale, a run's settings are wrong, no run measured the metric,
            the CSV file has points to keep that are not in the grids, or nothing can be chosen for a method.
    """
    tuning, points = experiment.tuning(scale), experiment.tuning_points(scale)
    metric = tuning.get("metric")
    held_out = metric is None or metric.startswith(HELD_OUT)
    for point in points:
        point.settings.setdefault("holdout", HOLDOUT if held_out else "0")
    seeds = seeds or tuning.get("seeds", [0])
    folder = "tuning" if scale == "small" else f"tuning-{scale}"
    planning = plan_runs(experiment.first_run(scale), points, seeds, how.out / experiment.name / folder, how)
    path = grid_path(results, experiment.name, scale)
    grid = _Grid(planning, tuning["grids"], points, seeds, metric)
    has_others = grid.keep(path, adds)
    if adds:
        print(f"{len(grid.kept)} of {len(points)} points are kept as they are in {path}", flush=True)
    elif has_others:
        keep_old([path])

    def write():
        if rows := grid.rows():
            write_tables((path, (*COLUMNS, WITH), rows))

    try:
        make(grid.planning, how, write)
    except UserError as error:
        if metric or "holdout" not in str(error):
            raise
        raise UserError(
            f"{experiment.name}: tune.metric is missing, and so a tenth of the data is held out: {error}: expected "
            "tune.metric: train_loss (of an attack, its objective)"
        ) from None
    write()
    _print_choice(experiment, grid, path)


def _print_choice(experiment, grid, path):
    rows = grid.rows()
    if not rows:
        raise UserError(f"{grid.planning.plan.out}: no run is complete; its .log files contain what the runs printed")
    shown = [[row["method"], row["settings"], f"{float(row['mean']):.4f}"] for row in rows if row["chosen"]]
    if shown:
        print(table([["method", "best settings", rows[0]["metric"]], *shown]))
    if rounds := grid.measured_once():
        print(
            f"in {rounds} rounds, each value is from one evaluation: with eval_every: {max(1, rounds // 20)} it is a "
            "mean over the last tenth"
        )
    print(f"the whole grid: {path}")
    lacking = [method for method in grid.names if method not in [one[0] for one in shown]]
    if lacking:
        raise UserError(
            f"{experiment.name}: nothing was chosen for {', '.join(lacking)}: a run of every point diverged, or one "
            "did not end: try other values in the grid, or see the .log files"
        )


def read_grid(path):
    """The rows of an experiment's grids as dicts of text; [] if there is no such file.

    Raises:
        UserError: if the file is damaged.
    """
    return read_rows(path, COLUMNS)


class _Grid:
    """The points of the methods' grids, and what is known of them.

    Args:
        planning: a `Planning` of all runs. names: method -> names of the settings that are tried.
        points, seeds: those of the planning. metric: by which to choose, or None for the usual one.

    Attributes:
        kept: number of a point -> its row in the CSV file, if that is kept.
        planning: of the runs that are left to make.
    """

    def __init__(self, planning, names, points, seeds, metric):
        self.planning, self.names, self.kept = planning, names, {}
        self._points, self._seeds, self._metric = points, seeds, metric
        self._read = {}  # name of a run that has ended -> its `RunFolder`
        first = planning.first
        self._before = command_of(first, first.runs[0]) if first else ""  # of the run whose model the others use
        self._runs = [[] for _ in points]  # of each point
        numbers = {id(point): number for number, point in enumerate(points)}
        for run in planning.plan.runs:
            self._runs[numbers[id(planning.points[run.name][0])]].append(run)

    def keep(self, path, adds):
        """Compare a CSV file with the points; returns whether it has others.

        With `adds`, points whose rows were made with the same settings, by the same metric and with the same seeds, are
        not to be made again.

        Raises:
            UserError: if `adds`, and the file has a point that is not in the grids.
        """
        rows, places = read_grid(path), {self._key(number): number for number in range(len(self._points))}
        for row in rows if adds else ():
            if tuple(row[name] for name in ("panel", "method", "settings")) not in places:
                raise UserError(
                    f"--add: {path}: has {row['method']} with {row['settings']} on {row['panel']}, which is not in the "
                    "grid now: put it there, or leave out --add to make all points again"
                )
        found = {}
        for row in rows:
            number = places.get(tuple(row[name] for name in ("panel", "method", "settings")))
            if number is not None and self._is_the_same(row, number):
                found[number] = row
        if adds:
            whole = {number: row for number, row in found.items() if row["runs"] == str(len(self._seeds))}
            self.kept = whole
            plan, kept = self.planning.plan, {run.name for number in whole for run in self._runs[number]}
            left = [run for run in plan.runs if run.name not in kept]
            first = self.planning.first if left else None
            plan = dataclasses.replace(plan, runs=left)
            self.planning = dataclasses.replace(self.planning, plan=plan, first=first)
        return len(found) < len(rows)

    def rows(self):
        """The rows of the CSV file: one for each point of which a run has ended; [] if none is complete.

        The best point of each method is marked as chosen once all runs of the method have ended.

        Raises:
            UserError: if no complete run measured the metric.
        """
        ended = {number: self._ended(number) for number in range(len(self._points)) if number not in self.kept}
        complete = [run for its in ended.values() for run in its if run.is_complete]
        metric = self._metric or next((row["metric"] for row in self.kept.values()), "")
        if not metric:
            if not complete:
                return []
            metric = _usual_metric(complete)
        measured = dict.fromkeys(name for run in complete for name in run.metrics if may_choose(name))
        if complete and metric not in measured:
            raise UserError(f"tune.metric: {metric}: no run measured it: expected one of {', '.join(measured)}")
        if not complete and not self.kept:
            return []
        rows = {}
        for number in range(len(self._points)):
            if number in self.kept:
                rows[number] = self.kept[number] | {"chosen": ""}
            elif ended[number]:
                rows[number] = self._row(number, ended[number], metric)
        for method in self.names:
            its = [number for number, point in enumerate(self._points) if point.method == method]
            if all(number in rows and int(rows[number]["runs"]) == len(self._seeds) for number in its):
                _choose([rows[number] for number in its], metric)
        return list(rows.values())

    def measured_once(self):
        """How many rounds the runs have if each measured the metric once in the last tenth of many; else 0."""
        ended = [run for number in range(len(self._points)) for run in self._ended(number) if run.is_complete]
        metric = next(iter(self.rows()), {}).get("metric")
        for run in ended:
            rounds = run.records[-1]["round"]
            if rounds <= LONG or sum(metric in line and line["round"] > 0.9 * rounds for line in run.records) > 1:
                return 0
        return min((run.records[-1]["round"] for run in ended), default=0)

    def _ended(self, number):
        """The `RunFolder`s of a point's runs that have ended; each is read once, when it has."""
        for run in self._runs[number]:
            path = self.planning.plan.folder(run)
            if run.name not in self._read and outcome(path) in STATES:
                self._read[run.name] = read_run(path)
        return [self._read[run.name] for run in self._runs[number] if run.name in self._read]

    def _key(self, number):
        """What a point's row in the CSV file is known by."""
        point = self._points[number]
        names = self.names[point.method]
        settings = ", ".join(f"{name.rpartition('.')[2]} {point.settings[name]}" for name in names)
        return point.panel, point.method, settings

    def _is_the_same(self, row, number):
        """Whether a row of the CSV file is what the runs of a point would measure."""
        seeds, metric = " ".join(map(str, self._seeds)), self._metric or row["metric"]
        if (row["seeds"], row["metric"]) != (seeds, metric) or WITH not in row:
            return False
        settings, _, before = row[WITH].partition(AFTER)
        if before != self._before:
            return False
        command = command_of(self.planning.plan, self._runs[number][0])
        return is_made_with({"settings": settings, "command": row["command"]}, command)

    def _row(self, number, runs, metric):
        """The row of one point of which some runs have ended."""
        values = tuple(value for run in runs if run.is_complete and (value := late(run, metric)) is not None)
        spread = Spread(values) if values else None
        known = provenance(runs[0].path)
        known["cpu_seconds"] = round(sum(provenance(run.path).get("cpu_seconds") or 0 for run in runs), 2)
        known.setdefault("command", command_of(self.planning.plan, self._runs[number][0]))
        return (
            dict(zip(("panel", "method", "settings"), self._key(number)))
            | {
                "metric": metric,
                "mean": spread.mean if spread else "",
                "deviation": spread.deviation if spread and spread.deviation is not None else "",
                "runs": len(runs),
                "diverged": sum(not run.is_complete for run in runs),
                "seeds": " ".join(map(str, self._seeds)),
                "chosen": "",
                WITH: algorithm_text(runs[0].settings) + (self._before and AFTER + self._before),
            }
            | {name: known.get(name, "") for name in FACTS}
        )


AFTER = "; after "  # in the column `WITH`, before the command of the run whose model the others use


def _usual_metric(runs):
    try:
        return usual_metric(runs)
    except UserError:
        raise UserError(
            "tune.metric is missing: no run measured held-out data: expected train_loss, of an attack its objective"
        ) from None


def _choose(rows, metric):
    """Mark the best of a method's rows, all of whose runs have ended, as chosen; one that diverged cannot be."""
    sign = 1 if less_is_better(metric) else -1
    usable = [
        row for row in rows if not int(row["diverged"]) and row["mean"] != "" and math.isfinite(float(row["mean"]))
    ]
    if usable:
        min(usable, key=lambda row: sign * float(row["mean"]))["chosen"] = "yes"
