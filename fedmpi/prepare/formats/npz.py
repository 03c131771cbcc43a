"""Arrays saved by numpy."""

import zipfile

import numpy as np

from fedmpi.data.source import ACCOUNT
from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.limits import check_file, check_members
from fedmpi.prepare.formats.common import choose_test_set

SAMPLES, LABELS = ("x", "images", "data"), ("y", "labels", "targets")
CHANNELS = (1, 3, 4)
FLAT = 2  # times that sides are longer than an axis of channels, or of slices of a flat volume
EXACT = 1 << 24  # up to which float32 has all whole numbers


def read(path, options):
    """An npz file with x_train, y_train, x_test and y_test, or with x and y; also in the words of MedMNIST.

    x: [n, ...] samples. y: [n] or [n, 1] labels, which may be words, or [n, classes] with a one in each row (one-hot).
    Of x and y, a random share becomes the test set (`ReaderOptions.test_share`).

    Returns:
        images: integers and truth values as uint8, or as float32 if they are not all in 0..255; other values
        as they are; channels last. labels [n]. Attributes: num_classes and class_names if the labels are words or truth
        values, or `ReaderOptions.classes` names them.
    """
    with attempt("read as npz", path, Exception):
        arrays = read_arrays(path)
    arrays = {name: values.astype(values.dtype.newbyteorder("="), copy=False) for name, values in arrays.items()}
    used = {(split, kind): find_array(arrays, split, words) for split in ("train", "test", "")
            for kind, words in (("x", SAMPLES), ("y", LABELS))}  # fmt: skip
    assumed, account = [], {}
    for name in {used[split, "y"] for split in ("train", "test", "")} - {None}:
        arrays[name] = numbered(name, arrays[name], assumed)
    if all(used[split, kind] for split in ("train", "test") for kind in "xy"):
        samples, labels = ({split: arrays[used[split, kind]] for split in ("train", "test")} for kind in "xy")
        rest = {*arrays} - {used[split, kind] for split in ("train", "test") for kind in "xy"}
        account["test_rows"] = "those of the file"
    elif used["", "x"] and used["", "y"]:
        x, y = arrays[used["", "x"]], arrays[used["", "y"]]
        if y.ndim != 1 or x.ndim == 0 or len(y) != len(x):
            raise UserError(f"{path}: y is {list(y.shape)}: expected one label per row of x")
        rows = choose_test_set(y, options)
        samples, labels = ({split: array[rows[split]] for split in rows} for array in (x, y))
        rest = {*arrays} - {used["", "x"], used["", "y"]}
    else:
        names = ", ".join(arrays) or "nothing"
        raise UserError(f"{path}: contains {names}: expected x and y, or x_train, y_train, x_test and y_test")
    layout = options.layout or guess_layout(path, samples["train"].shape)
    samples = {split: channels_last(path, values, layout) for split, values in _compact(samples).items()}
    labels, attributes = number_words(path, labels, options.classes)
    splits = {f"{split}/images": samples[split] for split in samples}
    if 2 < samples["train"].ndim < 6:
        assumed, account["given"] = [f"the axes of the arrays are {layout}", *assumed], {"layout": layout}
    account["assumed"] = assumed
    account["not_used"] = dict.fromkeys(sorted(rest), "another array")
    return splits | {f"{split}/labels": labels[split] for split in labels}, attributes | {ACCOUNT: account}


def read_arrays(path, chosen=lambda names: names):
    """{name: array} of a file that np.savez wrote; `chosen`: function of all names that gives those to read, or None.

    Raises:
        UserError: if it unpacks to too much, or is a single array. Exception: of many kinds, if it cannot be read.
    """
    check_file(path)
    if zipfile.is_zipfile(path):
        check_members(path)
    content = np.load(path, allow_pickle=False)
    if isinstance(content, np.ndarray):
        raise UserError(f"{path}: is a single array, as np.save writes it: expected what np.savez writes")
    with content as file:
        return {name: file[name] for name in chosen(file.files) if name is not None}


