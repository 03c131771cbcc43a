"""Tables: which columns are features, and what the others are."""

import dataclasses
import re

import numpy as np

from fedmpi.data.formats.common import choose_test_set, divided
from fedmpi.data.formats.features import Columns
from fedmpi.data.formats.frames import ARROW_OF_SPLITS, DATE, NAMELESS, Reading, read_table, table_ending
from fedmpi.data.source import ACCOUNT, COLUMNS, GROUP, ID
from fedmpi.errors import UserError
from fedmpi.text import short

INTEGER = re.compile(r"-?[0-9]{1,18}")  # ASCII digits only: int() cannot read ²
PLAIN = re.compile(r"-?(0|[1-9][0-9]*)\.[0-9]+")
FEW = 20  # rows, below which nothing is remarkable
MANY_CLASSES = 10
FAR = 3  # standard deviations from another silo's mean
MANY_ROWS = 1000
WHOLE = 1 << 53  # up to which float64 has all whole numbers


class Rows:
    """Columns that look like one array [n, features], which is made slice by slice.

    Args:
        columns: [features] arrays [m]. rows: [n] numbers of the rows to use.
    """

    def __init__(self, columns, rows):
        self._columns, self._rows = columns, rows
        self.shape = (len(rows), len(columns))
        self.dtype = np.result_type(np.float32, *{column.dtype for column in columns})

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, chosen):
        rows = self._rows[chosen]
        return np.stack([column[rows] for column in self._columns], axis=-1).astype(self.dtype, copy=False)

    def __array__(self, dtype=None, copy=None):
        return self[:]


