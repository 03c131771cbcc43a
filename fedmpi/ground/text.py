"""Tables and quantities for people."""

import contextlib
import contextvars
import dataclasses
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

# Control characters, line separators, and those that turn the direction of a text.
OBEYED = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
LONGEST_MESSAGE = 3000  # characters, of the line with which a program ends
# Kind of quantity -> (smallest number for which the unit is used, its size, its name).
UNITS: dict[str, tuple[tuple[float, float, str], ...]] = {
    "bytes": (
        (0, 1, "B"), (2**10, 2**10, "KiB"), (2**20, 2**20, "MiB"), (2**30, 2**30, "GiB"), (2**40, 2**40, "TiB"),
    ),
    "rounds": ((0, 1, ""), (1e5, 1e3, "thousands")),
    "gradients": ((0, 1, ""), (1e4, 1e3, "thousands"), (2e6, 1e6, "millions"), (2e9, 1e9, "billions")),
    "seconds": ((0, 1, "s"), (120, 60, "min"), (7200, 3600, "h")),
}  # fmt: skip


class Log(logging.LoggerAdapter):  # type: ignore[type-arg]  # it takes arguments from Python 3.11 on
    """The logger of a module; where a program has set up no logging, its warnings begin with "fedmpi: "."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})

    def process(self, message: object, options: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        message = printable_line(message)  # it may quote a file
        return (message if self.logger.hasHandlers() else f"fedmpi: {message}"), options


_shows_progress = contextvars.ContextVar("shows_progress", default=True)


def say(text: str) -> None:
    """Print lines about the progress of a run, or its result, if that is wanted here; see `progress_shown`."""
    if _shows_progress.get():
        print(text, flush=True)


@contextlib.contextmanager
def progress_shown(is_shown: bool) -> Iterator[None]:
    """A context in which the progress of runs is shown, as it is unless a program that calls a run decides, or not."""
    before = _shows_progress.set(is_shown)
    try:
        yield
    finally:
        _shows_progress.reset(before)


def shows_progress() -> bool:
    """Whether the progress of runs is shown here."""
    return _shows_progress.get()


def unit_for(kind: str, largest: float) -> tuple[float, str]:
    """(size, name) of the unit in which numbers up to `largest` of a kind are best read."""
    return [(size, unit) for smallest, size, unit in UNITS[kind] if largest >= smallest][-1]


def format_bytes(count: float) -> str:
    """A number of bytes with its unit, like "1.5 MiB"."""
    size, unit = unit_for("bytes", count)
    return f"{count / size:.{0 if size == 1 else 1}f} {unit}"


def format_seconds(seconds: float) -> str:
    """A time with its unit, like "12.3 min"."""
    return format_quantity("seconds", seconds)


def format_count(count: float) -> str:
    """A whole number with thousands separators, like "15,010"."""
    return f"{count:,.0f}"


def format_ranges(numbers: Iterable[int]) -> str:
    """Rising whole numbers in short, like "0-3,8"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


def format_quantity(kind: str, mean: float, low: float | None = None, high: float | None = None) -> str:
    """A number of a kind (see `UNITS`) with its unit, like "12.3 min"; with its range like "12.3 (11.9–13.0) min"."""
    values = [mean] if low is None or high is None or low == high else [mean, low, high]
    if kind == "bytes":
        words, unit = [format_bytes(value) for value in values], ""
    else:
        size, unit = unit_for(kind, mean)
        digits = 0 if unit == "" else max(0, 2 - int(math.log10(max(mean / size, 1))))
        words = [f"{value / size:,.{digits}f}" for value in values]
    text = words[0] if len(words) == 1 else f"{words[0]} ({words[1]}–{words[2]})"
    return f"{text} {unit}".rstrip()


def format_metric(mean: float, deviation: float | None = None) -> str:
    """A metric, or its mean ± standard deviation, with as many digits as are worth reading."""
    styles = ((1e7, ".4g"), (1e4, ",.0f"), (100, ",.1f"), (1e-2, ".4f"))
    style = next((style for least, style in styles if abs(mean) >= least), ".4g" if mean else ".4f")
    return f"{mean:{style}}" + ("" if deviation is None else f" ± {deviation:{style}}")


