"""What a run is compared with (`--baselines`): the file in its folder, and its table. Needs neither torch nor MPI."""

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from fedmpi.ground.files.own_files import replacing
from fedmpi.ground.files.run_files import BASELINES
from fedmpi.ground.text import Table, format_bytes, format_count, format_seconds, short
from fedmpi.runs.record import LEVEL, from_line, less_is_better, title, to_line

METHODS = {
    "federated": "the silos (participants, each with data of its own) train one model together",
    "local": "each silo trains alone, on its own data only",
    "pooled": "one model, trained as if the data of all silos lay in one place",
    "tuned": "the federated model, which each silo then trains further alone",
}
MOST_SILOS, LONGEST_NAME = 12, 40  # columns of single silos; characters of a silo's name
BEGIN = b'{"pending"'  # of the file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """One method of a comparison.

    Attributes:
        method: a key of `METHODS`. step_size: of the run. folder: of the run.
        clients: the metric of each silo's model on its tests; [] if the run diverged, and the numbers below are nan.
        mean, worst: over the silos that have tests. further: other metrics of the tests -> their means over silos.
        low, high: the 95 % interval of the mean by the number of test cases, exact for accuracy, otherwise of resamples
            of the cases within silos; nan if not known.
        held_out: the value that chooses the step size, the smaller the better. samples: seen in all silos. nbytes: sent
            by one silo.
        seconds: of the run.
        matrix: with cross_site, row i has the metric of silo i's model on the tests of each silo; else [].
        all_tests: with cross_site, its mean; else nan.
    """

    method: str
    step_size: float
    folder: pathlib.Path | None = None
    clients: list[float] = dataclasses.field(default_factory=list)
    mean: float = math.nan
    worst: float = math.nan
    further: dict[str, float] = dataclasses.field(default_factory=dict)
    low: float = math.nan
    high: float = math.nan
    held_out: float = math.nan
    samples: float = math.nan
    nbytes: float = math.nan
    seconds: float = math.nan
    matrix: list[list[float]] = dataclasses.field(default_factory=list)
    all_tests: float = math.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gain:
    """What a silo gains by taking part, on average; below 0 if it loses.

    Attributes:
        mean: the gain in the metric. low, high: its 95 % interval, see `Baseline`. deviation: its standard deviation
            over samples of the test cases. rows: number of test cases of all silos.
        is_clear: whether the mean is larger than the deviation, as for bold values in a report.
    """

    mean: float
    low: float
    high: float
    deviation: float
    rows: int

    @property
    def is_clear(self) -> bool:
        return abs(self.mean) > self.deviation


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A run and what it is compared with; as text, the table that the command prints.

    Attributes:
        metric: its name. tests: on which it is measured. names: of the silos, or [].
        methods: name -> `Baseline` with its best step size; the first is "federated".
        trials: name and step size, like "local-0.1" -> `Baseline`, of all runs.
        gain: the `Gain`; None if the cases are not known, or a part was made before an interruption.
    """

    metric: str
    tests: str
    names: list[str]
    methods: dict[str, Baseline]
    trials: dict[str, Baseline]
    gain: Gain | None
    _text: str = dataclasses.field(repr=False)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Comparison":
        """That of a file's content, see `read`."""
        methods = {row["method"]: _baseline(row) for row in content["rows"]}
        trials = {key: _baseline({"method": key.partition("-")[0], **run}) for key, run in content["runs"].items()}
        known = (content["metric"], content["tests"], content["names"])
        return cls(*known, methods, trials, gain_of(content), in_words(content))

    def __str__(self) -> str:
        return self._text


def _baseline(row: Mapping[str, Any]) -> Baseline:
    """A `Baseline` of a row of a file."""
    names = {field.name for field in dataclasses.fields(Baseline)}
    values = {name: value for name, value in row.items() if name in names}
    values |= {"nbytes": row["bytes"]} if row.get("bytes") is not None else {}
    values |= {"folder": pathlib.Path(row["folder"])} if "folder" in row else {}
    return Baseline(**values)


