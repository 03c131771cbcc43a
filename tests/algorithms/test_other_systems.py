"""The rows of docs/coming_from.md about methods of other systems, run against them where they are installed."""

import dataclasses
import inspect
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import other_clients
import pytest
import torch
from helpers import ROOT
from other_clients import ROUNDS, SAMPLES, fit, linear, uneven, weight

import fedmpi.algorithms
from fedmpi import simulate
from fedmpi.algorithms import Algorithm
from fedmpi.federation.participation import draw_participants
from fedmpi.ground.registry import known
from fedmpi.training.config import read_command_line

PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| (Flower|Keras) `(\w+)(?:\(amsgrad=(True)\))?`[^|]*\| `(.+?)` \| nothing \|$", PAGE, re.MULTILINE
)
SYSTEMS = "APPFL|NVFlare|pfl-research|fluke|FedLab"
OTHERS = re.findall(rf"^\| ({SYSTEMS}) `(.+?)`[^|]*\| `(--.+?)` \| (nothing|`[\d.]+`)[^|]*\|$", PAGE, re.MULTILINE)
X0 = np.array([1.0, -0.5, 0.0, 2.0])
MOVES = np.random.default_rng(5).normal(size=(ROUNDS, 2, 4)) * [1, 1e-2, 10, 1e-3]  # of both clients, whatever x is
# 0.125 is exact in float32, as which Keras keeps its step size.
SETTINGS = {"step_size": 1.0, "server_step_size": 0.125, "momentum": 0.8, "second_moment_decay": 0.95, "epsilon": 1e-3}


def ours(words):
    """x after each of the rounds, with the settings that the page names and `SETTINGS`."""
    config = read_command_line(words.split())
    cls = type(config.algorithm)
    left = {word.removeprefix("--algorithm.") for word in words.split()}
    left |= {"FedAvg": {"server_step_size"}, "FedAdagrad": {"momentum"}}.get(cls.__name__, set())  # both have defaults
    common = {name: SETTINGS[name] for name in SETTINGS.keys() & cls.__dataclass_fields__.keys() - left}
    settings = [word for name, value in common.items() for word in (f"--algorithm.{name}", str(value))]
    config = read_command_line([*words.split(), *settings])
    weights = SAMPLES if config.data.weighting == "samples" else None
    trace = simulate(
        config.algorithm, lambda i, x, sample: -MOVES[sample, i], X0, 2, ROUNDS, local_steps=1, weights=weights
    )
    return np.array([record["rows"]["x"][0] for record in trace if record["step"] is None][1:])


def flower_settings(name):
    if name in ("FedAvg", "FedAvgM"):
        return {} if name == "FedAvg" else {"server_learning_rate": 0.125, "server_momentum": 0.8}
    settings = {"eta": 0.125, "tau": 1e-3}
    return settings if name == "FedAdagrad" else {**settings, "beta_1": 0.8, "beta_2": 0.95}


def flowers(name):
    common = pytest.importorskip("flwr.common")
    strategies = pytest.importorskip("flwr.server.strategy")
    start = common.ndarrays_to_parameters([X0])
    strategy = getattr(strategies, name)(initial_parameters=start, **flower_settings(name))
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


def newer_flowers(name):
    """Of `flwr.serverapp`, whose strategies get and return records."""
    app = pytest.importorskip("flwr.app")
    strategies = pytest.importorskip("flwr.serverapp.strategy")
    strategy, found = getattr(strategies, name)(fraction_train=0.0, **flower_settings(name)), []  # asks no nodes itself
    arrays = app.ArrayRecord({"x": app.Array(X0)})
    for r in range(ROUNDS):
        strategy.configure_train(r + 1, arrays, app.ConfigRecord(), None)
        replies = []
        for move, samples in zip(MOVES[r], SAMPLES):
            moved = app.ArrayRecord({"x": app.Array(arrays["x"].numpy() + move)})
            content = app.RecordDict({"arrays": moved, "metrics": app.MetricRecord({"num-examples": samples})})
            replies.append(SimpleNamespace(content=content, has_error=lambda: False))
        arrays, _ = strategy.aggregate_train(r + 1, replies)
        found.append(arrays["x"].numpy())
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


