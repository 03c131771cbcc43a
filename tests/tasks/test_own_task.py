"""Tasks of the user's own: a Dataset per client, a loss and metrics."""

import dataclasses
import json
import math
from typing import NamedTuple

import pytest
import torch
from helpers import ROOT, train
from torch.utils.data import TensorDataset

import fedmpi
from fedmpi.tasks.metrics import Metric

CLOCKS = ("seconds", "local_seconds", "communication_seconds", "evaluation_seconds")


def records(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCKS} for line in lines]


@pytest.mark.rarely
def test_the_example_learns(tmp_path):
    settings = ("--task", "own_task.Waves", "--rounds", 30, "--algorithm", "fedadam", "--name", "run")
    settings += ("--algorithm.step_size", 0.5, "--algorithm.server_step_size", 0.1)
    done = train(2, tmp_path, *settings, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"})
    assert done.returncode == 0, done.stderr
    assert fedmpi.load_run(tmp_path / "run").final("accuracy") > 0.8
    assert 0 < fedmpi.load_run(tmp_path / "run").final("f1") <= 1


def test_the_example_is_short():
    """What a person writes for a task: the class, without the imports and the made-up data."""
    text = (ROOT / "examples" / "own_task.py").read_text(encoding="utf-8")
    assert len([line for line in text[text.index("class Waves") :].splitlines() if line.strip()]) < 25


@pytest.mark.rarely
def test_neither_workers_nor_ranks_change_a_batch(tmp_path):
    runs = []
    for ranks, workers in ((1, 0), (2, 2)):
        settings = ("--task", "noisy_task.Regression", "--task.workers", workers, "--name", f"w{workers}")
        settings += ("--clients", 2, "--rounds", 2, "--local-steps", 5, "--batch-size", 8, "--dtype", "float64")
        done = train(ranks, tmp_path, *settings)
        assert done.returncode == 0, done.stderr
        runs.append(records(tmp_path / f"w{workers}"))
    for one, other in zip(*runs, strict=True):
        assert one.keys() == other.keys() and {"loss", "bytes"} <= one.keys()
        # the noise of evaluated samples is not that of training
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-12)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("Empty", "train(0): has no items"),
        ("Unfinished", "Unfinished does not define loss(model, batch)"),
        ("BadMetric", "metric error = sklearn.metrics.no_such_score: cannot be imported"),
    ],
)
def test_what_is_missing_is_said_in_one_line(tmp_path, task, message):
    ended = train(1, tmp_path, "--task", f"noisy_task.{task}", "--rounds", 1)
    assert message in ended.stderr and "Traceback" not in ended.stderr and ended.returncode == 2, ended.stderr


def test_metrics_by_name():
    outputs, targets = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]), torch.tensor([0, 1, 1])
    for metric in (
        "sklearn.metrics.accuracy_score",
        ("torchmetrics.functional.accuracy", {"task": "multiclass", "num_classes": 2}),
        ("torchmetrics.Accuracy", {"task": "multiclass", "num_classes": 2}),
        lambda outputs, targets: (outputs.argmax(1) == targets).float().mean(),
    ):
        assert float(Metric("accuracy", metric)(outputs, targets)) == pytest.approx(2 / 3)


def test_metrics_get_their_settings_and_the_targets_first():
    outputs, targets = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]), torch.tensor([0, 1, 1])
    metric = Metric("precision", ("sklearn.metrics.precision_score", {"pos_label": 0}))
    assert metric(outputs, targets) == 0.5  # of the two that are called 0, one is


