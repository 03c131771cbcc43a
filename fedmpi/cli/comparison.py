"""Runs sorted into problems, methods and repetitions, by the roles of the settings in which they differ."""

import collections
import dataclasses
import functools
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fedmpi.ground.text import format_metric
from fedmpi.runs.folder import RunFolder
from fedmpi.runs.record import title
from fedmpi.training.settings import RunSettings


@dataclasses.dataclass(frozen=True)
class Spread:
    """Several runs' values of one field; `values` is never empty."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """The sample's standard deviation; None for a single value, nan if one is not finite."""
        if len(self.values) == 1:
            return None
        return statistics.stdev(self.values) if all(map(math.isfinite, self.values)) else math.nan

    def __str__(self) -> str:
        return format_metric(self.mean, self.deviation)


@dataclasses.dataclass(frozen=True)
class Method:
    """Runs that differ only in settings of the roles seed, speed and place.

    Attributes:
        label: what distinguishes it from the other methods of its problem.
        runs: its `RunFolder`s. settings: of the first.
    """

    label: str
    runs: list[RunFolder]

    @property
    def settings(self) -> dict[str, Any]:
        return self.runs[0].settings

    @property
    def seeds(self) -> dict[int, RunFolder]:
        """Seed -> its run: the same seed twice is no second sample; of several, the one that came furthest counts."""
        runs: dict[int, RunFolder] = {}
        for run in self.runs:
            seed = run.settings.get("seed", 0)
            runs[seed] = max(runs.get(seed, run), run, key=lambda of_seed: (of_seed.is_complete, len(of_seed.records)))
        return runs


@dataclasses.dataclass(frozen=True)
class Problem:
    """What several methods were run on: one task with its data, their partition, and a model.

    Attributes:
        label: a few words. methods: list of `Method`. titles: name of a metric -> words in place of `record.title`'s.
    """

    label: str
    methods: list[Method]
    titles: dict[str, str] = dataclasses.field(default_factory=dict)

    def title(self, metric: str) -> str:
        """What tables and figures call a metric."""
        return self.titles.get(metric) or title(metric)

    def renamed(self, labels: dict[str, str]) -> "Problem":
        """The same, with other names: a method's label or the first part of it, or a metric's name -> words."""

        def words(label: str) -> str:
            first, comma, rest = label.partition(", ")
            return labels.get(label) or labels.get(first, first) + comma + rest

        methods = [dataclasses.replace(method, label=words(method.label)) for method in self.methods]
        return Problem(self.label, methods, labels)


def problems(runs: Sequence[RunFolder]) -> list[Problem]:
    """Runs sorted into problems and methods, a list of `Problem`."""
    by_name = _sort_by(runs, lambda run: problem_name(run.settings))
    return [problem for group in by_name for problem in _problems_of_a_name(group)]


def distinguishes_methods(key: str) -> bool:
    """Whether runs that differ in a setting are different methods, or even problems."""
    return RunSettings.role(key) in ("learning", "problem")


def problem_name(settings: dict[str, Any]) -> str:
    """The data set and how it is split, as a short text."""
    data = settings.get("task.data")
    name = str(settings.get("task", "?")) if data is None else pathlib.PurePath(str(data)).name.removesuffix(".h5")
    return ", ".join(str(word) for word in (name, settings.get("partition"), settings.get("model")) if word)


def setting_in_words(key: str, value: object) -> str:
    """A setting as text, like "step_size 0.01" or "private none"."""
    return f"{key.rpartition('.')[2]} {'none' if value is None else value}"


def _problems_of_a_name(runs: Sequence[RunFolder]) -> list[Problem]:
    """The `Problem`s of runs whose `problem_name` is the same."""
    keys = [key for key in _common(runs) if RunSettings.role(key) == "problem"]
    groups = _sort_by(runs, functools.partial(_values, keys=keys))
    differing = _differing(groups, keys)
    return [Problem(_label(problem_name(group[0].settings), group, differing), _methods(group)) for group in groups]


def _common(runs: Sequence[RunFolder]) -> list[str]:
    """The settings present in every run, so that one added later does not split older runs."""
    return [key for key in runs[0].settings if all(key in run.settings for run in runs)]


def _label(name: str, group: Sequence[RunFolder], keys: Iterable[str]) -> str:
    """A name, and the settings `keys` of a group of runs, as text."""
    return ", ".join([name, *(setting_in_words(key, group[0].settings[key]) for key in keys)])


def _methods(runs: Sequence[RunFolder]) -> list[Method]:
    """The methods of a problem; if any two differ in a run's own setting, all labels name it."""
    own = [key for key in _common(runs) if "." not in key and distinguishes_methods(key) and key != "algorithm"]
    own = _differing([[run] for run in runs], own)
    methods: list[Method] = []
    for of_algorithm in _sort_by(runs, _algorithm):
        keys = [key for key in _common(of_algorithm) if distinguishes_methods(key)]
        groups = _sort_by(of_algorithm, functools.partial(_values, keys=keys))
        differing = dict.fromkeys([*own, *_differing(groups, keys)])
        methods += [Method(_label(_algorithm(group[0]), group, differing), group) for group in groups]
    return methods


def _algorithm(run: RunFolder) -> str:
    return str(run.settings.get("algorithm", "?"))


def _sort_by(runs: Sequence[RunFolder], key: Callable[[RunFolder], object]) -> list[list[RunFolder]]:
    """Lists of the runs for which the function `key` is the same, in the order of their first."""
    groups: dict[object, list[RunFolder]] = collections.defaultdict(list)
    for run in runs:
        groups[key(run)].append(run)
    return list(groups.values())


def _values(run: RunFolder, keys: Iterable[str]) -> str:
    """The values of some settings of a run, as text that can be compared."""
    return json.dumps([run.settings[key] for key in keys], default=str)


def _differing(groups: Sequence[Sequence[RunFolder]], keys: Iterable[str]) -> list[str]:
    """Those of `keys` in which the first runs of the groups differ."""
    return [key for key in keys if len({_values(group[0], [key]) for group in groups}) > 1]