def read(path, options):
    """A table with a header, one sample per row; `fedmpi.data.formats.frames` lists the formats.

    One column is the label (`ReaderOptions.label`, by default the last), numbers or words. Of the others, columns of
    numbers and those of `ReaderOptions.one_hot` are features. `Columns` says how, and can be shared by silos. The
    columns of `ReaderOptions.id`, `group` and `keep` are stored beside them, and nothing else is. A random share of the
    rows becomes the test set (`ReaderOptions.test_share`), unless it has a file of its own (`test_from`).

    Returns:
        images [n, features] float32 or float64, labels [n], one array [n] per column of id, group and keep;
        attributes num_classes, class_names, feature_names, mean, std, columns (`Columns` as JSON), and the account.
    """
    rest = set()
    if (path / ARROW_OF_SPLITS).is_file():
        if not (path / "train").is_dir():
            raise UserError(f"{path}: contains no folder train: give one of its folders, and maybe --test-from")
        has_test = (path / "test").is_dir() and not options.test_from
        options = dataclasses.replace(options, test_from=path / "test") if has_test else options
        rest = {entry.name for entry in path.iterdir() if entry.is_dir()} - {"train", *(["test"] if has_test else [])}
        path = path / "train"
    agreed = Columns.read(options.columns)
    if agreed is not None:
        agreed.check(options)
    reading = options.reading if options.reading != Reading() or agreed is None else agreed.reading
    kept = [*dict.fromkeys([*options.id, *filter(None, [options.group]), *options.keep])]
    label, left_out = None, []

    def wanted(names):
        """The columns to read, and those of them that are words whatever they contain."""
        nonlocal label, left_out
        for option, given in (("drop", options.drop), ("id", options.id), ("group", [options.group]),
                              ("keep", options.keep), ("features", options.features), ("one-hot", options.one_hot),
                              ("date", options.reading.dates)):  # fmt: skip
            for name in filter(None, given):
                rest = ", ".join(other for other in names if other != options.label)
                if name not in names or name == options.label:
                    raise UserError(f"--{option} {name}: {path} has no such column besides the label; it has {rest}")
        present = [name for name in names if name not in options.drop]
        label = label or options.label or next((name for name in reversed(present) if name not in kept
                                       and not NAMELESS.fullmatch(name)), names[-1])  # fmt: skip
        for name in (*kept, *options.one_hot, *options.reading.dates, *options.features, label):
            excluded = [*options.drop, *(kept if name in (*options.one_hot, *options.features, label) else ())]
            if name in excluded:
                expected = "expected one of both"
                raise UserError(f"{name}: is in --drop, --id, --group or --keep, and used otherwise: {expected}")
        if label in (*options.one_hot, *options.reading.dates):
            raise UserError(f"{label}: is the label: expected --label with another column, or no --one-hot and --date")
        if label not in names:
            raise UserError(f"{path}: expected rows and a column {label}; its header is {', '.join(names)}")
        named = {*options.one_hot, *options.features, *options.reading.dates, *(agreed.columns if agreed else ())}
        if options.features:
            left_out = [name for name in present if name not in (*options.features, *options.one_hot, *kept, label)]
        categories = [name for name, how in (agreed.columns if agreed else {}).items() if isinstance(how, list)]
        chosen = [name for name in present if name not in left_out and (name in named or name in (*kept, label)
                  or not NAMELESS.fullmatch(name))]  # fmt: skip
        used = {*chosen}
        left_out = [name for name in present if name not in used]
        return chosen, [label, *kept, *options.one_hot, *categories]

    table = read_table(path, reading, wanted)
    num_training = len(table)
    if options.test_from:
        if table_ending(options.test_from) is None:
            raise UserError(f"--test-from {options.test_from}: expected a table")
        rest |= _append(table, read_table(options.test_from, reading, wanted))
    if len(table) < 2:
        raise UserError(f"{path}: expected rows and a column {label}; its header is {', '.join(table.columns)}")
    answers = table.columns[label]
    if (without := answers.isna().to_numpy()).any():
        raise UserError(
            f"{path}: {table.place(int(np.flatnonzero(without)[0]))} has an empty field in column {label}, the label: "
            "expected a class in every line"
        )
    for name in (label, *kept, *options.one_hot):
        if (odd := table.columns[name].str.contains("\0", regex=False, na=False).to_numpy(bool)).any():
            found = f"{table.place(int(np.flatnonzero(odd)[0]))} has a character NUL in column {name}"
            raise UserError(f"{path}: {found}: expected text: is the encoding right (--encoding)?")
    if reserved := {"images", "labels", "."} & {*kept}:
        raise UserError(f"{path}: a column that is stored is called {reserved.pop()}: expected another name for it")
    groups = None if options.group is None else np.unique(_words(table, options.group), return_inverse=True)[1]
    if both := groups is not None and options.test_from and {*groups[:num_training]} & {*groups[num_training:]}:
        value = _words(table, options.group)[np.flatnonzero(groups == min(both))[0]]
        found = f"has {options.group} {value}, which {path} has, too: expected test rows of other groups, or no --group"
        raise UserError(f"--test-from {options.test_from}: {found}")
    if options.test_from:
        chosen = {"train": np.arange(num_training), "test": np.arange(num_training, len(table))}
    else:
        chosen = choose_test_set(np.unique(answers.to_numpy(str), return_inverse=True)[1], options, groups)
    others = [name for name in table.columns if name not in (*kept, label)]
    usable = [name for name in others if table.kinds[name] not in ("words", "empty") or name in options.one_hot]
    if agreed is None:
        columns = Columns.learn(table, usable, options.classes or _classes(answers), options, chosen["train"])
    else:
        columns = agreed
        odd = next((name for name in usable if name not in columns.columns), None)
        if odd is not None:
            known = ", ".join(columns.columns)
            found = f"column {odd} is not among those of the file of --columns: {known}; --drop {odd} leaves it out"
            raise UserError(f"{path}: {found}")
    labels = columns.numbered(table, label, columns.classes, "the classes ")
    features = columns.features(table)
    if not features:
        only = "; --separator names the mark between columns" if table.lines and len(table.columns) == 1 else ""
        raise UserError(f"{path}: expected at least one column of numbers besides {label}{only}")
    if agreed is None and options.columns:
        columns.write(options.columns)
    stored = {name: _stored(_words(table, name), name in options.keep) for name in kept}
    splits = {f"{split}/images": Rows([*features.values()], rows) for split, rows in chosen.items()}
    splits |= divided(chosen, labels=labels, **stored)
    mean, std = columns.normalisation()
    attributes = {"num_classes": len(columns.classes), "class_names": columns.classes, "feature_names": list(features)}
    roles = {GROUP: options.group} if options.group else {}
    roles |= {ID: [*options.id]} if options.id else {}
    given = {"separator": table.separator, "encoding": table.encoding} if table.lines else {}
    account = {
        "label": label,
        "features": {name: table.kinds[name] for name in columns.columns},
        "not_used": _not_used(table, columns, others, left_out, options)
        | dict.fromkeys(sorted(rest), "another part of the data"),
        "stored": {name: "not learned from" for name in kept},
        "assumed": table.assumed,
        "notes": _notes(table, columns, labels, label, options.group),
        "given": {"label": label, **given},
    } | ({"test_rows": f"those of {options.test_from}"} if options.test_from else {})
    attributes |= {"mean": mean, "std": std, COLUMNS: columns.text(), ACCOUNT: account}
    return splits, attributes | roles


