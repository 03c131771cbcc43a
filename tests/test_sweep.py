"""Held-out training data, and the sweep that chooses settings by them."""

import numpy as np
import pytest
import torch
from conftest import train
from torch.nn import functional

from fedmpi.comm.link import SoloLink
from fedmpi.data.partition import Even
from fedmpi.tasks.base import Place
from fedmpi.tasks.classification import Classification


def digits(holdout, seed=3):
    """The digits of three clients, loaded, with their model of random weights."""
    place = Place(3, range(3), 0, 1, seed, None, torch.device("cpu"), torch.float64, holdout)
    task = Classification().load(place, Even())
    task.meet(SoloLink())
    torch.manual_seed(0)
    return task, torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).double().eval()


def inputs_of(task, client):
    return task.batch(client, torch.arange(task.num_samples(client)))


def test_held_out_samples_are_not_trained_on_and_are_evaluated():
    whole, net = digits(0.0)
    task, _ = digits(0.25)
    held = []
    for client in range(3):
        num = whole.num_samples(client)
        assert task.num_samples(client) == num - num // 4
        everything = {(*row.flatten().tolist(), int(y)): (row, y) for row, y in zip(*inputs_of(whole, client))}
        kept = {(*row.flatten().tolist(), int(y)) for row, y in zip(*inputs_of(task, client))}
        assert kept < set(everything) and len(everything) == num
        held += [pair for key, pair in everything.items() if key not in kept]
    rows, labels = torch.stack([row for row, _ in held]), torch.stack([y for _, y in held])
    with torch.no_grad():
        metrics, scores = task.evaluate(net, SoloLink()), net(rows)
    assert metrics["holdout_loss"] == pytest.approx(functional.cross_entropy(scores, labels).item(), rel=1e-12)
    assert metrics["holdout_accuracy"] == pytest.approx((scores.argmax(1) == labels).double().mean().item())
    assert "holdout_loss" not in whole.evaluate(net, SoloLink())


def test_what_is_held_out_depends_on_the_seed_and_on_the_client_only():
    def first(seed, client):
        return inputs_of(digits(0.25, seed)[0], client)[0].numpy()

    np.testing.assert_array_equal(first(3, 1), first(3, 1))
    assert not np.array_equal(first(3, 1), first(4, 1))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--holdout", 1), "holdout = 1"),
        (("--holdout", 0.0001), "too few"),
        (("--task", "quadratic", "--holdout", 0.1), "task quadratic keeps no data aside"),
    ],
)
def test_holdouts_that_cannot_be(tmp_path, words, message):
    ended = train(1, tmp_path, *words)
    assert ended.returncode == 2
    assert message in ended.stderr and len(ended.stderr.splitlines()) == 1
