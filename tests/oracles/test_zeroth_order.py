"""The two-point oracle: its estimate, its directions, its batched evaluation; FedZO and FAFedZO on it."""

import json

import numpy as np
import pytest
import reference_minmax as reference
import torch
from helpers import train
from torch import nn
from torch.nn import functional

import fedmpi
from fedmpi.algorithms import FAFED, FAFedZO, FedAvg, FedZO
from fedmpi.data.sampler import EpochSampler
from fedmpi.federation.client import Client
from fedmpi.ground.errors import UserError
from fedmpi.oracles import Autograd, TwoPoint, two_point
from fedmpi.oracles.base import LocalObjective
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.training.config import read_command_line

N, D, MU = 3, 4, 0.05
X0 = np.random.default_rng(3).normal(size=D)
CENTRES = np.random.default_rng(4).normal(size=(N, D))


def loss(client, x, sample):
    """Neither linear nor quadratic, and its own on every sample."""
    shift = np.random.default_rng([client, sample + 9]).normal(size=D) / 3
    return float(np.sum((np.asarray(x) - CENTRES[client] - shift) ** 2) + np.sum(np.sin(np.asarray(x))))


def slopes(client, sample):
    return np.random.default_rng([client, sample + 5]).normal(size=D)


def linear_loss(client, x, sample):
    return float(slopes(client, sample) @ np.asarray(x))


def directions(client, sample):
    v = np.random.default_rng([client, sample + 9, 1]).normal(size=(3, D))
    return v / np.linalg.norm(v, axis=1, keepdims=True)


def averages(trace):
    return [r["rows"]["x"][0] for r in trace if r["step"] is None]


def some(round_index):
    return [c for c in range(N) if c != round_index % 3]


def run(algorithm, q=2, rounds=4, loss=loss, directions=directions, **more):
    settings = {"loss": loss, "directions": directions, "smoothing": MU, **more}
    return fedmpi.simulate(algorithm, x0=X0, num_clients=N, rounds=rounds, local_steps=q, **settings)


@pytest.mark.parametrize("q", [2, 3])
@pytest.mark.parametrize("active", [None, some], ids=["all", "some"])
def test_fedzo_against_its_transcription(q, active):
    found = averages(run(FedZO(step_size=0.03), q, participants=active))
    expected = reference.fedzo(loss, directions, X0, N, 4, q, 0.03, MU, active)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("q", [2, 3])
def test_fafedzo_against_its_transcription(q):
    algorithm = FAFedZO(step_size=0.03, fresh_weight=0.3, second_moment_decay=0.7, epsilon=0.1)
    expected = reference.fafedzo(loss, directions, X0, N, 4, q, 0.03, MU, 0.3, 0.7, 0.1)
    np.testing.assert_allclose(averages(run(algorithm, q)), expected, rtol=1e-11, atol=1e-12)


def axes(client, sample):
    """d orthonormal directions."""
    return np.linalg.qr(np.random.default_rng([client, sample + 9]).normal(size=(D, D)))[0]


def test_22_orthonormal_directions_give_the_gradient_of_linear_losses():
    same = {"step_size": 0.03, "fresh_weight": 0.3}
    for zeroth, first in ((FedZO(0.03), FedAvg(0.03)), (FAFedZO(**same), FAFED(**same))):
        by_gradient = fedmpi.simulate(first, lambda c, x, s: slopes(c, s), X0)
        by_loss = run(zeroth, loss=linear_loss, directions=axes)
        np.testing.assert_allclose(averages(by_loss), averages(by_gradient), rtol=1e-9, atol=1e-10)


def test_22_the_axes_give_half_mu_times_the_curvature_on_top():
    root = np.random.default_rng(0).normal(size=(D, D))
    hessian = root @ root.T
    trace = fedmpi.simulate(
        FedZO(1.0),
        x0=X0,
        num_clients=1,
        rounds=1,
        local_steps=1,
        loss=lambda c, x, s: 0.5 * float(np.asarray(x) @ hessian @ np.asarray(x)),
        directions=lambda c, s: np.eye(D),
        smoothing=MU,
    )
    estimate = X0 - averages(trace)[1]
    np.testing.assert_allclose(estimate, hessian @ X0 + MU / 2 * np.diag(hessian), rtol=1e-10)


def test_a_saddle_without_gradients():
    """ascent= goes with loss= too: the estimate's block is turned round."""
    down, up = run(FedZO(0.03), rounds=1, q=1), run(FedZO(0.03), rounds=1, q=1, ascent=slice(2, None))
    moved, turned = averages(down)[1] - X0, averages(up)[1] - X0
    np.testing.assert_allclose(turned, moved * [1, 1, -1, -1], rtol=1e-12)


def test_simulate_takes_either_gradients_or_losses():
    for wrong in (
        {},
        {"loss": loss},
        {"directions": directions},
        {"gradient": loss, "loss": loss, "directions": directions},
        {"loss": loss, "directions": directions, "smoothing": 0},
    ):
        with pytest.raises(UserError, match="simulate"):
            fedmpi.simulate(FedZO(), x0=X0, **wrong)
    with pytest.raises(UserError, match="x0"):
        fedmpi.simulate(FedZO(), loss=loss, directions=directions)


