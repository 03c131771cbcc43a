"""Mistakes in the file of an experiment, and damaged files of results: one line each, and never a traceback."""

import copy
import itertools
import json
import re

import pytest
from conftest import ROOT

from fedmpi.config.grammar import read_file
from fedmpi.errors import UserError
from fedmpi.reproduce import experiment as experiment_module
from fedmpi.reproduce.experiment import FOLDER, find_experiments, read_experiment
from fedmpi.reproduce.page import page
from fedmpi.reproduce.results import (
    read_results,
)

OF = {"claim": "best", "ahead": "FAFED", "of": ["FedAvg"]}
REACHES = {"claim": "best", "ahead": "FAFED", "reaches": 0.5}
GRID = {"algorithm.step_size": [0.1, 0.2]}
RIGHT = {
    "title": "A quadratic",
    "paper": "fafed",
    "place": "Table 9",
    "panels": {"low": {"task": "quadratic"}, "high": {"task": "quadratic"}},
    "methods": {"FedAvg": {"algorithm": "fedavg"}, "FAFED": {"algorithm": "fafed"}},
    "scales": {"small": {"says": "small as it is", "tuned": {"FAFED": {"algorithm.step_size": 0.1}}}},
    "metric": "distance",
    "printed": {"metric": "distance", "place": "Table 9", "values": {"low": {"FedAvg": 0.5}}},
    "figure": {"axis": "round", "metrics": ["distance"]},
    "claims": [OF, REACHES, OF | {"panel": "low", "than": "high"}, OF | {"at_share": 0.5, "level": True}],
    "tune": {"panel": "low", "grids": {"FedAvg": GRID}, "full": {"seeds": [0, 1]}},
    "findings": {"small": ["It is so."]},
}


def read(tmp_path, content):
    file = tmp_path / "tiny.yaml"
    file.write_text(json.dumps(content), encoding="utf-8")  # which is YAML without aliases
    return read_experiment(file)


def with_value(content, place, value):
    """A copy of a nested content with another value at a place, like ("scales", "small", "says")."""
    if not place:
        return value
    changed = list(content) if isinstance(content, list) else dict(content)
    old = content[place[0]] if isinstance(content, list) else content.get(place[0], {})
    changed[place[0]] = with_value(old, place[1:], value)
    return changed


def test_what_is_right_is_accepted(tmp_path):
    assert read(tmp_path, RIGHT).claims == RIGHT["claims"]
    assert not read(tmp_path, RIGHT | {"printed": {}, "claims": [], "figure": {}, "tune": {}}).tuning("small")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("title", None, "title: expected text, in quotes if it is a number, not nothing"),
        ("paper", ["fafed"], "paper: expected text"),
        ("paper", "fedprox", "paper: expected one of fafed"),
        ("data", [3], "data (entry 1): expected text, in quotes if it is a number, not 3"),
        ("settings", [], "settings: expected a mapping, not []"),
        ("panels", ["low"], "panels: expected a mapping, not ['low']"),
        ("panels low", None, "panels.low: expected a mapping, not nothing"),
        ("panels low-", {}, "panels: low and low-: their figures would have the same file name: rename one of them"),
        ("methods", {}, "expected methods, or not_run with the reason"),
        ("methods FAFED", "fafed", "methods.FAFED: expected a mapping, not 'fafed'"),
        ("scales", "small", "scales: expected a mapping"),
        ("scales large", {}, "scales.large: unknown key (known: small, mlp, full)"),
        ("scales small", None, "scales.small: expected a mapping, not nothing"),
        ("scales small setings", {}, "scales.small.setings: unknown key; did you mean 'settings'?"),
        ("scales small tuned", ["x"], "scales.small.tuned: expected a mapping, not ['x']"),
        ("scales small tuned", {"x": {}}, "scales.small.tuned: x is none of the methods (FedAvg; FAFED)"),
        ("scales small panels", 3, "scales.small.panels: expected a list, not 3"),
        ("scales small methods", [], "scales.small.methods: expected at least one entry in the list"),
        ("scales small methods", ["FAFED", "FAFED"], "scales.small.methods: FAFED is in the list twice"),
        ("metric", 3, "metric: expected text"),
        ("printed metrics", "distance", "printed.metrics: unknown key; did you mean 'metric'?"),
        ("printed", {"place": "Table 9", "values": {"low": {"FedAvg": 1}}}, "printed: the key metric is missing"),
        ("printed values", ["x"], "printed.values: expected a mapping"),
        ("printed values low FedAvg", "1e-5", "printed.values.low.FedAvg: expected a number, like 0.5 or 1.0e-5, not"),
        ("figure", ["x"], "figure: expected a mapping"),
        ("figure axis", "rounds", "figure.axis: expected one of round, bytes, gradients, seconds, not 'rounds'"),
        ("figure metrics", "distance", "figure.metrics: expected a list"),
        ("claims 0", {"claim": "best", "of": ["FedAvg"]}, "claims (entry 1): the key ahead is missing"),
        ("claims 0 claim", "good", "claims (entry 1): claim: good: expected one of diverges"),
        ("claims 0 ahead", ["FAFED"], "claims (entry 1).ahead: expected text"),
        ("claims 0 aheadd", "FAFED", "claims (entry 1).aheadd: unknown key; did you mean 'ahead'?"),
        ("claims 0 of", None, "claims (entry 1).of: expected a list, not nothing"),
        ("claims 0 of", ["FAFED"], "claims (entry 1): of: contains FAFED, the method that is ahead"),
        ("claims 0 reaches", 0.5, "claims (entry 1): expected either of or reaches"),
        ("claims 1 reaches", "0.5", "claims (entry 2).reaches: expected a number"),
        ("claims 1 level", True, "claims (entry 2): reaches and level: expected only one of them"),
        ("claims 2 of", ["FedAvg", "FedAMS"], "claims (entry 3): than: expected a single method in of"),
        ("claims 2 than", "low", "claims (entry 3): than: expected the key panel, with another panel"),
        ("claims 2 than", "medium", "claims (entry 3).than: medium is none of the panels (low; high)"),
        ("claims 3 at_share", 20, "claims (entry 4).at_share: expected a number above 0 and at most 1, not 20"),
        ("claims 3 level", "yes", "claims (entry 4).level: expected true or false"),
        ("tune", {"grids": {"FAFED": GRID}}, "tune: the key panel is missing"),
        ("tune", {"panel": "low"}, "tune: the key grids is missing"),
        ("tune full grid", {}, "tune.full.grid: unknown key; did you mean 'grids'?"),
        ("tune grids FedAvg lr", 0.1, "tune.grids.FedAvg.lr: expected a list, not 0.1"),
        ("tune grids FAFED", {"algorithm.step_size": [0.1]}, "tune: the methods' grids have 1, 2 points"),
        ("tune metric", "accuracy", "tune.metric: accuracy: settings are chosen by a metric on training data"),
        ("tune seeds", [0.5], "tune.seeds (entry 1): expected a whole number"),
        ("cpu_hours", "2 h", "cpu_hours: expected a number of hours, 0 or more, not '2 h'"),
        ("findings small", None, "findings.small: expected a list, not nothing"),
        ("findings small", [{"The reason": "none"}], "findings.small (entry 1): expected a sentence, in quotes"),
        ("findings large", ["It is so."], "findings.large: unknown key"),
    ],
)
def test_a_mistake_in_a_file_is_found_when_it_is_read(tmp_path, place, value, message):
    words = [int(word) if word.isdecimal() else word for word in place.split()]
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}/tiny.yaml: ") + ".*" + re.escape(message)):
        read(tmp_path, with_value(RIGHT, words, value))


