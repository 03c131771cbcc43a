"""Mistakes in the file of an experiment, and damaged files of results: one line each, and never a traceback."""

import copy
import itertools
import json
import os
import re
import shutil
import sys
import types

import pytest
from helpers import ROOT, execute
from test_report import make_run

from fedmpi.config.grammar import read_file
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.run_files import RECORDS
from reproduction import experiment as experiment_module
from reproduction import page as page_module
from reproduction.__main__ import listing
from reproduction.csv_files import write_tables
from reproduction.experiment import FOLDER, find_experiments, read_experiment
from reproduction.page import page
from reproduction.results import (
    CURVE_AMOUNTS,
    FIRST_COLUMNS,
    KEYS,
    RUN_COLUMNS,
    _check_measured,
    _read_ended,
    left_to_make,
    other_seeds,
    paths,
    read_results,
)
from reproduction.tuning import COLUMNS, read_grid

OF = {"claim": "best", "ahead": "FAFED", "of": ["FedAvg"]}
REACHES = {"claim": "best", "ahead": "FAFED", "reaches": 0.5}
WORSE = {"claim": "best", "ahead": "FAFED", "panel": "low", "worse_than": "high"}
ELSEWHERE = {"experiment": "zo_figure2a"}
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
    "claims": [OF, REACHES, OF | {"panel": "low", "than": "high"}, OF | {"at_share": 0.5, "level": 0.01}],
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
    further = [WORSE, WORSE | ELSEWHERE | {"worse_than": "iid"}, OF | {"all_at_share": 0.1}]
    assert read(tmp_path, RIGHT | {"claims": further}).claims == further
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
        ("claims 1 level", 0.1, "claims (entry 2): reaches and level: expected only one of them"),
        ("claims 2 of", ["FedAvg", "FedAMS"], "claims (entry 3): than: expected a single method in of"),
        ("claims 2 than", "low", "claims (entry 3): than: expected the key panel, with another panel"),
        ("claims 2 than", "medium", "claims (entry 3).than: medium is none of the panels (low; high)"),
        ("claims 3 at_share", 20, "claims (entry 4).at_share: expected a number above 0 and at most 1, not 20"),
        ("claims 0 worse_than", "low", "claims (entry 1): expected either of or reaches, or worse_than"),
        (
            "claims 0",
            WORSE | {"worse_than": "low"},
            "claims (entry 1): worse_than: expected the key panel, with another",
        ),
        (
            "claims 0",
            WORSE | {"worse_than": "medium"},
            "claims (entry 1).worse_than: medium is none of the panels (low",
        ),
        (
            "claims 0",
            WORSE | ELSEWHERE | {"worse_than": "low"},
            "worse_than: low is none of the panels of zo_figure2a (iid",
        ),
        ("claims 0", WORSE | {"experiment": "zo_figure"}, "experiment: zo_figure: expected one of fafed_figure1, "),
        ("claims 0 experiment", "zo_figure2a", "experiment: expected the key than or worse_than, with a panel of it"),
        ("claims 2 all_at_share", 0.1, "claims (entry 3): than and all_at_share: expected only one of them"),
        (
            "claims 3 all_at_share",
            1.5,
            "claims (entry 4).all_at_share: expected a number above 0 and at most 1, not 1.5",
        ),
        ("claims 0 best_so_far", "yes", "claims (entry 1).best_so_far: expected true or false"),
        ("claims 3 best_so_far", True, "claims (entry 4): best_so_far and at_share: expected only one of them"),
        ("printed fit_length", "yes", "printed.fit_length: expected true or false"),
        ("claims 3 level", True, "claims (entry 4).level: expected a margin above 0, in units of the metric"),
        ("tune", {"grids": {"FAFED": GRID}}, "tune: the key panel is missing"),
        ("tune", {"panel": "low"}, "tune: the key grids is missing"),
        ("tune full grid", {}, "tune.full.grid: unknown key; did you mean 'grids'?"),
        ("tune grids FedAvg lr", 0.1, "tune.grids.FedAvg.lr: expected a list, not 0.1"),
        (
            "tune grids FAFED",
            {"algorithm.step_size": [0.1]},
            "tune: the methods' grids have 1, 2 points: expected as many for each, or the reason in",
        ),
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


