"""Statistics of all silos' tables together, as sums: no row leaves its silo."""

import collections
import dataclasses
import json
import math

import numpy as np

from fedmpi.comm.agreement import agree, allgather_lines
from fedmpi.data.common_words import check_equal_words, num_holders
from fedmpi.data.hidden_sum import exact_hidden_sum, exact_sum, hidden_sum
from fedmpi.data.source import ACCOUNT, COLUMNS, HDF5Source, as_strings
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.hdf5 import readable
from fedmpi.prepare.formats import table
from fedmpi.prepare.formats.features import LARGEST, WITHOUT, Columns
from fedmpi.prepare.formats.fields import all_digits

QUANTILES = {"25 %": 0.25, "median": 0.5, "75 %": 0.75}
CELLS = 16  # into which a range of values is divided, again and again
REACH = math.sqrt(3) + 1e-9  # deviations from the mean within which all of these quantiles are


@dataclasses.dataclass(frozen=True)
class Silo:
    """What one silo's data are.

    Attributes:
        numbers: name of a column -> [n] float64, nan where a field is empty. words: name of a column of categories (of
            the label: "") -> Counter of them. facts: what is not a matter of the rows: `Columns`, or None.
        empty: names of columns without any value, of which other silos may have numbers.
    """

    numbers: dict
    words: dict
    facts: Columns | None = None
    empty: tuple = ()

    @classmethod
    def of_table(cls, path, options):
        """That of a table, see `fedmpi.prepare.formats.table.read`."""
        with all_digits():
            splits, attributes = table.read(path, dataclasses.replace(options, missing="category", least=1))
        rows = np.concatenate([splits[f"{split}/images"][:] for split in ("train", "test")]).astype(np.float64)
        labels = np.concatenate([splits[f"{split}/labels"] for split in ("train", "test")])
        found, reasons = cls.of_features(rows, labels, attributes), attributes[ACCOUNT]["not_used"]
        return dataclasses.replace(found, empty=tuple(name for name in reasons if reasons[name] == table.EMPTY))

    @classmethod
    def of_file(cls, path):
        """That of the training samples of an HDF5 file: of each feature, or of the pixels of each channel."""
        source = HDF5Source(path, tested=False)
        with readable(source.path) as file:
            rows, labels = file["train/images"][:].astype(np.float64), source.labels["train"]
        classes = as_strings(source.attributes.get("class_names", range(source.num_classes)))
        if rows.ndim > 2:
            channels = rows.shape[-1] if rows.ndim > 3 else 1
            columns = rows.reshape(-1, channels).T
            return cls({f"channel {k}": column for k, column in enumerate(columns)}, {"": _counted(classes, labels)})
        names = as_strings(source.attributes.get("feature_names", range(rows.shape[1])))
        return cls.of_features(rows, labels, {**source.attributes, "feature_names": names, "class_names": classes})

    @classmethod
    def of_features(cls, rows, labels, attributes):
        """That of [n, features] and labels [n], by the attributes of their file."""
        names, numbers, words = attributes["feature_names"], {}, {}
        facts = Columns.of(json.loads(attributes[COLUMNS]), "columns") if COLUMNS in attributes else None
        columns = dict(zip(names, rows.T))
        for name, how in (facts.columns if facts else dict.fromkeys(names, {})).items():
            if isinstance(how, list):
                words[name] = collections.Counter({k: int(columns[f"{name}={k}"].sum()) for k in how})
                continue
            is_empty = columns.get(f"{name} is {WITHOUT}", np.zeros(len(rows))) > 0
            numbers[name] = np.where(is_empty, math.nan, columns[name])
        words[""] = _counted(attributes["class_names"], labels)
        return cls(numbers, words, facts)


def _counted(names, labels):
    return collections.Counter(dict(zip(names, np.bincount(labels, minlength=len(names)).tolist())))


