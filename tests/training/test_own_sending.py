"""A user's own aggregation and stage: by name from the command line and a file, resumed, and in own loops."""

import json

import pytest
import torch
import yaml
from helpers import start, train
from own_sending import Rounding, TrimmedMean
from safetensors.torch import load_file

import fedmpi

CHOSEN = {"aggregation": {"name": "own_sending.TrimmedMean", "trim": 2}}
CHOSEN |= {"stages": {"name": "own_sending.Rounding", "rounding": {"unit": 0.001}}}


def model(folder):
    return {name: value.numpy().tobytes() for name, value in load_file(folder / "model.safetensors").items()}


@pytest.mark.rarely
def test_runs_go_on_with_the_same_bits_on_other_ranks(tmp_path):
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(CHOSEN))
    words = ("--config", tmp_path / "own.yaml", "--clients", 6, "--local-steps", 3, "--threads", 1)
    whole = train(3, tmp_path, *words, "--rounds", 4, "--name", "whole")
    assert whole.returncode == 0, whole.stderr
    assert "aggregation left out" in whole.stdout
    records = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert all(record["aggregation_left_out"] > 0 for record in records)
    settings = yaml.safe_load((tmp_path / "whole" / "settings.yaml").read_text())
    assert {key: settings[key] for key in CHOSEN} == CHOSEN
    part = train(3, tmp_path, *words, "--rounds", 2, "--name", "part", "--checkpoint-every", 2)
    assert part.returncode == 0, part.stderr
    resumed = train(2, tmp_path, "--resume", tmp_path / "part", "--rounds", 4)
    assert resumed.returncode == 0, resumed.stderr
    assert model(tmp_path / "part") == model(tmp_path / "whole")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--stages", "norm_boun"), "unknown stage 'norm_boun'; did you mean 'norm_bound'?"),
        (("--aggregation", "krum"), "unknown aggregation 'krum'"),
        (("--stages", "norm_bound", "--stages.norm_bound.bound", 0), "stages.bound = 0.0: expected a number > 0"),
        (("--stages", "norm_bound", "--stages.norm_bound.bnd", 1), "unknown setting stages.norm_bound.bnd"),
        (("--aggregation", "own_sending.TrimmedMean", "--aggregation.trim", -1), "aggregation.trim = -1: expected"),
    ],
)
def test_mistakes_are_one_line(tmp_path, words, line):
    ended = start(1, "-m", "fedmpi.train", "--out", tmp_path, *words)
    assert ended.returncode == 2 and f"fedmpi: error: {line}" in ended.stderr and ended.stderr.count("\n") == 1


def test_own_loops_take_names_and_objects():
    def trained(**arguments):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fed = fedmpi.average(model, optimizer, every=2, **arguments)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.eye(3)).square().mean().backward()
            optimizer.step()
            fed.step()
        fed.finish()
        return model.weight.detach()

    plain, coarse = trained(), trained(stages=[Rounding(unit=0.25)])
    assert not torch.equal(plain, coarse) and torch.equal(coarse, (4 * coarse).round() / 4)
    assert torch.equal(plain, trained(aggregation="reproducible"))
    assert torch.equal(plain, trained(aggregation=TrimmedMean, stages="norm_bound"))  # one client is taken as it is
    with pytest.raises(fedmpi.UserError, match="stages is a int: expected a list"):
        trained(stages=3)
    with pytest.raises(fedmpi.UserError, match="aggregation is a Rounding: expected a name"):
        trained(aggregation=Rounding())


def test_a_run_with_objects_can_be_repeated_from_its_settings(tmp_path):
    words = {"clients": 3, "rounds": 1, "local_steps": 1, "out": tmp_path, "threads": 1}
    given = fedmpi.train(aggregation=TrimmedMean(trim=0), stages=[Rounding(unit=0.5)], **words)
    again = fedmpi.train(config=given.folder / "settings.yaml", name="again", out=tmp_path)
    assert again.settings["stages"] == {"name": "own_sending.Rounding", "rounding": {"unit": 0.5}}
    assert model(again.folder) == model(given.folder)