@pytest.mark.rarely("reproduction", "fedmpi/cli/sweep", "fedmpi/config")
@pytest.mark.parametrize("name", ["fafed_table2_low", "mom_figure2"])
def test_every_value_of_a_file_may_be_something_else(monkeypatch, name):
    """It is refused in one line, or points and pages can be made from it."""
    right, path = read_file(FOLDER / f"{name}.yaml"), FOLDER / f"{name}.yaml"
    results = read_results(ROOT / "reproduction" / "results", read_experiment(path), "small")
    papers, content = experiment_module.read_papers(), right
    monkeypatch.setattr(experiment_module, "read_papers", lambda: papers)
    monkeypatch.setattr(experiment_module, "read_file", lambda _: content)
    monkeypatch.setattr(page_module, "ps_of_paper", lambda folder, paper: {})
    uncached = experiment_module._read_experiment.__wrapped__
    monkeypatch.setattr(experiment_module, "_read_experiment", uncached)
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
            page(ROOT, one, "small", results, {})
    assert num_refused > 400


@pytest.mark.parametrize("name", ["nothing.yaml", "nothing.yml"])
def test_a_file_that_is_not_there_is_named(name):
    with pytest.raises(UserError, match=f"^{name}: cannot be read: No such file or directory$"):
        find_experiments([name])


def test_an_own_file_with_the_name_of_a_table_would_replace_its_results(tmp_path):
    path = tmp_path / "fafed_theorem1.yaml"
    path.write_bytes((FOLDER / path.name).read_bytes())
    with pytest.raises(UserError, match="fafed_theorem1 is one of the papers' tables or figures .*: rename the file"):
        find_experiments([str(path)])
    assert [one.name for one in find_experiments([str(FOLDER / path.name)])] == ["fafed_theorem1"]


def test_files_of_one_name_would_share_their_results(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        read(tmp_path / folder, RIGHT | {"title": folder})
    with pytest.raises(UserError, match="b/tiny.yaml: another experiment is called tiny, too: rename the file"):
        find_experiments([f"{tmp_path}/{folder}/tiny.yaml" for folder in ("a", "b")])
    assert len(find_experiments([f"{tmp_path}/a/tiny.yaml", f"{tmp_path}/a/../a/tiny.yaml"])) == 1


@pytest.fixture
def written(tmp_path):
    """(an experiment, its folder of results, the paths of its files)."""
    one = read(tmp_path, RIGHT)
    keys = [dict(zip(KEYS, key)) for key in itertools.product(("low", "high"), ("FedAvg", "FAFED"), ("0", "1"))]
    runs = [key | {"state": "complete", "rounds": 4, "cpu_seconds": 1.5} for key in keys]
    curves = [key | {"round": at, "seconds": 0.1, "distance": 1 / at} for key in keys for at in (2, 4)]
    found = paths(tmp_path, one, "small")
    write_tables((found[0], [*KEYS, *CURVE_AMOUNTS, "distance"], curves))
    write_tables((found[1], RUN_COLUMNS, runs))
    write_tables((found[2], FIRST_COLUMNS, [{"rounds": 2, "values": "distance 0.5", "cpu_seconds": 1}]))
    return one, tmp_path, found


def test_the_files_of_the_fixture_are_right(written):
    one, folder, _ = written
    results = read_results(folder, one, "small")
    assert [len(run.records) for run in results.method("high", "FAFED").runs] == [2, 2]
    assert "## high" in page(folder, one, "small", results, {})


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (0, r"0\.25\n\Z", "0.2", "line 17: the line is cut off"),
        (0, r",0\.1,0\.25\n\Z", "", "line 17: 7 values instead of 9"),
        (0, r"low,FedAvg,0,4.*\n", "", "seed 0 of FedAvg on low ends at round 2 instead of 4"),
        (0, r"(low,FedAvg,0,2.*\n)", r"\1\1", "line 3: round 2 comes after round 2"),
        (0, r"high,FAFED,1", "high,FAFED,7", "line 16: the file of the runs has no seed 7 of FAFED"),
        (0, r"0\.5", "half", "line 2: expected numbers: could not convert string to float: 'half'"),
        (0, r"FedAvg,0,2", "FedAvg,0,two", "line 2: round: expected a whole number, not 'two'"),
        (0, r"\A", "<<<<<<< HEAD\n", "line 1: no column panel"),
        (0, r"(low,FedAvg,0,4)", r"=======\n\1", "line 3: 1 values instead of 9"),
        (0, r"panel,", "pannel,", "line 1: no column panel"),
        (0, r"distance\n", "round\n", "line 1: two columns have the same name"),
        (0, r"(?s).*", "", "line 1: no column panel"),
        (0, r"(?s).*", "\udcff\udcfe", "contains something else than text"),
        (0, r"low,FedAvg,0,2", '"low,FedAvg,0,2', "line 2: unexpected end of data"),
        (0, None, "", "is missing, but tiny-runs.csv is there"),
        (1, None, "", "is missing, but tiny.csv is there"),
        (1, r"\n(?s:.*)", "\n", "line 2: no run"),
        (1, r"state", "status", "line 1: no column state"),
        (1, r"(low,FedAvg,0.*\n)", r"\1\1", "line 3: seed 0 of FedAvg on low is there twice"),
        (1, r"FedAvg,0", "FedAvg,zero", "line 2: seed: expected a whole number, not 'zero'"),
        (1, r"complete", "finished", "line 2: state: expected one of complete, diverged, not finished"),
        (1, r"1\.5", "nan", "line 2: cpu_seconds: expected a number, not 'nan'"),
        (2, r",1,", ",long,", "line 2: cpu_seconds: expected a number, not 'long'"),
        (2, r"values", "value", "line 1: no column values"),
    ],
)
def test_a_damaged_file_of_results_is_named_with_its_line(written, file, old, new, message):
    one, folder, files = written
    if old is None:
        files[file].unlink()
    else:
        damaged = re.sub(old, new, files[file].read_text(encoding="utf-8"), count=1)
        files[file].write_text(damaged, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UserError) as raised:
        read_results(folder, one, "small")
    assert str(raised.value).startswith(str(files[file])) and message in str(raised.value), raised.value
    with pytest.raises(UserError, match=message_of(raised)):
        listing([str(folder / "tiny.yaml")], folder, None)
    with pytest.raises(UserError, match=message_of(raised)):  # before the runs of --add are made
        left_to_make(folder, one, "small", None)


