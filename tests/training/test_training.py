"""The main job as its user starts it: mpirun, python -m fedmpi.train, and what it leaves behind."""

import json
import re

import h5py
import numpy as np
import pytest
import torch
import yaml
from helpers import PROGRAMS, start, train
from safetensors.torch import load_file

import fedmpi.algorithms
from fedmpi.algorithms import Algorithm
from fedmpi.ground.registry import known
from fedmpi.models.mlp import MLP

SHORT = ("--rounds", 20, "--local-steps", 5, "--clients", 4)


def rows(folder):
    with h5py.File(folder / "model.h5") as file:
        return {name: values[:] for name, values in file["rows"].items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run of the default job on 2 ranks: (its output, its run folder)."""
    out = tmp_path_factory.mktemp("runs")
    ended = train(2, out, *SHORT, "--name", "it", "--eval-every", 5)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, out / "it"


@pytest.mark.always
def test_output_ends_in_a_table(finished):
    output, folder = finished
    assert "round 5/20: train_loss" in output
    for name in ("rounds", "accuracy", "train loss", "local steps", "communication", "evaluation", "sent per client"):
        assert re.search(rf"^  {name}  ", output, re.MULTILINE), name
    assert str(folder) in output


@pytest.mark.always
def test_metrics_have_a_line_a_round(finished):
    lines = [json.loads(line) for line in (finished[1] / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, 21))
    assert [line["round"] for line in lines if "accuracy" in line] == [5, 10, 15, 20]
    assert lines[-1]["accuracy"] > 0.9
    assert lines[-1]["loss"] < lines[0]["loss"]
    dim = 64 * 200 + 200 + 200 * 10 + 10
    # FAFED: m and v at the start, then x, m and v in every round, in float32
    assert [line["bytes"] for line in lines[:2]] == [(2 + 3) * dim * 4, (2 + 3 + 3) * dim * 4]


@pytest.mark.always
def test_the_model_loads_into_plain_pytorch(finished):
    plain = MLP((1, 8, 8), 10)
    plain.load_state_dict(load_file(finished[1] / "model.safetensors"))
    with h5py.File(finished[1] / "model.h5") as file:
        for name, value in plain.state_dict().items():
            np.testing.assert_array_equal(value.numpy(), file["model"][name][:])
    flat = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
    np.testing.assert_array_equal(flat.numpy(), rows(finished[1])["x"])


@pytest.mark.always
def test_settings_of_a_run_repeat_it_bit_for_bit(finished, tmp_path):
    settings = yaml.safe_load((finished[1] / "settings.yaml").read_text())
    assert settings["algorithm"]["name"] == "fafed"
    settings.update(out=str(tmp_path), name="again")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    ended = start(2, "-m", "fedmpi.train", "--config", tmp_path / "run.yaml")
    assert ended.returncode == 0, ended.stderr
    first, second = rows(finished[1]), rows(tmp_path / "again")
    assert set(first) == {"x", "m", "v", "A"}
    for name, values in first.items():
        assert values.tobytes() == second[name].tobytes(), name


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float64", 1e-12)])
def test_placing_four_clients_on_one_two_and_four_ranks(tmp_path, dtype, tolerance):
    found = []
    for ranks in (1, 2, 4):
        # default threads on purpose: one rank computes with more of them than four
        ended = start(ranks, "-m", "fedmpi.train", *SHORT, "--dtype", dtype, "--out", tmp_path, "--name", f"on-{ranks}")
        assert ended.returncode == 0, ended.stderr
        found.append(rows(tmp_path / f"on-{ranks}")["x"])
    for x in found[1:]:
        assert np.linalg.norm(x - found[0]) <= tolerance * np.linalg.norm(found[0])


def test_equal_threads_give_equal_bits_on_one_and_two_ranks(finished, tmp_path):
    assert train(1, tmp_path, *SHORT, "--name", "one").returncode == 0
    assert rows(tmp_path / "one")["x"].tobytes() == rows(finished[1])["x"].tobytes()


def test_clients_that_do_not_divide_among_ranks(tmp_path):
    ended = train(2, tmp_path, "--clients", 5, "--rounds", 2, "--participation", 0.5, "--weighting", "samples")
    assert ended.returncode == 0, ended.stderr
    assert "5 on 2 ranks" in ended.stdout


@pytest.mark.parametrize("task", ["counterexample", "quadratic"])
def test_toy_tasks_find_their_minimum_only_with_fafed(tmp_path, task):
    settings = ("--task", task, "--clients", 3, "--rounds", 1000, "--local-steps", 1, "--dtype", "float64")

    def distance(name, *more):
        ended = train(1, tmp_path, *settings, "--name", name, "--eval-every", 1000, *more)
        assert ended.returncode == 0, ended.stderr
        return json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])["distance"]

    assert distance("fafed", "--algorithm.step_size", 0.1) < 0.11
    naive = distance("naive", "--algorithm", "naive-adaptive-fedavg", "--algorithm.step_size", 0.1)
    if task == "counterexample":
        assert naive > 40  # ten to begin with


@pytest.mark.parametrize("data", ["fashion_mnist", pytest.param("mnist", marks=pytest.mark.slow)])
def test_real_images(tmp_path, data_dir, data):
    ended = train(
        2, tmp_path, "--task.data", data, "--rounds", 20, "--clients", 4, "--eval-every", 20, "--name", data,
        env={"FEDMPI_DATA": str(data_dir)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    last = json.loads((tmp_path / data / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["accuracy"] > (0.75 if data == "fashion_mnist" else 0.9)


@pytest.mark.slow
def test_fashion_mnist_reaches_085_in_20_epochs(tmp_path, data_dir):
    ended = train(
        4,
        tmp_path,
        "--task.data",
        "fashion_mnist",
        "--data-dir",
        data_dir,
        "--epochs",
        20,
        "--name",
        "it",
        timeout=3000,
    )
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in (tmp_path / "it" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["accuracy"] >= 0.85


def test_output_rules(tmp_path):
    settings = ("--clients", 2, "--eval-every", 1, "--algorithm.step_size", 0.3)  # its first round is its best
    for rule in ("best", "uniform"):
        ended = train(1, tmp_path, "--rounds", 6, *settings, "--result", rule, "--name", rule)
        assert ended.returncode == 0, ended.stderr
        chosen = int(re.search(r"iterate of round (\d)", ended.stdout).group(1))
        lines = [json.loads(line) for line in (tmp_path / rule / "metrics.jsonl").read_text().splitlines()]
        if rule == "best":
            assert chosen == max(lines, key=lambda line: line.get("accuracy", 0))["round"] < 6
        else:
            assert "(drawn uniformly)" in ended.stdout
        expected = train(1, tmp_path, "--rounds", chosen, *settings, "--name", f"as-{rule}")
        assert rows(tmp_path / rule).keys() == {"x"}
        np.testing.assert_array_equal(rows(tmp_path / rule)["x"], rows(tmp_path / f"as-{rule}")["x"])
        # the closing table says what the result is worth
        accuracy = re.compile("^  accuracy .*$", re.MULTILINE)
        assert accuracy.search(ended.stdout).group() == accuracy.search(expected.stdout).group()


def test_clipping_and_weight_decay(tmp_path):
    """One step of SGD from the same model with a norm of at most 0.01 moves by at most η times that."""
    common = ("--algorithm", "fedavg", "--algorithm.step_size", 1, "--rounds", 1, "--local-steps", 1, "--clients", 2)
    assert train(1, tmp_path, *common, "--clip-norm", 1e-6, "--name", "still").returncode == 0
    assert train(1, tmp_path, *common, "--clip-norm", 0.01, "--name", "clipped").returncode == 0
    still, clipped = rows(tmp_path / "still")["x"], rows(tmp_path / "clipped")["x"]
    moved = np.linalg.norm(clipped - still)
    assert 0.001 < moved < 0.0101
    assert train(1, tmp_path, *common, "--clip-norm", 1e-6, "--weight-decay", 0.25, "--name", "decayed").returncode == 0
    np.testing.assert_allclose(rows(tmp_path / "decayed")["x"], 0.75 * still, atol=1e-5)


@pytest.mark.always
def test_every_algorithm_trains_on_two_ranks():
    ended = start(2, PROGRAMS / "every_algorithm.py")
    assert ended.returncode == 0, ended.stderr
    assert {line.split()[0] for line in ended.stdout.splitlines()} == set(known(fedmpi.algorithms, Algorithm))
