"""Columns of a table as features, the same on all silos: missing values, and categories as columns of 0 and 1."""

import dataclasses
import json
import pathlib

import numpy as np

from fedmpi.data.source import plain
from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.own_files import check_regular, replacing
from fedmpi.ground.text import short
from fedmpi.prepare.formats.frames import Reading

MISSING = ("refuse", "median", "category")  # what happens to empty fields
LARGEST = np.finfo(np.float32).max
WITHOUT = "missing"  # the category of empty fields


@dataclasses.dataclass(frozen=True)
class Columns:
    """How the columns of a table become features. It contains no rows, so silos can share it (`--columns`).

    In a file that one silo writes, every category has at least `ReaderOptions.least` rows there, and so has every
    class that the user has not named; a median is that of as many rows. Nothing is of a single row.

    Attributes:
        missing: one of `MISSING`. With "median" an empty field of a column of numbers gets the column's median; with
            "category" each column of numbers also has a feature that says where it was empty.
        classes: the names of the classes, in the order of their labels.
        columns: name -> {"median", "mean", "std"} of a column of numbers, or the categories of a one-hot column.
        reading: a `Reading`: how fields are read.
        aliases: name of a column or of the label -> {what fields contain: the category or class that it means}.
        id: names of columns that are not learned from, and that predictions show. group: name of the column of groups.
        label: name of the column with the classes.
    """

    missing: str
    classes: list
    columns: dict
    reading: Reading = Reading()
    aliases: dict = dataclasses.field(default_factory=dict)
    id: tuple = ()
    group: str | None = None
    label: str = ""

    @classmethod
    def learn(cls, table, names, classes, label, options, training):
        """Those of a `Table`.

        Args:
            table: with all columns. names: of those that are features. classes: names. label: their column.
            options: `ReaderOptions`. training: rows of which the statistics are computed.
        """
        columns, missing, least = {}, options.missing or "refuse", options.least
        if options.columns and not options.classes:
            _check_classes(table, classes, label, options)
        for name in names:
            values = table.columns[name]
            if table.kinds[name] == "words":
                counts = values.value_counts()
                words = sorted(counts.index[counts >= least])
                columns[name] = [*words, WITHOUT] if missing == "category" else words
                continue
            numbers = np.asarray(values[training], np.float64)
            is_blank = np.isnan(numbers)
            known = numbers[~is_blank] if is_blank.any() else numbers
            known = known if len(known) else values[~np.isnan(values)]
            if options.columns and len(known) < least:
                raise UserError(
                    f"{table.path}: column {name} has fewer than {least} rows with a number: the file of --columns "
                    f"would say much about each: --drop {name}, or --least N for fewer rows"
                )
            with np.errstate(invalid="ignore", over="ignore"):  # `features` refuses what is not finite
                median = _median(known, least)
                numbers[is_blank] = median
                mean, std = float(numbers.mean()), float(numbers.std()) if np.ptp(numbers) else 1.0
            columns[name] = {"median": median, "mean": mean, "std": std}
        return cls(missing, classes, columns, options.reading, {}, tuple(options.id), options.group, label)

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
        columns = cls.of(content, f"--columns {file}")
        if not columns.label:
            hint = 'add "label": "COLUMN", or remove the file and prepare all silos again'
            raise UserError(f"--columns {file}: does not say which column is the label: {hint}")
        return columns

    @classmethod
    def of(cls, content, given):
        """Those of the content of a JSON file: a dict like the attributes. A message begins with `given`.

        Raises:
            UserError: if it is something else.
        """
        try:
            keys = ("median", "mean", "std")
            columns = {name: {key: float(column[key]) for key in keys} if isinstance(column, dict)
                       else [*map(str, column)]
                       for name, column in content["columns"].items()}  # fmt: skip
            numbers = [column for column in columns.values() if isinstance(column, dict)]
            if not all(np.isfinite([*facts.values()]).all() and facts["std"] > 0 for facts in numbers):
                raise ValueError("a median, mean or std is not finite, or a std is not above 0")
            lists = [content["classes"], *(column for column in columns.values() if isinstance(column, list))]
            if any(len({*words}) < len(words) for words in lists):
                raise ValueError("a class or a category is there twice")
            if content["missing"] not in MISSING:
                raise ValueError(f"missing is not one of {', '.join(MISSING)}")
            aliases = {str(name): {str(word): str(other) for word, other in meanings.items()}
                       for name, meanings in content.get("aliases", {}).items()}  # fmt: skip
            reading = {key: tuple(v) if isinstance(v, list) else v for key, v in content.get("reading", {}).items()}
            roles = tuple(map(str, content.get("id", ()))), content.get("group"), str(content.get("label", ""))
            classes = [str(name) for name in content["classes"]]
            return cls(content["missing"], classes, columns, Reading(**reading), aliases, *roles)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise UserError(f"{given}: expected what data prepare --columns writes: {short(repr(error))}") from None

    def text(self, indent=None):
        """Everything as JSON, in one line without an indent."""
        return json.dumps(dataclasses.asdict(self), indent=indent, ensure_ascii=False)

    def write(self, file):
        """Write the JSON file, by which the other silos make the same features.

        Raises:
            UserError: if it cannot be written.
        """
        with attempt("write", f"--columns {file}"), replacing(file, b'"missing": "') as part:
            part.write_text(f"{self.text(1)}\n", encoding="utf-8")

    def check(self, options):
        """Check that options do not contradict the file of `--columns`.

        Raises:
            UserError: if they do.
        """
        one_hot = [name for name, column in self.columns.items() if isinstance(column, list)]
        agreed = f"--missing {self.missing}" + "".join(f" --one-hot {name}" for name in one_hot)
        given = f"--columns {options.columns}: was made with"
        if options.label not in (None, self.label):
            raise UserError(f"{given} --label {self.label}: expected the same, not {options.label}")
        if self.group is not None and options.group not in (None, self.group):
            raise UserError(f"{given} --group {self.group}: expected the same, not {options.group}")
        if options.missing not in (None, self.missing) or {*options.one_hot} - {*one_hot}:
            raise UserError(f"{given} {agreed}: expected the same options")
        lost = [*{*self.columns} & {*options.drop, *options.id, *options.keep, options.group}]
        if lost or (options.features and {*options.features} != {*self.columns}):
            raise UserError(f"{given} the features {', '.join(self.columns)}: expected no other, and none left out")
        if options.classes and options.classes != self.classes:
            raise UserError(f"{given} the classes {', '.join(self.classes)}: expected the same in --classes")

    def features(self, table, unknown, least=None):
        """name -> [n] values of each feature, in an order that is the same on all silos.

        Args:
            table: a `Table`. unknown: column -> number of fields whose category is not known, which this function
                fills: they count as missing, or as none of the known ones. least: rows from which such a category is
                an error, because the others should know it; so is one that looks like a known one, and a column
                without any known one. None: none is.

        Raises:
            UserError: if the table lacks a column, or a field is not allowed.
        """
        features = {}
        for name, how in self.columns.items():
            if name not in table.columns:
                raise UserError(f"{table.path}: lacks the column {name}; its header is {', '.join(table.columns)}")
            is_list = isinstance(how, list)
            features |= self._one_hot(table, name, how, unknown, least) if is_list else self._numbers(table, name, how)
        return features

    def numbered(self, table, name, known, kind, unknown=None, least=1):
        """[n] number in the list `known` of each field of a column of words, after its aliases; -1 of an empty one.

        Those that are not in the list are an error, or are -1 and counted in `unknown`: see `features`.

        Raises:
            UserError: one line with the fields that are not in the list and have to be.
        """
        meant = {word: number for number, word in enumerate(known)}
        aliases = self.aliases.get(name, {})
        meant |= {word: meant[other] for word, other in aliases.items() if other in meant}
        words = table.columns[name]
        is_known = words.isin([*meant])
        counts, similar = words[~is_known].value_counts(), {plain(word): word for word in known}
        if known and not is_known.any():
            least = least and 1
        odd = sorted(word for word, number in counts.items() if least and (number >= least or plain(word) in similar))
        if odd:
            same = {word: similar[plain(word)] for word in odd if plain(word) in similar}
            hint = f'; if it means the same, add "aliases": {json.dumps({name: same})}' if same else ""
            hint += f"; --least N counts categories of fewer than N rows as unknown (now {least})" * (least > 1)
            raise UserError(
                f"{table.path}: column {name} contains {short(', '.join(odd), 300)}, which is not among {kind}"
                f"{', '.join(known)}: add it to --classes or the file of --columns, and prepare all silos so{hint}"
            )
        if len(counts):
            unknown[name] = int(counts.sum())
        return words.map(meant).fillna(-1).to_numpy(np.int64)

    def normalisation(self):
        """(mean, std) of every feature; 0 and 1 of those that are 0 or 1."""
        pairs = []
        for how in self.columns.values():
            if isinstance(how, list):
                pairs += [(0.0, 1.0)] * len(how)
            else:
                pairs += [(how["mean"], how["std"])] + [(0.0, 1.0)] * (self.missing == "category")
        return tuple(zip(*pairs))

    def _numbers(self, table, name, how):
        values = table.columns[name]
        if table.kinds[name] == "words":
            row = next(row for row, word in enumerate(values) if isinstance(word, str) and not _is_number(word))
            found = f"{table.place(row)} has {short(values[row], 60)} in column {name}"
            raise UserError(f"{table.path}: {found}: expected a number", table.place(row))
        values = np.asarray(values, np.float64 if table.kinds[name] == "empty" else None)
        is_blank = np.isnan(values)
        self._refuse_empty(table, name, is_blank, "a number")
        if not np.isfinite(values[~is_blank]).all() or np.abs(values[~is_blank]).max(initial=0) > LARGEST:
            row = int(np.flatnonzero(~is_blank & ~(np.abs(values) <= LARGEST))[0])
            expected = "expected a finite number"
            found = f"{table.place(row)} has {values[row]:.4g} in column {name}"
            raise UserError(f"{table.path}: {found}: {expected}", table.place(row))
        indicator = {f"{name} is {WITHOUT}": is_blank} if self.missing == "category" else {}
        if is_blank.any():  # otherwise without a copy, which would double the memory
            values = np.where(is_blank, values.dtype.type(how["median"]), values)
        return {name: values, **indicator}

    def _one_hot(self, table, name, categories, unknown, least):
        if table.kinds[name] not in ("words", "empty"):
            raise UserError(f"{table.path}: column {name} contains {table.kinds[name]}: expected categories")
        numbers = self.numbered(table, name, categories, "", unknown, least)
        self._refuse_empty(table, name, table.columns[name].isna().to_numpy(), "a category")
        if self.missing == "category":
            numbers = np.where(numbers < 0, categories.index(WITHOUT), numbers)
        return {f"{name}={category}": numbers == number for number, category in enumerate(categories)}

    def _refuse_empty(self, table, name, is_blank, expected):
        if self.missing == "refuse" and is_blank.any():
            place = table.place(int(np.flatnonzero(is_blank)[0]))
            raise UserError(
                f"{table.path}: {place} has an empty field in column {name}: expected {expected} in every line; "
                "data prepare with --missing median or --missing category accepts empty fields",
                place,
            )


def _check_classes(table, classes, label, options):
    """Check that a file for other silos names no class of few rows.

    Raises:
        UserError: one line with how many there are.
    """
    counts, least = table.columns[label].value_counts(), options.least
    few = sum(counts.get(name, 0) < least for name in classes)
    if few:
        raise UserError(
            f"{table.path}: column {label} has {few} class{'es' if few > 1 else ''} of fewer than {least} rows, and "
            "the file of --columns would tell others the name: leave these rows out, name in --classes all classes "
            "that the others may know, or write the file with data statistics --out; --least 1 writes all"
        )


def _median(values, least):
    """The median of values [n]; if fewer than `least` of them are equal to it, the mean of as many in their middle."""
    median = float(np.median(values))
    if np.count_nonzero(values == median) >= least or least < 3:
        return median
    begin = max((len(values) - least) // 2, 0)
    return float(np.sort(values)[begin : len(values) - begin].mean())


def _is_number(word):
    try:
        return bool(np.isfinite(float(word)))
    except ValueError:
        return False