def test_metrics_are_those_of_the_test_data(tmp_path, monkeypatch):
    monkeypatch.setattr("fedmpi.tasks.custom.EVALUATION_BATCH", 3)
    inputs = torch.linspace(-1, 2, 7)[:, None]
    test = TensorDataset(inputs, inputs.square())
    task = fedmpi.Task.of(
        "Square",
        train=lambda client, num_clients: TensorDataset(torch.full((5, 1), 1.0 + client), torch.zeros(5, 1)),
        test=lambda: test,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    )
    task.metrics = {"largest": lambda outputs, targets: (outputs - targets).abs().max()}
    run = fedmpi.train(task=task, model=torch.nn.Linear(1, 1), clients=2, rounds=2, out=tmp_path, algorithm="fedavg")
    with torch.no_grad():
        errors, of_clients = run.model(inputs) - inputs.square(), run.model(torch.tensor([[1.0], [2.0]]))
    expected = {
        "test_loss": errors.square().mean().item(),
        "largest": errors.abs().max().item(),
        "train_loss": of_clients.square().mean().item(),
    }
    assert {name: run.final[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_a_task_of_functions(tmp_path):
    def data(client, num_clients):
        return TensorDataset(torch.full((3, 1), 1.0 + client), torch.zeros(3))

    Zero = fedmpi.Task.of("Zero", train=data, loss=lambda model, batch: model(batch[0]).square().mean())
    assert len(Zero().train(0, 1)) == 3 and Zero.__module__ == __name__ and Zero().test() is None
    run = fedmpi.train(task=Zero, model=torch.nn.Linear(1, 1), clients=2, rounds=20, out=tmp_path, algorithm="fedavg")
    assert run.final["train_loss"] < 0.1
    bias, weight = run.model.bias.item(), run.model.weight.item()
    of_clients = fedmpi.load_run(run.folder).clients["train_loss"]
    assert of_clients == pytest.approx([(weight + bias) ** 2, (2 * weight + bias) ** 2], abs=1e-6)


def test_each_client_has_results_on_its_own_test_data(tmp_path):
    def data(client, num_clients):
        return TensorDataset(torch.full((3 + client, 1), 1.0 + client), torch.zeros(3 + client))

    members = {"train": data, "test_of": lambda client, num_clients: None if client == 1 else data(client, num_clients)}
    members |= {"loss": lambda model, batch: model(batch[0]).square().mean()}
    members |= {"metrics": {"largest": lambda outputs, targets: outputs.max()}}
    Zero = fedmpi.Task.of("Zero", **members)
    run = fedmpi.train(task=Zero, model=torch.nn.Linear(1, 1), clients=3, rounds=1, out=tmp_path, algorithm="fedavg")
    outputs = [run.model(torch.tensor([1.0 + client])).item() for client in range(3)]
    clients = fedmpi.load_run(run.folder).clients
    assert clients["test_loss"] == pytest.approx([outputs[0] ** 2, math.nan, outputs[2] ** 2], nan_ok=True, abs=1e-6)
    assert clients["largest"] == pytest.approx([outputs[0], math.nan, outputs[2]], nan_ok=True, abs=1e-6)
    whole = (3 * outputs[0] ** 2 + 5 * outputs[2] ** 2) / 8
    assert run.final["test_loss_samples"] == pytest.approx(whole, abs=1e-6)
    assert run.final["test_loss"] == pytest.approx((outputs[0] ** 2 + outputs[2] ** 2) / 2, abs=1e-6)
    assert run.final["largest"] == pytest.approx(max(outputs[0], outputs[2]), abs=1e-6)


class Pair(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    inputs: torch.Tensor
    targets: torch.Tensor


@pytest.mark.parametrize("kind", [Pair, Record])
def test_batches_with_names_reach_the_loss_as_they_are(tmp_path, kind):
    inputs = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
    members = {
        "train": lambda client, num_clients: [kind(one, one) for one in inputs],
        "collate": lambda items: kind(*(torch.stack([getattr(i, n) for i in items]) for n in ("inputs", "targets"))),
        "loss": lambda model, batch: (model(batch.inputs) - batch.targets).square().mean(),
        "predict": lambda model, batch: (model(batch.inputs), batch.targets),
        "metrics": {"error": lambda outputs, targets: (outputs - targets).abs().max()},
    }
    task = fedmpi.Task.of("Line", **members)
    run = fedmpi.train(task=task, model=torch.nn.Linear(1, 1), rounds=30, out=tmp_path, algorithm="fedavg", threads=1)
    assert run.final["error"] < 1


def test_metrics_that_need_more_than_a_few_samples_are_tried_on_all(tmp_path):
    labels = torch.zeros(100, dtype=torch.int64)
    labels[97] = 1  # not among the few

    def both_classes(outputs, targets):
        if len(targets.unique()) < 2:
            raise ValueError("only one class")
        return 1.0

    task = fedmpi.Task.of(
        "Rare",
        train=lambda client, num_clients: TensorDataset(torch.rand(100, 2), labels),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        metrics={"both": both_classes},
    )
    assert fedmpi.train(task=task, model=torch.nn.Linear(2, 2), rounds=1, out=tmp_path, threads=1).final["both"] == 1
