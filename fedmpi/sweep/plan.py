"""Which runs a sweep consists of: every point of a grid, or a list of settings, and a name for each."""

import dataclasses
import itertools
import json
import pathlib
import re

import yaml

from fedmpi.config.words import flatten
from fedmpi.errors import UserError

OWN = ("out", "name", "ranks")  # settings of a run that the sweep gives itself


@dataclasses.dataclass(frozen=True)
class Planned:
    """One run to be made.

    Attributes:
        name: of its folder. varied: setting -> word, of what differs between the runs.
    """

    name: str
    varied: dict

    @property
    def configuration(self):
        """What is varied but for the seed, as a hashable."""
        return tuple((key, word) for key, word in self.varied.items() if key != "seed")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A sweep.

    Attributes:
        out: folder of the run folders. common: setting -> word, of all runs. runs: list of `Planned`.
    """

    out: pathlib.Path
    common: dict
    runs: list

    def folder(self, run):
        """The run folder of a `Planned` run."""
        return self.out / run.name

    def words(self, run):
        """The words behind ``python -m fedmpi.train`` that make a run."""
        settings = {**self.common, **run.varied, "out": str(self.out), "name": run.name}
        return [f"--{key}={word}" for key, word in settings.items()]


def make_plan(out, file, grid, common):
    """The `Plan` from a file and the command line; the command line goes first.

    Args:
        out: folder of the run folders. file: path of a YAML file, or None.
        grid: texts like "algorithm.step_size=0.001,0.003". common: words like "--rounds", "20".

    Raises:
        UserError: one line: what came, what was expected.
    """
    content = _read(file) if file else {}
    axes = {_key(key): _values(key, values) for key, values in flatten(content.get("grid", {})).items()}
    axes |= dict(_axis(text) for text in grid)
    points = [_words(point) for point in content.get("list", [{}])]
    shared = _words(content.get("settings", {})) | _settings(common)
    shared = {key: word for key, word in shared.items() if key not in axes}
    if not axes and points == [{}]:
        raise UserError("nothing to vary: give --grid algorithm.step_size=0.001,0.01 --grid seed=0,1,2 or a --plan")
    for key in [*axes, *shared, *(key for point in points for key in point)]:
        if key in OWN:
            raise UserError(f"{key}: is not a setting of the sweep's runs; the sweep gives it itself (see --help)")
    varied = [point | dict(zip(axes, words)) for point in points for words in itertools.product(*axes.values())]
    return Plan(out, shared, [Planned(name, settings) for name, settings in zip(_names(varied), varied)])


def _read(path):
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"--plan {path}: cannot be read: {' '.join(str(error).split())}") from None
    kinds = {"settings": dict, "grid": dict, "list": list}
    if not isinstance(content, dict) or any(not isinstance(v, kinds.get(k, ())) for k, v in content.items()):
        raise UserError(f"--plan {path}: expected 'settings:' and 'grid:' with settings in them, or a 'list:' of them")
    if not all(isinstance(point, dict) for point in content.get("list", [])):
        raise UserError(f"--plan {path}: list: expected settings in each line, like - {{seed: 0}}")
    return content


def _words(settings):
    """Setting -> word from a dict as in a settings file."""
    return {_key(key): _word(value) for key, value in flatten(settings).items()}


def _axis(text):
    """(setting, words) from "seed=0,1,2"; commas inside brackets belong to a value."""
    key, equals, values = text.partition("=")
    words = [word.strip() for word in re.split(r",(?![^\[({]*[\])}])", values)]
    if not equals or not key or not all(words):
        raise UserError(f"--grid {text}: expected a setting and its values, like algorithm.step_size=0.001,0.01")
    return _key(key), list(dict.fromkeys(words))


def _values(key, values):
    if not isinstance(values, list) or not values:
        raise UserError(f"grid: {key}: expected a list of values, like [0.001, 0.01]")
    return list(dict.fromkeys(map(_word, values)))


def _settings(words):
    """Setting -> word from the words of a command line."""
    settings, rest = {}, list(words)
    while rest:
        key, equals, word = rest.pop(0).partition("=")
        if not key.startswith("--"):
            raise UserError(f"'{key}': expected an option, like --rounds 100 (see --help)")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"{key}: expected a value after it")
            word = rest.pop(0)
        settings[_key(key[2:])] = word
    return settings


def _key(text):
    return str(text).strip().removeprefix("--").replace("-", "_")


def _word(value):
    return value if isinstance(value, str) else json.dumps(value)


def _names(points):
    """A folder name per point: what varies, in short, like "step_size=0.01,seed=0"; all different."""
    keys = list(dict.fromkeys(key for point in points for key in point))
    ends = [key.rpartition(".")[2] for key in keys]
    short = {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends)}
    names = []
    for point in points:
        name = re.sub(r"[^\w.,=+-]+", "_", ",".join(f"{short[key]}={word}" for key, word in point.items()))[:200]
        while name in names:
            name += "+"
        names.append(name)
    return names