@pytest.mark.parametrize(("name", "words"), [(name, words) for system, name, _, words in ROWS if system == "Flower"])
def test_nothing_remains_of_flowers_newer_strategies(name, words):
    np.testing.assert_allclose(ours(words), newer_flowers(name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("system", "name", "amsgrad", "words"), ROWS, ids=lambda value: value.split(" -")[0])
def test_nothing_remains(system, name, amsgrad, words, monkeypatch):
    theirs = flowers(name) if system == "Flower" else kerass(name, amsgrad, monkeypatch)
    np.testing.assert_allclose(ours(words), theirs, rtol=1e-12, atol=1e-12)


def appfls(name):
    aggregators = pytest.importorskip("appfl.algorithm.aggregator")
    from omegaconf import DictConfig

    settings = {"server_learning_rate": 0.125, "server_adapt_param": 1e-3}
    # FedAdagrad has its own default of momentum here, as in the paper's experiments.
    settings |= {"server_momentum_param_1": 0.0 if "Adagrad" in name else 0.8, "server_momentum_param_2": 0.95}
    aggregator = getattr(aggregators, name)(aggregator_configs=DictConfig(settings))
    aggregator.global_state = {"x": torch.tensor(X0)}
    found = []
    for moves in MOVES:
        x = aggregator.global_state["x"].clone()
        aggregator.aggregate({client: {"x": x + torch.tensor(move)} for client, move in enumerate(moves)})
        found.append(aggregator.global_state["x"].numpy().copy())
    return np.array(found)


def central(name, model):
    settings = {"lr": 0.125, "betas": (0.8, 0.95), "eps": 1e-3} if name == "Adam" else {"lr": 0.125, "momentum": 0.8}
    return getattr(torch.optim, name)(model.parameters(), **settings)


def at_x0():
    model = linear()
    model.weight.data.copy_(torch.tensor(X0))
    return model


def nvflares(name):
    fedopt = pytest.importorskip("nvflare.app_opt.pt.fedopt")
    generator = fedopt.PTFedOptModelShareableGenerator(source_model="model", device="cpu")
    generator.model = at_x0()
    generator.optimizer = central(name, generator.model)

    def step(move):
        generator.server_update({"weight": move[None]})
        return weight(generator.model)

    return np.array([step(moves.mean(0)) for moves in MOVES])


def pfls(name):
    pytorch = pytest.importorskip("pfl.model.pytorch")
    from pfl.stats import MappedVectorStatistics

    module = at_x0()
    module.loss = module.metrics = None
    model = pytorch.PyTorchModel(module, torch.optim.SGD, central(name, module))

    def step(move):
        model.apply_model_update(MappedVectorStatistics({"weight": torch.tensor(move[None])}))
        return weight(module)

    return np.array([step(moves.mean(0)) for moves in MOVES])


class Sized:
    def __init__(self, n_examples):
        self.n_examples = n_examples


def flukes(name, **settings):
    algorithms = pytest.importorskip(
        "fluke.algorithms.fedopt" if name == "FedOptServer" else "fluke.algorithms.fedavgm"
    )
    clients = [Sized(number) for number in SAMPLES]
    server = getattr(algorithms, name)(model=at_x0(), test_set=None, clients=clients, **settings)
    found = []
    for moves in MOVES:
        models = [at_x0() for _ in moves]
        for model, move in zip(models, moves):
            model.weight.data.copy_(server.model.weight.data + torch.tensor(move))
        server.aggregate(clients, models)
        found.append(weight(server.model))
    return np.array(found)


def fluke_opt(mode):
    settings = {"beta1": 0.0 if mode == "adagrad" else 0.8, "beta2": 0.95, "tau": 1e-3}
    return flukes("FedOptServer", mode=mode, lr=0.125, **settings)


THEIRS = {  # what the page names -> its x after each round, ours from the settings on the page
    **{
        name: (partial(appfls, name), ours)
        for name in (f"{method}Aggregator" for method in ("FedAvg", "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad"))
    },
    **{f"PTFedOptModelShareableGenerator({name})": (partial(nvflares, name), ours) for name in ("Adam", "SGD")},
    **{f"central_optimizer={name}": (partial(pfls, name), ours) for name in ("Adam", "SGD")},
    **{f'FedOptServer(mode="{mode}")': (partial(fluke_opt, mode), ours) for mode in ("adam", "yogi", "adagrad")},
    "FedAVGMServer": (lambda: flukes("FedAVGMServer", momentum=0.8), ours),
    "PTScaffoldHelper": (other_clients.nvflare_scaffold, fit),
    "PTFedProxLoss(mu=0.5)": (other_clients.nvflare_fedprox, fit),
    "FedProxTrainer": (other_clients.appfl_fedprox, fit),
    "FedProxClient(mu=0.5)": (other_clients.fluke_fedprox, fit),
    "FedProxSerialClientTrainer": (other_clients.fedlab_fedprox, fit),
    "FedProx(mu=0.5)": (other_clients.pfl_fedprox, fit),
    "ScaffoldServerHandler": (other_clients.fedlab_scaffold, fit),
    "SCAFFOLD": (other_clients.pfl_scaffold, fit),
    "SCAFFOLDServer(weighted=False)": (partial(other_clients.fluke_scaffold, False), fit),
    "SCAFFOLDServer": (partial(other_clients.fluke_scaffold, True), fit),
    "FedNovaServerHandler": (other_clients.fedlab_fednova, partial(fit, steps=uneven)),
    "FedDynServerHandler": (other_clients.fedlab_feddyn, fit),
    "FedExPServer(weighted=False)": (other_clients.fluke_fedexp, fit),
    "FedNovaServer(weighted=False)": (other_clients.fluke_fednova, partial(fit, steps=uneven)),
}


def lag(mine, theirs):
    """Of fluke's FedAVGM after the last round, in first moves."""
    move = np.average(MOVES[0], axis=0, weights=SAMPLES)
    return ((mine - theirs)[-1] / move).mean()


def times_c(mine, theirs):
    """How many times ours NVFlare's c of the first round is, where every second client takes part."""
    half = {"participants": lambda r: [r % 2]}
    theirs = other_clients.nvflare_scaffold(**half, c_too=True)
    return (theirs[0] / fit("--algorithm scaffold", **half, row="c")[0]).mean()


def apart(mine, theirs):
    """The largest difference, in largest moves of ours."""
    return abs(mine - theirs).max() / abs(mine).max()


REMAINS = {"FedAVGMServer": lag, "PTScaffoldHelper": times_c, "SCAFFOLD": apart, "SCAFFOLDServer": apart}
REMAINS |= {"FedDynServerHandler": apart, "FedNovaServer(weighted=False)": apart}
TOLERANCES = {"FedProx(mu=0.5)": 1e-6, "FedExPServer(weighted=False)": 2e-3}  # moves, and their norms, in float32


@pytest.mark.parametrize(("system", "there", "words", "remains"), OTHERS, ids=lambda value: value.split(" -")[0])
def test_what_remains_is_what_the_page_says(system, there, words, remains):
    find_theirs, find_ours = THEIRS[there]
    theirs, mine = find_theirs(), find_ours(words.split(" --participation")[0])
    if remains == "nothing" or there == "PTScaffoldHelper":
        tolerance = TOLERANCES.get(there, 1e-12)
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)
    if remains != "nothing":
        assert float(f"{REMAINS[there](mine, theirs):.2g}") == float(remains.strip("`"))


