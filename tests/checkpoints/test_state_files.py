"""State files: what is read is what was written, with its type; other programs read the tensors, too."""

import math

import pytest
import torch
from safetensors.torch import load_file

from fedmpi.checkpoints import files
from fedmpi.checkpoints.files import Damaged, read_state, write_state
from fedmpi.own_files import make_folder

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
