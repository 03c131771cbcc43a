"""Which runs a sweep consists of: every point of a grid, or a list of settings, and a name for each."""

import dataclasses
import itertools
import math
import pathlib
import re

from fedmpi.config.grammar import SWITCHES, as_text, assignments_of, flatten, parse_command_line, read_file, spelling
from fedmpi.ground.errors import UserError

OWN = ("out", "name", "ranks")  # settings of a run that the sweep sets itself
NOT_FOR_SWEEPS = ("list", *SWITCHES)  # options of fedmpi.train that print something instead of training
MOST_RUNS = 100_000


@dataclasses.dataclass(frozen=True)
class Planned:
    """One run that a sweep consists of.

    Attributes:
        name: of its folder. varied: setting -> text, of what differs between the runs.
    """

    name: str
    varied: dict

    @property
    def configuration(self):
        """What is varied except the seed, as a hashable."""
        return tuple((key, text) for key, text in self.varied.items() if key != "seed")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A sweep.

    Attributes:
        out: folder of the run folders. common: setting -> text, of all runs. runs: list of `Planned`.
    """

    out: pathlib.Path
    common: dict
    runs: list

    def folder(self, run):
        """The run folder of a `Planned` run."""
        return self.out / run.name

    def arguments(self, run):
        """The arguments of ``python -m fedmpi.train`` that make a run."""
        settings = {**self.common, **run.varied, "out": str(self.out), "name": run.name}
        return [f"--{key}={text}" for key, text in settings.items()]


def make_plan(out, file, grid, common):
    """The `Plan` from a file and the command line; the command line overrides the file.

    Args:
        out: folder of the run folders. file: path of a YAML or TOML file, or None.
        grid: texts like "algorithm.step_size=0.001,0.003". common: arguments like "--rounds", "20".

    Raises:
        UserError: one line: what was given, what was expected.
    """
    content = _read(file) if file else {}
    axes = {key: _values(key, values) for key, values in flatten(content.get("grid", {})).items()}
    axes |= dict(axis(text) for text in grid)
    points = [dict(assignments_of(point)) for point in content.get("list", [{}])]
    if not axes and points == [{}]:
        raise UserError("nothing to vary: give --grid algorithm.step_size=0.001,0.01 --grid seed=0,1,2 or a --plan")
    shared = _shared(content, common, [*axes, *(key for point in points for key in point)], axes)
    if (number := len(points) * math.prod(map(len, axes.values()))) > MOST_RUNS:
        raise UserError(f"the grid has {number} points: expected at most {MOST_RUNS}; --search tries some of many")
    varied = [point | dict(zip(axes, texts)) for point in points for texts in itertools.product(*axes.values())]
    return Plan(out, shared, [Planned(name, settings) for name, settings in zip(names_of(varied), varied)])


def plan_of_search(out, file, varied, common):
    """The `Plan`, without runs, of a search that varies the settings `varied`; see `make_plan`."""
    return Plan(out, _shared(_read(file) if file else {}, common, varied, varied), [])


def _shared(content, common, varied, replaced):
    """Setting -> text of all runs, without those in `replaced`."""
    assignments, flags = parse_command_line(common)
    shared = dict(assignments_of(content.get("settings", {}))) | flags | dict(assignments)
    shared = {key: text for key, text in shared.items() if key not in replaced}
    for key in [*varied, *shared]:
        if key in OWN:
            raise UserError(f"{key}: is not a setting of the sweep's runs: the sweep sets it itself (see --help)")
        if key in NOT_FOR_SWEEPS:
            raise UserError(f"{key}: is an option of fedmpi.train, not of a sweep; leave it out")
    return shared


def _read(path):
    content = read_file(path, "--plan")
    kinds = {"settings": dict, "grid": dict, "list": list}
    if any(not isinstance(v, kinds.get(k, ())) for k, v in content.items()):
        raise UserError(f"--plan {path}: expected 'settings:' and 'grid:' with settings in them, or a 'list:' of them")
    if not all(isinstance(point, dict) for point in content.get("list", [])):
        raise UserError(f"--plan {path}: list: expected settings in each line, like - {{seed: 0}}")
    return content


def axis(text):
    """(setting, texts) from "seed=0,1,2"; commas inside brackets belong to a value."""
    key, equals, values = text.partition("=")
    texts = [value.strip() for value in re.split(r",(?![^\[({]*[\])}])", values)]
    if not equals or not key or not all(texts):
        raise UserError(f"--grid {text}: expected a setting and its values, like algorithm.step_size=0.001,0.01")
    return spelling(key), list(dict.fromkeys(texts))


def _values(key, values):
    if not isinstance(values, list) or not values:
        raise UserError(f"grid: {key}: expected a list of values, like [0.001, 0.01]")
    return list(dict.fromkeys(map(as_text, values)))


def names_of(points):
    """A folder name per point: the varied settings in short, like "step_size=0.01,seed=0"; all different."""
    keys = list(dict.fromkeys(key for point in points for key in point))
    ends = [key.rpartition(".")[2] for key in keys]
    short = {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends)}
    names = []
    for point in points:
        name = re.sub(r"[^\w.,=+-]+", "_", ",".join(f"{short[key]}={text}" for key, text in point.items()))[:200]
        while name in names:
            name += "+"
        names.append(name)
    return names
