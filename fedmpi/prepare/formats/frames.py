"""Tables of many formats as columns of numbers and of words; pandas reads them."""

import bz2
import codecs
import collections
import contextlib
import csv
import dataclasses
import gzip
import io
import itertools
import lzma
import pathlib
import re
import warnings
import zipfile

import numpy as np

from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.limits import Limited, check_file
from fedmpi.prepare.formats.fields import AS_NUMBER, BOTH, CODE, compact, recognise
from fedmpi.prepare.formats.typed import ARROW, ARROW_OF_SPLITS, LINES, TYPED, read_typed

EMPTY = ("", "NA", "N/A", "NaN", "nan", "null", "NULL")  # fields without a value
FIRST_BYTES = 1 << 20  # from which encoding and separator are found
FIELDS_AT_ONCE = 1 << 22
SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}


def _open_zip(path, mode, **options):
    """The only file in a zip file; `options` are those of a text."""
    with zipfile.ZipFile(path) as archive:
        file = archive.open(archive.namelist()[0])  # keeps the archive open
    return io.TextIOWrapper(file, **options) if mode == "rt" else file


OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zip": _open_zip}
TEXTS = (".csv", ".tsv")
NAMELESS = re.compile(r"(Unnamed: (row )?\d+|__index_level_\d+__)?")  # what pandas calls a column without a name
DATE = re.compile(r"\d{4}-\d\d-\d\d.*|\d\d?[./]\d\d?[./]\d{4}.*")
MOST_COLUMNS = 100_000  # each takes a third of a millisecond
CODES_AMONG = 1000  # rows among which codes are looked for
BEYOND = "\0"  # the name of what follows the last column


def table_ending(path):
    """The ending of a table's name, without that of a compressed file; None if it is no table.

    ".arrow" is a folder that Hugging Face's `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote.
    """
    if path.is_dir():
        return ".arrow" if (path / ARROW).is_file() or (path / ARROW_OF_SPLITS).is_file() else None
    last = path.suffix.lower()
    name = path.stem if last in OPENERS else path.name
    if last == ".zip" and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            inside = [pathlib.PurePath(member) for member in archive.namelist()]
        name = inside[0] if len(inside) == 1 else ""
        name = name and (name if name.suffix else f"{name}.csv")  # pandas gives a file in t.zip the name t
    ending = pathlib.PurePath(name).suffix.lower()
    return ending if ending in TEXTS or (ending in TYPED and last not in OPENERS) else None


@dataclasses.dataclass(frozen=True)
class Reading:
    """How the fields of a table are read; a model contains it, so that predictions read theirs in the same way.

    Attributes:
        na: comma-separated fields that mean "no value", besides `EMPTY`. na_in: "COLUMN=FIELDS", of single columns.
        decimal, thousands: marks in numbers; ".,": the decimal mark of some is a point, and of others a comma.
        separator, encoding: of CSV; None: they are found. skip_lines: numbers of lines that are left out.
        censored: what <0.3 is: "half" 0.15 or "bound" 0.3; None: a mistake. dates: columns that are days since 1970.
        units: what is left out after numbers, like mg/L.
    """

    na: str = ""
    na_in: tuple = ()
    decimal: str | None = None
    thousands: str | None = None
    separator: str | None = None
    encoding: str | None = None
    skip_lines: tuple = ()
    censored: str | None = None
    dates: tuple = ()
    units: tuple = ()

    def marks(self, column=None):
        """All fields that mean "no value" in a column, or in all."""
        more = [fields for name, _, fields in (entry.rpartition("=") for entry in self.na_in) if name == column]
        return {*EMPTY, *(mark.strip() for fields in (self.na, *more) for mark in fields.split(","))}

    def numbers_without_value(self, column):
        """Those that are numbers, like -999."""
        if not self.na and not self.na_in:
            return []
        numbers = []
        for mark in self.marks(column):
            with contextlib.suppress(ValueError):
                numbers.append(float(mark))
        return [number for number in numbers if number == number]

    def joined(self, given):
        """This `Reading` of the file of --columns, and what was `given` for one table: a `Reading`, too.

        Raises:
            UserError: if they contradict each other in what must be equal in all silos.
        """
        usual, changes = Reading(), {}
        for key, value in vars(given).items():
            former = getattr(self, key)
            if value == getattr(usual, key):
                continue
            if key in ("na", "na_in", "units", "dates"):  # more than the first silo has
                value = ",".join(filter(None, [former, value])) if key == "na" else (*dict.fromkeys([*former, *value]),)
            elif key == "censored" and former != value:
                expected = f"expected {'no --censored' if former is None else f'--censored {former}'}, as in --columns"
                raise UserError(f"--censored {value}: {expected}")
            changes[key] = value
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass
class Table:
    """Columns by name.

    Attributes:
        path: of the file. columns: name -> [n] float32 or float64, nan where a field is empty; or a pandas Series of
            str, stripped, missing where it is empty.
        kinds: name -> "numbers", "true or false", "dates", "words" or "empty". assumed: lines on how it was read.
        lines: function that gives the line numbers of the rows of CSV; None if rows have no lines.
        separator, encoding: of CSV.
    """

    path: object
    columns: dict
    kinds: dict = dataclasses.field(default_factory=dict)
    assumed: list = dataclasses.field(default_factory=list)
    lines: object = None
    separator: str = ""
    encoding: str = ""

    def __len__(self):
        return len(next(iter(self.columns.values()), ()))

    def place(self, row):
        """Where a row is in the file: "line 3", or "row 1"."""
        return f"row {row + 1}" if self.lines is None else f"line {next(itertools.islice(self.lines(), row, None))}"


