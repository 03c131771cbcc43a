"""The rows of docs/coming_from.md about Flower and Keras, run against them where they are installed."""

import re

import numpy as np
import pytest
from helpers import ROOT

from fedmpi import simulate
from fedmpi.config.build import read_command_line

ROWS = re.findall(
    r"^\| (Flower|Keras) `(\w+)(?:\(amsgrad=(True)\))?`[^|]*\| `(.+?)` \| nothing \|$",
    (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
ROUNDS, SAMPLES = 20, [30, 10]
X0 = np.array([1.0, -0.5, 0.0, 2.0])
MOVES = np.random.default_rng(5).normal(size=(ROUNDS, 2, 4)) * [1, 1e-2, 10, 1e-3]  # of both clients, whatever x is
# 0.125 is exact in float32, as which Keras keeps its step size.
SETTINGS = {"step_size": 1.0, "server_step_size": 0.125, "momentum": 0.8, "second_moment_decay": 0.95, "epsilon": 1e-3}


def ours(words):
    """x after each of the rounds, with the settings that the page names and `SETTINGS`."""
    config = read_command_line(words.split())
    cls = type(config.algorithm)
    left = {"FedAvg": {"server_step_size"}, "FedAdagrad": {"momentum"}}.get(cls.__name__, set())  # both have defaults
    common = {name: SETTINGS[name] for name in SETTINGS.keys() & cls.__dataclass_fields__.keys() - left}
    settings = [word for name, value in common.items() for word in (f"--algorithm.{name}", str(value))]
    config = read_command_line([*words.split(), *settings])
    weights = SAMPLES if config.run.weighting == "samples" else None
    trace = simulate(
        config.algorithm, lambda i, x, sample: -MOVES[sample, i], X0, 2, ROUNDS, local_steps=1, weights=weights
    )
    return np.array([record["rows"]["x"][0] for record in trace if record["step"] is None][1:])


def flowers(name):
    common = pytest.importorskip("flwr.common")
    strategies = pytest.importorskip("flwr.server.strategy")
    options = {"initial_parameters": common.ndarrays_to_parameters([X0])}
    if name == "FedAvgM":
        options |= {"server_learning_rate": 0.125, "server_momentum": 0.8}
    elif name != "FedAvg":
        options |= {"eta": 0.125, "beta_1": 0.8, "beta_2": 0.95, "tau": 1e-3}
        if name == "FedAdagrad":
            options = {key: options[key] for key in ("initial_parameters", "eta", "tau")}
    strategy = getattr(strategies, name)(**options)
    x, found = X0, []
    for r in range(ROUNDS):
        results = []
        for move, samples in zip(MOVES[r], SAMPLES):
            parameters = common.ndarrays_to_parameters([x + move])
            ok = common.Status(common.Code.OK, "")
            results.append((None, common.FitRes(ok, parameters, samples, {})))
        (x,) = common.parameters_to_ndarrays(strategy.aggregate_fit(r + 1, results, [])[0])
        found.append(x)
    return np.array(found)


def kerass(name, amsgrad, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    x = keras.Variable(X0, dtype="float64")
    optimizer = getattr(keras.optimizers, name)(0.125, beta_1=0.8, beta_2=0.95, epsilon=1e-3, amsgrad=bool(amsgrad))
    found = []
    for moves in MOVES:
        optimizer.apply([keras.ops.convert_to_tensor(-moves.mean(0), dtype="float64")], [x])
        found.append(keras.ops.convert_to_numpy(x).copy())
    return np.array(found)


def test_the_page_has_the_rows():
    assert {(system, name) for system, name, _, _ in ROWS} >= {
        *(("Flower", name) for name in ("FedAvg", "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad")),
        ("Keras", "Adam"),
    }


@pytest.mark.parametrize(("system", "name", "amsgrad", "words"), ROWS, ids=lambda value: value.split(" -")[0])
def test_nothing_remains(system, name, amsgrad, words, monkeypatch):
    theirs = flowers(name) if system == "Flower" else kerass(name, amsgrad, monkeypatch)
    np.testing.assert_allclose(ours(words), theirs, rtol=1e-12, atol=1e-12)