# The oracle on modules.

GENERATOR = torch.Generator().manual_seed(0)
INPUTS, LABELS = torch.randn(24, 1, 8, 8, generator=GENERATOR), torch.arange(24) % 3


class Rows:
    """The least of a task: rows and labels in memory; checks that no graph is built."""

    forward_only = True

    def batch(self, client, indices):
        return INPUTS[indices], LABELS[indices]

    def loss(self, module, batch):
        inputs, labels = batch
        value = functional.cross_entropy(module(inputs.to(next(module.parameters()).dtype)), labels)
        if self.forward_only:
            assert not torch.is_grad_enabled() and value.grad_fn is None
        return value


class Recurrent(nn.LSTM):
    """An LSTM along the channels of an image; torch has no batched form of it."""

    def forward(self, images):
        return super().forward(images.flatten(2))[0]


def network(kind):
    torch.manual_seed(1)
    head = [nn.Flatten(), nn.Linear(4 * 6 * 6, 3)]
    middle = {
        "plain": nn.Tanh(),
        "dropout": nn.Dropout(0.5),
        "batch_norm": nn.BatchNorm2d(4),
        "lstm": Recurrent(36, 36, batch_first=True),
        "group_norm": nn.GroupNorm(2, 4),
    }[kind]
    return nn.Sequential(nn.Conv2d(1, 4, 3), middle, nn.ReLU(), *head)


def make(kind="plain", oracle=None, dtype=torch.float32, channels_last=True, task=None):
    flat = FlatModule(network(kind).to(dtype), channels_last=channels_last)
    buffers = flat.buffers.clone()
    sampler = EpochSampler(24, 6, 12, seed=0, client=0)
    oracle = oracle or TwoPoint()
    objective = LocalObjective(flat, task or Rows(), sampler, seed=7)
    return flat, oracle.make(Client(0, buffers=buffers), objective, oracle.workspace(flat)), buffers


