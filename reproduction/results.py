"""Results in CSV files: every evaluated round of every run, and every run with how it was made.

Pages, figures and the summary are made from these files alone.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import shlex
import sys

from fedmpi.cli.comparison import Method
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.run_files import RECORDS
from fedmpi.ground.settings import nearest
from fedmpi.ground.text import short
from fedmpi.runs.folder import RunFolder, outcome, read_run
from fedmpi.runs.record import AMOUNTS, title
from reproduction.csv_files import RESTORE, damaged, number_of, read_rows, whole_number, write_tables
from reproduction.experiment import find_experiments, state_of
from reproduction.running import FIRST_RUN, command_of, decisive_settings, provenance

KEYS = ("panel", "method", "seed")
FACTS = (
    "cpu_seconds", "wall_seconds", "ranks", "threads", "cores", "processor", "torch", "commit", "date", "command",
    "made_by",
)  # fmt: skip
RUN_COLUMNS = (*KEYS, "state", "rounds", "gradients", "settings", *FACTS)
FIRST_COLUMNS = ("rounds", "values", *FACTS)
ALGORITHM = "algorithm."  # begins the names of the algorithm's settings
PERIODS = ("m_every", "v_every")  # of averages of a row, in rounds
CURVE_AMOUNTS = ("round", "iteration", "bytes", "gradients", "seconds")
STATES = ("complete", "diverged")
DERIVED = {"training_perplexity": "train_loss"}  # metrics that are computed from another one, and are in no file


@dataclasses.dataclass(frozen=True)
class Results:
    """What was measured of an experiment at a scale.

    Attributes:
        runs: list of dict, a row of the runs' file each. panels: panel -> list of `Method` in the file's order.
        firsts: the rows of the run before all others: one, or none, or several if it was made again for a further seed
            and came out differently.
        elsewhere: name -> `Results` at this scale of the other experiments that the claims name, or None.
    """

    runs: list
    panels: dict
    firsts: list = dataclasses.field(default_factory=list)
    elsewhere: dict = dataclasses.field(default_factory=dict)

    def method(self, panel, name):
        """The `Method` of that name, or None."""
        return next((one for one in self.panels.get(panel, []) if one.label == name), None)

    def only(self, seeds):
        """The same of some seeds alone; `runs` and `firsts` stay."""

        def of_method(method):
            return Method(method.label, [run for run in method.runs if run.settings["seed"] in seeds])

        panels = {name: list(map(of_method, methods)) for name, methods in self.panels.items()}
        elsewhere = {name: its and its.only(seeds) for name, its in self.elsewhere.items()}
        return dataclasses.replace(self, panels=panels, elsewhere=elsewhere)

    def of_seeds_in(self, other):
        """The same of the seeds of other `Results` alone, if it has them all; else itself."""
        return self.only({int(seed) for seed in other.seeds}) if {*other.seeds} < {*self.seeds} else self

    @property
    def seeds(self):
        """All seeds, as text."""
        return sorted({row["seed"] for row in self.runs}, key=int)


def paths(folder, experiment, scale):
    """(file of the curves, of the runs, of the run before them) of an experiment."""
    stem = folder / scale / experiment.name
    return tuple(stem.with_name(f"{stem.name}{word}.csv") for word in ("", "-runs", "-first"))


def grid_path(results, name, scale):
    """The CSV file of an experiment's grids."""
    return results / "tuning" / (f"{name}.csv" if scale == "small" else f"{name}-{scale}.csv")


