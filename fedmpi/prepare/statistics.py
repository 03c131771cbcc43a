"""Statistics of all silos' tables together, as sums: no row leaves its silo."""

import collections
import dataclasses
import json
import math

import numpy as np

from fedmpi.comm.agreement import agree, allgather_lines
from fedmpi.data.common_words import check_equal_words, num_holders
from fedmpi.data.hidden_sum import hidden_sum
from fedmpi.data.source import ACCOUNT, COLUMNS, HDF5Source, as_strings
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.hdf5 import readable
from fedmpi.prepare.formats import table
from fedmpi.prepare.formats.features import LARGEST, WITHOUT, Columns
from fedmpi.prepare.formats.fields import all_digits

QUANTILES = {"25 %": 0.25, "median": 0.5, "75 %": 0.75}
CELLS, STEPS = 16, 12  # into which a range of values is divided, and how often
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
            splits, attributes = table.read(path, dataclasses.replace(options, missing="category"))
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
    counts = [[len(known[name]), len(columns[name]), math.fsum(known[name])] for name in columns]
    number, total, sums = hidden_sum(link, np.ravel(counts)).reshape(-1, 3).T
    means = np.divide(sums, number, out=np.zeros(len(number)), where=number > 0)
    rest = [known[name] - mean for name, mean in zip(columns, means)]  # the mean is rounded
    sums, squares = hidden_sum(link, np.ravel([[math.fsum(of), math.fsum(of**2)] for of in rest])).reshape(-1, 2).T
    shift = np.divide(sums, number, out=np.zeros(len(number)), where=number > 0)
    means, squares = means + shift, squares - number * shift**2
    squares[squares <= number * np.spacing(means) ** 2] = 0  # of equal numbers, but for rounding
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
    """[columns, quantiles] of values, each from the narrowest range around it that has at least `least` rows."""
    shape = (len(columns), len(QUANTILES))
    low, high = (np.repeat(edge[:, None], shape[1], axis=1) for edge in (means - reach, means + reach))
    starts = [[(values < edge).sum() for edge in edges] for values, edges in zip(columns, low)]
    below = hidden_sum(link, np.ravel(starts)).reshape(shape)
    wanted = (number[:, None] - 1) * np.array([*QUANTILES.values()]) + 0.5  # rows below the value
    inside, is_open = np.maximum(number[:, None] - below, 0), np.ones(shape, bool)
    for _ in range(STEPS):
        cells = np.zeros((*shape, CELLS))
        for column, quantile in zip(*np.nonzero(is_open)):
            edges = np.linspace(low[column, quantile], high[column, quantile], CELLS + 1)
            values = columns[column]
            places = np.searchsorted(edges[1:-1], values[(values >= edges[0]) & (values <= edges[-1])], side="right")
            cells[column, quantile] = np.bincount(places, minlength=CELLS)
        cells = hidden_sum(link, cells.ravel()).reshape(cells.shape)
        for column, quantile in zip(*np.nonzero(is_open)):
            place, counts = (column, quantile), cells[column, quantile]
            upper = below[place] + np.cumsum(counts)
            first = last = min(int(np.searchsorted(upper, wanted[place])), CELLS - 1)
            edges = np.linspace(low[place], high[place], CELLS + 1)
            while counts[first : last + 1].sum() < least and (first > 0 or last < CELLS - 1):
                first, last, is_open[place] = max(first - 1, 0), min(last + 1, CELLS - 1), False
            is_open[place] &= edges[first] < edges[last + 1]
            inside[place] = counts[first : last + 1].sum()
            below[place] = upper[last] - inside[place]
            low[place], high[place] = edges[first], edges[last + 1]
        if not is_open.any():
            break
    share = np.divide(wanted - below, inside, out=np.full(shape, 0.5), where=inside > 0).clip(0, 1)
    return low + share * (high - low)


def _of_words(link, counters, least, least_silos):
    """{"rows": category -> number, of those that enough silos have, "other": number of the rest}."""
    present = [{word for word, number in counter.items() if number} for counter in counters]
    holders = num_holders(link, [{word.encode() for word in words} for words in present])
    own = [word.decode() for word, number in holders.items() if number >= least_silos]
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
