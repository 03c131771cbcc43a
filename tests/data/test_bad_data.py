"""Broken data: one clear line before any training, never a traceback."""

import hashlib
import hmac
import json
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from helpers import train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmpi.comm.solo import SoloLink
from fedmpi.data.partitions import Column, Dirichlet, Even
from fedmpi.data.source import HDF5Source, open_source, silo_path
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.hdf5 import files_of
from fedmpi.tasks.base import RankContext
from fedmpi.tasks.classification import Classification
from fedmpi.training.data_account import account_for_data

IMAGES, LABELS = np.zeros((60, 8, 8), np.uint8), np.arange(60) % 3


def write(path, attributes=(), **changes):
    """A good small data set, with data sets changed (a name with __ for /) or left out (None)."""
    content = {"train/images": IMAGES, "train/labels": LABELS, "test/images": IMAGES[:20], "test/labels": LABELS[:20]}
    content |= {key.replace("__", "/"): value for key, value in changes.items()}
    with h5py.File(path, "w") as file:
        for key, value in content.items():
            if value is not None:
                chunks = (10, *value.shape[1:]) if key.endswith("images") and value.ndim > 1 and value.size else None
                file.create_dataset(key, data=value, chunks=chunks, compression="gzip" if chunks else None)
        file.attrs.update(attributes)
    return path


def load(data, num_clients=2, partition=None, **task):
    """What one rank alone does before training."""
    place = RankContext(num_clients, range(num_clients), 0, 1, 0, None, torch.device("cpu"), torch.float32)
    return Classification(data=str(data), **task).load(place, partition or Even())


def one_line(error):
    text = str(error.value)
    assert "\n" not in text and len(text) > 10
    return text


def with_value(array, value):
    array = array.astype(np.float32) if isinstance(value, float) else array.copy()
    array.flat[-1] = value
    return array


@pytest.mark.parametrize(
    ("changes", "attributes", "message"),
    [
        (
            {"train__images": None},
            {},
            "lacks the data set train/images; it contains test/images, test/labels, train/labels",
        ),
        ({"test__images": None, "test__labels": None}, {}, "lacks the data set test/images"),
        ({"train__labels": LABELS[:-1]}, {}, r"train/labels is int64\[59\]: expected integers \[60\], one per image"),
        ({"train__labels": LABELS.astype(float)}, {}, r"train/labels is float64\[60\]: expected integers"),
        ({"train__labels": LABELS[:, None]}, {}, r"train/labels is int64\[60, 1\]: expected integers"),
        ({"train__labels": with_value(LABELS, -1)}, {}, r"train/labels contains -1: expected 0..2"),
        ({"train__labels": with_value(LABELS, 3)}, {"num_classes": 3}, "train/labels contains 3: expected 0..2"),
        ({"test__labels": with_value(LABELS[:20], 99)}, {"num_classes": 10}, "test/labels contains 99: expected 0..9"),
        ({"train__images": IMAGES.astype(np.int32)}, {}, r"train/images is int32\[60, 8, 8\]: expected uint8 or float"),
        ({"train__images": np.zeros(60, np.uint8)}, {}, r"train/images is uint8\[60\]: expected uint8 or float"),
        ({"train__images": np.zeros((60, 0), np.uint8)}, {}, r"train/images is uint8\[60, 0\]: expected"),
        (
            {"test__images": IMAGES[:20, :5]},
            {},
            r"test/images is uint8\[20, 5, 8\]: expected the shape and type of train",
        ),
        ({"test__images": IMAGES[:20].astype(float)}, {}, r"test/images is float64.*: expected the shape and type of"),
        ({"train__images": IMAGES[:0], "train__labels": LABELS[:0]}, {}, r"train/labels is int64\[0\].*at least one"),
        ({}, {"std": [0.0]}, r"attribute std = \[0.0\]: expected 1 numbers > 0"),
        ({}, {"mean": [0.1, 0.2]}, r"attribute mean = \[0.1, 0.2\]: expected 1 numbers"),
        ({}, {"mean": "grey"}, "attribute mean = grey: expected numbers"),
    ],
    ids=str,
)
def test_a_file_that_is_not_as_it_should_be(tmp_path, changes, attributes, message):
    path = write(tmp_path / "data.h5", attributes, **changes)
    with pytest.raises(UserError, match=message) as error:
        load(path)
    assert "data" in one_line(error)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite(tmp_path, value):
    images = with_value(IMAGES, value)
    path = write(tmp_path / "data.h5", train__images=images, test__images=IMAGES[:20].astype(np.float32))
    with pytest.raises(UserError, match="train/images contains a value that is not finite in sample 59"):
        load(path)