def message_of(raised):
    return f"^{re.escape(str(raised.value))}$"


def test_results_of_a_scale_that_the_file_no_longer_has_are_named(written):
    one, folder, _ = written
    (folder / "small").rename(folder / "full")
    with pytest.raises(UserError, match="tiny-runs.csv: the experiment's file has no scale full"):
        read_results(folder, one, "full")


def test_a_damaged_grid_is_named_with_its_line(tmp_path):
    path = tmp_path / "tiny.csv"
    write_tables((path, COLUMNS, [{"method": "FAFED", "settings": "step_size 0.1", "chosen": "yes"}]))
    assert [row["chosen"] for row in read_grid(path)] == ["yes"]
    path.write_text(path.read_text(encoding="utf-8") + "high\n", encoding="utf-8")
    with pytest.raises(UserError, match=f"^{path}, line 3: 1 values instead of {len(COLUMNS)}: restore the file"):
        read_grid(path)


def test_a_complete_run_whose_records_are_lost_is_named(written):
    """It was a traceback, once its results were in the files."""
    one, folder, (curves, runs, _) = written
    make_run(folder / "run", "fedavg", 0)
    (folder / "run" / RECORDS).unlink()
    with pytest.raises(UserError, match="metrics.jsonl: no round is recorded"):
        _read_ended(folder / "run")
    curves.write_text(",".join([*KEYS, *CURVE_AMOUNTS]) + "\n", encoding="utf-8")
    runs.write_text(runs.read_text(encoding="utf-8").replace("complete,4", "complete,0"), encoding="utf-8")
    with pytest.raises(UserError, match="ends at round 0"):
        read_results(folder, one, "small")


def test_a_page_of_runs_that_measured_nothing_says_so(written):
    """Every method diverged before its first evaluation."""
    one, folder, (curves, runs, _) = written
    curves.write_text(",".join([*KEYS, *CURVE_AMOUNTS]) + "\n", encoding="utf-8")
    runs.write_text(runs.read_text(encoding="utf-8").replace("complete,4", "diverged,1"), encoding="utf-8")
    assert "| FAFED | 2 of 2 diverged | diverged |" in page(
        folder, one, "small", read_results(folder, one, "small"), {}
    )


