"""MNIST and Fashion-MNIST in their official IDX files."""

import gzip
import struct

import numpy as np

from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.limits import check_file, unpacked
from fedmpi.prepare.formats.common import first_file

TORCHVISION_FOLDERS = ("raw", "MNIST/raw", "FashionMNIST/raw")  # below the folder that torchvision was given


def read(folder, options):
    """MNIST or Fashion-MNIST from a folder with its four IDX files, also where torchvision puts them.

    The files are train-images-idx3-ubyte, train-labels-idx1-ubyte and the same with t10k, gzipped or not.

    Returns:
        images [n, 28, 28] uint8, labels [n] uint8; attribute num_classes.
    """
    root = folder
    if not any(folder.glob("*-ubyte*")):
        root = next((folder / path for path in TORCHVISION_FOLDERS if (folder / path).is_dir()), folder)
    splits = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        for kind, ending in (("images", "idx3-ubyte"), ("labels", "idx1-ubyte")):
            names = [f"{prefix}-{kind}{mark}{ending}{packed}" for mark in "-." for packed in (".gz", "")]
            splits[f"{split}/{kind}"] = read_idx_file(first_file(root, *names))
    return splits, {"num_classes": 10}


def read_idx_file(path):
    """The uint8 array of an IDX file of bytes, gzipped or not.

    Raises:
        UserError: if the file is not IDX, not of bytes, or shorter than its header says.
    """
    with attempt("read as IDX", path, Exception):
        check_file(path)
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = unpacked(file, path, path.stat().st_size)
        if content[:3] != b"\0\0\x08":
            raise UserError(f"{path}: begins with {content[:4].hex(' ')}: expected an IDX file of bytes, 00 00 08")
        shape = struct.unpack(f">{content[3]}I", content[4 : 4 + 4 * content[3]])
        return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)
