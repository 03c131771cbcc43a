"""Lines about what may be a mistake in a table: values that mean none, identifiers, quantities as classes."""

import re
import shlex

import numpy as np

from fedmpi.ground.text import short

FEW = 20  # rows, below which nothing is remarkable
MANY_CLASSES, MANY_NUMBERS = 10, 20  # classes; of them if they are whole numbers
FEW_PER_CLASS = 30  # samples of a class, on average
FAR = 3  # standard deviations from another silo's mean
MANY_ROWS = 1000
WHOLE = 1 << 53  # up to which float64 has all whole numbers
# What often stands for no value, besides numbers beyond HUGE.
MARKERS = np.array([float(f"{sign}{digit * number}") for sign in "-+" for digit in "789" for number in range(1, 7)])
HUGE = 1e20  # from which a number is one of those with which formats fill, like 9.97e36
NAMES_OF_PERSONS = re.compile(
    "id|pid|patient|patients|patientid|patnr|pat|subject|subj|case|mrn|persons?|participant|individual|customer|client|"
    "user|member|household|family|visitid|encounter|episode|admission|stay|hadm|animal|donor|sample|specimen"
)
LEAST_GROUPS, LEAST_CHANGES = 10, 5  # values of a column of groups; of its classes in their order
MOST_CANDIDATES, MOST_OTHERS = 20, 20  # columns of groups that are looked at; others by which they are judged
EXPLAINED, SMOOTH = 0.5, 0.5  # share of the variance between groups; correlation of a group's mean with the next one's


def notes_on(table, columns, labels, label, group):
    """Lines about what may be a mistake.

    Args:
        table: a `fedmpi.prepare.formats.frames.Table`. columns: a `Columns`. labels: [n] numbers of the classes.
        label, group: names of their columns; group may be None.
    """
    notes, num_rows = [], len(labels)
    if group and (number := int(table.columns[group].isna().sum())):
        notes.append(f"{group}: {number} rows have none, and count as one group")
    if num_rows < FEW:
        return notes
    notes += _notes_on_classes(columns.classes, num_rows, label, labels)
    numbers = [name for name in columns.columns if name.replace(".", "", 1).isdecimal()]
    if 2 * len(numbers) > len(columns.columns) and numbers != [*map(str, range(len(numbers)))]:
        words = short(", ".join(numbers), 60)
        notes.append(f"the header contains numbers ({words}): is it a row, and the file has none?")
    has_classes = len(np.unique(labels)) > 1
    measured = {name: table.columns[name] for name, how in columns.columns.items()
                if isinstance(how, dict) and table.kinds[name] != "empty"}  # fmt: skip
    whole = {}
    for name, values in measured.items():
        how = columns.columns[name]
        if abs((mean := np.nanmean(values, dtype=np.float64)) - how["mean"]) > FAR * how["std"]:
            there = f"{how['mean']:.4g} ± {how['std']:.4g} in the file of --columns"
            notes.append(f"{name}: its mean is {mean:.4g} here and {there}: is the unit the same?")
        notes += _notes_on_markers(name, values)
        begin = values[:MANY_ROWS]  # most columns need no more than these
        is_whole = (begin == np.floor(begin)).all() and (values == np.floor(values)).all()
        if is_whole and len(np.unique(values)) > 0.95 * num_rows:
            notes.append(f"{name}: nearly all of its whole numbers differ: is it an identifier? (--drop, --id)")
        elif is_whole and np.abs(values).max() > WHOLE:
            notes.append(f"{name}: whole numbers above 2^53 are rounded: is it an identifier? (--drop, --id)")
        elif is_whole:
            whole[name] = values
        if has_classes and _is_in_order(begin, labels[:MANY_ROWS]) and _is_in_order(values, labels):
            notes.append(f"{name}: its order is that of {label}: does it contain the answer?")
    return notes + ([] if group else _notes_on_groups(whole, measured, labels))


def _notes_on_classes(classes, num_rows, label, labels):
    if len(classes) == 1:
        return [f"{label}: all rows have the class {classes[0]}: expected others, or --classes"]
    if len(classes) <= MANY_CLASSES:
        return []
    try:
        numbers = np.array([float(name) for name in classes])
    except ValueError:
        numbers = np.array([])
    are_few = num_rows < FEW_PER_CLASS * len(numbers)
    is_quantity = (numbers % 1 != 0).any() or (len(numbers) > MANY_NUMBERS and are_few)
    many = f"{label}: {len(classes)} classes in {num_rows} rows"
    if is_quantity:
        way = f"--drop {shlex.quote(label)} and --label COLUMN learn another column"
        learned = 'a quantity is learned by fedmpi.train(task="regression") from Python'
        return [f"{many}, all of them numbers: is it a quantity? Here every value is a class; {learned}; {way}"]
    return [f"{many}: is it a quantity, or an identifier?"] if 2 * len(classes) > num_rows else []