def test_the_page_has_all_rows_of_other_systems():
    assert {there for _, there, _, _ in OTHERS} == THEIRS.keys()


def test_flowers_participants_are_fewer_where_the_product_rounds_down():
    """The page's example: 0.29 of 100 clients."""
    strategies = pytest.importorskip("flwr.server.strategy")
    counted = [strategies.FedAvg(fraction_fit=share).num_fit_clients(100)[0] for share in (0.29, 0.001)]
    here = [len(draw_participants(100, share, 0, 0)) for share in (0.29, 0.001)]
    assert (counted, here) == ([28, 2], [29, 1])


DEFAULTS = re.findall(r"^\| (Flower|fluke) `([\w.]+)` \| `(.+?)` \| `(\w+)`: `(.+?)` \|$", PAGE, re.MULTILINE)


def test_defaults_are_as_the_page_says():
    classes = known(fedmpi.algorithms, Algorithm)
    assert len(DEFAULTS) >= 5
    for _, _, _, algorithm, values in DEFAULTS:
        settings = {field.name: field.default for field in dataclasses.fields(classes[algorithm])}
        for name, value in (pair.split("=") for pair in values.split(", ")):
            assert settings[name] == float(value), (algorithm, name)


@pytest.mark.parametrize(("system", "name", "values"), [row[:3] for row in DEFAULTS])
def test_defaults_there_are_as_the_page_says(system, name, values):
    place, _, name = name.rpartition(".")
    modules = ["fluke.algorithms.fedopt", "fluke.algorithms.fedavgm"]
    if system == "Flower":
        modules = [f"flwr.{place or 'server.strategy'}"]
    classes = [getattr(pytest.importorskip(module), name, None) for module in modules]
    parameters = inspect.signature(next(filter(None, classes))).parameters
    for setting, value in (pair.split("=") for pair in values.split(", ")):
        assert parameters[setting].default == float(value), (name, setting)