def pooled(link, silos, least, least_silos):
    """The statistics of all silos together. Collective on the link.

    Args:
        silos: `Silo`s of this rank. least: rows that a number must be of to be shown. least_silos: that must have a
            category or class for its name to leave them.

    Returns:
        {"rows": number, "silos": number, "numbers": name -> {"missing", "mean", "std", ...}, "words": name (of the
        classes: "") -> {"rows": {category: number}, "other": number}}; None for a number of too few rows. std is that
        of a sample (n - 1), as in pandas.

    Raises:
        UserError: on every rank, if the silos have other columns.
    """
    silos = _with_empty_columns(link, silos)
    kinds = [{"columns": json.dumps([sorted(silo.numbers), sorted(silo.words)])} for silo in silos]
    check_equal_words(link, kinds, "statistics")
    agree(link, lambda: [_check_finite(silo) for silo in silos])
    first = silos[0]
    num_silos, num_rows = (
        hidden_sum(link, [len(silos), sum(silo.words[""].total() for silo in silos)]).astype(int).tolist()
    )
    columns = {name: np.concatenate([silo.numbers[name] for silo in silos]) for name in sorted(first.numbers)}
    found = _of_numbers(link, columns, least)
    words = {
        name: _of_words(link, [silo.words[name] for silo in silos], least, least_silos) for name in sorted(first.words)
    }
    # In the order of this rank's own file.
    numbers, words = ({name: of[name] for name in own} for own, of in ((first.numbers, found), (first.words, words)))
    return {"rows": num_rows, "silos": num_silos, "numbers": numbers, "words": words}


def _with_empty_columns(link, silos):
    """The `Silo`s with those of their empty columns that are of numbers, or empty, in all others. Collective."""
    number = int(link.allgather([len(silos)], "machinery").sum())
    holders = num_holders(link, [{name.encode() for name in [*silo.numbers, *silo.empty]} for silo in silos])
    found = []
    for silo in silos:
        blank = np.full(silo.words[""].total(), math.nan)
        added = {name: blank for name in silo.empty if holders[name.encode()] == number}
        found.append(dataclasses.replace(silo, numbers=silo.numbers | added))
    return found


def _check_finite(silo):
    for name, values in silo.numbers.items():
        if (np.abs(values) > LARGEST).any():
            raise UserError(f"column {name} contains a number above {LARGEST:.4g}: expected finite numbers")


