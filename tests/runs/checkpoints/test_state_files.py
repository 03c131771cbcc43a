"""State files: what is read is what was written, with its type; other programs read the tensors, too."""

import errno
import json
import math

import pytest
import torch
from safetensors.torch import load_file

from fedmpi.ground.files.own_files import make_folder, read_mark
from fedmpi.runs.checkpoints import files
from fedmpi.runs.checkpoints.files import Damaged, make_checkpoint_folder, read_state, write_state

TENSORS = {
    "u8": torch.arange(5, dtype=torch.uint8),  # first: what comes after it must still be aligned
    "x": torch.randn(3, 5),
    "transposed": torch.randn(4, 6).t(),
    "part": torch.randn(10)[::3],
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(3),
    "bool": torch.tensor([True, False]),
    "bf16": torch.randn(3).bfloat16(),
    "f64": torch.randn(70_000, dtype=torch.float64),
}
NUMBERS = {
    "round": 3,
    "nan": math.nan,
    "best": -math.inf,
    "none": [],
    "present": [0, 2],
    "large": 2**70,
    "tiny": 5e-324,
}


@pytest.fixture
def path(tmp_path):
    make_folder(tmp_path / "000001", "checkpoint")
    return tmp_path / "000001" / "server.safetensors"


def check(found):
    assert set(found) == {*TENSORS, *NUMBERS}
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
        assert found[name].data_ptr() % tensor.element_size() == 0, name
    for name, number in NUMBERS.items():
        assert repr(found[name]) == repr(number), name


@pytest.mark.parametrize("piece", [files.PIECE, 1000])
def test_a_state_comes_back_as_it_was(path, monkeypatch, piece):
    monkeypatch.setattr(files, "PIECE", piece)
    written = write_state(path, {**TENSORS, **NUMBERS})
    found = read_state(path, *written)
    check(found)
    assert set(load_file(path)) == set(TENSORS)
    assert write_state(path, found) == written  # in place of the file from which these tensors are mapped
    check(found)
    check(read_state(path, *written))


def test_every_byte_of_a_small_file_counts(path):
    written = write_state(path, {"x": torch.ones(3), "round": 2})
    content = bytearray(path.read_bytes())
    for number in range(len(content)):
        path.write_bytes(content[:number] + bytes([content[number] ^ 1]) + content[number + 1 :])
        with pytest.raises(Damaged, match="its bytes are not those that were written"):
            read_state(path, *written)


def test_a_state_without_tensors(path):
    assert read_state(path, *write_state(path, NUMBERS))["present"] == [0, 2]


def test_the_folder_of_a_checkpoint_is_that_of_its_run_or_refused(tmp_path):
    """Several ranks make it; the writer's line about a failure has the error's `strerror`."""
    folder = tmp_path / "run" / "checkpoints" / "000001"
    for _ in range(2):
        make_checkpoint_folder(folder, "a" * 32)
    assert read_mark(folder, "checkpoint")["identity"] == "a" * 32
    (tmp_path / "link").symlink_to(folder.parent)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "a file").touch()
    for refused, code, text in [
        (folder, errno.EEXIST, "exists, and is not a checkpoint of this run"),
        (plain, errno.EEXIST, "exists, and is not a checkpoint of this run"),
        (tmp_path / "link" / "000002", errno.ELOOP, "is a symbolic link"),
    ]:
        with pytest.raises(OSError) as error:
            make_checkpoint_folder(refused, "b" * 32)
        assert error.value.errno == code and error.value.strerror == text
        assert error.value.filename == str(refused.parent if code == errno.ELOOP else refused)


def test_unneeded_checkpoints_are_removed_with_their_folders(tmp_path):
    """What is no file of a checkpoint stays, and so do the files of lost clients that a kept one needs."""
    for number in (1, 2, 3, 4):
        folder = tmp_path / "checkpoints" / f"{number:06d}"
        make_checkpoint_folder(folder, "a" * 32)
        for name in ("manifest.json", "server.safetensors", "client-0000.safetensors", "client-0001.safetensors"):
            (folder / name).write_text(json.dumps(name))
    (tmp_path / "checkpoints" / "000002" / "notes.txt").touch()
    (tmp_path / "checkpoints" / "mine").mkdir()
    files.remove_checkpoints(tmp_path, [4], {(1, 3)})
    left = {path.name: {one.name for one in path.iterdir()} for path in (tmp_path / "checkpoints").iterdir()}
    assert left.keys() == {"000002", "000003", "000004", "mine"} and "notes.txt" in left["000002"]
    assert {name for name in left["000003"] if name.endswith(("json", "safetensors"))} == {"client-0001.safetensors"}
    assert len(left["000004"]) == 5 and not {"manifest.json", "server.safetensors"} & left["000002"]
    files.remove_checkpoints(tmp_path / "nothing", [])
