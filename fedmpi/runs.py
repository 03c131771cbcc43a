"""Run folders as they are read after, or during, a run: settings, records, and which runs belong together."""

import collections
import dataclasses
import functools
import json
import math
import pathlib

import yaml

from fedmpi.errors import UserError
from fedmpi.presets import is_paper

# Settings that say how fast a run is and how often it is looked at: what is learned is the same, but for rounding.
PACE = (
    "eval_every", "device", "threads", "transport", "channels_last", "direct_gradients", "fused_update", "tune_malloc",
)  # fmt: skip
# Settings that say where and how a run was made or lies; runs that differ in nothing else are seeds of one method.
PLACES = ("seed", "name", "out", "data_dir", "ranks", *PACE)
# Settings that say what is learned: methods are compared within a problem.
PROBLEM = ("task", "partition", "model")
# What a record counts; everything else in it is a metric.
COUNTS = ("round", "iteration", "bytes", "gradients")
CLOCKS = ("seconds", "local_seconds", "communication_seconds", "evaluation_seconds")


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


@dataclasses.dataclass(frozen=True)
class Method:
    """Runs that differ in their seed, and in where and how fast they were made, only.

    Attributes:
        label: what tells it from the other methods of its problem.
        runs: its `RunFolder`s. settings: of the first.
    """

    label: str
    runs: list

    @property
    def settings(self):
        return self.runs[0].settings


@dataclasses.dataclass(frozen=True)
class Problem:
    """What several methods were run on: one task with its data, their partition, and a model.

    Attributes:
        label: a few words. methods: list of `Method`.
    """

    label: str
    methods: list


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


def flatten(settings):
    """A nested settings dict as key -> value: {"algorithm": {"name": "fafed"}} is {"algorithm": "fafed"}."""
    flat = {}
    for key, value in settings.items():
        if not isinstance(value, dict):
            flat[key] = value
            continue
        for inner, inner_value in value.items():
            flat[key if inner == "name" else f"{key}.{inner}"] = inner_value
    return flat


def problems(runs):
    """Runs sorted into problems, methods and seeds: a list of `Problem`."""
    return [one for like in _sort_by(runs, lambda run: problem_name(run.settings)) for one in _problems_of_a_name(like)]


def _problems_of_a_name(runs):
    keys = [key for key in _common(runs) if key.partition(".")[0] in PROBLEM]
    groups = _sort_by(runs, functools.partial(_chosen, keys=keys))
    differing = _differing(groups, keys)
    return [Problem(_label(problem_name(group[0].settings), group, differing), _methods(group)) for group in groups]


def _common(runs):
    """The settings that all runs know: a newer one tells no problems and no methods apart."""
    return [key for key in runs[0].settings if all(key in run.settings for run in runs)]


def _label(name, group, keys):
    return ", ".join([name, *(say(key, group[0].settings[key]) for key in keys)])


def problem_name(settings):
    """The data set and how it is split, in a few words."""
    data = settings.get("task.data")
    name = str(settings.get("task", "?")) if data is None else pathlib.PurePath(str(data)).name.removesuffix(".h5")
    return ", ".join(str(word) for word in (name, settings.get("partition"), settings.get("model")) if word)


def say(key, value):
    """A setting in words, like "step_size 0.01"."""
    return f"{key.rpartition('.')[2]} {value}"


def _methods(runs):
    """The methods of a problem; a run's own settings are named in all labels where any two methods differ in them."""
    of_a_run = [key for key in _common(runs) if "." not in key and key not in (*PLACES, "algorithm")]
    of_a_run = _differing([[run] for run in runs], of_a_run)
    methods = []
    for like in _sort_by(runs, _algorithm):
        keys = [key for key in _common(like) if key not in PLACES]
        groups = _sort_by(like, functools.partial(_chosen, keys=keys))
        differing = dict.fromkeys([*of_a_run, *_differing(groups, keys)])
        methods += [Method(_label(_algorithm(group[0]), group, differing), group) for group in groups]
    return methods


def _algorithm(run):
    return run.settings.get("algorithm", "?")


def _sort_by(runs, key):
    groups = collections.defaultdict(list)
    for run in runs:
        groups[key(run)].append(run)
    return list(groups.values())


def _chosen(run, keys):
    return json.dumps([run.settings[key] for key in keys], default=str)


def _differing(groups, keys):
    """Those of some keys in which the first runs of groups differ."""
    return [key for key in keys if len({_chosen(group[0], [key]) for group in groups}) > 1]


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