def _notes_on_markers(name, values):
    """A line about each value of a column [n] that may stand for none, like -999: it is far from all others."""
    low, high = np.nanmin(values), np.nanmax(values)
    notes = []
    for end in (low, high):
        if end not in MARKERS and abs(end) < HUGE:
            continue
        rest = values[(values != end) & ~np.isnan(values)]
        rest = rest[~np.isin(rest, MARKERS) | (rest > low) & (rest < high) & (np.abs(rest) < 10)]
        if len(np.unique(rest[:MANY_ROWS])) < 3:
            continue
        count, gap = int((values == end).sum()), abs(end - (rest.min() if end == low else rest.max()))
        is_below_all = end < 0 <= rest.min()
        if gap > (0 if is_below_all else np.ptp(rest) / 2) and count > (0 if is_below_all or abs(end) >= HUGE else 1):
            mark = f"{end:.0f}" if abs(end) < HUGE else repr(float(end))
            way = f"--na-in {shlex.quote(f'{name}={mark}')} --missing median"
            notes.append(f"{name}: has the value {mark} in {count} rows, far from all others: if it means none, {way}")
    return notes


def _notes_on_groups(whole, measured, labels):
    """A line about columns that are numbers of patients, or of others of whom there are several rows.

    Args:
        whole: name -> [n] of columns of whole numbers; measured: of all columns of numbers. labels: [n] classes.
    """
    found = {}
    for name, values in whole.items():
        distinct, groups = np.unique(values, return_inverse=True)
        if LEAST_GROUPS <= len(distinct) <= len(values) / 2:
            found[name] = groups
    chosen = [name for name in found if _is_of_persons(name)]
    if not chosen and len(found) <= MOST_CANDIDATES:
        chosen = [name for name, groups in found.items() if _divides(groups, name, measured, labels)]
    those = "and those to train and to test have the same: if rows of one belong together, like a patient's"
    those = "and those to train and to test have the same: if rows of one belong together, like a patient's"
    return [
        f"{name}: {found[name].max() + 1} numbers in {len(labels)} rows, learned from, {those}, "
        f"--group {shlex.quote(name)}"
        for name in chosen
    ]


def _is_of_persons(name):
    """Whether the name of a column has a word for persons or identifiers: patient_no, visitId, ID."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return any(NAMES_OF_PERSONS.fullmatch(word.lower()) for word in (*words, name.replace("_", "")))


def _divides(groups, name, measured, labels):
    """Whether groups [n] of rows differ as persons do: not more smoothly the nearer their numbers are.

    Either all rows of each have one class, with classes in no order, or they explain most of the variance of most other
    columns.
    """
    sizes = np.bincount(groups)
    first = labels[np.unique(groups, return_index=True)[1]]
    if (first[groups] == labels).all() and np.count_nonzero(np.diff(first)) >= LEAST_CHANGES and sizes.min() > 1:
        return True
    others = [values for other, values in measured.items() if other != name][:MOST_OTHERS]
    return bool(others) and 2 * sum(_is_explained(groups, sizes, values) for values in others) > len(others)


def _is_explained(groups, sizes, values):
    """Whether the means of values [n] in groups differ much, and not smoothly with the group's number."""
    values = np.nan_to_num(np.asarray(values, np.float64) - np.nanmean(values, dtype=np.float64))
    means = np.bincount(groups, values) / sizes
    total, within = (values**2).sum(), ((values - means[groups]) ** 2).sum()
    free = len(values) - len(sizes)
    if not total > 0 or free < 1 or np.ptp(means) == 0:
        return False
    explained = 1 - (within / free) / (total / (len(values) - 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        smooth = np.corrcoef(means[:-1], means[1:])[0, 1]
    return explained > EXPLAINED and not smooth > SMOOTH


def _is_in_order(values, labels):
    """Whether the values [n] of each class lie between those of two other classes."""
    import pandas

    extremes = pandas.Series(values).groupby(labels).agg(["min", "max"]).sort_values("min").to_numpy()
    return bool((extremes[:-1, 1] < extremes[1:, 0]).all())