def write_results(folder, experiment, scale, planning, adds=False):
    """Write what the runs of a plan measured; returns the names of runs that did not end, which are left out.

    Args:
        adds: whether the files keep what they have of runs that are not planned; see `left_to_make`. If not, the old
            files are kept under other names if they have other seeds.

    Raises:
        UserError: if no run has ended, or a file cannot be written.
    """
    ended = [run for run in planning.plan.runs if outcome(planning.plan.folder(run)) in STATES]
    if planning.plan.runs and not ended:
        raise UserError(f"{planning.plan.out}: no run has ended; its .log files contain what the runs printed")
    curves, rows = [], []
    for run in ended:
        point, seed = planning.points[run.name]
        record = _read_ended(planning.plan.folder(run))
        key = {"panel": point.panel, "method": point.method, "seed": str(seed)}
        rows.append(key | _row(record))
        evaluated = [line for line in record.records if set(line) - {*AMOUNTS, "loss"}]
        curves += [key | {name: _text(value) for name, value in _columns(line)} for line in evaluated]
    curves_path, runs_path, first_path = paths(folder, experiment, scale)
    firsts = [_first(_read_ended(planning.first.folder(planning.first.runs[0])))] if planning.first else []
    kept = _not_planned(runs_path, planning) if adds else []
    if kept:
        curves = _in_order(experiment, scale, _not_planned(curves_path, planning) + curves)
        rows = _in_order(experiment, scale, kept + rows)
        values = [row["values"] for row in firsts]
        firsts = [row for row in read_rows(first_path, FIRST_COLUMNS) if row["values"] not in values] + firsts
    metrics = dict.fromkeys(name for line in curves for name in line if name not in (*KEYS, *CURVE_AMOUNTS))
    _check_measured(experiment, rows, metrics)
    if not adds and other_seeds(folder, experiment, scale, planning):
        keep_old([curves_path, runs_path, first_path])
    files = [(curves_path, [*KEYS, *CURVE_AMOUNTS, *metrics], curves), (runs_path, RUN_COLUMNS, rows)]
    if firsts or first_path.is_file():
        files.append((first_path, FIRST_COLUMNS, firsts))
    write_tables(*files)
    return [run.name for run in planning.plan.runs if run not in ended]


def _read_ended(folder):
    """The `RunFolder` of a run that has ended.

    Raises:
        UserError: if it is complete, and its records are not there.
    """
    record = read_run(folder)
    if record.is_complete and not record.records:
        raise UserError(f"{folder / RECORDS}: no round is recorded: restore the file, or move the folder elsewhere")
    return record


def other_seeds(folder, experiment, scale, planning):
    """The seeds that the files have and that are not planned, as text."""
    rows = _of_other_seeds(paths(folder, experiment, scale)[1], planning)
    return sorted({row["seed"] for row in rows}, key=int)


def keep_old(files):
    """Copy files that are going to be replaced to the first free one of NAME.1.old, NAME.2.old, ..."""
    for path in (path for path in files if path.is_file()):
        names = (path.with_name(f"{path.name}.{number}.old") for number in itertools.count(1))
        new = next(name for name in names if not os.path.lexists(name))
        try:
            with open(new, "xb") as file:
                file.write(path.read_bytes())
        except OSError as error:
            raise UserError(f"{new}: cannot be written: {error.strerror}") from None


def _check_measured(experiment, rows, metrics):
    """Check that every metric that an experiment's file names was measured, if a run is complete.

    Args:
        rows: of the runs' file. metrics: names of what the runs measured.

    Raises:
        UserError: if one was not.
    """
    if all(row["state"] == "diverged" for row in rows):
        return
    named = [("metric", experiment.metric), ("printed.metric", experiment.printed.get("metric"))]
    named += [("figure.metrics", name) for name in experiment.figure.get("metrics", [])]
    named += [("claims", claim.get("metric")) for claim in experiment.claims]
    for key, name in [(key, DERIVED.get(name, name)) for key, name in named]:
        if name and name not in (*metrics, "loss"):
            raise UserError(
                f"{experiment.name}: {key}: no run measured {name}{nearest(name, metrics)} (measured: "
                f"{', '.join(metrics) or 'nothing'}): mend the experiment's file; the runs are kept"
            )


def left_to_make(folder, experiment, scale, planning):
    """The `Planning` without the runs that the files have, made with the same settings.

    Raises:
        UserError: if the files have runs that were made with other settings, and are not planned.
    """
    made = read_results(folder, experiment, scale)
    _, path, first_path = paths(folder, experiment, scale)
    command = command_of(planning.first, planning.first.runs[0]) if planning.first else ""
    for row in made.firsts if made and planning.first else []:
        if _settings_of_command(row["command"]) != _settings_of_command(command):
            raise UserError(
                f"--add: {first_path}: the run '{FIRST_RUN}' whose model the others use was made with other settings "
                "than the experiment has now: make all seeds again, without --add"
            )
    commands = {}
    for run in planning.plan.runs:
        point, _ = planning.points[run.name]
        commands.setdefault((point.panel, point.method), command_of(planning.plan, run))
    planned, kept = _keys(planning), set()
    for row in made.runs if made else []:
        key = tuple(row[name] for name in KEYS)
        command = commands.get(key[:2])
        if command is None:
            raise UserError(
                f"--add: {path}: has {row['method']} on {row['panel']}, which the experiment does not have now: "
                "leave out --add, to make all seeds again"
            )
        if is_made_with(row, command):
            kept.add(key)
        elif key not in planned:
            raise UserError(
                f"--add: {path}: seed {row['seed']} of {row['method']} was made with other settings than the "
                "experiment has now: make it again as well (--seeds), or leave out --add to drop it"
            )
    left = [run for run in planning.plan.runs if _key(planning, run.name) not in kept]
    plan = dataclasses.replace(planning.plan, runs=left)
    points = {run.name: planning.points[run.name] for run in left}
    return dataclasses.replace(planning, plan=plan, points=points, first=planning.first if left else None)


