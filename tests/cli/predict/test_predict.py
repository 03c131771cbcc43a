"""`python -m fedmpi predict` and `fedmpi.load`, given run folders and samples of any kind: right predictions, or
one line and no file."""

import csv
import functools
import json
import os
import sys
import textwrap
import time

import h5py
import numpy as np
import pytest
import torch
from helpers import execute, train
from safetensors.torch import load_file, save_file

import fedmpi
from fedmpi.cli.predict.__main__ import _are_alike, main
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import check_regular
from fedmpi.models.mlp import MLP
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.runs.initial import read_initial

INPUT = {"shape": [1, 4, 4], "divide_by": 255, "mean": [0.3], "std": [0.4]}
ARGUMENTS = {"shape": [1, 4, 4], "num_classes": 3, "hidden": 5}
NAMES = ["=1+1", "@home", "-ill"]
IMAGES = np.arange(7 * 16, dtype=np.uint8).reshape(7, 4, 4)
TENSORS = MLP(**ARGUMENTS).state_dict()


def description(**changed):
    model = {"class": "fedmpi.models.mlp.MLP", "arguments": ARGUMENTS}
    return {"task": "classification", "model": model, "input": INPUT, **changed}


ANOTHER = "sample,predicted,probability\n7,1,0.5\n"  # another run's table


@pytest.fixture
def folder(tmp_path):
    """A run folder with the model of a network that is not trained, beside `ok.npz`."""
    folder = tmp_path / "run"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors")
    (folder / "model.json").write_text(json.dumps(description()))
    np.savez(tmp_path / "ok.npz", x=IMAGES)
    return folder


def predicted(folder, file, *options):
    """The rows of the table."""
    out = folder.parent / "out.csv"
    main([str(folder), str(file), "--out", str(out), *options])
    return list(csv.DictReader(open(out, newline="")))


def refused(capsys, folder, file, *options):
    """The one line of a program that ends with exit code 2; the table of another run is as it was."""
    out = folder.parent / "out.csv"
    out.write_text(ANOTHER)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(folder), str(file), "--out", str(out), *options])
    printed = capsys.readouterr()
    assert ended.value.code == 2 and not printed.out and out.read_text() == ANOTHER
    assert printed.err.startswith("fedmpi: error: ") and len(printed.err.splitlines()) == 1, printed.err
    return printed.err


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_a_sample_that_is_not_finite_is_named(folder, tmp_path, capsys, value):
    """It was of class 0 with probability nan."""
    images = np.concatenate([IMAGES.astype(np.float64)] * 200)
    images[[1234, 1300], 2, 2] = value
    np.savez(tmp_path / "odd.npz", x=images)
    line = refused(capsys, folder, tmp_path / "odd.npz")
    assert "odd.npz" in line and "sample 1234 (from 0) has " in line and "not finite" in line


def test_a_field_of_a_table_that_is_not_finite_is_refused(folder, tmp_path, capsys):
    for field in ("nan", "inf", "1e42", "9" * 400):
        rows = [",".join(f"p{n}" for n in range(16)), ",".join("1" * 16), ",".join([*"1" * 15, field])]
        (tmp_path / "odd.csv").write_text("\n".join(rows))
        assert "sample 1 (from 0)" in refused(capsys, folder, tmp_path / "odd.csv")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_named(folder, tmp_path, capsys, value):
    weight = TENSORS["1.weight"].clone()
    weight[3, 7] = value
    save_file({**TENSORS, "1.weight": weight}, folder / "model.safetensors")
    line = refused(capsys, folder, tmp_path / "ok.npz")
    assert f"{folder / 'model.safetensors'}: 1.weight[3, 7] is not finite" in line


def test_a_score_that_is_not_finite_is_refused(folder, tmp_path, capsys):
    save_file({name: torch.full_like(value, 3e38) for name, value in TENSORS.items()}, folder / "model.safetensors")
    assert "(from 0) has a score that is not finite" in refused(capsys, folder, tmp_path / "ok.npz")