def read_table(path, reading, wanted=None):
    """The `Table` of a file.

    Args:
        path: a `pathlib.Path` for which `table_ending` is not None. reading: a `Reading`.
        wanted: function of the names of all columns; it gives those to read, and those that are words, whatever they
            contain, or raises `UserError`. None: all, and none of them.

    Raises:
        UserError: one line, if the file cannot be read, or a column is neither of numbers nor of words.
    """
    marks = [*(BOTH if reading.decimal == BOTH else [reading.decimal or "."]), *filter(None, [reading.thousands])]
    if {*map(len, marks)} != {1} or len({*marks}) < len(marks):
        raise UserError(
            f"--decimal and --thousands are {' and '.join(filter(None, [reading.decimal or '.', reading.thousands]))}: "
            f"expected two different characters, or {BOTH} without thousands"
        )
    if odd := [entry for entry in reading.na_in if "=" not in entry]:
        raise UserError(f"--na-in {odd[0]}: expected a column and fields, like crp=-999")
    if min(reading.skip_lines, default=1) < 1:
        raise UserError(f"--skip-lines {min(reading.skip_lines)}: expected numbers from 1 on")
    ending = table_ending(path)
    wanted = wanted or (lambda names: (names, ()))
    if ending in TEXTS:
        table, words = _read_text(path, reading, wanted)
    else:
        frame, assumed = read_typed(path, ending, reading)
        check_names(path, frame.columns.tolist())
        names, words = wanted(frame.columns.tolist())
        table = Table(path, {name: frame.pop(name) for name in names}, {}, assumed)
    odd = []
    for name in table.columns:
        table.columns[name], table.kinds[name] = recognise(table, name, reading, name in words, odd)
    if odd:
        others = f"; the same is so of {', '.join(name for name, *_ in odd[1:])}" if odd[1:] else ""
        raise UserError(f"{odd[0][1]}{others}", odd[0][2])
    return table


def check_names(path, names):
    """Check that there are columns, not too many, and that no two have one name.

    Raises:
        UserError: if it is not so.
    """
    if not names:
        raise UserError(f"{path}: is empty: expected a header and rows")
    if len(names) > MOST_COLUMNS:
        expected = f"expected at most {MOST_COLUMNS:,}; an array in an .npz file may be wider"
        raise UserError(f"{path}: has {len(names):,} columns: {expected}")
    repeated = next((name for name, number in collections.Counter(names).items() if number > 1), None)
    if repeated is not None:
        raise UserError(f"{path}: the header contains {repeated} twice: expected another name for each column")


