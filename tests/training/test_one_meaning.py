"""A metric has one name and one value in the record, the closing table, the report, Python, evaluate, and predict."""

import csv
import html
import json
import re

import h5py
import numpy as np
import own_tasks
import pytest
import torch
from helpers import start, train
from sklearn import metrics as sk

import fedmpi
from fedmpi.runs.record import title

SIZES = (50, 30, 12)
WORDS = ["--rounds", 3, "--local_steps", 4, "--batch_size", 8, "--model", "mlp", "--holdout", 0.2, "--threads", 1]
WORDS += ["--task.metrics", "f1,auroc,specificity,confusion", "--task.class_weights", "balanced", "--name", "run"]
NAMES = {"train_loss", "test_loss", "accuracy", "holdout_loss", "holdout_accuracy", "f1", "auroc", "specificity"}
NAMES |= {f"{name}_samples" for name in ("train_loss", "test_loss", "accuracy", "holdout_loss", "holdout_accuracy")}


@pytest.fixture(scope="module", params=[[], ["--result", "best"]], ids=["last", "best"])
def made(request, tmp_path_factory):
    """(folder with three silos, and a run on them; what the run printed)."""
    folder, draw = tmp_path_factory.mktemp("meanings"), np.random.default_rng(0)
    for client, size in enumerate(SIZES):
        with h5py.File(folder / f"silo_{client}.h5", "w") as file:
            file.attrs["num_classes"] = 2
            for split in ("train", "test"):
                labels = (draw.random(size) < (0.2, 0.6, 0.5)[client]).astype(int)
                inputs = draw.standard_normal((size, 4)) + labels[:, None] * (1.5 - client)
                file[f"{split}/images"], file[f"{split}/labels"] = inputs.astype("float32"), labels
    ended = train(2, folder, "--data", folder / "silo_{client}.h5", "--clients", 3, *WORDS, *request.param)
    assert ended.returncode == 0, ended.stderr
    return folder, ended.stdout


def of_result(folder):
    """The record of the round whose model is the result: the best by accuracy on held-out data, or the last."""
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    is_best = fedmpi.load_run(folder / "run").settings["result"] == "best"
    return max(records, key=lambda record: record["holdout_accuracy"]) if is_best else records[-1]