@pytest.mark.rarely
@pytest.mark.parametrize("kind", ["plain", "dropout", "batch_norm", "lstm", "group_norm"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_batched_and_one_by_one_give_the_same(kind, channels_last):
    results = []
    for settings in ({}, {"at_once": 3}, {"evaluation": "one_by_one"}, {"evaluation": "one_by_one", "at_once": 7}):
        kind_of = TwoPoint(directions=8, smoothing=0.01, **settings)
        flat, oracle, buffers = make(kind, kind_of, torch.float64, channels_last)
        pair = oracle.gradient_pair(flat.x, flat.x + 0.1, oracle.draw())
        results.append(([g.clone() for g in pair], buffers, torch.stack(oracle.take_losses())))
    if kind == "dropout" and channels_last:
        results = results[:2]  # a batch lays out its images in another order than one pass, and so its mask
    for pair, buffers, losses in results[1:]:
        torch.testing.assert_close(pair, results[0][0], rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(buffers, results[0][1])
        assert losses == pytest.approx(results[0][2])


POOLING = [
    nn.MaxPool2d(2),
    nn.MaxPool2d((3, 2)),
    nn.MaxPool2d([2, 3], stride=[2, 3]),
    nn.MaxPool2d(3, stride=1),
    nn.MaxPool2d(2, padding=1),
    nn.MaxPool2d(4, ceil_mode=True),
    nn.MaxPool2d(2, dilation=2),
]


@pytest.mark.parametrize("pooling", POOLING, ids=str)
def test_pooling_at_once_is_torchs(pooling, monkeypatch):
    """The images are of 7 x 7: some windows are cut off; NaN stays NaN. The first three kinds go the quick way."""
    calls, largest = [], two_point._largest
    monkeypatch.setattr(two_point, "_largest", lambda *arguments: (calls.append(1), largest(*arguments))[1])
    images = torch.randn(5, 2, 3, 7, 7, generator=GENERATOR)
    images[0, 0, 0, 1, 1] = torch.nan
    for layout in (images, images.transpose(1, 2), images[:, :, :1]):
        with two_point._QuickPooling():
            found, alone = torch.func.vmap(pooling)(layout), pooling(layout[0])
        expected = torch.stack([pooling(one) for one in layout])
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(alone, expected[0], rtol=0, atol=0, equal_nan=True)
    assert len(calls) == (12 if pooling in POOLING[:3] else 0)


def test_directions_have_length_one_and_do_not_depend_on_how_many_lie_in_memory():
    oracles = [make(oracle=TwoPoint(directions=8, at_once=k))[1] for k in (1, 3, 8)]
    drawn = [torch.cat([v.clone() for v in o._workspace.directions.of(noise=5)]) for o in oracles]
    for other in drawn[1:]:
        torch.testing.assert_close(other, drawn[0])
    torch.testing.assert_close(torch.linalg.vector_norm(drawn[0], dim=1), torch.ones(8))


@pytest.mark.parametrize("evaluation", ["batched", "one_by_one"])
def test_batch_norm_moves_as_by_one_forward_pass_at_z(evaluation):
    flat, zeroth, buffers = make("batch_norm", TwoPoint(directions=5, at_once=2, evaluation=evaluation))
    task = Rows()
    task.forward_only = False
    other, first, expected = make("batch_norm", Autograd(), task=task)
    for _ in range(2):
        zeroth.gradient_pair(flat.x, flat.x + 1, zeroth.draw())
        first.gradient_pair(other.x, other.x + 1, first.draw())
    torch.testing.assert_close(buffers, expected)
    assert [o.client.counters[0].item() for o in (zeroth, first)] == [2, 2]
    losses, its_losses = (torch.stack(o.take_losses()) for o in (zeroth, first))
    torch.testing.assert_close(losses, its_losses)
    assert len(losses) == 2


@pytest.mark.parametrize("evaluation", ["batched", "one_by_one"])
def test_both_of_a_pair_share_sample_directions_and_masks(evaluation):
    flat, oracle, _ = make("dropout", TwoPoint(evaluation=evaluation), torch.float64)
    sample = oracle.draw()
    g, g_prev = (row.clone() for row in oracle.gradient_pair(flat.x, flat.x.clone(), sample))
    torch.testing.assert_close(g, g_prev, rtol=1e-9, atol=1e-9)
    other = oracle.gradient(flat.x, oracle.draw()).clone()
    assert not torch.allclose(g, other)
    # also after other directions came in between
    torch.testing.assert_close(oracle.gradient(flat.x, sample), g, rtol=1e-9, atol=1e-9)


def test_the_cost_is_one_forward_pass_more_than_directions():
    flat, oracle, _ = make(oracle=TwoPoint(directions=20, at_once=6))
    oracle.gradient_pair(flat.x, flat.x, oracle.draw())
    assert (oracle.num_evaluations, oracle.client.num_gradients) == (42, 2)


class Cubic:
    """F(x) = Σ x_j³ / 3, whose mean over a ball of radius μ has the gradient x² + μ² / (d + 2)."""

    def batch(self, client, indices):
        return 0

    def loss(self, module, batch):
        return (module.x**3).sum() / 3


def test_23_the_mean_of_many_estimates_is_the_gradient_of_the_smoothed_loss():
    mu, dim = 0.8, 5
    module = nn.Module()
    module.x = nn.Parameter(torch.linspace(-1, 1, dim, dtype=torch.float64))
    flat, kind = FlatModule(module), TwoPoint(directions=20, smoothing=mu)
    objective = LocalObjective(flat, Cubic(), lambda number: None)
    oracle = kind.make(Client(0, buffers=flat.buffers), objective, kind.workspace(flat))
    estimates = torch.stack([oracle.gradient(flat.x, oracle.draw()).clone() for _ in range(1500)])
    error = estimates.std(0) / len(estimates) ** 0.5
    expected = flat.x**2 + mu**2 / (dim + 2)
    deviation = (estimates.mean(0) - expected) / error
    assert deviation.abs().max() < 4
    assert ((estimates.mean(0) - flat.x**2) / error).mean() > 4  # the smoothing is seen; the test is sharp


# Choosing the oracle.


def test_every_algorithm_runs_on_either_oracle_and_some_bring_their_own():
    chosen = {
        ("--algorithm", "fedavg"): Autograd,
        ("--algorithm", "fedzo"): TwoPoint,
        ("--algorithm", "fafedzo"): TwoPoint,
        ("--algorithm", "fafedzo", "--oracle", "autograd"): Autograd,
        ("--algorithm", "fed_lamb", "--oracle", "two_point"): TwoPoint,
    }
    for words, kind in chosen.items():
        assert type(read_command_line(list(words)).oracle) is kind
    config = read_command_line(["--algorithm", "fedzo", "--oracle.directions", "7", "--oracle.smoothing", "0.01"])
    assert config.oracle == TwoPoint(directions=7, smoothing=0.01)
    assert config.resolved["oracle"] == {
        "name": "two_point",
        "directions": 7,
        "smoothing": 0.01,
        "evaluation": "batched",
        "at_once": 32,
    }
    for wrong in (["--oracle.smoothing", "0"], ["--oracle.directions", "0"], ["--oracle.evaluation", "fast"]):
        with pytest.raises(UserError, match="oracle"):
            read_command_line(["--algorithm", "fedzo", *wrong])
    with pytest.raises(UserError, match="two_point"):
        read_command_line(["--oracle", "two_points"])


def test_fed_lamb_learns_from_losses_alone(tmp_path):
    settings = ["--algorithm", "fed_lamb", "--oracle", "two_point", "--model", "mlp", "--model.hidden", 8]
    done = train(2, tmp_path, *settings, "--rounds", 30, "--local-steps", 5, "--name", "r", "--eval-every", 10)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line["train_loss"] for line in lines if "train_loss" in line]
    assert evaluated[-1] < evaluated[0] - 0.05
