"""Which runs belong together: problems, methods, seeds."""

import collections
import dataclasses
import functools
import json
import pathlib

# Settings that say how fast a run is and how often it is looked at: what is learned is the same, but for rounding.
PACE = (
    "eval_every", "device", "threads", "transport", "channels_last", "direct_gradients", "fused_update", "tune_malloc",
)  # fmt: skip


# Settings that say where and how a run was made or lies; runs that differ in nothing else are seeds of one method.
PLACES = ("seed", "name", "out", "data_dir", "ranks", *PACE)


# Settings that say what is learned: methods are compared within a problem.
PROBLEM = ("task", "partition", "model")


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
