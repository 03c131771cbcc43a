"""Tables: which columns are features, and what the others are."""

import dataclasses
import re

import numpy as np

from fedmpi.data.source import ACCOUNT, COLUMNS, GROUP, ID
from fedmpi.ground.errors import UserError
from fedmpi.prepare.formats.common import choose_test_set, divided
from fedmpi.prepare.formats.features import Columns
from fedmpi.prepare.formats.fields import hint_of_words
from fedmpi.prepare.formats.frames import DATE, NAMELESS, TEXTS, read_table, table_ending
from fedmpi.prepare.formats.notes import FEW, notes_on
from fedmpi.prepare.formats.typed import ARROW_OF_SPLITS

INTEGER = re.compile(r"-?[0-9]{1,18}")  # ASCII digits only: int() cannot read ²
EMPTY = "is empty"  # why a column is no feature
PLAIN = re.compile(r"-?(0|[1-9][0-9]*)\.[0-9]+")


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
    """A table with a header, one sample per row; `fedmpi.prepare.formats.frames` lists the formats.

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
    agreed, label, group, reading, left_out = Columns.read(options.columns), None, options.group, options.reading, []
    if agreed is not None:
        agreed.check(options)
        label, group, reading = agreed.label, group or agreed.group, agreed.reading.joined(options.reading)
    for part in filter(None, [path, options.test_from]):
        _check_meaning(part, options.reading)
    kept = [*dict.fromkeys([*options.id, *filter(None, [group]), *options.keep])]

    def wanted(names):
        """The columns to read, and those of them that are words whatever they contain."""
        nonlocal label, left_out, kept
        if agreed is not None:  # what the first silo does not learn from is not learned from here
            kept = [*dict.fromkeys([*kept, *(name for name in agreed.id if name in names)])]
            _check_agreed(path, names, agreed, options)
        for option, given in (("drop", options.drop), ("id", options.id), ("group", [group]),
                              ("keep", options.keep), ("features", options.features), ("one-hot", options.one_hot),
                              ("date", options.reading.dates)):  # fmt: skip
            for name in filter(None, given):
                rest = ", ".join(other for other in names if other != (label or options.label))
                if name not in names or name == (label or options.label):
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
        place = table.place(int(np.flatnonzero(without)[0]))
        found = f"{path}: {place} has an empty field in column {label}, the label: expected a class in every line"
        raise UserError(f"{found}{_hint_of_title([*table.columns, *left_out])}", place)
    for name in (label, *kept, *options.one_hot):
        if (odd := table.columns[name].str.contains("\0", regex=False, na=False).to_numpy(bool)).any():
            found = f"{table.place(int(np.flatnonzero(odd)[0]))} has a character NUL in column {name}"
            raise UserError(f"{path}: {found}: expected text: is the encoding right (--encoding)?")
    if reserved := {"images", "labels", "."} & {*kept}:
        raise UserError(f"{path}: a column that is stored is called {reserved.pop()}: expected another name for it")
    groups = None if group is None else np.unique(_words(table, group), return_inverse=True)[1]
    if both := groups is not None and options.test_from and {*groups[:num_training]} & {*groups[num_training:]}:
        value = _words(table, group)[np.flatnonzero(groups == min(both))[0]]
        found = f"has {group} {value}, which {path} has, too: expected test rows of other groups, or no --group"
        raise UserError(f"--test-from {options.test_from}: {found}")
    if options.test_from:
        chosen = {"train": np.arange(num_training), "test": np.arange(num_training, len(table))}
    else:
        chosen = choose_test_set(np.unique(answers.to_numpy(str), return_inverse=True)[1], options, groups)
    others = [name for name in table.columns if name not in (*kept, label)]
    usable = [name for name in others if table.kinds[name] not in ("words", "empty") or name in options.one_hot]
    if agreed is None:
        columns = Columns.learn(table, usable, options.classes or _classes(answers), label, options, chosen["train"])
    else:
        columns = agreed
        odd = next((name for name in usable if name not in columns.columns), None)
        if odd is not None:
            known = ", ".join(columns.columns)
            found = f"column {odd} is not among those of the file of --columns: {known}; --drop {odd} leaves it out"
            raise UserError(f"{path}: {found}")
    labels = columns.numbered(table, label, columns.classes, "the classes ")
    unknown = {}
    features = columns.features(table, unknown, None if agreed is None else options.least)
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
    roles = {GROUP: group} if group else {}
    ids = [name for name in kept if name in (*options.id, *(agreed.id if agreed else ()))]
    roles |= {ID: ids} if ids else {}
    given = {"separator": table.separator, "encoding": table.encoding} if table.lines else {}
    account = {
        "label": label,
        "features": {name: table.kinds[name] for name in columns.columns},
        "not_used": _not_used(table, columns, others, left_out, options, reading)
        | dict.fromkeys(sorted(rest), "another part of the data"),
        "stored": {name: "not learned from" for name in kept},
        "assumed": table.assumed,
        "notes": [
            *_notes_on_unknown(unknown, len(table), agreed, options),
            *notes_on(table, columns, labels, label, group),
        ],
        "given": {"label": label, **given},
    } | ({"test_rows": f"those of {options.test_from}"} if options.test_from else {})
    attributes |= {"mean": mean, "std": std, COLUMNS: columns.text(), ACCOUNT: account}
    return splits, attributes | roles


def _notes_on_unknown(unknown, num_rows, agreed, options):
    """A line about each column with categories that are no features: how many, and not which."""
    of = f"of fewer than {options.least} rows (--least)"
    why = of if agreed is None else f"that the file of --columns does not have, each {of}"
    return [f"{name}: {number} of {num_rows} rows have categories {why}: they count as unknown"
            for name, number in unknown.items()]  # fmt: skip


def _hint_of_title(names):
    """What to do if the header is none."""
    nameless = sum(bool(NAMELESS.fullmatch(name)) for name in names)
    return "; most columns have no name: --skip-lines 1 leaves out a title" if 2 * nameless > len(names) else ""


def _check_agreed(path, names, agreed, options):
    """Check that a table has the label and the column of groups of the file of --columns."""
    for role, name in (("label", agreed.label), ("group", agreed.group)):
        if name is not None and name not in names:
            found = f"has no column {name}, which is the {role} in --columns {options.columns}"
            raise UserError(f"{path}: {found}: expected it under that name; it has {', '.join(names)}")


def _check_meaning(path, reading):
    """Check that what is said about lines is said of a table that has some."""
    ending = table_ending(path)
    has_lines = {"skip_lines": ending in (*TEXTS, ".xlsx"), "separator": ending in TEXTS,
                 "encoding": ending in (*TEXTS, ".arff")}  # fmt: skip
    for name, is_used in has_lines.items():
        if ending is not None and getattr(reading, name) and not is_used:
            raise UserError(f"--{name.replace('_', '-')}: has no meaning for {path}: leave it out")


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


def _not_used(table, columns, others, left_out, options, reading):
    """name -> why, of the columns that are no features."""
    reasons = dict.fromkeys(options.drop, "--drop")
    nameless = "has no name, like the row numbers that pandas writes"
    reasons |= {name: nameless if NAMELESS.fullmatch(name) else "is not in --features" for name in left_out}
    for name in others:
        if name in columns.columns:
            continue
        values = table.columns[name]
        if table.kinds[name] == "empty":
            reasons[name] = EMPTY
            continue
        distinct, filled = values.nunique(), int(values.notna().sum())
        how = f"words, {distinct} of {filled} differ{hint_of_words(name, values, reading)}"
        if all(map(DATE.fullmatch, values.dropna().iloc[:FEW])):
            how += f": --date {name} (days since 1970-01-01)"
        if len(values) >= FEW and 2 * distinct <= filled:
            how += f": --one-hot {name} (categories), --group {name} (rows of one are not divided), --keep {name}"
        reasons[name] = how
    return reasons


def _classes(values):
    """The names of the classes, sorted as numbers if all are integers, otherwise as text."""
    names = sorted({*values})
    return sorted(names, key=int) if all(map(INTEGER.fullmatch, names)) else names  # 0, 2, 10 and not 0, 10, 2