def numbers_in(text):
    """Name -> the number as it stands behind it, in lines of names, two spaces or more, and values."""
    pairs = (re.split(r" {2,}", line.strip(), maxsplit=1) for line in text.splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


@pytest.mark.rarely
def test_all_say_the_same(made):
    folder, printed = made
    record = of_result(folder)
    assert record.keys() >= NAMES and record["tables"].keys() == {"confusion"}
    evaluated = start(2, "-m", "fedmpi", "evaluate", folder / "run", "--threads", 1)
    assert evaluated.returncode == 0, evaluated.stderr
    for text in (printed, evaluated.stdout):
        found = numbers_in(text)
        for name in NAMES:
            assert found[name.replace("_", " ")] == f"{record[name]:.4f}", name
        for kind, row in zip("01", record["tables"]["confusion"]["values"]):
            assert found[f"confusion {kind}"] == f"0 {row[0]:g}, 1 {row[1]:g}"
        assert found["averages"].startswith("over clients, as in training; _samples: over samples; f1, auroc,")
        assert found["accuracy of clients"].startswith(f"{record['accuracy']:.4f} on average")
    run = fedmpi.load_run(folder / "run")
    assert {name: run.final(name) for name in NAMES} == {name: record[name] for name in NAMES}
    assert {name: [*values] for name, values in run.clients.items()} == record["clients"]
    assert np.array_equal(run.tables["confusion"][1], record["tables"]["confusion"]["values"])


def test_the_report_says_the_same(made, tmp_path):
    folder, _ = made
    assert_report(folder / "run", of_result(folder), NAMES, tmp_path)


def assert_report(run, record, names, out):
    """The page and the CSV file of a run's report say what the record of its result says."""
    pytest.importorskip("matplotlib")
    from fedmpi.cli.report.__main__ import main

    assert not main([str(run), "--out", str(out / "page.html")])
    page = html.unescape((out / "page.html").read_text())
    for name in names:
        assert title(name) in page and f"{record[name]:.4f}" in page, name
    file = next(out.glob("*/finals.csv"))
    finals = {row["quantity"]: float(row["mean"]) for row in csv.DictReader(file.open())}
    assert all(finals[name] == pytest.approx(record[name], rel=1e-8) for name in names)


def test_predict_and_scikit_learn_say_the_same(made, tmp_path):
    folder, _ = made
    rows, accuracies = [], []
    for client in range(3):
        out = tmp_path / f"{client}.csv"
        words = ["-m", "fedmpi", "predict", folder / "run", folder / f"silo_{client}.h5", "--out", out]
        words.append("--probabilities")
        ended = start(1, *words)
        assert ended.returncode == 0, ended.stderr
        accuracies.append(float(ended.stdout.split()[-1]))
        rows += csv.DictReader(out.open())
    labels, found = ([int(row[name]) for row in rows] for name in ("label", "predicted"))
    record, scores = of_result(folder), [float(row["probability of 1"]) for row in rows]
    assert accuracies == pytest.approx(record["clients"]["accuracy"], abs=5e-5)
    assert sk.f1_score(labels, found) == pytest.approx(record["f1"], abs=1e-12)
    assert sk.recall_score(labels, found, pos_label=0) == pytest.approx(record["specificity"], abs=1e-12)
    assert sk.roc_auc_score(labels, scores) == pytest.approx(record["auroc"], abs=1e-4)  # 6 digits are written
    assert sk.accuracy_score(labels, found) == pytest.approx(record["accuracy_samples"], abs=1e-12)
    assert sk.confusion_matrix(labels, found).tolist() == record["tables"]["confusion"]["values"]


def of_own_task(kind, model, task):
    """Metric -> its value, or vector or matrix, by scikit-learn."""
    silos = [task.test_of(client, 3).tensors for client in (0, 1)]
    with torch.no_grad():
        outputs, targets = torch.cat([model(silo[0]) for silo in silos]), torch.cat([silo[1] for silo in silos])
        losses = [task.loss(model, silo).item() for silo in silos]
    if kind == "Pixels":
        outputs, targets = outputs.argmax(1).flatten(), targets.flatten()
        found = {"accuracy": sk.accuracy_score(targets, outputs), "confusion": sk.confusion_matrix(targets, outputs)}
    elif kind == "Labels":
        found = {"f1": sk.f1_score(targets, outputs > 0, average="macro"), "auc": sk.roc_auc_score(targets, outputs)}
        found["of_each"] = [sk.recall_score(targets, outputs > 0, average=None)]
    else:
        found = {"r2": sk.r2_score(targets, outputs), "mae": sk.mean_absolute_error(targets, outputs)}
    return {**found, "test_loss": np.mean(losses), "test_loss_samples": np.average(losses, weights=own_tasks.SIZES[:2])}


@pytest.mark.parametrize("kind", ["Values", "Labels", "Pixels"])
def test_own_tasks_say_the_same_everywhere(tmp_path, kind):
    words = ["--task", f"own_tasks.{kind}", "--clients", 3, "--rounds", 4, "--batch_size", 8, "--result", "best"]
    ended = train(2, tmp_path, *words, "--threads", 1, "--name", "run")
    assert ended.returncode == 0, ended.stderr
    evaluated = start(2, "-m", "fedmpi", "evaluate", tmp_path / "run", "--import", "own_tasks", "--threads", 1)
    assert evaluated.returncode == 0, evaluated.stderr
    run = fedmpi.load_run(tmp_path / "run")
    record = {name: run.final(name) for name in run.metrics if name != "loss"}
    for text in (ended.stdout, evaluated.stdout):
        found = numbers_in(text)
        assert {name: found[name.replace("_", " ")] for name in record} == {k: f"{v:.4f}" for k, v in record.items()}
        assert found["averages"].endswith(f"; {', '.join(getattr(own_tasks, kind).metrics)}: of all samples")
    task = getattr(own_tasks, kind)()
    model = fedmpi.load(tmp_path / "run", getattr(own_tasks, task.model.split(".")[1])())
    right = of_own_task(kind, model, task)
    assert right.keys() - run.tables.keys() | {"train_loss", "train_loss_samples"} == record.keys()
    for name, value in right.items():
        found = run.tables[name][1] if name in run.tables else record[name]
        assert np.allclose(found, value, rtol=1e-6, atol=1e-6), name
    assert_report(tmp_path / "run", record, record, tmp_path)
