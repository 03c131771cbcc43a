"""Run folders as they are read after, or during, a run: settings and records."""

import dataclasses
import json
import math
import pathlib

import yaml

from fedmpi.config.words import flatten
from fedmpi.errors import UserError
from fedmpi.presets import is_paper
from fedmpi.runs.record import CLOCKS, COUNTS


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """One run folder.

    Attributes:
        path: a `pathlib.Path`.
        settings: key -> value, flat: "rounds", "algorithm" (its name), "algorithm.step_size", ...
        records: dicts of numbers, one per round, in order.
        is_complete: whether the run ended and left its model. diverged: why it did not, or "".
        paper: what a preset says of the paper's result, or {}.
    """

    path: pathlib.Path
    settings: dict
    records: list
    is_complete: bool
    diverged: str
    paper: dict

    @property
    def metrics(self):
        """Names of what the run measured, in the order of their first record."""
        names = dict.fromkeys(name for record in self.records for name in record)
        return [name for name in names if name not in COUNTS and name not in CLOCKS]

    def final(self, metric):
        """The last value of a metric, or None."""
        return next((record[metric] for record in reversed(self.records) if metric in record), None)

    def num_rounds(self):
        """How many rounds the run was to have; None where its settings do not say (--epochs)."""
        return self.settings.get("rounds") if self.settings.get("epochs") is None else None


def is_run(folder):
    """Whether a folder looks like a run folder."""
    return (folder / "settings.yaml").is_file()


def is_complete(folder):
    """Whether the run of a folder came to its end and left its model there."""
    return (folder / "model.pt").is_file()


def read_run(folder):
    """The `RunFolder` of a `pathlib.Path`.

    Raises:
        UserError: one line: what is wrong with the folder.
    """
    if not folder.exists():
        raise UserError(f"{folder}: no such folder")
    if not is_run(folder):
        raise UserError(f"{folder}: not a run folder (no settings.yaml in it)")
    settings, paper = _read_settings(folder / "settings.yaml")
    records = _read_records(folder / "metrics.jsonl")
    note = folder / "diverged.txt"
    diverged = note.read_text(encoding="utf-8").strip() if note.is_file() else ""
    return RunFolder(folder, settings, records, is_complete(folder), diverged, paper)


def find_runs(paths):
    """All runs in folders that are run folders or hold some.

    Args:
        paths: list of `pathlib.Path`.

    Returns:
        (list of `RunFolder` with at least one record, list of one line for each that is not usable).
    """
    runs, complaints = [], []
    for folder in dict.fromkeys(inner for path in paths for inner in run_folders(path)):
        try:
            run = read_run(folder)
            if not run.records:
                raise UserError(f"{folder}: no round is recorded{f' ({run.diverged})' if run.diverged else ' yet'}")
            runs.append(run)
        except UserError as error:
            complaints.append(str(error))
    return runs, complaints


def run_folders(path):
    """The run folders among the folders in `path`; `path` itself if it is one or holds none."""
    if is_run(path) or not path.is_dir():
        return [path]
    return sorted(inner for inner in path.iterdir() if is_run(inner)) or [path]


def _read_settings(path):
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected settings, one a line")
    paper = content.pop("paper", None) or {}
    if not is_paper(paper):
        raise UserError(f"{path}: paper: expected source, printed and methods as in a preset")
    settings = flatten({str(key): value for key, value in content.items()})
    _check_settings(path, settings)
    return settings, paper


def _check_settings(path, settings):
    """See that the settings by which runs are sorted, named and timed are what they should be."""
    for keys, kind, words in ((("algorithm", "task"), str, "a name"), (("rounds", "seed"), int, "a whole number")):
        for key in keys:
            if key in settings and type(settings[key]) is not kind:
                raise UserError(f"{path}: {key} = {settings[key]!r}: expected {words}")


def _read_records(path):
    """The records of metrics.jsonl, if it is there; a last line that is still being written is left out."""
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    by_round = {}
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not _is_record(record):
            raise UserError(f"{path}: line {number} is not the record of a round")
        by_round[record["round"]] = {k: v for k, v in record.items() if type(v) in (int, float)}
    return [by_round[number] for number in sorted(by_round)]


def _is_record(record):
    """Whether a line of metrics.jsonl has its round, and counts and times that are numbers >= 0."""
    if not isinstance(record, dict) or type(record.get("round")) is not int or record["round"] < 1:
        return False
    amounts = [record[key] for key in COUNTS + CLOCKS if key in record]
    return all(type(amount) in (int, float) and 0 <= amount < math.inf for amount in amounts)
