"""Fast paths and trial passes may not touch the user's objects: one spy model through all doors."""

import csv
import hashlib
import json
import sys

import numpy as np
import pytest
import safetensors.torch
import sklearn.datasets
import torch
from helpers import PROGRAMS, execute, start

import fedmpi

WORDS = (
    "--data",
    "digits",
    "--model",
    "spy.Spy",
    "--clients",
    2,
    "--batch_size",
    20,
    "--local_steps",
    2,
    "--rounds",
    4,
)
WORDS += ("--algorithm", "fedavg", "--threads", 1, "--eval_every", 4)


@pytest.mark.rarely
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_part_trains_as_the_user_set_it_and_nothing_of_his_objects_changes(ranks, tmp_path):
    ended = start(ranks, PROGRAMS / "spy.py", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("no findings") == ranks, ended.stdout


def in_process(log, *words):
    """A program without ranks of its own that finds the spy model."""
    variables = {"SPY_LOG": str(log), "PYTHONPATH": f"{PROGRAMS}:{PROGRAMS.parent.parent}", "OMP_NUM_THREADS": "1"}
    ended = execute([sys.executable, "-m", *map(str, words)], env=variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def passes(log):
    """[(whether with gradients, name of a part -> whether it was in training mode, digest of the batch)]."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def of_training(log):
    """The digests of the batches in passes with gradients, in which every part was as the user has set it."""
    found = [(modes, digest) for has_gradient, modes, digest in passes(log) if has_gradient]
    assert found and all(
        mode == (name.partition(".")[0] != "frozen") for modes, _ in found for name, mode in modes.items()
    )
    return [digest for _, digest in found]


def digests(folder):
    return {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.glob("model.*")}


def values(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spy")
    ended = start(
        1, "-m", "fedmpi.train", *WORDS, "--out", folder, "--name", "it", env={"SPY_LOG": str(folder / "log")}
    )
    assert ended.returncode == 0, ended.stderr
    return folder / "it"


def test_a_sweep_trains_as_one_run_does(trained, tmp_path):
    in_process(tmp_path / "log", "fedmpi.cli.sweep", "--grid", "seed=0", *WORDS, "--out", tmp_path / "sweep")
    alone = start(1, "-m", "fedmpi.train", *WORDS, "--holdout", 0.1, "--out", tmp_path, "--name", "one",
                  env={"SPY_LOG": str(tmp_path / "alone")})  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    one, swept = values(tmp_path / "one"), values(tmp_path / "sweep" / "seed=0")
    assert of_training(tmp_path / "log") == of_training(tmp_path / "alone")
    assert all(torch.equal(value, swept[name]) for name, value in one.items())


def test_evaluate_measures_in_evaluation_mode_and_changes_nothing(trained, tmp_path):
    before, log = digests(trained), tmp_path / "log"
    ended = start(2, "-m", "fedmpi", "evaluate", trained, "--import", "spy", "--threads", 1, env={"SPY_LOG": str(log)})
    assert ended.returncode == 0, ended.stderr
    assert not any(any(modes.values()) for has_gradient, modes, _ in passes(log) if not has_gradient)
    accuracy = fedmpi.load_run(trained).final("accuracy")
    assert f"{accuracy:.4f}" in ended.stdout and digests(trained) == before


def test_predict_answers_in_evaluation_mode_and_changes_nothing(trained, tmp_path):
    before, log, digits = digests(trained), tmp_path / "log", sklearn.datasets.load_digits()
    tests, labels = (digits.images[4::5] * (255 / 16)).round().astype(np.uint8), digits.target[4::5]
    np.savez(tmp_path / "samples.npz", x=tests)
    in_process(
        log, "fedmpi.cli.predict", trained, tmp_path / "samples.npz", "--import", "spy", "--out", tmp_path / "out.csv"
    )
    assert passes(log) and not any(has_gradient or any(modes.values()) for has_gradient, modes, _ in passes(log))
    with open(tmp_path / "out.csv", newline="") as file:
        found = np.mean([int(row["predicted"]) == label for row, label in zip(csv.DictReader(file), labels)])
    assert found == pytest.approx(fedmpi.load_run(trained).final("accuracy")) and digests(trained) == before
