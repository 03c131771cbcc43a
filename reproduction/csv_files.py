"""CSV files of text: writing them whole or not at all, and reading them with a line about what is damaged."""

import contextlib
import csv
import io

from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import replacing
from fedmpi.ground.text import short

RESTORE = "restore the file (git checkout), or remove it and make the runs again"  # if it is damaged


def write_tables(*tables):
    """Write CSV files at once, so that a kill leaves files that belong together; each replaces one of its own kind.

    Args:
        tables: (path, names of the columns, rows as dicts) of each; what a row does not have is empty.

    Raises:
        UserError: if one cannot be written, or fedmpi did not write the file that is there.
    """
    path = None
    try:
        with contextlib.ExitStack() as stack:
            for path, columns, rows in tables:
                path.parent.mkdir(parents=True, exist_ok=True)
                part = stack.enter_context(replacing(path, signature(columns)))
                with open(part, "w", newline="", encoding="utf-8") as file:
                    lines = csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n")
                    lines.writeheader()
                    lines.writerows(rows)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def signature(columns):
    """What begins the files with some columns that fedmpi writes: the first three are always the same."""
    return ",".join([*columns][:3]).encode() + b","


def read_rows(path, columns=()):
    """The rows of a CSV file as dicts of text; [] if there is no such file.

    Args:
        columns: names of those that it must have.

    Raises:
        UserError: if it is damaged.
    """
    if not path.is_file():
        return []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            text = file.read()
    except UnicodeDecodeError:
        raise UserError(f"{path}: contains something else than text: {RESTORE}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows = []
    try:
        header = next(lines, [])
        if lacking := [name for name in columns if name not in header]:
            raise damaged(path, 0, f"no column {lacking[0]}")
        if len(set(header)) < len(header):
            raise damaged(path, 0, "two columns have the same name")
        for fields in lines:
            if len(fields) != len(header):
                raise damaged(path, len(rows) + 1, f"{len(fields)} values instead of {len(header)}")
            rows.append(dict(zip(header, fields)))
    except csv.Error as error:
        raise damaged(path, len(rows) + 1, str(error)) from None
    if not text.endswith("\n"):
        raise damaged(path, len(rows), "the line is cut off")
    return rows


def damaged(path, number, what):
    """The `UserError` about line `number` + 1 of a CSV file, its row `number`; 0 is the header."""
    return UserError(f"{path}, line {number + 1}: {what}: {RESTORE}")


def whole_number(path, number, row, name):
    """The whole number in a column of row `number` of a CSV file."""
    if not (row[name].isdecimal() and len(row[name]) < 19):
        raise damaged(path, number, f"{name}: expected a whole number, not '{short(row[name], 50)}'")
    return int(row[name])


def number_of(text):
    """The int or float that a text means."""
    value = float(text)
    return int(value) if value.is_integer() and "." not in text and "e" not in text else value