@pytest.mark.parametrize(
    ("partition", "num_clients", "message"),
    [
        (Even(), 61, "clients = 61: expected at most one per training sample, 60"),
        (Dirichlet(min_samples=31), 2, "client 0 of 2 only 30 samples: expected at least 31"),
        (Column(by="writer"), 2, "has no column train/writer with one value per sample; train contains labels"),
    ],
    ids=str,
)
def test_a_split_that_cannot_be(tmp_path, partition, num_clients, message):
    with pytest.raises(UserError, match=message) as error:
        load(write(tmp_path / "data.h5"), num_clients, partition)
    one_line(error)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"std": (0.0,)}, r"task.std = \[0.0\]: expected 1 numbers > 0"),
        ({"mean": (1.0, 2.0)}, r"task.mean = \[1.0, 2.0\]: expected 1 numbers"),
        ({"crop_padding": -1}, "task.crop_padding = -1: expected a number >= 0"),
    ],
)
def test_settings_that_do_not_fit(tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        load(write(tmp_path / "data.h5"), **settings)


def test_feature_vectors_cannot_be_cropped(tmp_path):
    flat = np.zeros((60, 5), np.float32)
    path = write(tmp_path / "data.h5", train__images=flat, test__images=flat[:20])
    with pytest.raises(UserError, match=r"expected images, and samples are \[5\]"):
        load(path, flip=True)


def test_silo_files(tmp_path):
    write(tmp_path / "silo_0.h5")
    pattern = str(tmp_path / "silo_{client}.h5")
    with pytest.raises(UserError, match="client 1 has no file .*silo_1.h5"):
        load(pattern)
    with pytest.raises(UserError, match="partition dirichlet: silo files .* are split already"):
        load(pattern, partition=Dirichlet())
    with pytest.raises(UserError, match="expected a pattern with {client} and nothing else in braces"):
        silo_path("silo_{client}_{rank}.h5", 0)
    assert silo_path(str(tmp_path / "silo_{client:01d}.h5"), 0) == str(tmp_path / "silo_0.h5")


@pytest.mark.parametrize(
    "pattern", ["{client:1000000000}", "{client!r}", "{client.__class__}", "{client}{0}", "{client", "{{client}}"]
)
def test_a_pattern_of_silo_files_with_anything_else_in_braces_is_refused(pattern):
    with pytest.raises(UserError, match="expected a pattern with {client} and nothing else in braces"):
        silo_path(pattern, 0)


@pytest.mark.parametrize(
    ("labels", "attributes", "message"),
    [
        ([(0, 1), (7, 8)], {}, "silo_1.h5: contains the labels 7, 8, but no client has the label 2, 3, 4, 5, 6: exp"),
        ([(0, 2), (2, 0)], {}, "silo_0.h5: contains the labels 0, 2, but no client has the label 1"),
        (
            [(0, 1), (0, 1)],
            [{"class_names": ["a", "b"]}, {"class_names": ["b", "a"]}],
            "the class names are not the same in the files of all 2 clients",
        ),
        ([(0, 1), (0, 1)], [{"num_classes": 3}, {}], "client 1 has no attribute num_classes; client 0 has 3 classes"),
        ([(0, 1), (1, 2)], {}, None),
        ([(0, 1), (7, 8)], {"num_classes": 9}, "no sample has label 2, 3, 4, 5, 6, of 9 classes"),
        ([(0, 1), (0, 1)], {"class_names": ["a", "b", "c"]}, "no sample has label 2, of 3 classes"),
    ],
)
def test_labels_of_all_silo_files_together(tmp_path, capsys, labels, attributes, message):
    """They have no gaps, or the files say which classes there are."""
    for client, (low, high) in enumerate(labels):
        own = np.where(LABELS % 2, high, low)
        of_file = attributes[client] if isinstance(attributes, list) else attributes
        write(tmp_path / f"silo_{client}.h5", of_file, train__labels=own, test__labels=own[:20])
    loaded = load(tmp_path / "silo_{client}.h5")
    if message is None or message.startswith("no sample"):
        loaded.synchronise(SoloLink())
        assert loaded.num_classes == (3 if "9" not in (message or "") else 9)
        said = capsys.readouterr().err
        assert said == (message and f"fedmpi: {tmp_path}/silo_{{client}}.h5: {message}\n" or "")
        return
    with pytest.raises(UserError, match=message) as error:
        loaded.synchronise(SoloLink())
    one_line(error)


def test_no_file_and_no_hdf5(tmp_path):
    (tmp_path / "text.h5").write_text("not HDF5")
    (tmp_path / "folder.h5").mkdir()
    for name, message in (
        ("text", "cannot be read as HDF5"),
        ("folder", "no file"),
        ("none", "no file .*digits needs no file"),
    ):
        with pytest.raises(UserError, match=message) as error:
            open_source(name, tmp_path)
        one_line(error)


def try_everything(path):
    """Open a file and read all of it: it is good, or it is a user's error."""
    try:
        source = HDF5Source(path)
        for split in ("train", "test"):
            source.read(split, np.arange(len(source.labels[split])))
    except UserError as error:
        assert "\n" not in str(error)
        return False
    return True


@given(content=st.binary(max_size=2000))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes(tmp_path, content):
    path = tmp_path / "random.h5"
    path.write_bytes(content)
    assert not try_everything(path)
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + content)  # behind the signature of HDF5
    assert not try_everything(path)


