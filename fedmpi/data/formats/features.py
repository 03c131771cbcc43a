"""Columns of a table as features: missing values, and categories as one column of 0 and 1 each (one-hot)."""

import json
import pathlib

import numpy as np

from fedmpi.errors import UserError

MISSING = ("refuse", "median", "category")  # what happens to empty fields
WITHOUT = "missing"  # the category of empty fields


def fill(path, name, values, missing):
    """Features of a column of numbers with empty fields, as name -> [n] float32; None for any other column.

    Args:
        path: of the table. name: of the column. values: [n] str. missing: one of `MISSING`. With "median" an empty
            field gets the median of the others; with "category" there is also a column that says where it was empty.

    Raises:
        UserError: if `missing` is "refuse".
    """
    is_blank = np.char.strip(values) == ""
    try:
        known = values[~is_blank].astype(np.float32)
    except ValueError:
        return None
    if not is_blank.any() or not len(known):
        return None
    if missing == "refuse":
        line = 2 + int(np.flatnonzero(is_blank)[0])
        raise UserError(
            f"{path}: line {line} has an empty field in column {name}: expected a number in every line; "
            "--missing median or --missing category accepts empty fields"
        )
    filled = np.full(len(values), np.median(known), dtype=np.float32)
    filled[~is_blank] = known
    indicator = {f"{name} is {WITHOUT}": is_blank.astype(np.float32)} if missing == "category" else {}
    return {name: filled, **indicator}


def one_hot(path, name, values, categories, missing):
    """A column of categories as features "NAME=CATEGORY" -> [n] float32, in the order of `categories`.

    Args:
        path, name, values, missing: see `fill`. categories: list of str that all silos share; of an empty field no
            feature is 1, unless `missing` is "category".

    Raises:
        UserError: if a value is no category, or is empty with missing = "refuse".
    """
    words = np.char.strip(values)
    if missing == "category":
        words = np.where(words == "", WITHOUT, words)
    if missing == "refuse" and (words == "").any():
        line = 2 + int(np.flatnonzero(words == "")[0])
        raise UserError(f"{path}: line {line} has an empty field in column {name}: see --missing")
    unknown = sorted({*words.tolist()} - {*categories, ""})
    if unknown:
        raise UserError(
            f"{path}: column {name} contains {unknown[0]}, which is not among {', '.join(categories)}: "
            "add it to the file of --columns, and prepare all silos with that file"
        )
    return {f"{name}={category}": (words == category).astype(np.float32) for category in categories}


def agreed_categories(path, columns, options):
    """name -> list of categories of the one-hot columns, from the file that `--columns` names.

    If there is no such file yet, the categories are those in the table, and the file is written. It contains only
    names, no rows: silos that are prepared with the same file have the same features.

    Args:
        path: of the table. columns: name -> [n] str. options: `ReaderOptions`.

    Raises:
        UserError: if the file or a column is missing or damaged.
    """
    unknown = [name for name in options.one_hot if name not in columns]
    if unknown:
        raise UserError(
            f"--one-hot {unknown[0]}: {path} has no such column besides the label; it has {', '.join(columns)}"
        )
    file = pathlib.Path(options.columns) if options.columns else None
    if file is not None and file.is_file():
        try:
            agreed = json.loads(file.read_text(encoding="utf-8"))
            return {name: [str(word) for word in agreed[name]] for name in options.one_hot}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"--columns {file}: expected JSON like {{column: [category, ...]}}: {error}") from None
    found = {}
    for name in options.one_hot:
        words = sorted({*np.char.strip(columns[name]).tolist()} - {""})
        found[name] = [*words, WITHOUT] if options.missing == "category" else words
    if file is not None:
        file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return found


def read_parquet(path):
    """(names, rows as lists of str) of a parquet file; an empty field is "".

    Raises:
        UserError: if it cannot be read, or a package for it is missing.
    """
    try:
        import pandas

        frame = pandas.read_parquet(path)
    except ImportError:
        raise UserError(f'{path}: parquet needs pandas and pyarrow: pip install "fedmpi[parquet]"') from None
    except Exception as error:  # noqa: BLE001  pyarrow's errors are of many kinds
        raise UserError(f"{path}: cannot be read as parquet: {' '.join(str(error).split())[:200]}") from None
    texts = [
        ["" if missing else str(value) for value, missing in zip(frame[name], frame[name].isna())] for name in frame
    ]
    return [str(name) for name in frame], [list(row) for row in zip(*texts)]
