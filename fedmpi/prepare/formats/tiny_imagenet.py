"""Tiny-ImageNet in its official zip file."""

import numpy as np

from fedmpi.ground.errors import UserError, attempt
from fedmpi.prepare.formats.common import open_archive, read_bytes
from fedmpi.prepare.formats.images import ImageFiles

SIDE = 64  # pixels


def read(folder, options):
    """Tiny-ImageNet from a folder with tiny-imagenet-200.zip, its unpacked folder, or that folder's content.

    The official validation images become the test set, because the official test set has no labels.

    Returns:
        images [n, 64, 64, 3] uint8, labels [n] uint8; attributes num_classes, class_names (WordNet numbers, sorted).
    """
    root = open_archive(folder, "tiny-imagenet-200.zip", "tiny-imagenet-200")
    class_names = sorted(_read_text(root / "wnids.txt").split())
    label_of = {name: label for label, name in enumerate(class_names)}
    annotations = root / "val" / "val_annotations.txt"
    lines = [line.split("\t") for line in _read_text(annotations).splitlines()]
    for line in lines:
        if len(line) < 2 or line[1] not in label_of:
            raise UserError(f"{annotations}: has the line {line[:2]}: expected an image and a class of wnids.txt")
    test = [(root / "val" / "images" / line[0], label_of[line[1]]) for line in lines]
    train = [(file, label_of[name]) for name in class_names for file in _list_files(root / "train" / name / "images")]
    splits = {}
    for split, files in (("train", train), ("test", test)):
        splits[f"{split}/images"] = ImageFiles([file for file, _ in files], "RGB", size=SIDE)
        splits[f"{split}/labels"] = np.array([label for _, label in files], np.uint8)
    return splits, {"num_classes": len(class_names), "class_names": class_names}


def _read_text(file):
    with attempt("read as UTF-8", file, UnicodeDecodeError):
        return read_bytes(file).decode()


def _list_files(folder):
    """The files of a folder, which may lie in a zip file, sorted by name."""
    with attempt("read", folder, Exception):
        return sorted(folder.iterdir(), key=lambda file: file.name)
