"""Arrays saved by numpy."""

import numpy as np

from fedmpi.data.formats.common import choose_test_set
from fedmpi.errors import UserError, attempt


def read(path, options):
    """An npz file with x_train, y_train, x_test and y_test, or with x and y.

    x: [n, ...] samples. y: [n] or [n, 1] labels, which may be words. Of x and y, a random share becomes
    the test set (`ReaderOptions.test_share`).

    Returns:
        images: integers and truth values as uint8, or as float32 if they are not all in 0..255; other values
        as they are. labels [n]. Attributes: num_classes and class_names if the labels are words or truth values.
    """
    with attempt("read as npz", path, Exception), np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    if {"x_train", "y_train", "x_test", "y_test"} <= set(arrays):
        samples = {split: arrays[f"x_{split}"] for split in ("train", "test")}
        labels = {split: arrays[f"y_{split}"].squeeze() for split in samples}
    elif {"x", "y"} <= set(arrays):
        x, y = arrays["x"], arrays["y"].squeeze()
        if y.ndim != 1 or x.ndim == 0 or len(y) != len(x):
            raise UserError(f"{path}: y is {list(arrays['y'].shape)}: expected one label per row of x")
        rows = choose_test_set(y, options)
        samples, labels = ({split: array[rows[split]] for split in rows} for array in (x, y))
    else:
        names = ", ".join(arrays) or "nothing"
        raise UserError(f"{path}: contains {names}: expected x and y, or x_train, y_train, x_test and y_test")
    samples = _compact(samples)
    labels, attributes = _number_words(labels)
    splits = {f"{split}/images": samples[split] for split in samples}
    return splits | {f"{split}/labels": labels[split] for split in labels}, attributes


def _compact(samples):
    """{split: samples}; integers and truth values become uint8, or float32 if they are not all in 0..255."""
    if any(values.dtype.kind not in "biu" for values in samples.values()):
        return samples
    are_bytes = all(values.min(initial=0) >= 0 and values.max(initial=0) <= 255 for values in samples.values())
    return {split: values.astype(np.uint8 if are_bytes else np.float32) for split, values in samples.items()}


def _number_words(labels):
    """({split: labels}, attributes); words and truth values become numbers, and the attributes name them."""
    if any(values.dtype.kind not in "USb" for values in labels.values()):
        return labels, {}
    class_names, numbers = np.unique(np.concatenate(list(labels.values())), return_inverse=True)
    numbers = np.split(numbers, np.cumsum([len(values) for values in labels.values()])[:-1])
    attributes = {"num_classes": len(class_names), "class_names": class_names.astype(str).tolist()}
    return dict(zip(labels, numbers)), attributes
