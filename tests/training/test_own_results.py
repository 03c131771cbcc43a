"""Clients that train alone (`--private '*'`) have their own best model and end by themselves, in every task."""

import json

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
from helpers import train
from torch.utils.data import TensorDataset

import fedmpi

ALONE = {"private": "*", "algorithm": {"name": "fedavg", "step_size": 0.5}, "threads": 1, "clients": 3, "model": "mlp"}
SPLIT = {"partition": {"name": "dirichlet", "concentration": 0.3}, "holdout": 0.2, "eval_every": 1, "batch_size": 20}


def alone(out, **settings):
    return fedmpi.train(**{**ALONE, "out": out, **settings})


def values_of(folder, client):
    return safetensors.torch.load_file(folder / "models" / f"client_{client}.safetensors")


def own_values(folder, metric):
    """[rounds, clients] of what was measured in every round."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return np.array([line["clients"][metric] for line in lines])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Runs of 1, 2, ... 6 rounds: after each, every client has its last model."""
    out = tmp_path_factory.mktemp("alone")
    return [alone(out, rounds=rounds, **SPLIT).folder for rounds in range(1, 7)]


def test_each_client_has_its_own_best_model(folders, tmp_path):
    run = alone(tmp_path, rounds=6, result="best", **SPLIT)
    best = own_values(run.folder, "holdout_accuracy").argmax(0)  # the first of equal ones
    assert len(set(best)) > 1, "the clients are to be best in different rounds"
    for client, number in enumerate(best):
        right = values_of(folders[number], client)
        assert all(torch.equal(value, right[name]) for name, value in values_of(run.folder, client).items())
    found = own_values(run.folder, "holdout_accuracy").max(0)
    assert run.final["holdout_accuracy"] == pytest.approx(found.mean())


@pytest.mark.parametrize("words", [{"stop": "train_loss<0.15"}, {"patience": 1}, {"patience": 1, "result": "best"}])
def test_each_client_ends_by_itself(folders, tmp_path, words):
    run = alone(tmp_path, rounds=6, **words, **SPLIT)
    measured = own_values(folders[-1], "train_loss" if "stop" in words else "holdout_accuracy")
    ends = []
    for values in measured.T:
        if "stop" in words:
            ends.append(next((k for k, value in enumerate(values) if value < 0.15), 5))
        else:
            ends.append(next((k for k in range(1, 6) if values[k] <= values[:k].max()), 5))
    assert len(set(ends)) > 1, "the clients are to end in different rounds"
    assert len(run.metrics) == max(ends) + 1
    for client, end in enumerate(ends):
        number = measured[: end + 1, client].argmax() if "result" in words else end
        right = values_of(folders[number], client)
        assert all(torch.equal(value, right[name]) for name, value in values_of(run.folder, client).items()), client


def test_ranks_and_a_stop_change_no_result(tmp_path):
    words = ("--private", "*", "--algorithm", "fedavg", "--algorithm.step_size", 0.5, "--clients", 3, "--model", "mlp")
    words += ("--partition", "dirichlet", "--partition.concentration", 0.3, "--holdout", 0.2, "--eval_every", 1)
    words += ("--batch_size", 20, "--result", "best", "--patience", 2)
    jobs = [(1, ("--name", "whole", "--rounds", 6)), (3, ("--name", "other", "--rounds", 6))]
    jobs += [(2, ("--name", "part", "--rounds", 3)), (1, ("--resume", tmp_path / "part", "--rounds", 6))]
    for ranks, more in jobs:
        ended = train(ranks, tmp_path, *words, *more)
        assert ended.returncode == 0, ended.stderr
    for client in range(3):
        whole = values_of(tmp_path / "whole", client)
        for name in ("other", "part"):
            found = values_of(tmp_path / name, client)
            assert all(torch.allclose(value, whole[key], atol=1e-6) for key, value in found.items())


def data_of(client, number=40):
    draw = torch.Generator().manual_seed(client)
    inputs = torch.randn(number, 3, generator=draw)
    return TensorDataset(inputs, (inputs.sum(1) > 0.5 - client / 3).long())