def _append(table, other):
    """Add the rows of another `Table` with the same columns; return the names of its further ones."""
    import pandas

    if lost := [name for name in table.columns if name not in other.columns]:
        raise UserError(f"--test-from {other.path}: has no column {lost[0]}: expected the columns of {table.path}")
    for name, values in table.columns.items():
        if table.kinds[name] != other.kinds[name]:
            kinds = f"{table.kinds[name]} in {table.path} and {other.kinds[name]} in {other.path}"
            raise UserError(f"--test-from: column {name} contains {kinds}: expected the same")
        both = [values, other.columns[name]]
        is_array = isinstance(values, np.ndarray)
        table.columns[name] = np.concatenate(both) if is_array else pandas.concat(both, ignore_index=True)
    return {f"{name} ({other.path.name})" for name in other.columns.keys() - table.columns.keys()}


def _words(table, name):
    """[n] str of a column that is not learned from; an empty field is ""."""
    return table.columns[name].fillna("").to_numpy(str)


def _stored(words, may_be_numbers):
    """[n] of a column that is not learned from: bytes, or numbers if all are plain numbers, to sort by them."""
    if may_be_numbers and all(map(INTEGER.fullmatch, words)) and (words.astype(int).astype(str) == words).all():
        return words.astype(np.int64)
    is_number = may_be_numbers and all(map(PLAIN.fullmatch, words))
    return words.astype(np.float64) if is_number else np.char.encode(words, "utf-8")


def _not_used(table, columns, others, left_out, options):
    """name -> why, of the columns that are no features."""
    reasons = dict.fromkeys(options.drop, "--drop")
    nameless = "has no name, like the row numbers that pandas writes"
    reasons |= {name: nameless if NAMELESS.fullmatch(name) else "is not in --features" for name in left_out}
    for name in others:
        if name in columns.columns:
            continue
        values = table.columns[name]
        if table.kinds[name] == "empty":
            reasons[name] = "is empty"
            continue
        distinct, filled = values.nunique(), int(values.notna().sum())
        how = f"words, {distinct} of {filled} differ"
        if all(map(DATE.fullmatch, values.dropna().iloc[:FEW])):
            how += f": --date {name} (days since 1970-01-01)"
        if len(values) >= FEW and 2 * distinct <= filled:
            how += f": --one-hot {name} (categories), --group {name} (rows of one are not divided), --keep {name}"
        reasons[name] = how
    return reasons


def _notes(table, columns, labels, label, group):
    """Lines about what may be a mistake."""
    notes, num_rows = [], len(labels)
    if group and (number := int(table.columns[group].isna().sum())):
        notes.append(f"{group}: {number} rows have none, and count as one group")
    if num_rows < FEW:
        return notes
    if len(columns.classes) > MANY_CLASSES and 2 * len(columns.classes) > num_rows:
        notes.append(f"{label}: {len(columns.classes)} classes in {num_rows} rows: is it a quantity, or an identifier?")
    if len(columns.classes) == 1:
        notes.append(f"{label}: all rows have the class {columns.classes[0]}: expected others, or --classes")
    numbers = [name for name in columns.columns if name.replace(".", "", 1).isdecimal()]
    if 2 * len(numbers) > len(columns.columns) and numbers != [*map(str, range(len(numbers)))]:
        words = short(", ".join(numbers), 60)
        notes.append(f"the header contains numbers ({words}): is it a row, and the file has none?")
    has_classes = len(np.unique(labels)) > 1
    for name, how in columns.columns.items():
        if isinstance(how, list):
            continue
        values = table.columns[name]
        if abs((mean := np.nanmean(values, dtype=np.float64)) - how["mean"]) > FAR * how["std"]:
            there = f"{how['mean']:.4g} ± {how['std']:.4g} in the file of --columns"
            notes.append(f"{name}: its mean is {mean:.4g} here and {there}: is the unit the same?")
        begin = values[:MANY_ROWS]  # most columns need no more than these
        is_whole = (begin == np.floor(begin)).all() and (values == np.floor(values)).all()
        if is_whole and len(np.unique(values)) > 0.95 * num_rows:
            notes.append(f"{name}: nearly all of its whole numbers differ: is it an identifier? (--drop, --id)")
        elif is_whole and np.abs(values).max() > WHOLE:
            notes.append(f"{name}: whole numbers above 2^53 are rounded: is it an identifier? (--drop, --id)")
        if has_classes and _is_in_order(begin, labels[:MANY_ROWS]) and _is_in_order(values, labels):
            notes.append(f"{name}: its order is that of {label}: does it contain the answer?")
    return notes


def _is_in_order(values, labels):
    """Whether the values [n] of each class lie between those of two other classes."""
    import pandas

    extremes = pandas.Series(values).groupby(labels).agg(["min", "max"]).sort_values("min").to_numpy()
    return bool((extremes[:-1, 1] < extremes[1:, 0]).all())


def _classes(values):
    """The names of the classes, sorted as numbers if all are integers, otherwise as text."""
    names = sorted({*values})
    return sorted(names, key=int) if all(map(INTEGER.fullmatch, names)) else names  # 0, 2, 10 and not 0, 10, 2
