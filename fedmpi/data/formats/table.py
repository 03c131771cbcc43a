"""A table: CSV or parquet."""

import csv
import re

import numpy as np

from fedmpi.data.formats.common import choose_test_set
from fedmpi.data.formats.features import agreed_categories, fill, one_hot, read_parquet
from fedmpi.errors import UserError

INTEGER = re.compile(r"-?[0-9]{1,18}")  # ASCII digits only: int() cannot read ²


def read(path, options):
    """A CSV file in UTF-8 with a header, one sample per line, or a parquet file.

    One column is the label (`ReaderOptions.label`, by default the last), numbers or words. Of the others,
    columns of numbers are features, and columns of words are kept as columns that a partition can split by;
    those of `ReaderOptions.one_hot` become features, too.
    A random share of the lines becomes the test set (`ReaderOptions.test_share`).

    Returns:
        images [n, features] float32, labels [n], one bytes array [n] per column of words;
        attributes num_classes, class_names, feature_names.
    """
    names, rows = read_parquet(path) if path.suffix == ".parquet" else read_lines(path)
    label = options.label or names[-1]
    if label not in names or len(rows) < 2:
        raise UserError(f"{path}: expected rows and a column {label}; its header is {', '.join(names)}")
    check_lines(path, names, rows)
    columns = {name: np.array(values) for name, values in zip(names, zip(*rows))}
    class_names, labels = _number_classes(columns.pop(label))
    features, words, categories = {}, {}, agreed_categories(path, columns, options)
    for name, values in columns.items():
        if name in categories:
            features |= one_hot(path, name, values, categories[name], options.missing)
            words[name] = np.char.encode(values, "utf-8")
            continue
        filled = fill(path, name, values, options.missing)
        if filled is not None:
            features |= filled
            continue
        try:
            features[name] = values.astype(np.float32)
        except ValueError:
            _check_words(path, name, values)
            words[name] = np.char.encode(values, "utf-8")
    if not features:
        raise UserError(f"{path}: expected at least one column of numbers besides {label}")
    matrix = np.stack(list(features.values()), axis=1)  # [n, features]
    splits = {}
    for split, chosen in choose_test_set(labels, options).items():
        splits |= {f"{split}/images": matrix[chosen], f"{split}/labels": labels[chosen]}
        splits |= {f"{split}/{name}": values[chosen] for name, values in words.items()}
    attributes = {"num_classes": len(class_names), "class_names": class_names, "feature_names": list(features)}
    return splits, attributes


def read_lines(path):
    """(names in the header, lines as lists of fields); blank lines at the end are dropped.

    Raises:
        UserError: if the file cannot be read, or is empty.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines = list(csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as CSV with a header: {error}") from None
    while lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise UserError(f"{path}: is empty: expected CSV with a header")
    return lines[0], lines[1:]


def check_lines(path, names, rows):
    """Check that no two columns have one name, and that all lines have as many fields as the header.

    Raises:
        UserError: one line that names the first column or line that is wrong.
    """
    repeated = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if repeated is not None:
        raise UserError(f"{path}: the header contains {repeated} twice: expected another name for each column")
    for line, row in enumerate(rows, start=2):
        if len(row) != len(names):
            raise UserError(f"{path}: line {line} has {len(row)} fields: expected {len(names)}, as in the header")


def _number_classes(values):
    """(class names, [n] labels from 0); the names are sorted as numbers if all are integers, otherwise as text."""
    classes, labels = np.unique(values, return_inverse=True)
    if all(INTEGER.fullmatch(name) for name in classes):  # 0, 2, 10 and not 0, 10, 2
        order = np.argsort(classes.astype(int))
        classes, labels = classes[order], np.argsort(order)[labels]
    return classes.tolist(), labels


def _check_words(path, name, values):
    """Check that a column that is not all numbers is one of words, not one of numbers with some missing."""
    is_blank = np.char.strip(values) == ""
    try:
        values[~is_blank].astype(np.float32)
    except ValueError:
        if name in ("images", "labels"):
            raise UserError(f"{path}: a column of words is called {name}: expected another name for it") from None
        return
    line = 2 + int(np.flatnonzero(is_blank)[0])
    raise UserError(f"{path}: line {line} has an empty field in column {name}: expected a number in every line")