def test_truncated_files(tmp_path):
    whole = write(tmp_path / "whole.h5").read_bytes()
    for share in np.linspace(0, 1, 60, endpoint=False):
        path = tmp_path / "cut.h5"
        path.write_bytes(whole[: int(share * len(whole))])
        assert not try_everything(path)


def test_corrupt_chunks_are_noticed(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, IMAGES.shape, dtype=np.uint8)
    path = write(tmp_path / "data.h5", train__images=noise)
    content = bytearray(path.read_bytes())
    with h5py.File(path) as file:
        chunk = file["train/images"].id.get_chunk_info(3)
    for offset in range(chunk.byte_offset + 20, chunk.byte_offset + 40):
        content[offset] ^= 0x55
    path.write_bytes(content)
    with pytest.raises(UserError, match="data.h5: cannot be read as HDF5"):
        load(path)


@pytest.mark.rarely
@given(flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=30))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_bytes(tmp_path, flips):
    """Anywhere in the file: it is read, or it is a user's error."""
    content = bytearray(write(tmp_path / "flipped.h5").read_bytes())
    for position, change in flips:
        content[position % len(content)] ^= change
    (tmp_path / "flipped.h5").write_bytes(content)
    try_everything(tmp_path / "flipped.h5")


def test_training_on_broken_files_ends_with_one_line(tmp_path):
    """Also if only one rank finds it: the others do not wait."""
    write(tmp_path / "silo_0.h5")
    (tmp_path / "silo_1.h5").write_bytes((tmp_path / "silo_0.h5").read_bytes()[:3000])
    ended = train(2, tmp_path / "runs", "--data", tmp_path / "silo_{client}.h5")
    lines = [line for line in ended.stderr.splitlines() if line.startswith("fedmpi: error: ")]
    assert len(lines) == 1 and "silo_1.h5: cannot be read as HDF5" in lines[0]
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("value", "attributes"), [(3e38, {}), (1.0, {"std": [1e-300]}), (5.0, {"std": [1e-25]})])
def test_values_too_large_to_compute_with_are_blamed_on_the_data(tmp_path, value, attributes):
    images = with_value(IMAGES, value)
    path = write(tmp_path / "data.h5", attributes, train__images=images, test__images=IMAGES[:20].astype(np.float32))
    loaded = load(path) if attributes == {} else None
    with pytest.raises(UserError, match="the samples: values from .* are as large as .*: expected at most"):
        (loaded or load(path)).synchronise(SoloLink())


def refer(kind, path, other):
    """A good file in which train/images refers to another file in the way that `kind` says."""
    write(path, train__images=None)
    write(other)
    with h5py.File(path, "a") as file:
        if kind == "link":
            file["train/images"] = h5py.ExternalLink(str(other), "train/images")
        elif kind == "group":
            file["more"] = h5py.ExternalLink(str(other), "/")
            file["train/images"] = IMAGES
        elif kind == "storage":
            external = [(str(other), 0, h5py.h5f.UNLIMITED)]
            file.create_dataset("train/images", IMAGES.shape, IMAGES.dtype, external=external)
        else:
            layout = h5py.VirtualLayout(IMAGES.shape, IMAGES.dtype)
            layout[:] = h5py.VirtualSource(str(other), "train/images", IMAGES.shape)
            file.create_virtual_dataset("train/images", layout)
    if kind == "missing":
        other.unlink()
    return path


@pytest.mark.parametrize(
    ("kind", "place", "message"),
    [
        ("link", "other.h5", "is a link into another file"),
        ("group", "other.h5", "is a link into another file"),
        ("storage", "other.h5", "lies in another file"),
        ("distant", "../other.h5", "expected a file in the same folder"),
        ("missing", "other.h5", "which is missing: its samples would be 0"),
    ],
)
def test_a_file_that_refers_to_others_is_refused(tmp_path, kind, place, message):
    (tmp_path / "data").mkdir()
    with pytest.raises(UserError, match=message) as error:
        load(refer(kind, tmp_path / "data" / "it.h5", tmp_path / "data" / place))
    one_line(error)


def test_a_view_of_files_in_the_same_folder_is_read(tmp_path):
    path, other = tmp_path / "it.h5", tmp_path / "other.h5"
    load(refer("near", path, other))
    assert files_of(path) == [path, other]


