"""Run folders from strangers: nothing that one names is imported or executed, and a damaged one gives one line."""

import json
import sys

import pytest
import torch
import yaml
from safetensors.torch import save_file

import fedmpi
from fedmpi.errors import UserError
from fedmpi.tasks.attack import load_classifier
from fedmpi.tasks.base import RankContext
from fedmpi.tasks.toys import Point

CONTEXT = RankContext(2, range(2), 0, 1, 0, None, torch.device("cpu"), torch.float32)


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """The dotted path of a class in a module that must not be imported."""
    (tmp_path / "a_trap.py").write_text("import torch\nclass Trap(torch.nn.Linear): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "a_trap.Trap"
    assert "a_trap" not in sys.modules


def classifier(folder, **settings):
    content = {"task": {"name": "classification", "data": "digits"}, "model": "mlp", **settings}
    (folder / "settings.yaml").write_text(yaml.safe_dump(content))
    return load_classifier(str(folder), CONTEXT)


def test_a_classifier_names_no_class_that_is_imported(tmp_path, trap):
    for name in (trap, "os.system", "fedmpi.models.mlp.MLP"):
        with pytest.raises(UserError, match="a class that a run folder names is not imported"):
            classifier(tmp_path, model={"name": name})


@pytest.mark.parametrize(
    "settings",
    [
        {"task": None}, {"task": "classification"}, {"task": {"name": "classification", "data": 3}}, {"task": [1]},
        {"model": "mlp"}, {"model": {"name": ["mlp"]}}, {"model": {"name": "mlp", "hidden": "many"}},
        {"model": {"name": "mlp", "hidden": -3}}, {"model": {"name": "mlp", "shape": 3}}, {"model": {}},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_classifier_is_one_line(tmp_path, settings):
    with pytest.raises(UserError) as error:
        classifier(tmp_path, **settings)
    assert "\n" not in str(error.value)


def test_load_imports_nothing_that_a_folder_names(tmp_path, trap):
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")

    def describe(path, **arguments):
        content = {"model": {"class": path, "arguments": arguments}}
        (tmp_path / "model.json").write_text(json.dumps(content))
        return fedmpi.load(tmp_path)

    for path in (trap, "os.system", "builtins.print", "fedmpi.errors.UserError", "x", ""):
        with pytest.raises(UserError, match="is not imported"):
            describe(path)
    assert isinstance(describe("fedmpi.tasks.toys.Point", x0=[0.0, 0.0]), Point)
    with pytest.raises(UserError, match="the model cannot be built: TypeError"):
        describe("torch.nn.Linear", rows=3)
