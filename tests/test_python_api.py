"""fedmpi from a Python program: the trained model and what a program needs to use it."""

import json
import re
import textwrap

import pytest
import torch
from conftest import execute, train
from safetensors.torch import load_file

import fedmpi
from fedmpi.runs.model_files import prepare_inputs

# Ten lines of PyTorch that give the accuracy which a run printed, without fedmpi.
PLAIN = """
    import json, sys
    import sklearn.datasets, torch
    from safetensors.torch import load_file
    facts = json.load(open(f"{sys.argv[1]}/model.json"))["input"]
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10))
    net.load_state_dict(load_file(f"{sys.argv[1]}/model.safetensors"))
    digits = sklearn.datasets.load_digits()
    images, labels = (torch.tensor(part[4::5]) for part in (digits.images, digits.target))
    inputs = (images * (255 / 16)).round().float() / facts["divide_by"]
    scores = net((inputs - torch.tensor(facts["mean"])) / torch.tensor(facts["std"]))
    print((scores.argmax(1) == labels).float().mean().item())
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run of the default job on 2 ranks: (the accuracy that it printed, its run folder)."""
    out = tmp_path_factory.mktemp("runs")
    ended = train(2, out, "--rounds", 20, "--clients", 4, "--name", "it", "--model", "mlp")
    assert ended.returncode == 0, ended.stderr
    return float(re.search(r"^  accuracy +([0-9.]+)", ended.stdout, re.MULTILINE).group(1)), out / "it"


def test_plain_pytorch_gets_the_printed_accuracy(finished):
    accuracy, folder = finished
    ended = execute(["python", "-c", textwrap.dedent(PLAIN), folder], cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) == pytest.approx(accuracy, abs=1e-4)


def test_load_gives_a_model_that_is_ready_for_use(finished):
    accuracy, folder = finished
    model = fedmpi.load(folder)
    assert not model.training and isinstance(model, torch.nn.Module)
    for name, value in load_file(folder / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], value)
    from fedmpi.data.source import DigitsSource

    digits = DigitsSource()
    labels = torch.from_numpy(digits.labels["test"])
    inputs = prepare_inputs(model.fedmpi, digits.read("test", range(len(labels))))
    assert (model(inputs).argmax(1) == labels).float().mean().item() == pytest.approx(accuracy, abs=1e-4)


def test_load_reads_folders_of_earlier_versions(finished, tmp_path):
    values = load_file(finished[1] / "model.safetensors")
    torch.save(values, tmp_path / "model.pt")
    with pytest.raises(fedmpi.UserError, match="model.json does not say how to build the model"):
        fedmpi.load(tmp_path)
    (tmp_path / "model.json").write_text((finished[1] / "model.json").read_text())
    model = fedmpi.load(tmp_path)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def test_load_says_what_is_wrong(finished, tmp_path):
    with pytest.raises(fedmpi.UserError, match=r"contains no model.safetensors \(no such folder\)"):
        fedmpi.load(tmp_path / "nothing")
    with pytest.raises(fedmpi.UserError, match="does not fit Linear"):
        fedmpi.load(finished[1], torch.nn.Linear(2, 3))
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(fedmpi.UserError, match="model.safetensors: cannot be read"):
        fedmpi.load(tmp_path)


@pytest.mark.parametrize("task", ["auc", "saddle_quadratic", "attack"])
def test_models_of_other_tasks_load_too(finished, tmp_path, task):
    words = {
        "auc": ("--algorithm", "fmgda"),
        "saddle_quadratic": ("--algorithm", "fmgda"),
        "attack": ("--algorithm", "fafedzo", "--algorithm.step_size", 1e-4, "--task.classifier", finished[1]),
    }[task]
    ended = train(1, tmp_path, "--task", task, *words, "--rounds", 2, "--clients", 2, "--name", "it")
    assert ended.returncode == 0, ended.stderr
    model = fedmpi.load(tmp_path / "it")
    values = load_file(tmp_path / "it" / "model.safetensors")
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert json.loads((tmp_path / "it" / "model.json").read_text()) == model.fedmpi