def numbered(name, labels, assumed):
    """Labels [n] of an array of them: also of [n, 1], of a one in each row, and of floats that are whole numbers."""
    is_table = labels.ndim == 2 and labels.shape[1] > 1 and labels.dtype.kind in "biuf"
    if is_table and np.isin(labels, (0, 1)).all() and (labels.sum(1) == 1).all():
        assumed.append(f"{name}: each row has one 1, at the place of its class")
        return labels.argmax(1)
    labels = labels.reshape(-1) if labels.ndim == 2 and 1 in labels.shape else labels
    if labels.dtype.kind == "f" and np.isfinite(labels).all() and (labels == np.floor(labels)).all():
        assumed.append(f"{name}: the whole numbers are classes")
        return labels.astype(np.int64)
    return labels


def find_array(names, split, words):
    """The name of the array of a split ("" if there is none) that is called by one of some words, or None."""
    ways = [f"{word}_{split}" for word in words] + [f"{split}_{word}" for word in words] if split else words
    return next((name for name in names if name.lower() in ways), None)


def guess_layout(path, shape):
    """Letters of the axes of an array: n samples, c channels, d h w depth, height and width.

    Raises:
        UserError: if an axis could be channels, as in a multispectral image, or the slices of a flat volume.
    """
    if len(shape) < 4:
        return "nhw"[: len(shape)]
    first, last = (shape[axis] in CHANNELS for axis in (1, -1))
    if len(shape) > 4:
        return "ndhwc" if last or shape[1] >= shape[-1] else "ncdhw"
    sides = shape[1:]
    for axis, channels, slices in () if first or last else ((-1, "nhwc", "nhwd"), (0, "nchw", "ndhw")):
        if FLAT * sides[axis] <= min(np.delete(sides, axis)):
            expected = f"expected --layout {channels} if they have {sides[axis]} channels, {slices} if so many slices"
            raise UserError(f"{path}: samples are {list(shape)}: {expected}")
    return "nhwc" if last else "nchw" if first else "ndhw"


def channels_last(path, values, layout):
    """An array whose axes are in the order of the file: n, d, h, w, c; a volume gets a channel."""
    right = [letter for letter in "ndhwc" if letter in layout]
    if sorted(layout) != sorted(right) or "n" not in layout or len(layout) != values.ndim:
        if values.ndim > 5:
            return values
        expected = f"expected {values.ndim} of the letters n, c, d, h and w, each once, and n"
        raise UserError(f"{path}: --layout {layout}: samples are {list(values.shape)}: {expected}")
    values = values.transpose([layout.index(letter) for letter in right])
    return values[..., None] if "d" in right and "c" not in right else values


def _compact(samples):
    """{split: samples}; integers and truth values become uint8, or floats if they are not all in 0..255."""
    if any(values.dtype.kind not in "biu" for values in samples.values()):
        return samples
    are_bytes = all(values.min(initial=0) >= 0 and values.max(initial=0) <= 255 for values in samples.values())
    largest = max(np.abs(values.astype(np.float64)).max(initial=0) for values in samples.values())
    kind = np.uint8 if are_bytes else np.float32 if largest <= EXACT else np.float64
    return {split: values.astype(kind) for split, values in samples.items()}


def number_words(path, labels, classes):
    """({split: labels}, attributes); words and truth values become numbers, and the attributes name them."""
    every = np.concatenate([values.reshape(-1) for values in labels.values()])
    if every.dtype.kind not in "USb" and not classes:
        return labels, {}
    words = np.char.strip(np.char.decode(every, "utf-8") if every.dtype.kind == "S" else every.astype(str))
    names, numbers = np.unique(words, return_inverse=True)
    if all(map(str.isdecimal, names)):  # 0, 2, 10 and not 0, 10, 2
        order = np.argsort(names.astype(int))
        names, numbers = names[order], np.argsort(order)[numbers]
    if classes and every.dtype.kind in "iu" and every.max(initial=0) < len(classes) and not {*names} <= {*classes}:
        numbers, names = every, classes
    elif classes:
        if odd := {*names} - {*classes}:
            expected = f"expected those of --classes {','.join(classes)}"
            raise UserError(f"{path}: has labels {', '.join(sorted(odd))}: {expected}")
        numbers, names = np.array([classes.index(name) for name in names])[numbers], classes
    numbers = np.split(numbers, np.cumsum([len(values) for values in labels.values()])[:-1])
    return dict(zip(labels, numbers)), {"num_classes": len(names), "class_names": [*map(str, names)]}
