"""Columns of a table as features, the same on all silos: missing values, and categories as columns of 0 and 1."""

import dataclasses
import json
import pathlib

import numpy as np

from fedmpi.errors import UserError, attempt, cannot
from fedmpi.own_files import check_regular, replacing
from fedmpi.text import short

MISSING = ("refuse", "median", "category")  # what happens to empty fields
EMPTY = ("", "NA", "N/A", "NaN", "nan", "null", "NULL")  # fields without a value
WITHOUT = "missing"  # the category of empty fields


@dataclasses.dataclass(frozen=True)
class Columns:
    """How the columns of a table become features. It contains no rows, so silos can share it (`--columns`).

    Attributes:
        missing: one of `MISSING`. With "median" an empty field of a column of numbers gets the column's median; with
            "category" each column of numbers also has a feature that says where it was empty.
        classes: the names of the classes, in the order of their labels.
        columns: name -> {"median", "mean", "std"} of a column of numbers, or the categories of a one-hot column.
    """

    missing: str
    classes: list
    columns: dict

    @classmethod
    def learn(cls, path, table, classes, options, training):
        """Those of a table.

        Args:
            path: of the table, for messages. table: name -> [n] str, without the label. classes: names.
            options: `ReaderOptions`. training: rows of which the statistics are computed.

        Raises:
            UserError: if a one-hot column does not exist.
        """
        absent = [name for name in options.one_hot if name not in table]
        if absent:
            raise UserError(
                f"--one-hot {absent[0]}: {path} has no such column besides the label; it has {', '.join(table)}"
            )
        columns = {}
        for name, values in table.items():
            if name in options.one_hot:
                words = sorted({*np.char.strip(values).tolist()} - {*EMPTY})
                columns[name] = [*words, WITHOUT] if options.missing == "category" else words
            elif (numbers := as_numbers(values)) is not None:
                known = numbers[training][~np.isnan(numbers[training])]
                known = known if len(known) else numbers[~np.isnan(numbers)]
                with np.errstate(invalid="ignore", over="ignore"):  # `features` refuses what is not finite
                    filled = np.where(np.isnan(numbers[training]), np.median(known), numbers[training])
                    mean, std = float(filled.mean()), float(filled.std())
                columns[name] = {"median": float(np.median(known)), "mean": mean, "std": std or 1.0}
        return cls(options.missing, classes, columns)

    @classmethod
    def read(cls, file):
        """Those of the JSON file that `--columns` names; None if there is no such file.

        Raises:
            UserError: if the file is damaged.
        """
        if file is None:
            return None
        if not pathlib.Path(file).is_file():
            check_regular(pathlib.Path(file))
            return None
        with attempt("read as JSON", f"--columns {file}", OSError, ValueError, RecursionError):
            content = json.loads(pathlib.Path(file).read_text(encoding="utf-8"))
        return cls.of(content, f"--columns {file}")

    @classmethod
    def of(cls, content, given):
        """Those of the content of a JSON file: a dict like the attributes. A message begins with `given`.

        Raises:
            UserError: if it is something else.
        """
        try:
            columns = {
                name: {key: float(one[key]) for key in ("median", "mean", "std")}
                if isinstance(one, dict)
                else [str(word) for word in one]
                for name, one in content["columns"].items()
            }
            numbers = [one for one in columns.values() if isinstance(one, dict)]
            if not all(np.isfinite([*one.values()]).all() and one["std"] > 0 for one in numbers):
                raise ValueError("a median, mean or std is not finite, or a std is not above 0")
            if content["missing"] not in MISSING:
                raise ValueError(f"missing is not one of {', '.join(MISSING)}")
            return cls(content["missing"], [str(name) for name in content["classes"]], columns)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise UserError(f"{given}: expected what data prepare --columns writes: {short(repr(error))}") from None

    def text(self):
        """Everything as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    def write(self, file):
        """Write the JSON file, by which the other silos make the same features.

        Raises:
            UserError: if it cannot be written.
        """
        text = json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False)
        with attempt("write", f"--columns {file}"), replacing(file, b'"missing": "') as part:
            part.write_text(f"{text}\n", encoding="utf-8")

    def check(self, options):
        """Check that options do not contradict the file of `--columns`.

        Raises:
            UserError: if they do.
        """
        one_hot = [name for name, one in self.columns.items() if isinstance(one, list)]
        agreed = f"--missing {self.missing}" + "".join(f" --one-hot {name}" for name in one_hot)
        if options.missing != self.missing or {*options.one_hot} != {*one_hot}:
            raise UserError(f"--columns {options.columns}: was made with {agreed}: expected the same options")

    def features(self, path, table):
        """name -> [n] float32 of each feature, in an order that is the same on all silos.

        Args:
            path: of the table, for messages. table: name -> [n] str.

        Raises:
            UserError: if the table lacks a column, or a field is not allowed.
        """
        features = {}
        for name, how in self.columns.items():
            if name not in table:
                raise UserError(f"{path}: lacks the column {name}; its header is {', '.join(table)}")
            encode = self._one_hot if isinstance(how, list) else self._numbers
            features |= encode(path, name, table[name], how)
        return features

    def normalisation(self):
        """(mean, std) of every feature; 0 and 1 of those that are 0 or 1."""
        pairs = []
        for how in self.columns.values():
            if isinstance(how, list):
                pairs += [(0.0, 1.0)] * len(how)
            else:
                pairs += [(how["mean"], how["std"])] + [(0.0, 1.0)] * (self.missing == "category")
        return tuple(zip(*pairs))

    def _numbers(self, path, name, values, how):
        numbers, is_blank = as_numbers(values), is_empty(values)
        if numbers is None and not is_blank.all():
            odd = next(row for row in np.flatnonzero(~is_blank) if as_numbers(values[row : row + 1]) is None)
            raise UserError(f"{path}: line {odd + 2} has {values[odd]} in column {name}: expected a number")
        self._refuse_empty(path, name, is_blank, "a number")
        with np.errstate(over="ignore"):
            filled = np.where(is_blank, how["median"], 0.0 if numbers is None else numbers).astype(np.float32)
        if not np.isfinite(filled).all():
            odd = int(np.flatnonzero(~np.isfinite(filled))[0])
            raise UserError(f"{path}: line {odd + 2} has {values[odd]} in column {name}: expected a finite number")
        indicator = {f"{name} is {WITHOUT}": is_blank.astype(np.float32)} if self.missing == "category" else {}
        return {name: filled, **indicator}

    def _one_hot(self, path, name, values, categories):
        is_blank = is_empty(values)
        self._refuse_empty(path, name, is_blank, "a category")
        words = np.where(is_blank, WITHOUT if self.missing == "category" else "", np.char.strip(values))
        unknown = sorted({*words.tolist()} - {*categories, ""})
        if unknown:
            raise UserError(
                f"{path}: column {name} contains {unknown[0]}, which is not among {', '.join(categories)}: "
                "add it to the file of --columns, and prepare all silos with that file"
            )
        return {f"{name}={category}": (words == category).astype(np.float32) for category in categories}

    def _refuse_empty(self, path, name, is_blank, expected):
        if self.missing == "refuse" and is_blank.any():
            line = 2 + int(np.flatnonzero(is_blank)[0])
            raise UserError(
                f"{path}: line {line} has an empty field in column {name}: expected {expected} in every line; "
                "--missing median or --missing category accepts empty fields"
            )


def as_numbers(values):
    """[n] float64 of a column of numbers, nan where a field is empty; None for a column of words, or an empty one.

    Args:
        values: [n] str.
    """
    is_blank = is_empty(values)
    if is_blank.all():
        return None
    try:
        return np.where(is_blank, "nan", values).astype(np.float64)
    except ValueError:
        return None


def is_empty(values):
    """[n] where a column of text has no value."""
    return np.isin(np.char.strip(values), EMPTY)


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
        raise cannot("read as parquet", path, error) from None
    texts = [
        ["" if missing else str(value) for value, missing in zip(frame[name], frame[name].isna())] for name in frame
    ]
    return [str(name) for name in frame], [list(row) for row in zip(*texts)]
