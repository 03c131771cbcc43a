"""Data that come divided by user: LEAF (JSON) and TensorFlow Federated (HDF5)."""

import json

import h5py
import numpy as np

from fedmpi.data.source import ACCOUNT
from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.hdf5 import readable
from fedmpi.ground.files.limits import check_file
from fedmpi.prepare.formats.common import attempt_all, choose_test_set
from fedmpi.prepare.formats.npz import number_words, numbered

USER = "user"  # the column that says whose samples these are
INPUTS = ("pixels", "image")  # names in files of TensorFlow Federated


def find_files(path):
    """{"train": files, "test": files or []} of LEAF or TensorFlow Federated at a path; None if it is neither."""
    found = {split: [] for split in ("train", "test")}
    if path.is_dir():
        for split in found:
            found[split] = sorted((path / split).glob("*.json")) or sorted(path.glob(f"*_{split}.h5"))
    elif path.suffix == ".h5" and h5py.is_hdf5(path):
        found["train"] = [path]
    files = found["train"]
    if files and files[0].suffix == ".h5":
        with readable(files[0]) as file:
            return found if isinstance(file.get("examples"), h5py.Group) else None
    return found if files else None


def read(path, options):
    """Files of `find_files`. A random share of each class is the test set, if there is none.

    Returns:
        images [n, ...] as in the files, labels [n], and the column `user`: the name of each sample's user; attributes
        num_classes and class_names, if the labels are words.
    """
    splits, others = {}, set()
    assumed = [f"the column {USER} says whose samples these are (--partition column --partition.by {USER})"]
    for split, files in find_files(path).items():
        read_one = _leaf if files and files[0].suffix == ".json" else _federated
        found = sum(attempt_all(files, lambda file, read_one=read_one: [*read_one(file)]), [])
        parts = [part for part in found if len(part[2])]
        others = others.union(*(part[3] for part in parts))
        if odd := [user for user, samples, labels, _ in parts if len(samples) != len(labels)]:
            raise UserError(f"{path}: {odd[0]} has not as many samples as labels: expected a label for each")
        if parts:
            users = np.repeat([user.encode() for user, *_ in parts], [len(part[2]) for part in parts])
            with attempt("read", path, ValueError):
                samples, labels = (np.concatenate(arrays) for arrays in list(zip(*parts))[1:3])
            splits[split] = samples, numbered(f"{split} labels", labels, assumed), users
    if "train" not in splits:
        raise UserError(f"{path}: contains no samples to train on")
    account = {"assumed": assumed, "not_used": dict.fromkeys(sorted(others), "neither the samples nor their labels")}
    if "test" in splits:
        account["test_rows"] = "those of the files"
    else:
        rows = choose_test_set(splits["train"][1], options)
        splits = {split: [values[rows[split]] for values in splits["train"]] for split in rows}
    labels, attributes = number_words(path, {split: of_split[1] for split, of_split in splits.items()}, options.classes)
    arrays = {f"{split}/images": of_split[0] for split, of_split in splits.items()}
    arrays |= {f"{split}/labels": labels[split] for split in splits}
    arrays |= {f"{split}/{USER}": of_split[2] for split, of_split in splits.items()}
    return arrays, {**attributes, ACCOUNT: account}


def _leaf(file):
    """(user, samples, labels, names of what else there is) of each user in a JSON file of LEAF."""
    check_file(file)
    with attempt("read as LEAF", file, Exception):
        content = json.loads(file.read_text(encoding="utf-8"))
        if {*content["users"]} != {*content["user_data"]}:
            raise UserError(f"{file}: users and user_data name different users: expected the same")
        for user, data in content["user_data"].items():
            samples = np.array(data["x"])
            if samples.dtype.kind not in "biuf":
                raise UserError(f"{file}: x of {user} contains {samples.dtype.name}: expected numbers")
            yield user, samples.astype(np.float32), np.array(data["y"]), data.keys() - {"x", "y"}


def _federated(file):
    """(user, samples, labels, names of what else there is) of each user in an HDF5 file of TensorFlow Federated."""
    with readable(file) as opened:
        for user, group in opened["examples"].items():
            name = next((name for name in INPUTS if name in group), None)
            if name is None or "label" not in group:
                raise UserError(f"{file}: {user} has {', '.join(group)}: expected label, and {' or '.join(INPUTS)}")
            yield user, group[name][:], group["label"][:], group.keys() - {name, "label"}