def read(folder: pathlib.Path) -> dict[str, Any]:
    """The content of a run folder's file; {} if there is none, or it is not what fedmpi wrote.

    It has "pending" (whether runs are still to be made), "metric", "tests" (on which it is measured), "names" of silos
    or [], "notes", and "rows", one per method, each with "clients" (the metric of each silo's model on its tests),
    "mean", "worst", "step_size", "samples", "bytes", "seconds", "folder", and with --cross_site "all_tests" and
    "matrix".
    """
    try:
        content: dict[str, Any] = from_line((folder / BASELINES).read_bytes())
        content |= {key: short(content[key]) for key in ("metric", "tests") if key in content}
        if not content["pending"]:
            in_words(content)  # raises an error if it is not what fedmpi wrote
        return content if isinstance(content["runs"], dict) else {}
    except (OSError, ValueError, ZeroDivisionError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def write(folder: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Write the file."""
    with replacing(folder / BASELINES, BEGIN) as part:
        part.write_bytes(to_line({"pending": True, **content}))


def mean_and_worst(values: Iterable[float], metric: str) -> tuple[float, float]:
    """(mean, worst) of a metric over the silos that have it; nan if none has."""
    known = [value for value in values if value == value]
    worst = max if less_is_better(metric) else min
    return (math.fsum(known) / len(known), worst(known)) if known else (math.nan, math.nan)


def _gains(content: Mapping[str, Any]) -> dict[int, float]:
    """Silo -> what it gains by taking part, above 0 if the model is better."""
    rows = {row["method"]: row for row in content["rows"]}
    sign, pairs = _sign(content), zip(rows["federated"]["clients"], rows["local"]["clients"])
    return {silo: sign * (both - own) for silo, (both, own) in enumerate(pairs) if both == both and own == own}


def _sign(content: Mapping[str, Any]) -> int:
    return -1 if less_is_better(content["metric"]) else 1


def gain_of(content: Mapping[str, Any]) -> Gain | None:
    """The `Gain` of a file's content, or None."""
    found: dict[str, Any] = content.get("gain") or {}
    if not found:
        return None
    gains, sign = _gains(content), _sign(content)
    low, high = sorted((sign * float(found["low"]), sign * float(found["high"])))
    mean, rows = math.fsum(gains.values()) / len(gains), int(found["rows"])
    return Gain(mean=mean, low=low, high=high, deviation=float(found["deviation"]), rows=rows)


def gain_in_words(content: Mapping[str, Any]) -> str:
    """What a silo gains by taking part: a sentence."""
    metric, rows = content["metric"], {row["method"]: row for row in content["rows"]}
    if "clients" not in rows.get("local", {}):
        why = "training alone diverged" if "local" in rows else "--baselines lacks local"
        return f"what a silo gains by taking part: not known, because {why}"
    alone, gains, gain = rows["local"], _gains(content), gain_of(content)
    mean, number = math.fsum(gains.values()) / len(gains), sum(gain > 0 for gain in gains.values())
    words = f"the {title(metric)} of a silo on its {content['tests']}"
    if abs(mean) < LEVEL:
        words = f"taking part leaves {words} level on average"
    else:
        words = f"taking part {'improves' if mean > 0 else 'worsens'} {words} by {abs(mean):.4f} on average"
    if gain is not None:
        low, high = (gain.low, gain.high) if mean >= 0 else (-gain.high, -gain.low)
        words += f" (95 % interval {low:.4f} to {high:.4f}{'' if gain.is_clear else _unclear(gain)})"
    words += f", from {alone['mean']:.4f} alone to {rows['federated']['mean']:.4f}"
    words += f"; {number} of {len(gains)} silos gain"
    worst = min(gains, key=lambda silo: gains[silo])
    if gains[worst] < 0:
        words += f", and {name_of(content, worst)} loses most, {-gains[worst]:.4f}"
    if "mean" in rows.get("tuned", {}):
        words += f"; with training on at home afterwards (tuned) it is {rows['tuned']['mean']:.4f}"
    return words


def _unclear(gain: Gain) -> str:
    return f"; not clear with {format_count(gain.rows)} test row{'s' * (gain.rows != 1)}"


def name_of(content: Mapping[str, Any], silo: int) -> str:
    """A silo's name, or its number."""
    return short((content["names"] or {silo: ""})[silo] or f"silo {silo}", LONGEST_NAME)


def baseline_table(content: Mapping[str, Any]) -> Table:
    """The table of a file's content: a row per method."""
    metric, number = content["metric"], len(content["rows"][0]["clients"])
    shown, has_all = range(number if number <= MOST_SILOS else 0), any("all_tests" in row for row in content["rows"])
    measured = f"{title(metric)}: {content['tests']}, mean"
    has_interval = any("low" in row for row in content["rows"])
    further = dict.fromkeys(name for row in content["rows"] for name in row.get("further", {}))
    further.pop(metric, None)
    header = [
        "method",
        "step size",
        measured,
        "worst",
        *["95 % of mean"] * has_interval,
        *(f"{title(name)}, mean" for name in further),
        *(name_of(content, k) for k in shown),
    ]
    header += ["all silos' tests"] * has_all + ["samples seen", "bytes sent", "time"]
    rows = []
    for row in content["rows"]:
        if "clients" not in row:
            rows.append([row["method"], f"{row['step_size']:.4g}", "diverged", *[""] * (len(header) - 3)])
            continue
        numbers = [row["mean"], row["worst"], *(row.get("further", {}).get(name, math.nan) for name in further)]
        numbers += [row["clients"][k] for k in shown]
        numbers += [row.get("all_tests", math.nan)] * has_all
        cells = ["–" if math.isnan(value) else f"{value:.4f}" for value in numbers]
        if has_interval:
            cells.insert(2, f"{row['low']:.4f} to {row['high']:.4f}" if "low" in row else "–")
        costs = [format_count(row["samples"]), format_bytes(row["bytes"]), format_seconds(row["seconds"])]
        rows.append([row["method"], f"{row['step_size']:.4g}", *cells, *costs])
    return Table(header, rows)


def notes(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """[(word, what it means)] of the words in the table."""
    methods = [(row["method"], METHODS[row["method"]]) for row in content["rows"]]
    return [*methods, *((short(word), short(meaning)) for word, meaning in content["notes"])]


def in_words(content: Mapping[str, Any]) -> str:
    """All of it as text for a terminal: first what a silo gains."""
    meanings = [f"  {word}: {meaning}" for word, meaning in notes(content)]
    return "\n".join([gain_in_words(content), baseline_table(content).text(), *meanings])