@pytest.mark.parametrize("kind", ["link", "storage", "distant"])
def test_a_view_of_a_file_that_refers_to_others_is_refused(tmp_path, kind):
    (tmp_path / "data").mkdir()
    seen = refer(kind, tmp_path / "data" / "seen.h5", tmp_path / "other.h5")
    path = write(tmp_path / "data" / "it.h5", train__images=None)
    with h5py.File(path, "a") as file:
        layout = h5py.VirtualLayout(IMAGES.shape, IMAGES.dtype)
        layout[:] = h5py.VirtualSource(str(seen), "train/images", IMAGES.shape)
        file.create_virtual_dataset("train/images", layout)
    with pytest.raises(UserError, match=r"seen.h5: /train/images (is a link into|lies in|is a view of)") as error:
        load(path)
    one_line(error)


@pytest.mark.parametrize("number", [2.5, np.nan, 0, -3, [3, 3], "three"])
def test_a_number_of_classes_that_is_none(tmp_path, number):
    with pytest.raises(UserError, match="attribute num_classes = .*: expected a whole number >= 1"):
        load(write(tmp_path / "data.h5", {"num_classes": number}))


def test_gaps_and_labels_of_the_test_set_alone_are_said_aloud(tmp_path, capsys):
    load(write(tmp_path / "data.h5", {"num_classes": 6}, test__labels=with_value(LABELS[:20], 4)))
    assert capsys.readouterr().err == (
        "fedmpi: data: no sample has label 3, 5, of 6 classes\n"
        "fedmpi: data: the test set has label 4, which no training sample has\n"
    )
    load(write(tmp_path / "data.h5"))
    assert capsys.readouterr().err == ""


def account(tmp_path, files, folder, origin=None):
    """What one rank alone does for data.json of a run folder that reads some files; the folder's data.json."""
    (tmp_path / folder).mkdir(exist_ok=True)
    recorder = SimpleNamespace(folder=tmp_path / folder, write=lambda action: action(tmp_path / folder))
    task = SimpleNamespace(data_files=lambda: files)
    account_for_data(SimpleNamespace(link=SoloLink(), task=task, config=SimpleNamespace(origin=origin)), recorder)
    return json.loads((tmp_path / folder / "data.json").read_text())


def test_the_account_of_the_data_says_neither_which_file_nor_its_plain_checksum(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("fedmpi.ground.files.checksum.SETTLED_SECONDS", 0)
    paths = [write(tmp_path / "secret_0.h5"), write(tmp_path / "secret_1.h5", {"silo": "Bonn"})]
    plain = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    one, two = (account(tmp_path, paths, name) for name in ("one", "two"))
    assert one.keys() == {"salt", "files"} and one["salt"] != two["salt"]
    assert not {*one["files"], *plain} & {*two["files"]} and "secret" not in json.dumps(one)
    assert one["files"] == [hmac.new(one["salt"].encode(), text.encode(), "sha256").hexdigest() for text in plain]
    assert [*json.loads((tmp_path / "cache/fedmpi/checksums.json").read_text()).values()] == plain
    assert account(tmp_path, paths, "one") == one and account(tmp_path, paths, "two", tmp_path / "one") == two
    assert capsys.readouterr().err == ""  # the same data
    write(paths[1], train__labels=with_value(LABELS, 1))
    assert account(tmp_path, paths, "one")["files"][0] == one["files"][0]
    account(tmp_path, paths[:1], "three", tmp_path / "two")
    line = "fedmpi: the data differ from those of"
    assert capsys.readouterr().err == (
        f"{line} {tmp_path}/one: the data file number 2 of 2, in the order of the clients, has another content\n"
        f"{line} {tmp_path}/two: 1 data files instead of 2\n"
    )


@pytest.mark.parametrize("text", ["[]", "[" * 9999, "{}", '{"salt": 3, "files": 4}', '[{"sha256": 5}]', "x", '[["a"]]'])
def test_a_damaged_account_of_the_data_is_written_anew(tmp_path, text, capsys):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "data.json").write_text(text)
    assert len(account(tmp_path, [write(tmp_path / "data.h5")], "one")["files"]) == 1
    assert capsys.readouterr().err == ""


def test_a_rerun_on_other_data_says_so(tmp_path):
    path = write(tmp_path / "data.h5")
    words = ("--data", path, "--rounds", 1, "--local-steps", 1)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert train(2, tmp_path, *words, "--name", "one", env=cache).returncode == 0
    assert len(json.loads((tmp_path / "one" / "data.json").read_text())["files"]) == 1
    write(path, train__labels=with_value(LABELS, 1))
    again = ("--config", tmp_path / "one" / "settings.yaml", "--name", "two")
    ended = train(2, tmp_path, *again, env=cache)
    assert ended.returncode == 0
    assert f"fedmpi: the data differ from those of {tmp_path}/one: the data file has another content" in ended.stderr
