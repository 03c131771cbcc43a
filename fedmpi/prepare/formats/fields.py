"""Fields of a table's column as numbers, days, truth values or words, and what to do about those that are none."""

import collections
import contextlib
import contextvars
import dataclasses
import re
import shlex

import numpy as np

from fedmpi.ground.errors import UserError
from fedmpi.ground.text import short

# What often means that there is no value; it is not taken for that unasked.
MARKS = {"?", "-", "--", ".", "n/a", "na", "none", "nil", "missing", "unknown", "#n/a"}
NUMBER = re.compile(r"[<>≤≥~]?\s*[-+\N{MINUS SIGN}]?(\d{1,3}([,.'\s]\d{3})+|\d+)?([.,]?\d+)?([eE][-+]?\d+)?\s*%?")
MEASURED = re.compile(r"[-+]?\d+(?:[.,]\d+)?\s*([^\W\d_%][^\d\s]*|°\s*\w+)")  # a number and its unit
MOSTLY = 0.9  # share of numbers above which a column of words is a mistake
LONGEST_WORD = 60  # characters of a field that a message quotes
FEW_WORDS, LEAST_SHARE = 3, 0.05  # words that a hint lists; share of numbers from which it speaks of numbers
BOTH = ".,"  # the decimal mark of columns in which it is the one or the other
DATES = ("ISO8601", "%d.%m.%Y")
CODE = re.compile(r" *0\d+ *")  # like 00123
AS_NUMBER = "is a number; if it is a code: --one-hot, --id or --drop"
NEGLIGIBLE = 1e-4  # standard deviations by which a number may change in float32


_keeps_all = contextvars.ContextVar("keeps_all", default=False)


@contextlib.contextmanager
def all_digits():
    """A context in which numbers of a table stay float64."""
    before = _keeps_all.set(True)
    try:
        yield
    finally:
        _keeps_all.reset(before)


def compact(values):
    """[n] numbers as float32, or as float64 if float32 would change them, or in a context of `all_digits`."""
    exact = np.asarray(values, np.float64)
    if _keeps_all.get():
        return exact
    with np.errstate(over="ignore", invalid="ignore"):
        small = exact.astype(np.float32)
        lost = np.fmax.reduce(np.abs(small - exact), initial=0)
        if not lost > 0:
            return small
        known = exact[~np.isnan(exact)] if np.isnan(exact.min()) else exact
        return small if lost <= NEGLIGIBLE * known.std() else exact


def recognise(table, name, reading, is_word, odd):
    """(column, kind) of a column as it was read; what is wrong with it is added to `odd`."""
    import pandas

    values = table.columns[name]
    kind = values.dtype.kind
    if isinstance(values, np.ndarray):
        values = _without(values, reading.numbers_without_value(name))
        return values, "numbers" if not np.isnan(values).all() else "empty"
    if kind in "Mm":
        if kind == "m":
            table.assumed.append(f"{name}: times are numbers of days")
            return compact(values / pandas.Timedelta(days=1)), "numbers"
        if name in reading.dates:
            return _days(values), "dates"
        return values.astype(str).where(values.notna()), "words"
    if is_word and kind != "b" and not isinstance(values.dtype, pandas.StringDtype):
        values = values.astype(object).where(values.notna())
    elif kind in "fiu" or (not is_word and kind == "b"):
        is_bool, values = kind == "b", compact(values.astype("Float64").to_numpy(np.float64, na_value=np.nan))
        values = values if is_bool else _without(values, reading.numbers_without_value(name))
        return values, "empty" if np.isnan(values).all() else "true or false" if is_bool else "numbers"
    words = values.map(str, na_action="ignore").astype(object).str.strip()
    words = words.where(~words.isin(reading.marks(name)))
    if name in reading.dates:
        for form in DATES:
            dates = pandas.to_datetime(words, format=form, errors="coerce", utc=True)
            if not (odd_ones := words.notna() & dates.isna()).any():
                return _days(dates), "dates"
        row = int(np.flatnonzero(odd_ones)[0])
        problem = f"{table.place(row)} has {short(words[row], 60)}: expected dates like 2026-01-31 or 31.01.2026"
        raise UserError(f"{table.path}: --date {name}: {problem} in the whole column", table.place(row))
    distinct = words.value_counts()
    if is_word or not len(distinct):
        return words, "words" if len(distinct) else "empty"
    if {*distinct.index.str.lower()} <= {"true", "false"}:
        table.assumed.append(f"{name}: true is 1, false is 0")
        numbers = words.str.lower().map({"true": 1.0, "false": 0.0})
        return numbers.to_numpy(np.float32, na_value=np.nan), "true or false"
    return _numbers(table, name, words, distinct, reading, odd)


