"""CIFAR-10 in its official binary or Python version."""

import gzip
import io
import tarfile

import numpy as np

from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.limits import Limited, check_unpacked
from fedmpi.prepare.formats.common import first_file, read_bytes
from fedmpi.prepare.formats.pickled import unpickle_batch

RECORD_BYTES = 1 + 3 * 32 * 32  # a label, then the red, green and blue pixels
# version -> (folder in its tar file, ending of its files)
VERSIONS = {"binary": ("cifar-10-batches-bin", ".bin"), "python": ("cifar-10-batches-py", "")}


def read(folder, options):
    """CIFAR-10 from a folder with the tar file of either version, the folder in it, or its six files.

    Returns:
        images [n, 32, 32, 3] uint8, labels [n] uint8; attribute num_classes.
    """
    for version, (inside, ending) in VERSIONS.items():
        batches = {"train": [f"data_batch_{i}{ending}" for i in range(1, 6)], "test": [f"test_batch{ending}"]}
        tar, unpacked = folder / f"cifar-10-{version}.tar.gz", [folder / inside, folder]
        root = next((path for path in unpacked if (path / batches["train"][0]).is_file()), None)
        if tar.is_file() or root is not None:
            break
    else:
        raise UserError(
            f"{folder}: contains no data_batch_1.bin: expected cifar-10-binary.tar.gz, cifar-10-python.tar.gz, "
            "or the unpacked files of one of them"
        )
    names = [*batches["train"], *batches["test"]]
    files = _read_tar(tar, names) if tar.is_file() else {name: read_bytes(first_file(root, name)) for name in names}
    if version == "python":
        files = {name: unpickle_batch(content, f"{folder}: {name}") for name, content in files.items()}
    splits = {}
    for split, parts in batches.items():
        content = np.frombuffer(b"".join(files[name] for name in parts), np.uint8)
        if len(content) == 0 or len(content) % RECORD_BYTES:
            raise UserError(
                f"{folder}: {parts[0]}: has {len(content)} bytes: expected records of {RECORD_BYTES} bytes, "
                "a label and 32x32x3 pixels"
            )
        records = content.reshape(-1, RECORD_BYTES)
        splits[f"{split}/labels"] = records[:, 0]
        splits[f"{split}/images"] = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return splits, {"num_classes": 10}


def _read_tar(path, names):
    """Name -> bytes of files in a tar file, in whatever folder they are."""
    found, packed = {}, path.stat().st_size
    with attempt("read as tar", path, Exception), gzip.open(path) as file:
        with tarfile.open(fileobj=io.BufferedReader(Limited(file, path, packed)), mode="r|") as tar:
            for member in tar:
                if member.isfile() and (name := member.name.rsplit("/", 1)[-1]) in names:
                    check_unpacked(path, member.size, packed)  # a sparse one is longer than what is stored of it
                    found[name] = tar.extractfile(member).read()
        if missing := [name for name in names if name not in found]:
            raise UserError(f"{path}: contains no {missing[0]}")
    return found