@pytest.mark.parametrize("tests", ["shared", "own", "none"])
@pytest.mark.parametrize("is_object", [False, True])
def test_tasks_in_python_measure_each_client_with_its_own_model(tmp_path, tests, is_object):
    shared, own = (data_of(9, 50) if tests == "shared" else None), tests == "own"
    if is_object and own:
        pytest.skip("Datasets that are given as objects have a common test set")
    if is_object:
        given = {"data": [data_of(client) for client in range(3)], "test_data": shared}
    else:
        given = {"task": fedmpi.Task.of(
            "Mine",
            train=lambda client, num: data_of(client),
            test=lambda: shared,
            loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
            metrics={"accuracy": "sklearn.metrics.accuracy_score"},
            **({"test_of": lambda client, num: data_of(client + 5, 10 + client)} if own else {}),
        )}  # fmt: skip
    words = {"algorithm": {"name": "fedavg", "step_size": 0.5}, "private": "*", "clients": 3, "threads": 1}
    run = fedmpi.train(**given, model=torch.nn.Linear(3, 2), rounds=3, out=tmp_path, **words)
    found, loss = fedmpi.load_run(run.folder).clients, torch.nn.functional.cross_entropy
    pairs = []
    for client, model in run.models.items():
        with torch.no_grad():
            inputs, labels = data_of(client).tensors
            assert found["train_loss"][client] == pytest.approx(loss(model(inputs), labels).item(), rel=1e-5)
            part = slice(50 * client // 3, 50 * (client + 1) // 3)
            tensors = shared.tensors if shared else data_of(client + 5, 10 + client).tensors
            inputs, labels = (one[part] for one in tensors) if shared else tensors
            share = (model(inputs).argmax(1) == labels).double().mean().item()
            pairs.append((loss(model(inputs), labels).item(), share))
    if tests != "none":
        assert found["test_loss"] == pytest.approx([pair[0] for pair in pairs], rel=1e-5)
        assert found["accuracy"] == pytest.approx([pair[1] for pair in pairs])


def test_the_areas_of_clients_are_those_of_their_own_models(tmp_path):
    sk, draw, own = pytest.importorskip("sklearn.metrics"), np.random.default_rng(0), []
    for client in range(2):
        labels = draw.permutation(60) % 2
        inputs = (draw.standard_normal((60, 4)) + 0.5 * labels[:, None]).astype("float32")
        own.append((torch.tensor(inputs[40:]), labels[40:]))
        with h5py.File(tmp_path / f"silo_{client}.h5", "w") as file:
            file.attrs["num_classes"] = 2
            for split, part in (("train", slice(40)), ("test", slice(40, 60))):
                file[f"{split}/images"], file[f"{split}/labels"] = inputs[part], labels[part]
    words = {"task": "auc", "data": str(tmp_path / "silo_{client}.h5"), "model": "mlp", "rounds": 3, "clients": 2}
    run = fedmpi.train(**words, private="*", threads=1, out=tmp_path)
    with torch.no_grad():
        right = [sk.roc_auc_score(own[k][1], run.models[k](own[k][0]).numpy()) for k in range(2)]
    assert fedmpi.load_run(run.folder).clients["auc"] == pytest.approx(right)


def test_clients_whose_models_are_not_chosen_by_the_goal_are_named(tmp_path, capsys):
    """Client 1 has one sample, of which none can be held out."""
    words = {**ALONE, "model": torch.nn.Linear(3, 2), "rounds": 2, "result": "best", "eval_every": 1, "holdout": 0.2}
    sets = [data_of(client, number) for client, number in enumerate((40, 1, 40))]
    fedmpi.train(**words, data=sets, test_data=data_of(9), batch_size=5, out=tmp_path)
    line = "client 1: holdout_accuracy is not measured there, so the best of their own models is chosen by accuracy"
    assert capsys.readouterr().err.count(line) == 1
