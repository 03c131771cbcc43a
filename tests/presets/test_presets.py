"""Presets: each starts and contains what the paper printed; files and the command line override it."""

import json
import math
import pathlib

import pytest
import yaml
from conftest import PROGRAMS, start, train

from fedmpi.config.build import read_command_line
from fedmpi.errors import UserError
from fedmpi.presets import preset_names, preset_path
from fedmpi.registry import command_name
from fedmpi.runs.folder import read_run

HIGH = "fafed/fashion_mnist_high"


def content(name):
    return yaml.safe_load(preset_path(name).read_text())


LONG = ("auc", "lamb", "mom")  # a minute together
PAPERS = [
    pytest.param(paper, marks=pytest.mark.slow) if paper in LONG else paper
    for paper in sorted({name.partition("/")[0] for name in preset_names()})
]


@pytest.mark.parametrize("paper", PAPERS)
def test_every_preset_starts_and_runs_two_rounds(tmp_path, paper):
    """On small stand-ins of the data sets, a paper's presets in one process."""
    for folder in ("data", "runs"):
        (tmp_path / folder).mkdir()
    ended = start(1, PROGRAMS / "run_presets.py", paper, tmp_path / "data", tmp_path / "runs")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    folders = dict(line.split() for line in ended.stdout.splitlines())
    assert sorted(folders) == [name for name in preset_names() if name.startswith(f"{paper}/")]
    for name, folder in folders.items():
        lines = [json.loads(line) for line in pathlib.Path(folder, "metrics.jsonl").read_text().splitlines()]
        assert len(lines) == 2 and all(math.isfinite(line["loss"]) for line in lines), name


def test_a_preset_as_it_is_on_real_data(tmp_path, data_dir):
    """Full size but for the number of rounds; the table and the run folder name the paper's result."""
    ended = train(
        2, tmp_path, "--preset", HIGH, "--rounds", 2, "--epochs", "null", "--data-dir", data_dir, "--name", "it"
    )
    assert ended.returncode == 0, ended.stderr
    assert "20 on 2 ranks" in ended.stdout and "(in the paper: 0.8188)" in ended.stdout
    assert read_run(tmp_path / "it").paper["printed"]["accuracy"]["fedavg"] == 0.7958


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_says_where_it_is_from_and_what_came_out(name):
    lines, paper = preset_path(name).read_text().splitlines(), content(name)["paper"]
    assert lines[0].startswith("# ") and lines[1].startswith("# Source: ")
    assert paper["source"] and set(paper) <= {"source", "printed", "methods"}
    own = command_name(type(read_command_line(["--preset", name]).algorithm))
    for metric, values in paper["printed"].items():
        assert own in values, metric
        for algorithm, value in values.items():
            assert algorithm in {own, *paper.get("methods", {})} and 0 <= value < 100
        assert f"{values[own]:g}" in "".join(lines[: lines.index("paper:")]).replace(" ", "")
    assert own not in paper.get("methods", {})


@pytest.mark.parametrize("name", preset_names())
def test_its_methods_come_with_their_settings(name):
    for algorithm, settings in content(name)["paper"].get("methods", {}).items():
        resolved = read_command_line(["--preset", name, "--algorithm", algorithm]).resolved["algorithm"]
        assert resolved.pop("name") == algorithm
        assert {key: resolved[key] for key in settings} == settings


def test_another_algorithm_of_the_command_line_has_its_own_defaults():
    words = ["--preset", HIGH, "--algorithm", "FedProx"]
    assert read_command_line(words).resolved["algorithm"]["step_size"] == 0.1  # not FAFED's
    assert read_command_line([*words, "--algorithm.step_size", "0.5"]).algorithm.step_size == 0.5
    same = read_command_line(["--preset", HIGH, "--algorithm", "FAFED"]).resolved
    assert same == read_command_line(["--preset", HIGH]).resolved


def test_the_command_line_overrides_a_file_and_a_file_overrides_a_preset(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("local_steps: 5\nbatch_size: 7\nalgorithm: {name: fedavg}\n")
    config = read_command_line(["--preset", HIGH, "--config", str(file), "--batch-size", "9"])
    assert (config.run.clients, config.run.local_steps, config.run.batch_size) == (20, 5, 9)
    assert config.resolved["algorithm"]["step_size"] == content(HIGH)["paper"]["methods"]["fedavg"]["step_size"]


def test_a_run_of_a_preset_can_be_repeated_from_its_settings(tmp_path):
    resolved = read_command_line(["--preset", HIGH, "--seed", "3"]).resolved
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(resolved))
    assert read_command_line(["--config", str(tmp_path / "settings.yaml")]).resolved == resolved


@pytest.mark.parametrize("paper", ["paper: yes", "paper: {printed: {accuracy: 0.9}}", "paper: {methods: [fedavg]}"])
def test_a_paper_that_is_none(tmp_path, paper):
    (tmp_path / "run.yaml").write_text(paper)
    with pytest.raises(UserError, match=r"run\.yaml: paper: expected source, printed and methods"):
        read_command_line(["--config", str(tmp_path / "run.yaml")])


def test_presets_are_listed_with_a_line_each():
    lines = read_command_line(["--list", "presets"]).splitlines()
    assert [line.split()[0] for line in lines] == preset_names()
    assert "high heterogeneity" in next(line for line in lines if line.startswith(HIGH))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "fafed/fashion_mnist_hihg"], f"did you mean '{HIGH}'"),
        (["--preset", "../presets/fafed/mnist_low"], "unknown preset"),
        (["--preset", HIGH, "--local-steps", "0"], "local_steps = 0"),
    ],
)
def test_wrong_names(words, message):
    with pytest.raises(UserError, match=message):
        read_command_line(words)


@pytest.mark.parametrize("algorithm", [None, "fafed", "fedavg"])
def test_the_counterexample_ends_where_the_paper_says(tmp_path, algorithm):
    words = ["--algorithm", algorithm] if algorithm else []
    ended = train(1, tmp_path, "--preset", "fafed/counterexample", "--name", "it", *words)
    assert ended.returncode == 0, ended.stderr
    expected = content("fafed/counterexample")["paper"]["printed"]["distance"][algorithm or "naive_adaptive_fedavg"]
    assert read_run(tmp_path / "it").final("distance") == pytest.approx(expected, abs=1e-6)