def _without(values, numbers):
    """[n] values, nan where they are one of the `numbers` that mean no value."""
    if not numbers:
        return values
    return np.where(np.isin(values, np.array(numbers, values.dtype)), values.dtype.type(np.nan), values)


def _numbers(table, name, words, distinct, reading, odd):
    """(column, kind) of a column of text that is neither empty nor of truth values."""
    fields, counts = distinct.index, distinct.to_numpy()
    numbers = as_numbers(fields, reading)
    is_number = ~np.isnan(numbers)
    if is_number.all():
        code = next(filter(CODE.fullmatch, fields), None)
        table.assumed += [f"{name}: {code} {AS_NUMBER}"] if code else []
        table.assumed += [f"{name}: percent signs are left out"] if fields.str.endswith("%").all() else []
        thousands = [field for field in fields if re.fullmatch(r"[-+]?\d{1,3},\d{3}", field)]
        if reading.decimal == BOTH and thousands:
            table.assumed.append(f"{name}: the comma of {thousands[0]} is a decimal mark")
        return compact(words.map(dict(zip(fields, numbers))).astype(np.float64)), "numbers"
    like = np.array([bool(NUMBER.fullmatch(field)) and any(map(str.isdigit, field)) for field in fields])
    is_mark = fields.str.lower().isin(MARKS)
    others = counts[~is_mark].sum()
    share = counts[(like | is_number) & ~is_mark].sum() / max(1, others)
    if others and share >= MOSTLY:
        field = next(word for word in words if word in {*fields[~is_number]})
        row = int(np.flatnonzero(words == field)[0])
        ways = _ways(table, name, field, fields, reading)
        if table.place(row) == "line 2" and field[:1].isalpha() and field.lower() not in MARKS:
            ways.append("--skip-lines 2 (it contains units)")
        ways += [f"--one-hot {shlex.quote(name)} (they are categories)", f"--drop {shlex.quote(name)}"]
        found = f"{table.place(row)} has {short(field, LONGEST_WORD)} in column {name}"
        found += f", and {share:.0%} of its values are numbers"
        text = f"{table.path}: {found}: expected a number, or one of {', '.join(ways)}"
        odd.append((name, text, table.place(row)))
    return words, "words"


def as_numbers(fields, reading):
    """[n] float64 numbers that a pandas index of text contains, nan where it contains none."""
    import pandas

    fields = fields.str.replace("\N{MINUS SIGN}", "-")
    if fields.str.endswith("%").all():
        fields = fields.str.rstrip("%").str.strip()
    for unit in reading.units:
        fields = fields.str.replace(rf"(?<=\d)\s*{re.escape(unit)}$", "", regex=True)
    if reading.thousands:
        fields = fields.str.replace(rf"(?<=\d)(?<!\b0){re.escape(reading.thousands)}(?=\d{{3}}(?!\d))", "", regex=True)
    if reading.decimal == BOTH:
        fields = fields.str.replace(r"^([^.,]*),([^.,]*)$", r"\1.\2", regex=True)
    elif reading.decimal not in (None, "."):
        fields = fields.str.translate({ord(reading.decimal): ".", ord("."): reading.decimal})
    if not reading.censored:
        return np.asarray(pandas.to_numeric(fields, errors="coerce"), np.float64)
    bounds = pandas.to_numeric(fields.str.replace(r"^[<>≤≥]=?\s*", "", regex=True), errors="coerce")
    below = fields.str.startswith(("<", "≤")) & (reading.censored == "half")
    return np.where(below, bounds / 2, bounds)