@pytest.mark.parametrize("kind", [">u2", ">i8", "<u8", ">f4", ">f8", "f2", "g"])
def test_every_type_of_numbers_is_read(folder, tmp_path, kind):
    expected = predicted(folder, tmp_path / "ok.npz")
    np.savez(tmp_path / "it.npz", x=IMAGES.astype(kind)[::-1][:, ::-1][:, ::-1][::-1])
    assert predicted(folder, tmp_path / "it.npz") == expected
    with h5py.File(tmp_path / "it.h5", "w") as file:
        file["images"], file["labels"] = IMAGES.astype(kind), np.arange(7).astype(">i2").reshape(7, 1) % 3
    rows = predicted(folder, tmp_path / "it.h5")
    assert [int(row.pop("label")) for row in rows] == [0, 1, 2, 0, 1, 2, 0] and rows == expected


def test_samples_of_other_kinds_are_refused(folder, tmp_path, capsys):
    values = [
        np.zeros((0, 4, 4)), np.zeros((7, 0, 4)), np.zeros(()), np.zeros(7), IMAGES > 3, IMAGES * 1j,
        np.full((7, 4, 4), "1"), np.full((7, 4, 4), b"1"), np.zeros((7, 4, 4), "M8[s]"), np.zeros((7, 4, 4), "m8[s]"),
        np.zeros((7, 4, 4), [("a", "f4")]), np.full((7, 4, 4), None),
    ]  # fmt: skip
    for value in values:
        np.savez(tmp_path / "odd.npz", x=value)
        assert "odd.npz: " in refused(capsys, folder, tmp_path / "odd.npz"), value.dtype
        with h5py.File(tmp_path / "odd.h5", "w") as file:
            if value.dtype.kind not in "MmUO":
                file["images"] = value
            elif value.dtype.kind == "O":
                file.create_dataset("images", (7, 4, 4), dtype=h5py.vlen_dtype("f4"))
            else:
                file["images"] = h5py.Empty("f4")
        assert "odd.h5: " in refused(capsys, folder, tmp_path / "odd.h5"), value.dtype


@pytest.mark.parametrize("shape", [[3, 4, 5], [1, 6, 4, 5]])
def test_channels_may_stand_first_and_volumes_have_none(folder, tmp_path, shape):
    arguments = {**ARGUMENTS, "shape": shape}
    save_file(MLP(**arguments).state_dict(), folder / "model.safetensors")
    about = description(model={"class": "fedmpi.models.mlp.MLP", "arguments": arguments})
    (folder / "model.json").write_text(json.dumps({**about, "input": {**INPUT, "shape": shape}}))
    first = np.random.default_rng(0).integers(0, 256, (7, *shape)).astype(np.uint8)
    np.savez(tmp_path / "last.npz", x=np.moveaxis(first, 1, -1))
    np.savez(tmp_path / "other.npz", x=first if shape[0] > 1 else first[:, 0])
    assert predicted(folder, tmp_path / "other.npz") == predicted(folder, tmp_path / "last.npz")


def test_samples_of_other_shapes_are_refused(folder, tmp_path, capsys):
    for shape in (
        (2, 4, 5),
        (2, 2, 8),
        (2, 4, 4, 3),
        (2, 1, 1, 16),
        (2, 4, 4, 1, 1),
        (2, 17),
        (2, 2, 2, 2, 2),
    ):
        np.savez(tmp_path / "odd.npz", x=np.zeros(shape))
        assert "the model takes inputs of shape [1, 4, 4]" in refused(capsys, folder, tmp_path / "odd.npz"), shape
    expected = predicted(folder, tmp_path / "ok.npz")
    for shape in ((7, 16), (7, 4, 4, 1)):
        np.savez(tmp_path / "other.npz", x=IMAGES.reshape(shape))
        assert predicted(folder, tmp_path / "other.npz") == expected