@pytest.mark.parametrize("key", ["title", "paper", "place", "panels", "metric"])
def test_a_key_that_is_missing_is_named(tmp_path, key):
    with pytest.raises(UserError, match=f"tiny.yaml: the key {key} is missing|tiny.yaml: expected {key}, or not_run"):
        read(tmp_path, {name: value for name, value in RIGHT.items() if name != key})


def places(content, before=()):
    """The place of every value in a nested content."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield (*before, key)
        if isinstance(value, dict | list):
            yield from places(value, (*before, key))


@pytest.mark.parametrize("name", ["fafed_table2_low", "mom_figure2"])
def test_every_value_of_a_file_may_be_something_else(monkeypatch, name):
    """It is refused in one line, or points and pages can be made from it."""
    right, path = read_file(FOLDER / f"{name}.yaml"), FOLDER / f"{name}.yaml"
    results = read_results(ROOT / "results", read_experiment(path), "small")
    papers, content = experiment_module.read_papers(), right
    monkeypatch.setattr(experiment_module, "read_papers", lambda: papers)
    monkeypatch.setattr(experiment_module, "read_file", lambda _: content)
    num_refused = 0
    for place, value in itertools.product(places(right), (None, 3, "x", [], {})):
        content = with_value(right, place, copy.copy(value))
        try:
            one = read_experiment(path)
        except UserError as error:
            num_refused += 1
            assert str(error).startswith(f"{path}: "), (place, value)
            continue
        for scale in one.scales:
            one.points(scale)
            assert not one.tuning(scale) or one.tuning_points(scale)
        if "small" in one.scales and place[0] not in ("differs", "findings"):  # these take time, and are only shown
            page(one, "small", results, {})
    assert num_refused > 400


@pytest.mark.parametrize("name", ["nothing.yaml", "nothing.yml"])
def test_a_file_that_is_not_there_is_named(name):
    with pytest.raises(UserError, match=f"^{name}: cannot be read: No such file or directory$"):
        find_experiments([name])


def test_files_of_one_name_would_share_their_results(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        read(tmp_path / folder, RIGHT)
    with pytest.raises(UserError, match="b/tiny.yaml: another experiment is called tiny, too: rename the file"):
        find_experiments([f"{tmp_path}/{folder}/tiny.yaml" for folder in ("a", "b")])
