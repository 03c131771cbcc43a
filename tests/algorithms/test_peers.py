"""The settings with which a method has the numbers of other systems, step by step, in float64."""

import math

import numpy as np
import pytest
import torch

import fedmpi.algorithms
from fedmpi import simulate
from fedmpi.algorithms import Algorithm, DiLoCo, FedAdam, FedAMS, FedAvg, FedYogi, MimeAdam
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import known

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


def test_mimeadam_has_fedjaxs_numbers():
    """fedjax's mime.py with its Adam (optax): each local step is Adam's from the round's start, t = r + 1."""
    curvature = np.array([[1.0, 3.0, 0.2, 1.0], [2.0, 0.5, 1.0, 0.7], [0.5, 1.0, 2.0, 1.2]])

    def gradient(i, x, sample):
        return curvature[i] * (np.asarray(x) - i) + (0 if sample == -2 else 0.1 * np.sin(sample + i + np.arange(4)))

    def adam(g, m, v, t):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        return 0.05 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8), m, v

    settings = {"update": "fresh", "v0": 0.0, "correction": "torch", "epsilon": 1e-8, "server_step_size": 0.7}
    ours = simulate(MimeAdam(step_size=0.05, **settings), gradient, X0, 3, ROUNDS, 2)
    ours = [record["rows"]["x"][0] for record in ours if record["step"] is None][1:]
    x, m, v = X0, np.zeros(4), np.zeros(4)
    for r, found in enumerate(ours):
        c = np.mean([gradient(i, x, -2) for i in range(3)], axis=0)
        moves = []
        for i in range(3):
            y = x
            for sample in (2 * r, 2 * r + 1):
                y = y - adam(gradient(i, y, sample) - gradient(i, x, sample) + c, m, v, r + 1)[0]
            moves.append(x - y)
        x = x - 0.7 * np.mean(moves, axis=0)
        _, m, v = adam(c, m, v, r + 1)
        assert_equal(found, x)


ADAPTIVE = [
    cls
    for cls in known(fedmpi.algorithms, Algorithm).values()
    if {"v0", "second_moment_decay"} & set(cls.__dataclass_fields__)
]


@pytest.mark.parametrize("cls", ADAPTIVE, ids=lambda cls: cls.__name__)
def test_no_first_step_is_divided_by_epsilon_alone(cls):
    """Gradients of many sizes, and one that is 0: no coordinate's first step is longer than 10 step sizes."""
    scale = np.array([1e-5, 1e-2, 1.0, 100.0, 0.0])

    def gradient(client, x, sample):
        return scale * (1 + 0.3 * client + 0.2 * np.sin(sample))

    floor = {"epsilon": 1e-8} if "epsilon" in cls.__dataclass_fields__ else {}
    on_server = issubclass(cls, FedAvg) and cls is not DiLoCo
    algorithm = cls(step_size=1e-3, **floor, **({"server_step_size": 1e-3} if on_server else {}))
    given = {"gradient": gradient}
    if cls.oracle == "two_point":
        given = {"loss": lambda client, x, sample: float(gradient(client, x, sample) @ np.asarray(x))}
        given["directions"] = lambda client, sample: np.eye(5)
    records = simulate(algorithm, x0=np.ones(5), rounds=1, local_steps=2, segments=[slice(0, 5)], **given)
    x = [record["rows"]["x"] for record in records if not on_server or record["step"] is None]
    assert all(np.abs(after - before).max() <= 10 * 1e-3 for before, after in zip(x, x[1:]))


def test_weights_of_the_clients():
    """simulate(weights=...) averages as Flower does, by numbers of samples."""
    trace = simulate(FedAvg(step_size=0.5), lambda i, x, s: x - i, [4.0], 2, rounds=1, local_steps=1, weights=[3, 1])
    assert trace[-1]["rows"]["x"][0] == [(3 * 2.0 + 2.5) / 4]
    with pytest.raises(UserError, match="weights: 1 given"):
        simulate(FedAvg(), lambda i, x, s: x, [1.0], 2, weights=[1])
