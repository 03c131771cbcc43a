"""Tables with a column of images, as Hugging Face's `datasets` writes them: Parquet files and `save_to_disk`."""

import dataclasses
import json

import numpy as np

from fedmpi.data.source import ACCOUNT
from fedmpi.ground.errors import UserError, attempt
from fedmpi.prepare.formats.common import choose_test_set
from fedmpi.prepare.formats.frames import table_ending
from fedmpi.prepare.formats.images import image_splits
from fedmpi.prepare.formats.npz import number_words
from fedmpi.prepare.formats.typed import ARROW, ARROW_OF_SPLITS, named_classes, read_arrow, read_parquet

METADATA = b"huggingface"  # in a Parquet file: what the columns are


@dataclasses.dataclass(frozen=True)
class _Cell:
    """An image of a table, for `ImageFiles` like a file."""

    name: str
    content: bytes

    def read_bytes(self):
        return self.content

    def __str__(self):
        return self.name


def image_column(path):
    """The name of a table's first column of images, each with its bytes; None if there is none."""
    if table_ending(path) == ".parquet":
        try:
            import pyarrow
            from pyarrow.parquet import read_schema

            fields = [field for field in read_schema(path) if pyarrow.types.is_struct(field.type)]
        except (ImportError, OSError, ValueError):  # whoever reads the table says so
            return None
        return next((field.name for field in fields if "bytes" in {part.name for part in field.type}), None)
    if table_ending(path) != ".arrow":
        return None
    with attempt("read", path, OSError, ValueError, KeyError):
        features = json.loads((_parts(path)["train"] / ARROW).read_text(encoding="utf-8"))["features"]
    return next(
        (name for name, feature in features.items() if isinstance(feature, dict) and feature.get("_type") == "Image"),
        None,
    )


def read(path, options):
    """A table whose images are the samples, and one of whose other columns is the label (`ReaderOptions.label`, by
    default the one called label, or the last).

    Returns:
        images as `ImageFiles`, labels [n]; attributes num_classes, class_names, and the account.
    """
    parts = _parts(path) | ({"test": options.test_from} if options.test_from else {})
    column, cells, answers, others = image_column(path), {}, {}, ()
    for split, part in parts.items():
        frame = _frame(part)
        names = [name for name in frame.columns if name != column]
        label = options.label or ("label" if "label" in names else (names or [None])[-1])
        if column not in frame.columns or label not in names:
            raise UserError(f"{part}: expected columns {column} and {label}; it has {', '.join(frame.columns)}")
        others = [name for name in names if name != label]
        cells[split] = [_cell(part, row, value) for row, value in enumerate(frame[column])]
        if (empty := frame[label].isna().to_numpy()).any():
            raise UserError(f"{part}: row {np.flatnonzero(empty)[0] + 1} has an empty field in column {label}")
        answers[split] = frame[label].to_numpy(str)
    numbers, attributes = number_words(path, answers, options.classes)
    account = {"label": label, "not_used": dict.fromkeys(others, "another column"), "given": {"label": label}}
    if len(parts) == 1:
        rows = choose_test_set(numbers["train"], options)
        cells = {split: [cells["train"][row] for row in rows[split]] for split in rows}
        numbers = {split: numbers["train"][rows[split]] for split in rows}
    else:
        account["test_rows"] = f"those of {parts['test']}"
    images, assumed = image_splits(path, cells, options)
    account["assumed"] = [assumed]
    return images | {f"{split}/labels": labels for split, labels in numbers.items()}, attributes | {ACCOUNT: account}


def _parts(path):
    """{split: path} of the tables of one."""
    if not (path / ARROW_OF_SPLITS).is_file():
        return {"train": path}
    return {split: path / split for split in ("train", "test") if (path / split).is_dir()}


def _frame(path):
    """The pandas frame of a table; numbers of classes become their names where the file knows them."""
    if table_ending(path) == ".arrow":
        return read_arrow(path)
    with attempt("read as Parquet", path, Exception):
        table = read_parquet(path)
        known = json.loads((table.schema.metadata or {}).get(METADATA, b"{}")).get("info", {}).get("features", {})
        return named_classes(table.to_pandas(), known)


def _cell(path, row, value):
    name = f"{path}: row {row + 1}"
    if not isinstance(value, dict) or not value.get("bytes"):
        raise UserError(f"{name} contains no image: expected its bytes, not only the path of a file")
    return _Cell(name, value["bytes"])
