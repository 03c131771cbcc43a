"""Run folders from strangers: nothing that one names is imported or executed, and a damaged one gives one line."""

import json
import sys
import zlib

import h5py
import pytest
import torch
import yaml
from safetensors.torch import save_file

import fedmpi
from fedmpi.ground.errors import UserError
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.runs.checkpoints.files import Damaged, read_manifest, read_state, write_manifest
from fedmpi.runs.initial import read_initial
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


def test_files_of_tensors_refer_to_no_other_file(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(64))
    with h5py.File(tmp_path / "model.h5", "w") as file:
        file.create_dataset("model/0.weight", (8,), "f8", external=[(str(secret), 0, 64)])
    flat = FlatModule(torch.nn.Sequential(torch.nn.Linear(8, 1, bias=False)))
    with pytest.raises(UserError, match=r"^init = \S+: cannot be read: [^\n]+ lies in another file"):
        read_initial(str(tmp_path), flat)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("versions", []), ("round", "3"), ("round", 2.5), ("records", {}), ("settings", [[1]]), ("server", 3),
        ("server", ["a", 1]), ("server", None), ("clients", None), ("clients", {"x": None}), ("clients", {"0": 1}),
        ("clients", {"0": [1, 2]}), ("clients", {"0": [1, 2, "3"]}), ("clients", [[1, 2, 3]]),
        ("architecture", None), ("run_name", 3),
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_with_other_types_is_damaged(tmp_path, key, value):
    clients = {"0": [1, 2, 3], "1": None}
    good = {"round": 1, "layout": [], "records": 0, "server": [1, 2], "clients": clients, "settings": {}}
    good |= {"architecture": {}, "run_name": "it"}
    write_manifest(tmp_path, good)
    assert read_manifest(tmp_path)["clients"] == clients
    write_manifest(tmp_path, {**good, key: value})
    with pytest.raises(Damaged, match="another program wrote it: values are missing"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("[" * 99_999)
    with pytest.raises(Damaged, match="its bytes are not those that were written"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "metadata",
    [None, {"numbers": '{"loop/seconds": "abc"}'}, {"numbers": "{}", "bits": '{"server/x": ["no_type", [1]]}'}],
    ids=str,
)
def test_a_state_that_another_program_wrote_is_damaged(tmp_path, metadata):
    path = tmp_path / "server.safetensors"
    save_file({"server/x": torch.ones(1)}, path, metadata)
    content = path.read_bytes()
    with pytest.raises(Damaged, match="server.safetensors: cannot be read: "):
        read_state(path, len(content), zlib.crc32(content))


def test_load_imports_nothing_that_a_folder_names(tmp_path, trap):
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")

    def describe(path, **arguments):
        content = {"model": {"class": path, "arguments": arguments}}
        (tmp_path / "model.json").write_text(json.dumps(content))
        return fedmpi.load(tmp_path)

    for path in (trap, "x", ""):
        with pytest.raises(UserError, match="is not imported"):
            describe(path)
    for path in ("os.system", "builtins.print", "fedmpi.ground.errors.UserError"):  # they are imported, and not called
        with pytest.raises(UserError, match="is no class of modules"):
            describe(path)
    assert isinstance(describe("fedmpi.tasks.toys.Point", x0=[0.0, 0.0]), Point)
    with pytest.raises(UserError, match="the model cannot be built: TypeError"):
        describe("torch.nn.Linear", rows=3)
