"""The best settings of a sweep, chosen by a metric on held-out training data."""

import csv
import dataclasses
import math

from fedmpi.cli.comparison import Spread
from fedmpi.config.grammar import read_file
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import replacing
from fedmpi.ground.files.run_files import SETTINGS
from fedmpi.ground.files.settings_files import settings_text
from fedmpi.ground.text import Table
from fedmpi.runs.folder import outcome, read_run
from fedmpi.runs.record import HELD_OUT, is_beside, less_is_better, title
from fedmpi.training.settings import RunSettings

# Measured on training data; every other metric may come from the test set.
ALLOWED = ("train_loss", "loss")
BEST_OF = "# The best of a sweep:"  # begins the file of the best settings
# All data are trained on, so that nothing can be chosen on held-out data; threads were right for what else ran then.
IN_BEST = {"holdout": 0.0, "baselines_step_sizes": None, "threads": None}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One configuration of a sweep with the runs of its seeds.

    Attributes:
        varied: setting -> text. spread: `Spread` of the metric over the complete runs, or None.
        num_runs: planned. num_diverged: of these. path: folder of a complete one, or None.
    """

    varied: dict
    spread: Spread | None
    num_runs: int
    num_diverged: int
    path: object

    @property
    def is_complete(self):
        """Whether every planned run is complete."""
        return self.spread is not None and len(self.spread.values) == self.num_runs

    @property
    def label(self):
        return ", ".join(f"{key} {word}" for key, word in self.varied.items()) or "the only configuration"


def may_choose(name):
    """Whether a metric is measured on training data."""
    return name.startswith(HELD_OUT) or name in ALLOWED


def check_metric(name):
    """Check that settings may be chosen by a metric.

    Raises:
        UserError: if it may have been measured on the test set.
    """
    if not may_choose(name):
        raise UserError(
            f"--metric {name}: settings are chosen by a metric on training data, never by the test set: "
            f"expected holdout_accuracy, holdout_loss, ... or {', '.join(ALLOWED)}"
        )


def usual_metric(runs):
    """The metric by which to choose by default: one on held-out data, the loss only if no run has another.

    Raises:
        UserError: if no run has one.
    """
    names = [name for run in runs for name in run.metrics if name.startswith(HELD_OUT) and not is_beside(name)]
    if not names:
        raise UserError("no run measured held-out data: sweep with --holdout 0.1, or choose with --metric train_loss")
    return next((name for name in names if name != "holdout_loss"), names[0])


def ended_runs(plan):
    """The `RunFolder`s of a plan's complete runs: name of the `Planned` run -> folder."""
    return {run.name: read_run(plan.folder(run)) for run in plan.runs if outcome(plan.folder(run)) == "complete"}


def rank(plan, metric, ended):
    """Every configuration of a plan as a `Candidate`, the best first by a metric; `ended`: see `ended_runs`.

    Configurations with a run that diverged or is missing come last.
    """
    groups = {}
    for run in plan.runs:
        groups.setdefault(run.configuration, []).append(run)
    candidates = [_candidate(plan, dict(key), runs, metric, ended) for key, runs in groups.items()]

    def position(candidate):
        mean = candidate.spread.mean if candidate.spread else math.nan
        is_value = math.isfinite(mean)
        return not (candidate.is_complete and is_value), not is_value, mean if less_is_better(metric) else -mean

    return sorted(candidates, key=position)


def _candidate(plan, varied, runs, metric, ended):
    folders = [ended[run.name] for run in runs if run.name in ended]
    values = tuple(value for folder in folders if (value := folder.final(metric)) is not None)
    diverged = sum(outcome(plan.folder(run)) == "diverged" for run in runs)
    path = folders[0].path if folders else None
    return Candidate(varied, Spread(values) if values else None, len(runs), diverged, path)


def best_of_each_algorithm(candidates):
    """Algorithm's name -> its best `Candidate`; {} if the sweep does not vary the algorithm."""
    best = {}
    for candidate in candidates:
        if "algorithm" in candidate.varied and candidate.spread:
            best.setdefault(candidate.varied["algorithm"], candidate)
    return best


def candidate_table(candidates, metric):
    """The candidates as a `Table`, best first."""
    keys = list(dict.fromkeys(key for candidate in candidates for key in candidate.varied))
    rows = []
    for candidate in candidates:
        value = str(candidate.spread) if candidate.spread else "–"
        number = len(candidate.spread.values) if candidate.spread else 0
        runs = str(number) if number == candidate.num_runs else f"{number} of {candidate.num_runs}"
        runs += f", {candidate.num_diverged} diverged" if candidate.num_diverged else ""
        rows.append([*(candidate.varied.get(key, "") for key in keys), runs, value])
    return Table([*keys, "runs", title(metric)], rows, frozenset({(0, len(keys) + 1)}))


def write_candidates(path, candidates, metric):
    """The candidates as CSV, best first."""
    keys = list(dict.fromkeys(key for candidate in candidates for key in candidate.varied))
    header = ["standard deviation", "lowest", "highest", "runs that ended", "runs", "diverged"]
    with replacing(path, ",".join(header).encode()) as part, open(part, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow([*keys, metric, *header])
        for candidate in candidates:
            spread, numbers = candidate.spread, ["", "", "", "", 0]
            if spread:
                deviation = "" if spread.deviation is None else spread.deviation
                numbers = [spread.mean, deviation, min(spread.values), max(spread.values), len(spread.values)]
            settings = [candidate.varied.get(key, "") for key in keys]
            lines.writerow([*settings, *numbers, candidate.num_runs, candidate.num_diverged])


def write_best(path, candidate, metric):
    """A settings file that trains with the candidate's settings on all training data."""
    settings = read_file(candidate.path / SETTINGS)
    left_out = {"seed", *RunSettings.marked("each_start")}
    settings = {key: value for key, value in settings.items() if key not in left_out} | IN_BEST
    words = f"{BEST_OF} {candidate.label}\n# {title(metric)}: {candidate.spread}"
    text = f"{words}, {len(candidate.spread.values)} runs\n{settings_text(settings)}"
    with replacing(path, BEST_OF.encode()) as part:
        part.write_text(text, encoding="utf-8")