def _ways(table, name, field, fields, reading):
    """The options by which a field of a column of numbers is read; each has been tried on the whole column.

    Args:
        field: the first that is no number. fields: pandas index of all distinct ones.
    """
    before, place = as_numbers(fields, reading), fields.get_loc(field)
    known = ~np.isnan(before)
    tries = {"--censored half or bound (<0.3 is 0.15 or 0.3)": {"censored": "half"}}
    has_points = any(values.dtype.kind == "f" and (values % 1 > 0).any() for values in table.columns.values()
                     if isinstance(values, np.ndarray))  # fmt: skip
    tries |= {} if has_points else {"--decimal ,": {"decimal": ","}}
    tries[f"--decimal {BOTH} (some have a point, some a comma)"] = {"decimal": BOTH}
    if found := re.search(r"\d([,.'\s])\d{3}\b", field):
        tries[f"--thousands {shlex.quote(found[1])}"] = {"thousands": found[1]}
    if found := MEASURED.fullmatch(field):
        tries[f"--unit {shlex.quote(found[1])} (it is left out)"] = {"units": (*reading.units, found[1])}
    ways = []
    for option, change in tries.items():
        if "decimal" in change and (ways and ways[-1] == "--decimal ," or not re.fullmatch(r"[-+]?\d*,\d+", field)):
            continue
        after = as_numbers(fields, dataclasses.replace(reading, **change))
        if not np.isnan(after[place]) and (after[known] == before[known]).all():
            ways.append(option)
    is_mark = not ways or field[:1] in "<>≤≥"
    is_mark &= len(field) <= LONGEST_WORD
    return ([f"--na {shlex.quote(field)} (it means no value)"] if is_mark else []) + ways


def hint_of_words(name, values, reading):
    """What is said of a column of words which contains numbers: their share, the commonest words, and units; or ""."""
    counts = collections.Counter(values.dropna())
    fields = values.dropna().value_counts().index
    numbers = {field for field, number in zip(fields, as_numbers(fields, reading)) if number == number}
    units = collections.Counter()
    for field in {*counts} - numbers:
        if found := MEASURED.fullmatch(field):
            units[found[1]] += counts[field]
    filled, num_numbers = counts.total(), sum(counts[field] for field in numbers)
    if units.total() + num_numbers >= MOSTLY * filled:
        named = ", ".join(f"{short(unit, 20)} ({number})" for unit, number in units.most_common(FEW_WORDS))
        more = f" and {len(units) - FEW_WORDS} more" if len(units) > FEW_WORDS else ""
        advice = f"--unit {shlex.quote(next(iter(units)))} leaves it out" if len(units) == 1 else "expected one unit"
        return f"; {units.total() / filled:.0%} are numbers with a unit, {named}{more}: {advice}"
    if num_numbers < LEAST_SHARE * filled:
        return ""
    words = collections.Counter({word: number for word, number in counts.items() if word not in numbers})
    named = ", ".join(f"{short(word, 40)} ({number})" for word, number in words.most_common(FEW_WORDS))
    way = ""
    if len(words) <= FEW_WORDS and not any("," in word for word in words):
        marks = shlex.quote(f"{name}={','.join(words)}")
        way = f"; --na-in {marks} --missing median, if there they mean that there is no value"
    return f"; {1 - num_numbers / filled:.0%} are no numbers, most often {named}{way}"


def _days(dates):
    """[n] days since 1970-01-01."""
    import pandas

    epoch = pandas.Timestamp("1970-01-01", tz=dates.dt.tz)
    return compact((dates - epoch) / pandas.Timedelta(days=1))
