"""A table: CSV or parquet."""

import collections
import csv
import re

import numpy as np

from fedmpi.data.formats.common import choose_test_set
from fedmpi.data.formats.features import Columns, as_numbers, is_empty, read_parquet
from fedmpi.data.source import COLUMNS
from fedmpi.errors import UserError, attempt

INTEGER = re.compile(r"-?[0-9]{1,18}")  # ASCII digits only: int() cannot read ²


def read(path, options):
    """A CSV file in UTF-8 with a header, one sample per line, or a parquet file.

    One column is the label (`ReaderOptions.label`, by default the last), numbers or words. Of the others,
    columns of numbers are features, and columns of words are kept as columns that a partition can split by;
    those of `ReaderOptions.one_hot` become features, too. `Columns` says how, and can be shared by silos.
    A random share of the lines becomes the test set (`ReaderOptions.test_share`).

    Returns:
        images [n, features] float32, labels [n], one bytes array [n] per column of words;
        attributes num_classes, class_names, feature_names, mean, std, columns (`Columns` as JSON).
    """
    names, rows = read_table(path)
    label = options.label or names[-1]
    if label not in names or len(rows) < 2:
        raise UserError(f"{path}: expected rows and a column {label}; its header is {', '.join(names)}")
    check_lines(path, names, rows)
    table = {name: np.array(values) for name, values in zip(names, zip(*rows))}
    answers = table.pop(label)
    if (without := is_empty(answers)).any():
        raise UserError(
            f"{path}: line {2 + int(np.flatnonzero(without)[0])} has an empty field in column {label}, the label: "
            "expected a class in every line"
        )
    chosen = choose_test_set(answers, options)
    agreed = Columns.read(options.columns)
    if agreed is None:
        columns = Columns.learn(path, table, _classes(answers), options, chosen["train"])
    else:
        agreed.check(options)
        columns = agreed
    labels = _number_classes(path, label, answers, columns.classes)
    words = _columns_of_words(path, table, columns)
    features = columns.features(path, table)
    if not features:
        raise UserError(f"{path}: expected at least one column of numbers besides {label}")
    if agreed is None and options.columns:
        columns.write(options.columns)
    matrix = np.stack(list(features.values()), axis=1)  # [n, features]
    splits = {}
    for split, rows in chosen.items():
        splits |= {f"{split}/images": matrix[rows], f"{split}/labels": labels[rows]}
        splits |= {f"{split}/{name}": values[rows] for name, values in words.items()}
    mean, std = columns.normalisation()
    attributes = {"num_classes": len(columns.classes), "class_names": columns.classes, "feature_names": list(features)}
    return splits, {**attributes, "mean": mean, "std": std, COLUMNS: columns.text()}


def read_table(path):
    """(names of the columns, rows as lists of text) of a CSV or parquet file.

    Raises:
        UserError: if the file cannot be read, or is empty.
    """
    return read_parquet(path) if path.suffix == ".parquet" else read_lines(path)


def read_lines(path):
    """(names in the header, lines as lists of fields); blank lines at the end are dropped.

    Raises:
        UserError: if the file cannot be read, or is empty.
    """
    with (
        attempt("read as CSV with a header", path, OSError, ValueError, csv.Error),
        open(path, newline="", encoding="utf-8-sig") as file,
    ):
        lines = list(csv.reader(file))
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
    repeated = next((name for name, number in collections.Counter(names).items() if number > 1), None)
    if repeated is not None:
        raise UserError(f"{path}: the header contains {repeated} twice: expected another name for each column")
    for line, row in enumerate(rows, start=2):
        if len(row) != len(names):
            raise UserError(f"{path}: line {line} has {len(row)} fields: expected {len(names)}, as in the header")


def _classes(values):
    """The names of the classes, sorted as numbers if all are integers, otherwise as text."""
    names = np.unique(values)
    if all(INTEGER.fullmatch(name) for name in names):  # 0, 2, 10 and not 0, 10, 2
        names = names[np.argsort(names.astype(int))]
    return names.tolist()


def _number_classes(path, label, values, classes):
    """[n] labels from 0 of a column of class names."""
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = sorted({*values.tolist()} - {*classes})
    if unknown:
        raise UserError(
            f"{path}: column {label} contains {unknown[0]}, which is not among the classes "
            f"{', '.join(classes)}: add it to the file of --columns, and prepare all silos with that file"
        )
    return np.array([numbers[value] for value in values.tolist()])


def _columns_of_words(path, table, columns):
    """name -> [n] bytes of the columns by which a partition can split: those of words, also if they are features."""
    words = {}
    for name, values in table.items():
        if isinstance(columns.columns.get(name), dict):
            continue
        if name not in columns.columns and as_numbers(values) is not None:
            known = ", ".join(columns.columns)
            raise UserError(f"{path}: column {name} is not among those of the file of --columns: {known}")
        if name in ("images", "labels"):
            raise UserError(f"{path}: a column of words is called {name}: expected another name for it")
        words[name] = np.char.encode(values, "utf-8")
    return words
