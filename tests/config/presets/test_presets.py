"""Presets: each starts and contains what the paper printed; files and the command line override it."""

import json
import math
import pathlib
import re

import pytest
import yaml
from helpers import PROGRAMS, start, train
from torch import nn

from fedmpi.config.presets import preset_names, preset_path
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import command_name
from fedmpi.prepare.official import OFFICIAL
from fedmpi.runs.folder import read_run
from fedmpi.training.config import read_command_line

HIGH = "fafed/fashion_mnist_high"


def content(name):
    return yaml.safe_load(preset_path(name).read_text())


def head_of(name):
    """The comment at a preset's top, in one line."""
    lines = preset_path(name).read_text().partition("\npaper:")[0].splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines)


LONG = ("auc", "lamb", "mom")  # a minute together
PAPERS = [
    pytest.param(paper, marks=pytest.mark.slow) if paper in LONG else paper
    for paper in sorted({name.partition("/")[0] for name in preset_names()})
]


@pytest.mark.rarely
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


@pytest.mark.parametrize("name", [name for name in preset_names() if "below are those of" in head_of(name)])
def test_values_are_those_of_the_preset_that_the_head_names(name):
    head = head_of(name)
    named = re.search(r"weights below are those of (\S+), not chosen anew", head)[1]
    ours, theirs = content(name), content(named)
    assert ours["paper"]["methods"] == theirs["paper"]["methods"]
    if "except FAFED's step size" not in head:
        assert ours["algorithm"] == theirs["algorithm"]


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
    assert (config.data.clients, config.rounds.local_steps, config.data.batch_size) == (20, 5, 9)
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


@pytest.mark.parametrize(("algorithm", "expected"), [(None, 12.023417), ("fafed", 8.891588), ("fedavg", 6.0)])
def test_the_counterexample_ends_where_the_closed_forms_of_its_head_say(tmp_path, algorithm, expected):
    """The paper prints x after the first step only, so that nothing of this is said to be in the paper."""
    words = ["--algorithm", algorithm] if algorithm else []
    ended = train(1, tmp_path, "--preset", "fafed/counterexample", "--name", "it", *words)
    assert ended.returncode == 0, ended.stderr
    assert read_run(tmp_path / "it").final("distance") == pytest.approx(expected, abs=1e-6)
    assert "in the paper" not in ended.stdout and str(expected) in head_of("fafed/counterexample")


def test_fedams_has_the_square_of_the_papers_epsilon():
    """Its option 1 compares epsilon with v; FedAdam adds the paper's 0.01 to the root of v."""
    for name in (name for name in preset_names() if "fedams" in content(name)["paper"].get("methods", {})):
        methods = content(name)["paper"]["methods"]
        assert methods["fedams"]["epsilon"] == pytest.approx(methods["fedadam"]["epsilon"] ** 2), name


@pytest.mark.parametrize("name", [name for name in preset_names() if name.startswith("fafed/")])
def test_values_of_fafed_are_on_the_grid_or_the_head_says_that_they_are_not(name):
    if name in ("fafed/counterexample", "fafed/wikitext2"):
        return
    settings, methods, head = content(name), content(name)["paper"]["methods"], head_of(name)
    off = {one["step_size"] for one in (settings["algorithm"], *methods.values())} - {0.001, 0.01, 0.02, 0.05, 0.1}
    assert all(f"{value:g} is not on the grid" in head for value in off) or "not chosen anew" in head
    assert settings["algorithm"]["fresh_weight"] in (0.1, 0.9)
    assert all(methods[one]["server_step_size"] == pytest.approx(10**-1.5, rel=1e-4) for one in ("fedadam", "fedams"))
    assert any(origin in head for origin in ("starting points", "not chosen anew", "on held-out training data"))
    assert "enlarges the batch and reduces q" in head and "public code" in head


def test_the_batch_grows_and_q_falls_with_the_heterogeneity():
    for data in ("mnist", "fashion_mnist", "cifar10"):
        low, middle, high = (content(f"fafed/{data}_{at}") for at in ("low_b5_q20", "medium", "high_b100_q5"))
        assert [one["batch_size"] for one in (low, middle, high)] == [5, 50, 100]
        assert [one["local_steps"] for one in (low, middle, high)] == [20, 10, 5]


def test_the_cnn_of_the_lamb_paper_has_two_fully_connected_layers():
    for name, parameters in (("cifar10_cnn_iid", 89_834), ("fashion_mnist_cnn_noniid", 60_874)):
        config = read_command_line(["--preset", f"lamb/{name}"])
        shape = (3, 32, 32) if "cifar" in name else (1, 28, 28)
        net = config.model_class(shape=shape, num_classes=10, **config.model_settings)
        assert sum(isinstance(layer, nn.Linear) for layer in net.modules()) == 2
        assert sum(values.numel() for values in net.parameters()) == parameters


@pytest.mark.parametrize("name", [name for name in preset_names() if name.startswith("mom/")])
def test_all_methods_of_the_momentum_papers_figures_have_settings(name):
    methods = content(name)["paper"]["methods"]
    assert {*methods} == {*("fedavg", "scaffold", "fedavg_m", "fedavg_m_vr", "scaffold_m_vr", "mb_storm", "ce_lsgd")}
    if "resnet18" in name:  # β times the step size of the other form
        assert methods["fedavg_m"]["step_size"] == pytest.approx(0.1 * methods["fedavg_m_vr"]["step_size"])


@pytest.mark.parametrize("name", preset_names())
def test_data_that_no_package_contains_are_named_with_the_command_that_gets_them(name):
    task = content(name)["task"]
    data = task.get("data") or task.get("classifier", "").removeprefix("runs/zo_").removesuffix("_classifier")
    assert data in (*OFFICIAL, "")
    assert not data or f"python -m fedmpi data prepare {data} --data-dir data" in head_of(name)


@pytest.mark.parametrize("name", [name for name in preset_names() if name.startswith("lamb/")])
def test_fed_lamb_deals_all_samples_anew_in_every_round(name):
    """A local epoch of 25 active clients is then one pass over all samples, as in the paper."""
    config = read_command_line(["--preset", name])
    assert config.partition.redeal and config.rounds.local_epochs == 1 and config.rounds.participation == 0.5


def test_each_non_iid_figure_of_the_attack_has_a_preset_by_brightness():
    for name, figure, iid in (("local_steps", 7, "2a"), ("participation", 8, "4"), ("all", 9, "3")):
        plain, skewed = (content(f"zo/mnist_{name}{end}") for end in ("", "_noniid"))
        assert skewed.pop("partition") == {"name": "column", "by": "brightness", "cut": True}
        assert plain.pop("partition") == "uneven" and plain == skewed  # the same otherwise
        assert head_of(f"zo/mnist_{name}_noniid").partition(" Source")[0].endswith(f"(Figure {figure})")
        assert head_of(f"zo/mnist_{name}").partition(" Source")[0].endswith(f"(Figure {iid})")


@pytest.mark.parametrize(
    ("data", "samples"), [("fashion_mnist", 36_000), ("cifar10", 30_000), ("tiny_imagenet", 60_000)]
)
def test_coda_and_codasca_run_in_three_stages(data, samples):
    """Of the presets' length: epochs of what is left after 80 % of each negative class is removed, over 16 clients."""
    for method in ("coda", "codasca"):
        config = read_command_line(["--preset", f"auc/{data}", "--algorithm", method])
        rounds = math.ceil(config.rounds.epochs * math.ceil(samples / 16 / 50) / 10)
        assert math.ceil(rounds / config.algorithm.stage_rounds) == 3 and config.algorithm.step_decay == 3