def _of_numbers(link, columns, least):
    """name -> statistics of a column of numbers."""
    known = {name: values[~np.isnan(values)] for name, values in columns.items()}
    counts = [value for name in columns for value in (len(known[name]), len(columns[name]), exact_sum(known[name]))]
    counts = exact_hidden_sum(link, counts)
    number, total = (np.array(counts[k::3], np.int64) for k in (0, 1))
    means = np.array([float(of / max(int(n), 1)) for n, of in zip(number, counts[2::3])])
    rest = [known[name] - mean for name, mean in zip(columns, means)]
    sums = exact_hidden_sum(link, [exact_sum(power) for of in rest for power in (of, of**2)])
    # The mean is rounded, so the sum of the rest is not quite 0.
    squares = [square - of**2 / max(int(n), 1) for n, of, square in zip(number, sums[::2], sums[1::2])]
    squares = np.maximum([float(of) for of in squares], 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        stds = np.sqrt(squares / (number - 1))
        reach = REACH * np.sqrt(squares / number)
    at = _quantiles(link, [*known.values()], means, reach, number, least)
    found = {}
    for place, name in enumerate(columns):
        missing = int(total[place] - number[place])
        of_column = {"missing": missing if missing == 0 or missing >= least else None}
        numbers = {"mean": means[place], "std": stds[place], **dict(zip(QUANTILES, at[place]))}
        is_shown = number[place] >= max(least, 2)
        found[name] = of_column | {key: float(value) if is_shown else None for key, value in numbers.items()}
    return found


def _quantiles(link, columns, means, reach, number, least):
    """[columns, quantiles] of values: each between those of two rows, as in pandas."""
    places = (number[:, None] - 1).clip(0) * np.array([*QUANTILES.values()])
    rows = np.hstack([np.floor(places), np.ceil(places)])
    edges = [(_as_whole(mean - far), _as_whole(mean + far) + 1) for mean, far in zip(means, np.nan_to_num(reach))]
    below, above = np.hsplit(_values_of_rows(link, columns, rows, edges, least), 2)
    return below + (places - np.floor(places)) * (above - below)


def _values_of_rows(link, columns, rows, edges, least):
    """[columns, n] of values, each from the narrowest range around it that has at least `least` rows.

    Ranges are divided by what the numbers are as whole ones, so a single value is reached in 16 steps.

    Args:
        rows: [columns, n], how many rows of the column come before the one with the value.
        edges: for each column, the range in which the values are, see `_as_whole`.
    """
    columns, found = [np.sort(_as_whole(values)) for values in columns], np.zeros(rows.shape)
    ranges = {at: edges[at[0]] for at in np.ndindex(rows.shape)}
    while ranges:
        cuts = {at: [low + (high - low) * k // CELLS for k in range(CELLS + 1)] for at, (low, high) in ranges.items()}
        own = [np.searchsorted(columns[at[0]], cut) for at, cut in cuts.items()]
        for (at, cut), below in zip(cuts.items(), hidden_sum(link, np.ravel(own)).reshape(-1, CELLS + 1)):
            first = min(max(int(np.searchsorted(below, rows[at], side="right")) - 1, 0), CELLS - 1)
            last = first + 1
            while below[last] - below[first] < least and (first > 0 or last < CELLS):
                first, last = max(first - 1, 0), min(last + 1, CELLS)
            low, high, inside = cut[first], cut[last], max(below[last] - below[first], 1)
            ranges[at] = low, high
            if last - first > 1 or high - low == 1:
                del ranges[at]
                share = min(max((rows[at] + 0.5 - below[first]) / inside, 0), 1)
                low, high = _as_numbers(low), _as_numbers(high - 1)
                found[at] = low + share * (high - low)
    return found


def _as_whole(values):
    """Whole numbers in the order of some float64: neighbours differ by 1."""
    bits = np.abs(values).view(np.int64)
    return np.where(values < 0, -bits, bits) if np.ndim(values) else int(bits) * (-1 if values < 0 else 1)


def _as_numbers(whole):
    """The float64 of such a whole number."""
    return float(np.copysign(np.int64(abs(whole)).view(np.float64), whole))


def _of_words(link, counters, least, least_silos):
    """{"rows": category -> number, of those that enough silos have, "other": number of the rest}."""
    present = [{word for word, number in counter.items() if number} for counter in counters]
    holders = num_holders(link, [{word.encode() for word in words} for words in present])
    own = {word.decode() for word, number in holders.items() if number >= least_silos}
    if least_silos == 1:  # then a name needs rows enough, as in `data prepare`
        own &= {word for counter in counters for word, number in counter.items() if number >= least}
    names = sorted({json.loads(line) for line in allgather_lines(link, map(json.dumps, own), "words")}, key=_by_number)
    total = sum(counter.total() for counter in counters)
    own_counts = [sum(counter[name] for counter in counters) for name in names]
    counts = hidden_sum(link, [*own_counts, total - sum(own_counts)]).astype(int).tolist()
    few = [place for place, number in enumerate(counts) if 0 < number < least]
    if len(few) == 1 and len(counts) > 1:  # the number of all rows would give it away
        few.append(
            min((place for place in range(len(counts)) if place not in few), key=lambda k: (not counts[k], counts[k]))
        )
    shown = [None if place in few else number for place, number in enumerate(counts)]
    return {"rows": dict(zip(names, shown)), "other": shown[-1]}


def _by_number(word):
    """Numbers in their order, before words in theirs."""
    return (0, int(word), word) if table.INTEGER.fullmatch(word) else (1, 0, word)


def columns_of(found, facts, missing):
    """The `Columns` by which all silos prepare their tables, of what `pooled` has found and one silo's own.

    Args:
        missing: what happens to empty fields, one of `fedmpi.prepare.formats.features.MISSING`.

    Raises:
        UserError: if a column has too few rows.
    """
    columns = {}
    for name in dict.fromkeys([*facts.columns, *found["numbers"]]):
        if name in found["words"]:
            words = [word for word in found["words"][name]["rows"] if word != WITHOUT]
            columns[name] = [*words, WITHOUT] if missing == "category" else words
            continue
        numbers = found["numbers"][name]
        if numbers["missing"] == found["rows"]:
            continue  # empty in all silos
        if None in numbers.values():
            raise UserError(
                f"column {name} has too few rows with or without a number to say how it is scaled: leave it out"
            )
        empty, median, mean = numbers["missing"], numbers["median"], numbers["mean"]
        filled = found["rows"] - empty
        centre = (filled * mean + empty * median) / found["rows"]  # empty fields have the median then
        squares = numbers["std"] ** 2 * (filled - 1) + filled * (mean - centre) ** 2 + empty * (median - centre) ** 2
        columns[name] = {"median": median, "mean": centre, "std": math.sqrt(squares / found["rows"]) or 1.0}
    classes = [*found["words"][""]["rows"]]
    return dataclasses.replace(facts, missing=missing, classes=classes, columns=columns, aliases={})