def is_made_with(row, command):
    """Whether a row of the runs' file was made with the settings of a command, but for the seed."""
    wanted = _settings_of_command(command)
    # The algorithm's are compared with those that the run recorded: a preset's values may have changed since then.
    todays = algorithm_text({key: json.loads(text) for key, text in wanted.items()})
    if row["settings"] != todays:
        return False
    try:
        made = _settings_of_command(row["command"])
    except UserError:  # a setting or preset of the recorded command is no more
        return False
    return _without_algorithm(made) == _without_algorithm(wanted)


@functools.cache
def _settings_of_command(command):
    """The settings of a run's command that decide what it measures, without its seed: name -> value as JSON text.

    How the model is compiled changes rounding only, as another processor does.
    """
    its = decisive_settings(shlex.split(command)[3:])  # without python -m fedmpi.train
    return {key: text for key, text in its.items() if key not in ("seed", "oracle.compile")}


def _without_algorithm(settings):
    return {key: one for key, one in settings.items() if not key.startswith(ALGORITHM)}


def _of_other_seeds(path, planning):
    """The rows of a results file whose seeds are not planned."""
    seeds = {seed for _, seed in planning.points.values()}
    rows = enumerate(read_rows(path, KEYS), 1)
    return [row for number, row in rows if whole_number(path, number, row, "seed") not in seeds]


def _not_planned(path, planning):
    """The rows of a results file whose runs are not planned."""
    planned = _keys(planning)
    return [row for row in read_rows(path, KEYS) if tuple(row[name] for name in KEYS) not in planned]


def _keys(planning):
    """The `KEYS` of all planned runs, as they are in the files."""
    return {_key(planning, name) for name in planning.points}


def _key(planning, name):
    point, seed = planning.points[name]
    return point.panel, point.method, str(seed)


def _in_order(experiment, scale, rows):
    """Rows by seed, and those of a seed as the experiment has them; those of a run keep their order."""
    order = {(point.panel, point.method): number for number, point in enumerate(experiment.points(scale))}
    return sorted(rows, key=lambda row: (int(row["seed"]), order[row["panel"], row["method"]]))


def _first(record):
    """The row of the run before all others, with what was measured at its end."""
    last = record.records[-1]
    values = [f"{title(name)} {value:.4f}" for name, value in last.items() if name not in (*AMOUNTS, "loss", "clients")]
    return {"rounds": last["round"], "values": ", ".join(values)} | _facts(record)


def _columns(line):
    """[(name, value)] of a record that the file of the curves has."""
    return [(name, value) for name, value in line.items() if name in CURVE_AMOUNTS or name not in AMOUNTS]


def _row(record):
    """The columns of one run in the file of the runs."""
    last = record.records[-1] if record.records else {}
    state = "complete" if record.is_complete else "diverged"
    row = {"state": state, "rounds": last.get("round", 0), "gradients": last.get("gradients", "")}
    row["settings"] = algorithm_text(record.settings)
    return row | _facts(record)


def _facts(record):
    """How a run was made; what is not known is empty."""
    known = provenance(record.path)
    return {name: "" if known.get(name) is None else known[name] for name in FACTS}


def algorithm_text(settings):
    """The algorithm's settings as text, like "step_size 0.1, momentum 0.9".

    A schedule is there only if it changes the step, a row's period only if it is not every round.
    """
    its = {key.removeprefix(ALGORITHM): value for key, value in settings.items() if key.startswith(ALGORITHM)}
    if its.get("schedule") == "constant":
        its = {name: value for name, value in its.items() if not name.startswith("schedule")}
    every_round = {name for name in PERIODS if its.get(name) == 1}
    return ", ".join(f"{name} {value}" for name, value in its.items() if value is not None and name not in every_round)


def _text(value):
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _missing(path, other):
    """The `UserError` about a file that is not there although the other one of the same runs is."""
    return UserError(
        f"{path}: is missing, but {other.name} is there: restore it (git checkout), or remove {other.name} as well and "
        "make the runs again"
    )