def spread_in_words(values: Iterable[float], names: Sequence[str | None] = (), less_is_better: bool = False) -> str:
    """Values of several clients in a line: "0.9100 on average, 0.8500 at worst (client 2, Bonn), spread 0.0300".

    Args:
        values: one per client; nan where there is none. names: one per client, or () if clients have no names.
        less_is_better: decides which is the worst. The spread is the standard deviation over the clients.
    """
    known = {client: value for client, value in enumerate(values) if value == value}
    if not known:
        return "–"
    mean = sum(known.values()) / len(known)
    spread = (sum((value - mean) ** 2 for value in known.values()) / len(known)) ** 0.5
    worst = (max if less_is_better else min)(known, key=lambda client: known[client])
    who = ", ".join([f"client {worst}", *([str(names[worst])] if names and names[worst] else [])])
    return f"{mean:.4f} on average, {known[worst]:.4f} at worst ({who}), spread {spread:.4f}"


def table(rows: Iterable[Iterable[object]], right_from: int | None = None, indent: str = "  ") -> str:
    """Rows of cells as aligned lines, each `printable_line`; columns from `right_from` on are aligned to the right."""
    texts = [[printable_line(word) for word in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts)]
    columns = range(len(widths) if right_from is None else right_from)
    lines = []
    for row in texts:
        cells = [word.ljust(w) if c in columns else word.rjust(w) for c, (word, w) in enumerate(zip(row, widths))]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def printable(text: object) -> str:
    """A text for a terminal: what is not printed, like the sequences that colour or rename it, becomes blanks."""
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in str(text))


def printable_line(text: object) -> str:
    """`printable` text in one line: a line break in a name would forge a line of its own."""
    return printable(text).replace("\n", " ")


def printable_json(content: object, indent: int | None = None) -> str:
    """A value as JSON for a terminal: letters of all languages as they are, and what is not printed as \\u001b."""
    text = json.dumps(content, indent=indent, ensure_ascii=False)
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def short(text: object, longest: int = 300) -> str:
    """A text in one line, without control characters and cut to `longest` characters, for a message."""
    try:
        text = str(text)
    except Exception:  # noqa: BLE001  an integer of more digits than Python prints, or an object of the user's
        text = f"an object of type {type(text).__name__} that cannot be printed"
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= longest else f"{line[:longest]}..."


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of texts; the first cell of each row names the row.

    Attributes:
        header: list of str. rows: list of rows, each a list of as many str.
        best: (row, column) of each cell that contains the best value of its column, both from 0.
    """

    header: list[str]
    rows: list[list[str]]
    best: frozenset[tuple[int, int]] = frozenset()

    def text(self) -> str:
        """The table for a terminal."""
        return table([self.header, *self.rows], right_from=1)

    def markdown(self) -> str:
        """The table in Markdown, best values in bold."""
        rows = [[self._bold(r, c, as_markdown(cell)) for c, cell in enumerate(row)] for r, row in enumerate(self.rows)]
        lines = [list(map(as_markdown, self.header)), ["---"] + ["---:"] * (len(self.header) - 1), *rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"

    def _bold(self, row: int, column: int, cell: str) -> str:
        return f"**{cell}**" if (row, column) in self.best else cell


def as_markdown(text: object) -> str:
    """A text that Markdown shows as it is: without tags, formulas, links, emphasis and columns of its own."""
    escaped = str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|$~])", r"\\\1", escaped)


def as_cell(value: object) -> object:
    """A value for a CSV file: a text that a spreadsheet would take for a formula gets an apostrophe before it.

    What a terminal obeys becomes blanks, for those who look at the file in one.
    """
    if not isinstance(value, str):
        return value
    return "'" * (value[:1] in ("=", "+", "-", "@", "\t", "\r")) + OBEYED.sub(" ", value)


def format_table(titles: Iterable[object], rows: Iterable[Iterable[object]]) -> list[str]:
    """Lines of a table with titles: the first column aligned left, the others right."""
    return table([titles, *rows], right_from=1).splitlines()
