"""Samples to predict, from a file."""

import numpy as np

from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.hdf5 import readable
from fedmpi.ground.text import Log
from fedmpi.prepare.formats import ENDINGS
from fedmpi.prepare.formats.features import Columns
from fedmpi.prepare.formats.frames import read_table, table_ending
from fedmpi.prepare.formats.images import ImageFiles, check_images, is_image, train_folder
from fedmpi.prepare.formats.npz import LABELS, SAMPLES, find_array, numbered, read_arrays
from fedmpi.prepare.formats.table import INTEGER

log = Log(__name__)

MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # of pillow, by number of channels
NO_COLUMNS = {"missing": "refuse", "classes": [], "columns": {}}  # of models that were not trained on a table


def read_samples(path, split, label, description, follow_links=False):
    """The samples of a file, and their classes if it has them.

    Args:
        path: `pathlib.Path` of a file that ends in .h5, .hdf5, .npz or as tables do, or of a folder of images.
        split: "train" or "test": the part of an HDF5 or npz file, if it has parts.
        label: column of a table, or None. description: the content of the model's model.json.
        follow_links: whether images may lie outside of the folder, where symbolic links lead to.

    Returns:
        ([n, ...] array, [n] int64 array or None, and {column: [n] str} of a table's identifiers or of images' names).

    Raises:
        UserError: one line, if the file cannot be read or lacks something.
    """
    ids = {}
    with attempt("read", path, Exception):  # each library has its own errors for damaged files
        if path.is_dir() and path.suffix not in (".h5", ".hdf5", ".npz"):
            samples, labels, ids = _read_images(path, split, description, follow_links)
        elif not path.is_file():  # reading a FIFO or a device might never end
            raise UserError(f"{path}: {'is not a regular file' if path.exists() else 'no such file'}")
        elif path.suffix in (".h5", ".hdf5"):
            samples, labels = _read_hdf5(path, split)
        elif path.suffix == ".npz":
            samples, labels = _read_npz(path, split)
        elif table_ending(path):
            samples, labels, ids = _read_table(path, label, description)
        else:
            raise UserError(f"{path}: expected a file that ends in .h5, .hdf5, .npz, {ENDINGS}, or a folder of images")
    if labels is not None and len(labels) != len(samples):
        raise UserError(f"{path}: has {len(labels)} labels for {len(samples)} samples")
    return samples, labels if labels is None else _numbers(path, labels, description.get("class_names")), ids


def _read_hdf5(path, split):
    with readable(path) as file:
        prefix = "" if "images" in file else f"{split}/"
        samples, labels = (file.get(f"{prefix}{name}") for name in ("images", "labels"))
        _check(path, f"{prefix}images", samples)
        return samples[:], None if labels is None else labels[()].reshape(-1)


def _read_npz(path, split):
    def chosen(present):
        return [find_array(present, "", words) or find_array(present, split, words) for words in (SAMPLES, LABELS)]

    arrays = read_arrays(path, chosen)
    names = chosen(arrays)
    samples, labels = (name and arrays[name] for name in names)
    _check(path, f"x or x_{split}", samples)
    return samples, labels if labels is None else numbered(names[1], labels, []).reshape(-1)


def _read_images(path, split, description, follow_links):
    """(images as the model's were, the classes after which their folders are named or None, their names)."""
    root = path / split if train_folder(path) else path
    files = [file for file in sorted(root.rglob("*")) if is_image(file, root)]
    if not files:
        raise UserError(f"{root}: contains no image")
    check_images([(files, root)], follow_links)
    facts = description.get("input") or {"shape": (), "divide_by": 1}
    channels, *sides = facts["shape"] if len(facts["shape"]) == 3 else (None, None, None)
    mode = MODES.get(channels) if facts["divide_by"] == 255 else None
    images = ImageFiles(files, mode, sides[0] if sides[0] == sides[1] else None)
    samples = images[:]
    for number, change in (
        (len(images.resized), f"resized to {sides}"),
        (len(images.converted), f"converted to {mode}"),
    ):
        if number:
            log.warning(f"{path}: {number} of {len(files)} images are {change}, as the model takes them")
    folders = [file.relative_to(root).parts[0] for file in files]
    is_labelled = {*folders} <= {*description.get("class_names", ())}
    return (
        samples,
        np.array(folders) if is_labelled else None,
        {"file": [str(file.relative_to(root)) for file in files]},
    )


def _check(path, name, samples):
    """Check that samples are an array of numbers with at least one sample."""
    if samples is None:
        raise UserError(f"{path}: lacks the data set {name}")
    is_array = hasattr(samples, "ndim")
    if not is_array or samples.dtype.kind not in "iuf" or samples.ndim < 2 or 0 in samples.shape:
        found = f"{samples.dtype} {samples.shape}" if is_array else type(samples).__name__
        raise UserError(f"{path}: {name} is {found}: expected numbers [n, ...], at least one sample, and values in it")


def _read_table(path, label, description):
    """(the features that the model was trained on, or all columns but the label if it names none; labels; ids)."""
    columns = Columns.of(description.get("columns", NO_COLUMNS), "columns in model.json")
    categories = [name for name, how in columns.columns.items() if isinstance(how, list)]

    def wanted(names):
        chosen = [*columns.columns] or [*(description.get("feature_names") or names)]
        chosen = [*dict.fromkeys([*chosen, *filter(None, [label])])]
        missing = [name for name in chosen if name not in names]
        if missing:
            raise UserError(f"{path}: lacks the column {missing[0]}; its header is {', '.join(names)}")
        ids = [name for name in columns.id if name in names and name not in chosen]
        return [*chosen, *ids], [*categories, *ids, *filter(None, [label])]

    table = read_table(path, columns.reading, wanted)
    unknown = {}
    encoded = columns.features(table, unknown) if columns.columns else table.columns
    for name, number in unknown.items():
        log.warning(
            f"{path}: {number} rows have a category of {name} that the model does not know: it counts as missing"
        )
    features = description.get("feature_names") or [name for name in encoded if name != label]
    missing = [name for name in features if name not in encoded]
    if missing:
        raise UserError(f"{path}: lacks the column {missing[0]}; its header is {', '.join(table.columns)}")
    odd = next((name for name in features if not isinstance(encoded[name], np.ndarray)), None)
    if odd is not None:
        raise UserError(f"{path}: expected numbers in the columns {', '.join(features)}: {odd} contains words")
    samples = np.array([encoded[name] for name in features], dtype=np.float64).T
    _check(path, "the table", samples)
    ids = {name: table.columns[name].fillna("").tolist() for name in columns.id if name in table.columns}
    return samples, table.columns[label].fillna("").to_numpy(str) if label else None, ids


def _numbers(path, labels, class_names):
    """[n] int64 classes of labels, which are numbers or names of classes."""
    if labels.dtype.kind in "iu":
        return labels.astype(np.int64)
    words = [word.decode(errors="replace") if isinstance(word, bytes) else str(word) for word in labels.tolist()]
    numbers = {name: number for number, name in enumerate(class_names or [])}
    odd = next((word for word in words if word not in numbers and not INTEGER.fullmatch(word)), None)
    if odd is not None:
        raise UserError(f"{path}: label {odd}: expected one of {', '.join(numbers) or 'the numbers from 0'}")
    return np.array([numbers[word] if word in numbers else int(word) for word in words], dtype=np.int64)