def read_results(folder, experiment, scale):
    """The `Results` of an experiment, or None if it was not run at this scale.

    Raises:
        UserError: if a file is damaged or missing, or is from a scale that the experiment does not have.
    """
    found = _read_own(folder, experiment, scale)
    others = sorted({claim["experiment"] for claim in experiment.claims if "experiment" in claim})
    if not found or not others:
        return found
    elsewhere = {one.name: _read_own(folder, one, scale) for one in find_experiments(others)}
    return dataclasses.replace(found, elsewhere=elsewhere)


def _read_own(folder, experiment, scale):
    """`read_results` without the results of other experiments; files are read again only if they have changed."""
    files = paths(folder, experiment, scale)
    return _read_files(files, scale, scale in experiment.scales, tuple(map(state_of, files)))


@functools.cache
def _read_files(files, scale, is_known, states):
    curves_path, runs_path, first_path = files
    if not runs_path.is_file():
        if curves_path.is_file():
            raise _missing(runs_path, curves_path)
        return None
    if not is_known:
        raise UserError(f"{runs_path}: the experiment's file has no scale {scale} (any more): remove these results")
    if not curves_path.is_file():
        raise _missing(curves_path, runs_path)
    rows = read_rows(runs_path, RUN_COLUMNS)
    if not rows:
        raise damaged(runs_path, 1, "no run")
    runs = {}  # panel, method and seed -> `RunFolder`
    for number, row in enumerate(rows, 1):
        key = tuple(row[name] for name in KEYS)
        if key in runs:
            raise damaged(runs_path, number, f"seed {row['seed']} of {row['method']} on {row['panel']} is there twice")
        if row["state"] not in STATES:
            raise damaged(runs_path, number, f"state: expected one of {', '.join(STATES)}, not {row['state']}")
        settings = {"algorithm": row["method"], "seed": whole_number(runs_path, number, row, "seed")}
        _check_seconds(runs_path, number, row)
        is_complete = row["state"] == "complete"
        runs[key] = RunFolder(pathlib.Path(*key), settings, [], is_complete, "" if is_complete else row["state"], {})
    _add_curves(curves_path, runs)
    for row, run in zip(rows, runs.values()):
        last = run.records[-1]["round"] if run.records else 0
        if run.is_complete and (not last or row["rounds"] != str(last)):
            where = f"seed {row['seed']} of {row['method']} on {row['panel']}"
            raise UserError(f"{curves_path}: {where} ends at round {last} instead of {row['rounds']}: {RESTORE}")
    firsts = read_rows(first_path, FIRST_COLUMNS)
    for number, row in enumerate(firsts, 1):
        _check_seconds(first_path, number, row)
    panels = {}
    for (panel, method, _), run in runs.items():
        panels.setdefault(panel, {}).setdefault(method, []).append(run)
    methods = {panel: [Method(name, its) for name, its in methods.items()] for panel, methods in panels.items()}
    return Results(rows, methods, firsts)


def _add_curves(path, runs):
    """Add the rows of the file of the curves to the records of their runs.

    Args:
        runs: (panel, method, seed) -> `RunFolder`.
    """
    for number, row in enumerate(read_rows(path, (*KEYS, *CURVE_AMOUNTS)), 1):
        run = runs.get(tuple(row[name] for name in KEYS))
        if run is None:
            raise damaged(path, number, f"the file of the runs has no seed {row['seed']} of {row['method']}")
        last = run.records[-1]["round"] if run.records else 0
        if whole_number(path, number, row, "round") <= last:
            raise damaged(path, number, f"round {row['round']} comes after round {last}")
        try:
            record = {name: number_of(text) for name, text in row.items() if text and name not in KEYS}
        except ValueError as error:
            raise damaged(path, number, f"expected numbers: {error}") from None
        if "perplexity" in record and "train_loss" in record:  # a language model
            is_small = record["train_loss"] < math.log(sys.float_info.max)
            record["training_perplexity"] = math.exp(record["train_loss"]) if is_small else math.inf
        run.records.append(record)


def _check_seconds(path, number, row):
    """Check that the CPU time in row `number` of a CSV file is one, or is empty."""
    try:
        is_right = 0 <= float(row["cpu_seconds"] or 0) < math.inf
    except ValueError:
        is_right = False
    if not is_right:
        raise damaged(path, number, f"cpu_seconds: expected a number, not '{short(row['cpu_seconds'], 50)}'")
