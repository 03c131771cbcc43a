"""What is learned from Datasets that a program gives: classes, numbers, or several labels per input."""

import numpy as np
import pytest
import torch
from helpers import start
from torch.utils.data import TensorDataset

import fedmpi
from fedmpi.ground.errors import UserError

SETTINGS = {"local_steps": 3, "batch_size": 20, "algorithm": {"name": "fedavg", "step_size": 0.05}}


def numbers(sizes, outputs):
    """A Dataset of each size: targets [] or [outputs] are linear in 5 inputs, and noisy."""
    torch.manual_seed(3)
    weight, found = torch.randn(5, outputs or 1), []
    for size in sizes:
        inputs = torch.randn(size, 5)
        targets = inputs @ weight + 0.1 * torch.randn(size, outputs or 1)
        found.append(TensorDataset(inputs, targets if outputs else targets[:, 0]))
    return found


def labels(sizes):
    """A Dataset of each size with three labels per input."""
    sets = [data.tensors for data in numbers(sizes, 3)]
    return [TensorDataset(inputs, (targets > 0).long()) for inputs, targets in sets]


@pytest.mark.parametrize("outputs", [0, 2])
def test_regression_is_measured_as_written_here(tmp_path, outputs):
    *data, test = numbers([40, 70, 90], outputs)
    run = fedmpi.train(task="regression", data=data, test_data=test, rounds=8, out=tmp_path, **SETTINGS)
    inputs, targets = (part.double().numpy() for part in test.tensors)
    with torch.no_grad():
        predicted = run.model(test.tensors[0]).double().numpy().reshape(targets.shape)
    assert run.final["test_loss"] == pytest.approx(np.mean((predicted - targets) ** 2), rel=1e-6)
    assert run.final["mean_absolute_error"] == pytest.approx(np.abs(predicted - targets).mean(), rel=1e-6)
    unexplained = ((predicted - targets) ** 2).sum(0) / ((targets - targets.mean(0)) ** 2).sum(0)
    assert run.final["r2"] == pytest.approx(np.mean(1 - unexplained), rel=1e-6) and run.final["r2"] > 0.8


def test_it_is_gradient_descent_on_the_criterion(tmp_path):
    """Of a linear model with full batches, one step per round: against a loop written here."""
    data = numbers([40, 40], 0)
    torch.manual_seed(5)
    model = torch.nn.Linear(5, 1).double()
    weight, bias = (one.detach().clone() for one in (model.weight[0], model.bias))
    for criterion in ("squared", "absolute", "huber"):
        run = fedmpi.train(
            task={"name": "regression", "criterion": criterion}, data=data, model=model, rounds=4, local_steps=1,
            batch_size=40, dtype="float64", algorithm={"name": "fedavg", "step_size": 0.1}, out=tmp_path,
        )  # fmt: skip
        inputs, targets = (torch.cat([own.tensors[part] for own in data]).double() for part in (0, 1))
        w, b = weight.clone(), bias.clone()
        for _ in range(4):
            differences = inputs @ w + b - targets
            slopes = {"squared": 2 * differences, "absolute": differences.sign(), "huber": differences.clamp(-1, 1)}
            w, b = w - 0.1 * inputs.T @ slopes[criterion] / 80, b - 0.1 * slopes[criterion].mean()
        torch.testing.assert_close(torch.cat([run.model.weight[0], run.model.bias]).detach(), torch.cat([w, b]))


def test_several_labels_are_measured_as_written_here(tmp_path):
    *data, test = labels([40, 70, 90])
    run = fedmpi.train(task="multilabel", data=data, test_data=test, rounds=60, out=tmp_path, **SETTINGS)
    with torch.no_grad():
        logits = run.model(test.tensors[0]).double().numpy()
    right, found = test.tensors[1].numpy(), logits > 0
    loss = np.mean(np.log1p(np.exp(logits)) - right * logits)
    scores = [2 * (a & b).sum() / (a.sum() + b.sum()) for a, b in zip(found.T, right.T.astype(bool))]
    assert run.final["test_loss"] == pytest.approx(loss, rel=1e-6)
    assert run.final["f1"] == pytest.approx(np.mean(scores), rel=1e-6) and run.final["f1"] > 0.7
    assert run.final["exact_matches"] == pytest.approx((found == right).all(1).mean(), rel=1e-6)


@pytest.mark.rarely
def test_a_regression_goes_on_to_the_same_bits_on_two_ranks(tmp_path):
    done = start(2, "-m", "resumed_regression", tmp_path)
    assert done.stdout.splitlines().count("True True 6") == 6, done.stdout + done.stderr


def test_without_a_kind_targets_are_classes(tmp_path):
    data = [TensorDataset(*one.tensors[:1], one.tensors[1][:, 0]) for one in labels([40, 70])]
    given = {"data": data, "test_data": data[0], "rounds": 2, "out": tmp_path, **SETTINGS}
    runs = [fedmpi.train(task=task, **given) for task in (None, "classification")]
    assert runs[0].final == runs[1].final and runs[0].final["accuracy"] > 0


WORDS = [TensorDataset(torch.rand(4, 3), torch.tensor([[0.0, 2.0]] * 4))]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": "regression"}, r"task regression: expected data = \[one Dataset per client\]"),
        ({"task": "digits", "data": WORDS}, "task, beside data"),
        ({"task": {"name": "regression", "criterion": "x"}, "data": WORDS}, "task.criterion = x: expected one of"),
        ({"task": {"name": "regression", "width": 1}, "data": WORDS}, "task regression has no setting width"),
        ({"task": {"name": "multilabel", "criterion": "huber"}, "data": WORDS}, "multilabel has no setting"),
        ({"task": {"name": "classification", "workers": 1}, "data": WORDS}, "classification has no setting"),
        ({"task": {"name": "regression", "workers": -1}, "data": WORDS}, "task.workers = -1: expected"),
        ({"task": torch.nn.Linear(2, 1), "data": WORDS}, "task, beside data"),
        ({"task": "regression", "data": WORDS, "holdout": 0.1}, "holdout = 0.1: task datasets has no data to hold out"),
        ({"task": "regression", "data": WORDS, "cache": True}, "cache: task regression"),
        ({"task": "regression", "data": WORDS, "clients": 2}, "1 Datasets for 2 clients"),
        ({"task": "regression", "data": [*WORDS, *numbers([9], 0)]}, "expected one shape"),
        ({"task": "regression", "data": [[(torch.rand(3), torch.nan)]]}, "item 0 has the target nan"),
        ({"task": "regression", "data": [[torch.rand(3)]]}, r"item 0: expected \(input, target\)"),
        ({"task": "regression", "data": [[(torch.ones(3, dtype=torch.uint8), 1.0)]]}, r"bytes \(uint8\)"),
        ({"task": "multilabel", "data": WORDS}, "expected a vector of zeros and ones"),
        ({"task": "regression", "data": WORDS, "model": lambda: torch.nn.Linear(3, 1)}, r"outputs are \[1, 1\]"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(tmp_path, given, message):
    with pytest.raises(UserError, match=message) as met:
        fedmpi.train(rounds=1, out=tmp_path, **given)
    assert "\n" not in str(met.value)
