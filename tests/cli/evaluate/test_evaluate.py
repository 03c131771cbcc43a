"""Evaluation without training: what the run itself measured, per silo and together, also on other data."""

import re

import numpy as np
import pytest
from helpers import start, train

import fedmpi
from fedmpi.cli.evaluate.__main__ import _run
from fedmpi.comm.solo import SoloLink
from fedmpi.prepare.writer import write_file


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with two silos of unlike data, and a run on them."""
    folder = tmp_path_factory.mktemp("evaluate")
    for client in range(2):
        draw = np.random.default_rng(client)
        splits = {}
        for split, n in (("train", 200), ("test", 60)):
            features = draw.standard_normal((n, 6)).astype("float32")
            splits[f"{split}/images"] = features
            splits[f"{split}/labels"] = (features[:, client] > 0).astype("int64")
        write_file(folder / f"silo_{client}.h5", splits, {"num_classes": 2, "mean": [0.0] * 6, "std": [1.0] * 6})
    # Evaluated on some samples, but at its end on all.
    words = ("--data", folder / "silo_{client}.h5", "--rounds", 4, "--name", "run", "--evaluate_samples", 50)
    ended = train(2, folder, *words)
    assert "50 training and test samples, drawn once; at the end all\n" in ended.stdout
    assert ended.returncode == 0, ended.stderr
    return folder


def evaluate(*words):
    return start(2, "-m", "fedmpi", "evaluate", *words, "--threads", 1)


def values(output):
    """(name -> value of all silos together, rows of the table of silos)."""
    first, _, second = output.partition("\n\n")
    together = {line.rpartition("  ")[0].strip(): line.split()[-1] for line in first.splitlines()[1:]}
    return together, [line.split() for line in second.splitlines()]


def test_it_measures_what_the_run_measured_at_its_end(made):
    run = fedmpi.load_run(made / "run")
    together, rows = values(evaluate(made / "run").stdout)
    for name in ("train_loss", "test_loss", "accuracy"):
        assert float(together[name.replace("_", " ")]) == pytest.approx(run.final(name), abs=6e-5)
    assert [row[0] for row in rows] == ["client", "0", "1"]
    for name, of_clients in run.clients.items():
        column = [*run.clients].index(name) + 1
        assert [float(row[column]) for row in rows[1:]] == pytest.approx(of_clients, abs=6e-5)


def test_other_data_and_a_model_file(made, tmp_path):
    """Both silos have the first one's data: both have its results."""
    for client in range(2):
        (tmp_path / f"new_{client}.h5").write_bytes((made / "silo_0.h5").read_bytes())
    data = ("--data", tmp_path / "new_{client}.h5")
    ended = evaluate(made / "run", *data)
    _, rows = values(ended.stdout)
    assert rows[1][1:] == rows[2][1:]
    model = next(path for path in (made / "run").glob("model*") if path.suffix in (".h5", ".safetensors", ".pt"))
    assert values(evaluate(model, *data).stdout)[1] == rows
    assert not [path for path in tmp_path.rglob("metrics.jsonl")]


def test_wrong_words_are_one_line(made):
    ended = evaluate(made / "nothing")
    assert ended.returncode == 2 and re.search(r"error: init = .*nothing: no such file", ended.stderr), ended.stderr


def test_help_is_printed_and_nothing_done(capsys):
    _run(["--help"], SoloLink())
    printed = capsys.readouterr().out
    assert "usage: fedmpi evaluate MODEL [SETTINGS]" in printed and "run folder, or model file" in printed