def test_a_model_takes_each_channel_last(folder, tmp_path):
    """Volumes, too: the channels stand last in the file, and before the other axes in the model's input."""
    arguments, values = {**ARGUMENTS, "shape": [2, 3, 4, 5]}, np.arange(2 * 120).reshape(2, 3, 4, 5, 2) / 240
    model = MLP(**arguments)
    save_file(model.state_dict(), folder / "model.safetensors")
    about = description(model={"class": "fedmpi.models.mlp.MLP", "arguments": arguments})
    about["input"] = {"shape": [2, 3, 4, 5], "divide_by": 1, "mean": [0.1, 0.5], "std": [0.5, 2]}
    (folder / "model.json").write_text(json.dumps(about))
    np.savez(tmp_path / "it.npz", x=values)
    inputs = torch.tensor((values - [0.1, 0.5]) / [0.5, 2]).movedim(-1, 1).float()
    sure = model.eval()(inputs).softmax(1).max(1)
    for number, row in enumerate(predicted(folder, tmp_path / "it.npz")):
        assert int(row["predicted"]) == sure.indices[number]
        assert float(row["probability"]) == pytest.approx(sure.values[number].item(), abs=1e-5)


def test_damaged_files_of_samples_are_refused(folder, tmp_path, capsys):
    for ending in (".npz", ".h5", ".csv", ".parquet"):
        for number, content in enumerate(
            [b"", b"\n", b"PK\x03\x04", b"\x89HDF\r\n\x1a\n", b"PAR1PAR1", os.urandom(99)]
        ):
            path = tmp_path / f"{number}{ending}"
            path.write_bytes(content)
            assert path.name in refused(capsys, folder, path)
    np.save(tmp_path / "it.npy", IMAGES)
    assert "expected a file that ends in" in refused(capsys, folder, tmp_path / "it.npy")
    (tmp_path / "it.npy").rename(tmp_path / "it.npz")
    assert "expected what np.savez writes" in refused(capsys, folder, tmp_path / "it.npz")
    whole = (tmp_path / "ok.npz").read_bytes()
    (tmp_path / "part.npz").write_bytes(whole[: len(whole) // 2])
    assert "part.npz: cannot be read" in refused(capsys, folder, tmp_path / "part.npz")
    (tmp_path / "head.csv").write_text("a,b\n")
    assert "head.csv: " in refused(capsys, folder, tmp_path / "head.csv")


def test_a_file_of_samples_is_a_regular_one(folder, tmp_path, capsys):
    os.mkfifo(tmp_path / "a.csv")
    (tmp_path / "b.npz").symlink_to("/dev/zero")
    (tmp_path / "c.h5").mkdir()
    for name in ("a.csv", "b.npz", "c.h5"):
        assert f"{name}: is not a regular file" in refused(capsys, folder, tmp_path / name)
    assert "no such file" in refused(capsys, folder, tmp_path / "none.csv")
    assert "cannot be read" in refused(capsys, folder, tmp_path / f"{'x' * 300}.csv")
    (tmp_path / "link.npz").symlink_to(tmp_path / "ok.npz")
    assert len(predicted(folder, tmp_path / "link.npz")) == 7


def test_odd_labels_are_refused(folder, tmp_path, capsys):
    odd = [
        [3] * 7, [-1] * 7, np.full(7, 2**64 - 1, np.uint64), ["²"] * 7, ["9" * 30] * 7, ["9" * 5000] * 7, [b"\xff"] * 7,
        [True] * 7, [0.5] * 7, [np.nan] * 7, np.zeros(7, "M8[s]"), np.zeros(7, [("a", "i4")]), [0], 0, [[0, 2]] * 7,
    ]  # fmt: skip
    for labels in odd:
        np.savez(tmp_path / "odd.npz", x=IMAGES, y=labels)
        assert "label" in refused(capsys, folder, tmp_path / "odd.npz"), labels
    for label in (3, -1):
        np.savez(tmp_path / "odd.npz", x=IMAGES, y=[0, 2, label, 1, 1, 1, 9])
        what = f"odd.npz: label {label}: expected 0 to 2, the classes of the model, or a file without labels\n"
        assert refused(capsys, folder, tmp_path / "odd.npz").endswith(what)


def test_the_label_that_is_named_is_the_wrong_one(folder, tmp_path, capsys):
    np.savez(tmp_path / "odd.npz", x=IMAGES, y=["0", "1", "x", "0", "0", "0", "0"])
    assert "label x:" in refused(capsys, folder, tmp_path / "odd.npz")


def test_names_of_classes_are_no_formulas(folder, tmp_path):
    (folder / "model.json").write_text(json.dumps(description(class_names=NAMES)))
    np.savez(tmp_path / "it.npz", x=IMAGES, y=np.arange(7) % 3)
    rows = predicted(folder, tmp_path / "it.npz")
    assert [row["label"] for row in rows[:3]] == ["'=1+1", "'@home", "'-ill"]
    assert {row["predicted"] for row in rows} <= {f"'{name}" for name in NAMES}
    np.savez(tmp_path / "it.npz", x=IMAGES, y=[NAMES[number % 3] for number in range(7)])
    assert predicted(folder, tmp_path / "it.npz") == rows


ODD = [
    True, -1, 0, 2.5, float("nan"), float("inf"), 1e308, 10**400, "", "x", "\ud800", [], {}, [[]], [None], [0], [-1],
    [10**400], [float("nan")], {"a": 1}, [1, 4, 4, 1], [[1, 4, 4]], {"class": "x"}, 10**9, None,
]  # fmt: skip


def test_odd_values_in_model_json(folder, tmp_path, capsys):
    """Accepted, if they are right or not used; otherwise one line."""
    keys = [
        *(("task",), ("model",), ("input",), ("model", "class"), ("model", "arguments")),
        *(("input", name) for name in INPUT),
        *(("model", "arguments", name) for name in ARGUMENTS),
    ]
    num_refused = 0
    for *places, key in keys:
        for value in ODD:
            about = json.loads(json.dumps(description()))
            place = functools.reduce(dict.get, places, about)
            place[key] = value
            if value is None:
                del place[key]
            (folder / "model.json").write_text(json.dumps(about))
            try:
                assert len(predicted(folder, tmp_path / "ok.npz")) == 7
            except SystemExit:
                refused(capsys, folder, tmp_path / "ok.npz")
                num_refused += 1
    assert num_refused > 200


@pytest.mark.parametrize("key", ["class_names", "feature_names"])
@pytest.mark.parametrize("value", [3, True, "abc", {"a": 1}, [1, 2, 3], ["a", None], ["a", "\ud800"], [["a"]]], ids=str)
def test_names_in_model_json_are_texts(folder, tmp_path, capsys, key, value):
    (folder / "model.json").write_text(json.dumps(description(**{key: value})))
    assert f"model.json: {key} is " in refused(capsys, folder, tmp_path / "ok.npz")


def test_a_model_json_that_cannot_be_read(folder, tmp_path, capsys):
    for text in ("", "{", "[]", "3", "null", "[" * 100_000, '{"a":' * 100_000, '{"a": 1' + "0" * 5000 + "}", "\xff"):
        (folder / "model.json").write_bytes(text.encode("latin1"))
        assert "model.json: " in refused(capsys, folder, tmp_path / "ok.npz")
    with open(folder / "model.json", "wb") as file:
        file.truncate(1 << 30)
    assert "has 1,073,741,824 bytes: expected at most" in refused(capsys, folder, tmp_path / "ok.npz")


@pytest.mark.parametrize("key", ["hidden", "hidden_layers"])
def test_a_model_that_would_fill_the_memory_is_not_built(folder, tmp_path, capsys, key):
    arguments = {**ARGUMENTS, key: 20_000_000}
    about = description(model={"class": "fedmpi.models.mlp.MLP", "arguments": arguments})
    (folder / "model.json").write_text(json.dumps(about))
    assert "describes a far larger model" in refused(capsys, folder, tmp_path / "ok.npz")


def test_a_convolutional_model_of_huge_images_is_not_computed(folder, tmp_path, capsys):
    arguments = {"shape": [1, 10**5, 10**5], "num_classes": 3}
    about = description(model={"class": "fedmpi.models.cnn.CifarCNN", "arguments": arguments})
    (folder / "model.json").write_text(json.dumps(about))
    began = time.monotonic()
    refused(capsys, folder, tmp_path / "ok.npz")
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("name", ["torch.nn.Identity", "torch.nn.Module", "torch.nn.Flatten", "torch.nn.LSTM"])
def test_modules_that_are_no_classifiers_are_refused(folder, tmp_path, capsys, name):
    arguments = {"input_size": 4, "hidden_size": 2} if name.endswith("LSTM") else {}
    about = description(model={"class": name, "arguments": arguments})
    (folder / "model.json").write_text(json.dumps(about))
    module = getattr(torch.nn, name.rpartition(".")[2])(**arguments)
    save_file({**module.state_dict()}, folder / "model.safetensors")
    if name.endswith("Flatten"):  # its scores are the 16 values
        assert len(predicted(folder, tmp_path / "ok.npz")) == 7
    else:
        assert "ok.npz with the model of" in refused(capsys, folder, tmp_path / "ok.npz")


def test_other_tensors_are_refused(folder, tmp_path, capsys):
    weight = TENSORS["1.weight"]
    for value in (
        weight.long(),
        weight.to(torch.complex64),
        weight > 0,
        weight[:1],
        weight.reshape(-1),
        weight[..., None],
    ):
        save_file({**TENSORS, "1.weight": value.contiguous()}, folder / "model.safetensors")
        assert "does not fit MLP" in refused(capsys, folder, tmp_path / "ok.npz")
    save_file({name: value.to(torch.float8_e4m3fn) for name, value in TENSORS.items()}, folder / "model.safetensors")
    assert "fedmpi: error: " in refused(capsys, folder, tmp_path / "ok.npz")
    for content in (b"", b"\xff" * 99, (2).to_bytes(8, "little") + b"{}", b"\0" * 8):
        (folder / "model.safetensors").write_bytes(content)
        assert "fedmpi: error: " in refused(capsys, folder, tmp_path / "ok.npz")
    (folder / "model.safetensors").unlink()
    assert "the run did not end" in refused(capsys, folder, tmp_path / "ok.npz")


@pytest.mark.parametrize("name", ["model.json", "model.safetensors", "models/client_0.safetensors"])
def test_files_of_a_run_folder_are_regular_ones(folder, tmp_path, capsys, name):
    path, options = folder / name, ["--client", "0"] if name.startswith("models") else []
    path.parent.mkdir(exist_ok=True)
    (folder / ("model.json" if name == "model.json" else "model.safetensors")).rename(tmp_path / "it")

    def check():
        assert f"{name}: is a link, a folder, a FIFO or a device" in refused(
            capsys, folder, tmp_path / "ok.npz", *options
        )
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    for target in (tmp_path / "it", "/dev/zero", tmp_path / "none", folder):
        path.symlink_to(target)
        check()
    os.mkfifo(path)
    check()
    path.mkdir()
    check()


def test_the_run_folder_itself_may_be_a_link(folder, tmp_path, capsys):
    (tmp_path / "link").symlink_to(folder)
    assert len(predicted(tmp_path / "link", tmp_path / "ok.npz")) == 7
    (tmp_path / "models").mkdir()
    save_file(TENSORS, tmp_path / "models" / "client_0.safetensors")
    (folder / "models").symlink_to(tmp_path / "models")
    assert "models: is a link" in refused(capsys, folder, tmp_path / "ok.npz", "--client", "0")


def test_odd_names_of_folders(folder, tmp_path, capsys):
    for name in ("none", "x" * 300, "model.json", "ok.npz"):
        assert "fedmpi: error: " in refused(capsys, tmp_path / name, tmp_path / "ok.npz")
    assert check_regular(tmp_path / "ok.npz") and not check_regular(tmp_path / "none")


def test_init_reads_regular_files_only(tmp_path):
    for name in ("model.safetensors", "model.h5", "model.pt"):
        os.mkfifo(tmp_path / name)
        code = f"from fedmpi.runs.initial import read_initial\nread_initial({str(tmp_path / name)!r}, None)"
        ended = execute([sys.executable, "-c", code])
        assert "cannot be read: is not a regular file" in ended.stderr
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "model.h5").symlink_to("/dev/zero")
    with pytest.raises(fedmpi.UserError, match="is a link, a folder, a FIFO or a device"):
        read_initial(str(tmp_path / "run"), None)


EXPANDED = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
            self.register_buffer("mask", torch.ones(1).expand(10))
            self.register_buffer("rows", torch.arange(8.0).unfold(0, 4, 1))
            self.register_buffer("counts", torch.zeros(1, dtype=torch.int64).expand(10))
            self.scale = nn.Parameter(torch.ones(1).expand(10))
            self.fixed = nn.Parameter(torch.ones(1).expand(10), requires_grad=False)

        def forward(self, inputs):
            if self.training:
                self.rows = self.rows + 1
            return self.layers(inputs) * self.mask * self.scale * self.fixed
"""


def test_a_model_with_expanded_tensors_is_saved_and_loaded(tmp_path, monkeypatch):
    """Values cannot be copied into such tensors: they trained, and could not be loaded."""
    (tmp_path / "expanded_net.py").write_text(textwrap.dedent(EXPANDED))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    import expanded_net

    ended = train(2, tmp_path, "--clients", 2, "--rounds", 2, "--name", "it", "--model", "expanded_net.Net")
    assert ended.returncode == 0, ended.stderr
    run = fedmpi.train(clients=2, threads=1, rounds=2, model=expanded_net.Net, out=str(tmp_path), name="other")
    net = expanded_net.Net()
    objects = fedmpi.train(clients=2, threads=1, rounds=2, model=net, out=str(tmp_path), name="object")
    init = str(tmp_path / "it")
    more = fedmpi.train(clients=2, threads=1, rounds=2, model=net, init=init, out=str(tmp_path), name="more")
    assert net.scale.stride() == (0,)  # the user's own object is not changed
    runs = {"it": run, "other": run, "object": objects, "more": more}
    for name, one in runs.items():
        folder = tmp_path / name
        saved = load_file(folder / "model.safetensors")
        assert len(saved["scale"].unique()) > 1
        loads = [fedmpi.load(folder)] if name in ("it", "other") else []
        for model in (*loads, fedmpi.load(folder, expanded_net.Net), one.model):
            assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_a_file_of_the_users_is_not_replaced(folder, tmp_path, capsys):
    file, out = tmp_path / "good.npz", tmp_path / "thesis.txt"
    np.savez(file, x_test=np.zeros((2, 4, 4), np.uint8))
    out.write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        main([str(folder), str(file), "--out", str(out)])
    assert "thesis.txt: exists, and fedmpi did not write it" in capsys.readouterr().err
    assert out.read_text() == "mine"
    for _ in range(2):  # what it wrote itself it replaces
        main([str(folder), str(file), "--out", str(tmp_path / "new.csv")])


def test_the_probabilities_of_all_classes(folder, tmp_path):
    (folder / "model.json").write_text(json.dumps(description(class_names=["ill", "well", "unknown"])))
    with torch.no_grad():
        right = fedmpi.load(folder)((torch.tensor(IMAGES[:, None]) / 255 - 0.3) / 0.4).softmax(1)
    for row, shares in zip(predicted(folder, tmp_path / "ok.npz", "--probabilities"), right, strict=True):
        found = [float(row[f"probability of {name}"]) for name in ("ill", "well", "unknown")]
        assert found == pytest.approx(shares.tolist(), abs=1e-5) and max(found) == float(row["probability"])
    np.savez(tmp_path / "it.npz", x=IMAGES[:1], y=[1])
    (row,) = predicted(folder, tmp_path / "it.npz", "--probabilities")
    names = ["sample", "predicted", "probability", "label"]
    assert [*row] == [*names, "probability of ill", "probability of well", "probability of unknown"]
    best = ("ill", "well", "unknown")[right[0].argmax()]
    assert [row[name] for name in names] == ["0", best, f"{right[0].max():.6f}", "well"]


def test_one_score_is_that_of_the_second_class(folder, tmp_path):
    """As of the network of --task auc."""
    arguments = {**ARGUMENTS, "num_classes": 1}
    torch.manual_seed(0)
    model = MLP(**arguments)
    save_file(model.state_dict(), folder / "model.safetensors")
    about = description(model={"class": "fedmpi.models.mlp.MLP", "arguments": arguments})
    (folder / "model.json").write_text(json.dumps({**about, "class_names": ["negative", "positive"]}))
    images = np.random.default_rng(0).integers(0, 256, (20, 4, 4)).astype(np.uint8)
    np.savez(tmp_path / "it.npz", x=images)
    with torch.no_grad():
        scores = model((torch.tensor(images[:, None]) / 255 - 0.3) / 0.4)[:, 0]
        model[-1].bias -= scores.median()  # so that there are both
    save_file(model.state_dict(), folder / "model.safetensors")
    right = (scores - scores.median()).sigmoid()
    for row, share in zip(predicted(folder, tmp_path / "it.npz", "--probabilities"), right.tolist(), strict=True):
        assert row["predicted"] == ("positive" if share > 0.5 else "negative") or abs(share - 0.5) < 1e-6
        assert float(row["probability of positive"]) == pytest.approx(share, abs=1e-5)


@pytest.mark.parametrize("left_out", ["3", "3.*", "3.weight,3.bias"])
def test_another_head_on_a_trained_body(folder, left_out):
    flat = FlatModule(MLP(shape=(1, 4, 4), num_classes=7, hidden=5))
    head = flat.module[3].weight.clone()
    flat.load(read_initial(str(folder / "model.safetensors"), flat, left_out))
    assert torch.equal(flat.module[1].weight, TENSORS["1.weight"]) and torch.equal(flat.module[3].weight, head)
    with pytest.raises(UserError, match="3.weight has shape"):
        read_initial(str(folder / "model.safetensors"), flat)
    with pytest.raises(UserError, match="no layer is called 4"):
        read_initial(str(folder / "model.safetensors"), flat, "4")


def test_a_model_to_begin_from_has_every_name(folder, tmp_path):
    flat = FlatModule(MLP(**ARGUMENTS))
    for changed, message in (
        ({name: value for name, value in TENSORS.items() if name != "3.bias"}, "3.bias is missing"),
        ({**TENSORS, "4.bias": torch.zeros(1)}, "4.bias is not in the model"),
    ):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=f"does not fit the model: {message}$"):
            read_initial(str(tmp_path / "model.safetensors"), flat)


@pytest.mark.parametrize("samples", [IMAGES / 255.0, IMAGES * 257.0, np.full((1, 4, 4), 9e4)])
def test_samples_of_another_scale_are_named(folder, tmp_path, capsys, samples):
    """A model of bytes classified numbers from 0 to 1, and one of 16 bits bytes, without a word."""
    predicted(folder, tmp_path / "ok.npz")
    assert "unlike" not in capsys.readouterr().err
    np.savez(tmp_path / "odd.npz", x=samples, y=np.eye(3)[np.arange(len(samples)) % 3])
    rows = predicted(folder, tmp_path / "odd.npz")
    assert "the samples are unlike those of the training" in capsys.readouterr().err
    assert [row["label"] for row in rows] == ["0", "1", "2", "0", "1", "2", "0"][: len(rows)]


def test_which_samples_are_like_those_of_the_training():
    """Their mean is at most 10 standard deviations away in each channel, and images are not of one value."""
    far, flat = torch.randn(9, 2, 4, 4), torch.full((9, 1, 1, 2), 0.3)
    far[:, 1] += 10 - far[:, 1].mean()
    flat[:, :, :, 0] += 0.1
    for is_alike, inputs in (
        (True, far * 0.999), (False, far * 1.001), (False, -far * 1.001), (True, flat), (False, flat / 1.2),
        (True, torch.full((9, 1, 1, 1), 0.3)), (True, torch.full((9, 3), 0.3)), (False, torch.full((9, 3), 10.1)),
    ):  # fmt: skip
        assert _are_alike({"input": {"mean": [0.3, 0.2], "std": [0.4]}}, inputs) == is_alike, inputs
        assert _are_alike({"input": {"mean": [0, 0], "std": [1]}}, inputs)  # none were measured
