"""With what a run may go on from a checkpoint: its settings, model and software; whole runs are in tests/training."""

import pathlib
import types

import pytest
from torch import nn

from fedmpi.aggregation.mean import Mean
from fedmpi.ground.errors import UserError
from fedmpi.ground.machine.versions import versions
from fedmpi.oracles.architecture import as_json, describe
from fedmpi.runs.checkpoints import resume
from fedmpi.runs.checkpoints.files import describe_layout
from fedmpi.training.config import read_command_line


def run(*words, num_clients=2, shape=(3, 4), rank=0, model=None):
    """What the checks read of a `Run`, from real settings."""
    config = read_command_line(["--rounds", "8", *words])
    flat = types.SimpleNamespace(names=["0.weight"], shapes=[shape], segments=[slice(0, 12)], permuted=[False])
    flat.architecture = describe(model or nn.Sequential(nn.Linear(4, 3, bias=False)))
    return types.SimpleNamespace(
        settings={**config.resolved, "clients": num_clients},
        may_change=config.may_change,
        folder=pathlib.Path("it"),
        clients=[0],
        num_clients=num_clients,
        flat=flat,
        num_rounds=config.rounds.rounds,
        link=types.SimpleNamespace(rank=rank),
        federation=types.SimpleNamespace(aggregation=Mean()),
    )


def manifest(written, number=4):
    """That of a checkpoint after some rounds of a run."""
    return {
        "round": number,
        "settings": written.settings,
        "clients": {str(client): None for client in range(written.num_clients)},
        "layout": describe_layout(written.flat),
        "architecture": as_json(written.flat.architecture),
        "versions": versions(),
    }


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        ({}, {}, None),
        ({"words": ["--out", "a", "--threads", "1"]}, {"words": ["--out", "b", "--rounds", "9"]}, None),
        ({}, {"words": ["--eval-every", "2"]}, None),
        ({}, {"words": ["--batch-size", "7"]}, "the run has other settings: batch_size was 50, now 7; give the former"),
        (
            {},
            {"words": ["--eval-every", "2", "--patience", "3"]},
            "settings: eval_every was None, now 2, patience was None, now 3; give",
        ),
        ({}, {"num_clients": 3}, "other settings: clients was 2, now 3; give the former values, or begin a new run"),
        ({}, {"shape": (4, 3)}, "other settings: the model's parameters, or their order in memory (channels_last); "),
        (
            {},
            {"model": nn.Sequential(nn.Bilinear(1, 4, 3, bias=False))},
            "the model is another one: its part '0' is a Bilinear, the run's is a Linear; give the former model",
        ),
        (
            {"number": 9},
            {},
            "rounds = 8, but the run has already completed 9 rounds: expected at least as many",
        ),
    ],
)
def test_settings_that_must_agree(then, now, message):
    number = then.pop("number", 4)
    written = manifest(run(*then.get("words", ())), number)
    words = now.pop("words", ())
    if message is None:
        resume._check_settings(run(*words, **now), written)
        return
    with pytest.raises(UserError) as error:
        resume._check_settings(run(*words, **now), written)
    assert str(error.value).startswith("resume = it: ") and message in str(error.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_other_versions_are_said_by_rank_0(capsys, rank):
    written = manifest(run())
    written["versions"]["torch"] = "1.0"
    written["versions"]["nothing that is here"] = "2"
    resume._check_settings(run(rank=rank), written)
    line = "the checkpoint was written with torch 1.0: results may differ in the last digits"
    assert (line in capsys.readouterr().err) == (rank == 0)


def test_a_rank_that_sees_no_checkpoints_and_needs_them(tmp_path):
    own, written = run(), manifest(run())
    own.folder = tmp_path
    with pytest.raises(
        UserError, match=r"rank 0 has its checkpoints, but \S+ has not: use a folder that all nodes sha"
    ):
        resume._check_sees_checkpoints(own, None, written)
    resume._check_sees_checkpoints(own, str(tmp_path), written)
    own.clients = []
    resume._check_sees_checkpoints(own, None, written)
    (tmp_path / "checkpoints").mkdir()
    own.clients = [0]
    resume._check_sees_checkpoints(own, None, written)
