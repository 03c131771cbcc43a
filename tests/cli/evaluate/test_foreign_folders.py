"""A folder that is only read runs no code of its own; evaluating takes of a run what says how a model is measured."""

import json
import pathlib
import resource
import sys

import pytest
import yaml

import fedmpi
from fedmpi.cli.evaluate.__main__ import _run
from fedmpi.comm.solo import SoloLink
from fedmpi.ground.errors import UserError
from fedmpi.runs.checkpoints.files import Damaged, read_manifest

PAYLOAD = """
import pathlib
pathlib.Path(__file__).with_name("ran").touch()
Net = None
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    fedmpi.train(algorithm="fedavg", rounds=20, out=str(folder), name="base", threads=1)
    return folder


def measured(capsys, *words):
    """The accuracy that the program prints."""
    capsys.readouterr()
    _run([*map(str, words), "--threads", "1"], SoloLink())
    line = next(line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("accuracy"))
    return float(line.split()[-1])


def copied(base, folder):
    """A copy of the files of the run `base`, without its checkpoints."""
    folder.mkdir(parents=True)
    for file in (base / "base").iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize(
    "key", ["model", "Model", "task", "partition", "task.metrics", "task.transform", "task.TRANSFORM", "Task.Transform"]
)
def test_code_that_only_the_folder_names_is_not_run(base, tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    folder = copied(base, tmp_path / "runs" / "v")
    (folder / "payload.py").write_text(PAYLOAD, encoding="utf-8")
    settings = yaml.safe_load((folder / "settings.yaml").read_text(encoding="utf-8"))
    group, _, name = key.partition(".")
    before = {k: value for k, value in (settings.pop(group.lower(), None) or {}).items() if k != name.lower()}
    settings[group] = {**before, (name or "name"): "runs.v.payload.Net"}
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    with pytest.raises(UserError, match=f"(?i){key} = runs.v.payload.Net, which is not run: .*--import runs.v.payload"):
        _run([str(folder)], SoloLink())
    assert not (folder / "ran").exists() and "runs.v.payload" not in sys.modules


@pytest.mark.parametrize("name", ["settings.yaml", "metrics.jsonl", "clients.json", "model.json", "model.h5"])
def test_files_that_are_links_out_of_the_folder_are_not_read(base, tmp_path, name):
    folder = copied(base, tmp_path / "run")
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    read = {
        "settings.yaml": (fedmpi.load_run, lambda path: _run([str(path)], SoloLink())),
        "model.json": (fedmpi.load,),
        "model.h5": (lambda path: _run([str(path)], SoloLink()),),
    }.get(name, (fedmpi.load_run,))
    for function in read:
        with pytest.raises(UserError, match=f"{name}: is a link, .*expected the file itself"):
            function(folder)


def test_the_manifest_of_a_checkpoint_is_no_link_out_of_the_folder(base, tmp_path):
    manifest = next((base / "base" / "checkpoints").glob("*/manifest.json"))
    assert read_manifest(manifest.parent)["format"] == 1
    (tmp_path / "manifest.json").symlink_to(manifest)
    with pytest.raises(Damaged, match="manifest.json: is a link, .*expected the file itself"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("torch.nn.modules.batchnorm.BatchNorm1d", {"num_features": 3 * 10**9, "affine": False}),
        ("torch.nn.modules.linear.Linear", {"in_features": 10**5, "out_features": 10**5}),
        ("torch.nn.modules.batchnorm.BatchNorm1d", {"num_features": 350_000_000, "affine": False}),
    ],
)
def test_sizes_that_only_model_json_claims_get_no_memory(base, tmp_path, path, arguments):
    folder = copied(base, tmp_path / "run")
    description = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    description["model"] = {"class": path, "arguments": arguments}
    (folder / "model.json").write_text(json.dumps(description), encoding="utf-8")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="model.json describes a far larger model"):
        fedmpi.load(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # KiB


def test_the_users_own_algorithm_is_not_needed_and_own_code_can_be_trusted(base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("trusted_net.py").write_text(
        "from torch import nn\n"
        "def network(shape, num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))\n",
        encoding="utf-8",
    )
    pathlib.Path("own_method.py").write_text(
        "import dataclasses, fedmpi\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Own(fedmpi.algorithms.FedAvg):\n    pass\n",
        encoding="utf-8",
    )
    settings = {"rounds": 5, "out": str(tmp_path), "name": "own", "threads": 1}
    run = fedmpi.train(model="trusted_net.network", algorithm="own_method.Own", **settings)
    for module in ("trusted_net", "own_method"):
        sys.modules.pop(module)
    with pytest.raises(UserError, match="model = trusted_net.network, which is not run"):
        measured(capsys, "own")
    found = measured(capsys, "own", "--import", "trusted_net")
    assert found == pytest.approx(run.final["accuracy"], abs=6e-5) and "own_method" not in sys.modules
    assert measured(capsys, "own", "--model", "trusted_net.network") == found


@pytest.mark.parametrize(
    "settings",
    [
        {"init": "base", "init_except": "3"},
        {"participation": 0.5, "clients": 4, "weighting": "samples"},
        {"freeze": "1", "init": "base"},
        {"codec": "half", "stages": "norm_bound", "clients": 2},
        {"result": "best", "holdout": 0.2, "eval_every": 2},
        {"local_epochs": 1, "clients": 2, "partition": "dirichlet"},
        {"ranks": 1, "checkpoint_every": 3, "checkpoint_keep": 1},
    ],
)
def test_a_run_of_any_settings_is_measured_as_it_was_at_its_end(base, tmp_path, capsys, settings):
    if "init" in settings:
        settings = settings | {"init": str(base / "base")}
    run = fedmpi.train(algorithm="fedavg", rounds=4, out=str(tmp_path), name="run", threads=1, **settings)
    assert measured(capsys, tmp_path / "run") == pytest.approx(run.final["accuracy"], abs=6e-5)