def _read_text(path, reading, wanted):
    """(`Table` of a CSV file, columns that are words)."""
    import pandas

    opener = OPENERS.get(path.suffix.lower(), open)
    check_file(path)
    with attempt("read as CSV with a header", path, OSError, ValueError, EOFError, lzma.LZMAError, LookupError):
        begin, most = _measure(path, opener)
        encoding = reading.encoding or _encoding(begin)
        text = codecs.getincrementaldecoder(encoding)("replace").decode(begin)  # pandas will name what is not
    separator = reading.separator or ("\t" if table_ending(path) == ".tsv" else _separator(text))
    if len(separator) != 1:
        raise UserError(f"--separator {separator}: expected one character")

    def numbered():
        """(number of its last line, fields) of the header and each row."""
        with opener(path, "rt", encoding=encoding, errors="replace", newline="") as file:
            rows = csv.reader(file, delimiter=separator, skipinitialspace=True)
            yield from ((rows.line_num, row) for row in rows if row and rows.line_num not in reading.skip_lines)

    with attempt("read as CSV with a header", path, OSError, ValueError, csv.Error, EOFError):
        header = next(numbered(), (1, ()))
    if not header[1]:
        raise UserError(f"{path}: is empty: expected CSV with a header")
    names = [LINES.sub(" ", name.strip()) or f"Unnamed: {number}" for number, name in enumerate(header[1])]
    check_names(path, names)
    chosen, words = wanted(names)
    options = {
        "sep": separator, "encoding": encoding, "names": [*names, BEYOND], "header": None, "index_col": False,
        "skipinitialspace": True, "keep_default_na": False, "na_values": sorted(reading.marks()),
        "decimal": "." if reading.decimal in (None, BOTH) else reading.decimal, "on_bad_lines": "error",
        "skiprows": [*(line - 1 for line in reading.skip_lines), header[0] - 1 - "".join(header[1]).count("\n")],
    }  # fmt: skip
    # With thousands=, pandas would read 0.92 as 92.
    dtype = dict.fromkeys({*(chosen if reading.thousands else words), *reading.dates} & {*chosen} | {BEYOND}, str)

    def check_lengths():
        with attempt("read as CSV with a header", path, ValueError, csv.Error):
            for line, row in numbered():
                if len(row) < len(names) or any(field.strip() for field in row[len(names) :]):
                    hint = f"expected {len(names)}, as in the header (line {header[0]}; --skip-lines leaves out titles)"
                    raise UserError(f"{path}: line {line} has {len(row)} fields: {hint}", f"line {line}")

    try:  # all columns are read, so that lines are checked
        columns, mixed = _in_chunks(path, {**options, "dtype": dtype}, [*chosen, BEYOND], most)
        if mixed:  # words from some line on: the fields before it are read as they stand, too
            columns |= _in_chunks(path, {**options, "dtype": {**dtype, **dict.fromkeys(mixed, str)}}, mixed, most)[0]
    except UserError as error:
        if isinstance(error.__context__, UnicodeError):
            hint = "expected --encoding with another one, like latin-1"
            raise UserError(f"{path}: cannot be read as CSV with a header: it is not {encoding}: {hint}") from None
        check_lengths()  # pandas says neither the line nor what to do
        raise
    is_wrong = columns.pop(BEYOND).notna().any()
    is_wrong |= bool(chosen and names[-1] in chosen and pandas.isna(columns[names[-1]]).any())
    if is_wrong:  # are lines too long, or too short?
        check_lengths()
    firsts = zip(*(row for _, row in itertools.islice(numbered(), 1, CODES_AMONG) if len(row) >= len(names)))
    codes = {name: next(filter(CODE.fullmatch, fields), None) for name, fields in zip(names, firsts)}
    said = [f"the separator is a {SEPARATORS.get(separator, separator)}", f"the encoding is {encoding}"]

    said += [f"{name}: {code} {AS_NUMBER}" for name, code in codes.items()
             if code and isinstance(columns.get(name), np.ndarray)]  # fmt: skip

    def lines():
        return itertools.islice((line for line, _ in numbered()), 1, None)

    return Table(path, columns, {}, said, lines, separator, encoding), words


def _measure(path, opener):
    """(first bytes of a text, an upper bound of the number of its lines: a quoted field may contain some).

    Raises:
        UserError: if it unpacks to too much.
    """
    with opener(path, "rb") as file:
        content = file if opener is open else Limited(file, path, path.stat().st_size)
        begin, lines, piece = b"", 1, content.read(FIRST_BYTES)
        while piece:
            begin += piece[: FIRST_BYTES - len(begin)]
            letters = np.frombuffer(piece, np.uint8)
            lines += np.count_nonzero((letters == ord("\n")) | (letters == ord("\r")))
            piece = content.read(FIRST_BYTES)
    return begin, lines


def _in_chunks(path, options, names, most):
    """(columns as in `Table`, names of those that are numbers in some chunks and not in others).

    Args:
        most: at least as many as there are rows; memory that is not written to is not used.
    """
    import pandas

    length, numbers, others = 0, {}, {name: [] for name in names}
    rows = max(1, FIELDS_AT_ONCE // max(1, len(options["names"])))
    problems = (OSError, ValueError, EOFError, Warning)
    with attempt("read as CSV with a header", path, *problems), warnings.catch_warnings():
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        with pandas.read_csv(path, chunksize=rows, low_memory=False, **options) as chunks:
            for chunk in chunks:
                start, length = length, length + len(chunk)
                for name in names:
                    if (values := chunk[name]).dtype.kind not in "fiu":
                        others[name].append(values)
                        continue
                    values = compact(values)
                    column = numbers.setdefault(name, np.empty(most, np.float32))
                    if column.dtype != np.result_type(column, values):
                        numbers[name] = np.empty(most)
                        numbers[name][:start] = column[:start]
                    numbers[name][start:length] = values
    mixed = [name for name, pieces in others.items() if len({*(part.dtype for part in pieces)}) + (name in numbers) > 1]
    words = {name: pandas.concat(pieces, ignore_index=True) for name, pieces in others.items() if pieces}
    columns = {name: numbers[name][:length] if name in numbers else words.get(name, np.empty(0)) for name in names}
    return columns, mixed


def _encoding(begin):
    """The encoding of a text by its first bytes."""
    if begin.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if b"\0" in begin[:2]:  # half of an ASCII character
        return "utf-16-be" if begin[0] == 0 else "utf-16-le"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(begin)
        return "utf-8-sig" if begin.startswith(codecs.BOM_UTF8) else "utf-8"
    except UnicodeDecodeError:
        return "cp1252"


def _separator(text):
    """The separator by which most lines have as many fields as the first, and the most of them."""
    lines = text.splitlines()[:100]
    lines = lines[:-1] or lines  # the last one may be cut

    def rank(separator):
        try:
            counts = [len(row) for row in csv.reader(lines, delimiter=separator) if row]
        except csv.Error:
            return 0, 0
        is_table = bool(counts) and counts[0] > 1
        return (is_table and counts.count(counts[0]) / len(counts)) * (counts[0] if counts else 0), -len(separator)

    return max(SEPARATORS, key=rank)