@pytest.mark.parametrize(
    ("place", "name"),
    [("metric", "metric"), ("printed metric", "printed.metric"), ("figure metrics 0", "figure.metrics")]
    + [("claims 0 metric", "claims")],
)
def test_a_metric_that_no_run_measured_is_named(tmp_path, place, name):
    words = [int(word) if word.isdecimal() else word for word in place.split()]
    one, rows = read(tmp_path, with_value(RIGHT, words, "distanse")), [{"state": "complete"}]
    with pytest.raises(UserError, match=f"^tiny: {name}: no run measured distanse; did you mean 'distance'.*are kept$"):
        _check_measured(one, rows, ["train_loss", "distance"])
    _check_measured(one, [{"state": "diverged"}], [])


@pytest.mark.rarely("reproduction", "fedmpi/cli/sweep", "fedmpi/config")
def test_a_tuning_metric_that_no_run_measured_is_named(tmp_path):
    panel = {"task": "classification", "clients": 2, "rounds": 2, "local_steps": 1}
    tune = {"panel": "low", "metric": "holdout_auc", "grids": {"FedAvg": GRID}}
    read(tmp_path, RIGHT | {"panels": {"low": panel, "high": panel}, "tune": tune})
    words = [sys.executable, "-m", "reproduction", tmp_path / "tiny.yaml", "--tune"]
    ended = execute([*words, "--out", tmp_path / "runs", "--results", tmp_path], cwd=ROOT)
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1, ended.stderr
    assert "tune.metric: holdout_auc: no run measured it: expected one of loss, train_loss, holdout_" in ended.stderr


@pytest.mark.rarely("reproduction", "fedmpi/cli/sweep", "fedmpi/config")
def test_a_method_for_which_nothing_was_chosen_is_named(tmp_path):
    panel = {"task": "quadratic", "clients": 2, "rounds": 2, "local_steps": 1}
    grids = {"FedAvg": {"algorithm.step_size": [0.1]}, "FAFED": {"algorithm.step_size": [1.0e30]}}
    tune = {"panel": "low", "metric": "loss", "grids": grids}
    read(tmp_path, RIGHT | {"panels": {"low": panel, "high": panel}, "tune": tune})
    words = [sys.executable, "-m", "reproduction", tmp_path / "tiny.yaml", "--tune"]
    ended = execute([*words, "--out", tmp_path / "runs", "--results", tmp_path], cwd=ROOT)
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1, ended.stderr
    assert "tiny: nothing was chosen for FAFED: a run of every point diverged, or one did not end" in ended.stderr
    assert [row["chosen"] for row in read_grid(tmp_path / "tuning" / "tiny.csv")] == ["yes", ""]


def test_a_damaged_file_is_named_before_its_seeds_are_replaced(written):
    one, folder, (_, path, _) = written
    text = path.read_text(encoding="utf-8")
    nothing_planned = types.SimpleNamespace(points={})
    assert other_seeds(folder, one, "small", nothing_planned) == ["0", "1"]
    for old, new in (("seed,", "sead,"), (",0,complete", ",zero,complete")):
        assert old in text
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        with pytest.raises(UserError, match=f"^{path}, line "):
            other_seeds(folder, one, "small", nothing_planned)


@pytest.mark.rarely("reproduction", "fedmpi/cli/sweep", "fedmpi/config")
def test_folders_without_their_files_are_refused_in_one_line(tmp_path):
    shutil.copytree(ROOT / "reproduction", tmp_path / "reproduction", ignore=shutil.ignore_patterns("results", "tests"))
    words = [sys.executable, "-m", "reproduction", "--list"]
    (tmp_path / "reproduction" / "papers.yaml").unlink()
    for folder, message in (
        ("results", "papers.yaml: cannot be read: No such file or directory"),
        ("experiments", "experiments: contains no experiment: restore the folder (git checkout)"),
    ):
        shutil.rmtree(tmp_path / "reproduction" / folder, ignore_errors=True)
        ended = execute(words, cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
        assert ended.returncode == 2 and message in ended.stderr and len(ended.stderr.splitlines()) == 1, ended.stderr
