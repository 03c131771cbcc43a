"""The settings with which a method has the numbers of other systems, step by step, in float64."""

import math

import numpy as np
import pytest
import torch

from fedmpi import simulate
from fedmpi.algorithms import FedAdam, FedAMS, FedYogi

ROUNDS = 20
X0 = np.array([1.0, -0.5, 0.0, 2.0])
# The clients' mean move of every round, whatever x is; the last coordinate has gradients near epsilon.
DELTAS = np.random.default_rng(3).normal(size=(ROUNDS, 4)) * [1, 1e-2, 10, 1e-3]


def iterates(algorithm):
    """x after each of the rounds: one local step of size 1 a round moves every client by the round's delta."""
    trace = simulate(algorithm, lambda i, x, sample: -DELTAS[sample], X0, rounds=ROUNDS, local_steps=1)
    return np.array([record["rows"]["x"][0] for record in trace if record["step"] is None][1:])


def torch_iterates(**settings):
    x = torch.tensor(X0, requires_grad=True)
    optimizer = torch.optim.Adam([x], **settings)
    found = []
    for delta in DELTAS:
        x.grad = torch.tensor(-delta)
        optimizer.step()
        found.append(x.detach().numpy().copy())
    return np.array(found)


def assert_equal(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


SERVER = {"step_size": 1.0, "server_step_size": 0.1, "momentum": 0.8, "second_moment_decay": 0.95, "epsilon": 1e-3}
TORCH = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3}


def test_correction_torch_is_torchs():
    assert_equal(iterates(FedAdam(**SERVER, v0=0.0, correction="torch")), torch_iterates(**TORCH))
    amsgrad = torch_iterates(**TORCH, amsgrad=True)
    assert_equal(iterates(FedAMS(**SERVER, option=2, correction="torch")), amsgrad)


def test_first_steps_of_the_forms():
    """By hand: m = .2 Δ and √v = √.05 |Δ| after the first round, in which Flower's t is 2."""
    size = abs(DELTAS[0])
    expected = {
        "none": 0.2 * size / (math.sqrt(0.05) * size + 1e-3),
        "torch": size / (size + 1e-3),
        "keras": math.sqrt(0.05) * size / (math.sqrt(0.05) * size + 1e-3),
        "flower": 0.2 * math.sqrt(1 - 0.95**2) / (1 - 0.8**2) * size / (math.sqrt(0.05) * size + 1e-3),
    }
    for correction, step in expected.items():
        found = iterates(FedAdam(**SERVER, v0=0.0, correction=correction))[0] - X0
        assert_equal(found, 0.1 * step * np.sign(DELTAS[0]))


@pytest.mark.parametrize("correction", ["none", "torch", "keras", "flower"])
def test_one_word_has_one_meaning_in_all_methods(correction):
    """Where v never falls, FedAMS with option 2 is FedAdam; where it falls in every round, Yogi's v is Adam's."""
    growing = np.cumprod(np.full(ROUNDS, 1.3))[:, None] * np.sign(DELTAS)
    settings = {**SERVER, "correction": correction}

    def run(algorithm):
        trace = simulate(algorithm, lambda i, x, sample: -growing[sample], X0, rounds=ROUNDS, local_steps=1)
        return trace[-1]["rows"]["x"][0]

    assert_equal(run(FedAMS(**settings, option=2)), run(FedAdam(**settings, v0=0.0)))
    first = simulate(FedYogi(**settings, v0=0.0), lambda i, x, sample: -growing[sample], X0, rounds=1, local_steps=1)
    second = simulate(FedAdam(**settings, v0=0.0), lambda i, x, sample: -growing[sample], X0, rounds=1, local_steps=1)
    assert_equal(first[-1]["rows"]["x"], second[-1]["rows"]["x"])
