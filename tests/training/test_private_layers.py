"""`--private` keeps layers with their client, also on several ranks and over a stop; `--freeze` keeps what was."""

import numpy as np
import pytest
import safetensors.torch
from helpers import train

import fedmpi
from fedmpi.cli.predict.__main__ import main as predict
from fedmpi.ground.errors import UserError
from fedmpi.runs.folder import read_run

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, num_classes)

    def forward(self, inputs):
        return self.head(self.body(inputs))
"""
COMMON = ("--model", "mynet.Net", "--clients", 3, "--partition", "classes", "--partition.per_client", 4)
PERSONAL = ("--private", "bn,head", *COMMON, "--holdout", 0.2)


@pytest.fixture
def start(tmp_path):
    (tmp_path / "mynet.py").write_text(NET)

    def run(ranks, name, *words):
        ended = train(ranks, tmp_path, "--name", name, *words, env={"PYTHONPATH": _paths(tmp_path)})
        assert ended.returncode == 0, ended.stderr
        return tmp_path / name

    return run


def _paths(folder):
    from helpers import ROOT

    return f"{folder}:{ROOT}"


def models(folder):
    return [safetensors.torch.load_file(folder / "models" / f"client_{client}.safetensors") for client in range(3)]


@pytest.mark.rarely
def test_private_layers_differ_between_clients_and_the_others_are_the_averaged_model(start, capsys):
    folder = start(2, "personal", *PERSONAL, "--rounds", 3)
    shared, own = safetensors.torch.load_file(folder / "model.safetensors"), models(folder)
    for name, value in shared.items():
        is_private = name.startswith("head.") or name.startswith("body.2.")
        if not value.is_floating_point():
            continue
        for one, other in ((0, 1), (1, 2), (0, 2)):
            assert bool((own[one][name] != own[other][name]).any()) == is_private, name
        if not is_private:
            assert all((model[name] == value).all() for model in own), name
    defined = {}
    exec(NET, defined)
    loaded = fedmpi.load(folder, defined["Net"](10), client=1).state_dict()
    assert all((loaded[name] == value).all() for name, value in own[1].items())
    with pytest.raises(UserError, match="contains no models/client_3.safetensors"):
        fedmpi.load(folder, client=3)
    with pytest.raises(UserError, match=r"each client has a model of its own \(--private\): choose one, like client=0"):
        fedmpi.load(folder, defined["Net"](10))
    with pytest.raises(SystemExit):
        predict([str(folder), "none.csv"])
    assert "each client has a model of its own (--private): choose one, like --client 0" in capsys.readouterr().err
    clients = read_run(folder).clients
    assert len(clients["accuracy"]) == len(clients["holdout_accuracy"]) == 3


def test_ranks_and_a_stop_change_nothing(start):
    whole = start(1, "whole", *PERSONAL, "--rounds", 4)
    part = start(1, "part", *PERSONAL, "--rounds", 2)
    start(1, "part", "--resume", part, "--rounds", 4)
    ranks = start(3, "ranks", *PERSONAL, "--rounds", 4)
    for number, model in enumerate(models(whole)):
        for name, value in model.items():
            assert (models(part)[number][name] == value).all(), name
            assert np.allclose(models(ranks)[number][name], value, atol=1e-5), name


def test_every_client_is_evaluated_whatever_the_ranks(start):
    """Also before the end, on a part of the test samples."""
    words = (*PERSONAL, "--rounds", 2, "--eval_every", 1, "--evaluate_samples", 90)
    alone, spread = (read_run(start(ranks, f"on{ranks}", *words)) for ranks in (1, 3))
    assert alone.records[0]["accuracy"] == spread.records[0]["accuracy"]
    assert alone.records[0]["test_loss"] == pytest.approx(spread.records[0]["test_loss"], rel=1e-6)
    for run in (alone, spread):
        assert np.isfinite(run.clients["accuracy"]).all() and len(run.clients["accuracy"]) == 3


def test_frozen_layers_stay_as_they_were(start):
    first = start(1, "first", *COMMON, "--rounds", 1)
    frozen = start(1, "frozen", *COMMON, "--init", first, "--freeze", "body.*", "--rounds", 2)
    before, after = (safetensors.torch.load_file(folder / "model.safetensors") for folder in (first, frozen))
    assert (before["body.1.weight"] == after["body.1.weight"]).all()
    assert (before["head.weight"] != after["head.weight"]).any()


def test_what_private_layers_do_not_go_with_is_refused(tmp_path):
    ended = train(1, tmp_path, "--private", "heat", "--rounds", 1)
    assert ended.returncode == 2
    assert "private = heat: no layer is called heat" in ended.stderr
    ended = train(1, tmp_path, "--private", "1", "--result", "uniform")
    assert ended.returncode == 2
    assert "expected result = last or best" in ended.stderr
