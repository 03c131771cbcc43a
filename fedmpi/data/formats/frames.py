"""Tables of many formats as columns of numbers and of words; pandas reads them."""

import bz2
import codecs
import collections
import csv
import dataclasses
import gzip
import io
import itertools
import json
import lzma
import pathlib
import re
import shlex
import warnings
import zipfile

import numpy as np

from fedmpi.errors import UserError, attempt
from fedmpi.text import short

EMPTY = ("", "NA", "N/A", "NaN", "nan", "null", "NULL")  # fields without a value
# What often means that there is no value; it is not taken for that unasked.
MARKS = {"?", "-", "--", ".", "n/a", "na", "none", "nil", "missing", "unknown", "#n/a"}
NUMBER = re.compile(r"[<>≤≥~]?\s*[-+\N{MINUS SIGN}]?(\d{1,3}([,.'\s]\d{3})+|\d+)?([.,]?\d+)?([eE][-+]?\d+)?\s*%?")
MOSTLY = 0.9  # share of numbers above which a column of words is a mistake
FIRST_BYTES = 1 << 20  # from which encoding and separator are found
FIELDS_AT_ONCE = 1 << 22
SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}


def _open_zip(path, mode, **options):
    """The only file in a zip file; `options` are those of a text."""
    with zipfile.ZipFile(path) as archive:
        file = archive.open(archive.namelist()[0])  # keeps the archive open
    return io.TextIOWrapper(file, **options) if mode == "rt" else file


OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zip": _open_zip}
AS_IT_IS = {"dtype": False, "convert_dates": False}  # otherwise pandas takes "01" for 1, and `updated_at` for a date
TYPED = {
    ".parquet": ("read_parquet", {}),
    ".feather": ("read_feather", {}),
    ".xlsx": ("read_excel", {"sheet_name": None}),
    ".json": ("read_json", AS_IT_IS),
    ".jsonl": ("read_json", {"lines": True, **AS_IT_IS}),
    ".arff": ("", {}),  # by scipy
}
ARROW, ARROW_OF_SPLITS = "dataset_info.json", "dataset_dict.json"
TEXTS = (".csv", ".tsv")
NAMELESS = re.compile(r"(Unnamed: (row )?\d+|__index_level_\d+__)?")  # what pandas calls a column without a name
DATES = ("ISO8601", "%d.%m.%Y")
DATE = re.compile(r"\d{4}-\d\d-\d\d.*|\d\d?[./]\d\d?[./]\d{4}.*")
LINES = re.compile(r"\s*[\r\n]\s*")
CODE, CODES_AMONG = re.compile(r" *0\d+ *"), 1000  # like 00123; rows among which they are looked for
AS_NUMBER = "is a number; if it is a code: --one-hot, --id or --drop"
# Number and value of an attribute in a sparse row of ARFF.
SPARSE = re.compile(r"""(\d+)\s+('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s,}]+)""")
BEYOND = "\0"  # the name of what follows the last column
NEGLIGIBLE = 1e-4  # standard deviations by which a number may change in float32


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
        na: comma-separated fields that mean "no value", besides `EMPTY`. decimal, thousands: marks in numbers.
        separator, encoding: of CSV; None: they are found. skip_lines: numbers of lines of CSV that are left out.
        censored: what <0.3 is: "half" 0.15 or "bound" 0.3; None: a mistake. dates: columns that are days since 1970.
    """

    na: str = ""
    decimal: str = "."
    thousands: str | None = None
    separator: str | None = None
    encoding: str | None = None
    skip_lines: tuple = ()
    censored: str | None = None
    dates: tuple = ()

    @property
    def marks(self):
        """All fields that mean "no value"."""
        return {*EMPTY, *(mark.strip() for mark in self.na.split(","))}


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
    marks = [reading.decimal, *filter(None, [reading.thousands])]
    if {*map(len, marks)} != {1} or len({*marks}) < len(marks):
        raise UserError(f"--decimal and --thousands are {' and '.join(marks)}: expected two different characters")
    if min(reading.skip_lines, default=1) < 1:
        raise UserError(f"--skip-lines {min(reading.skip_lines)}: expected numbers from 1 on")
    ending = table_ending(path)
    wanted = wanted or (lambda names: (names, ()))
    if ending in TEXTS:
        table, words = _read_text(path, reading, wanted)
    else:
        frame, assumed = _read_typed(path, ending, reading)
        check_names(path, frame.columns.tolist())
        names, words = wanted(frame.columns.tolist())
        table = Table(path, {name: frame.pop(name) for name in names}, {}, assumed)
    odd = []
    for name in table.columns:
        table.columns[name], table.kinds[name] = _recognise(table, name, reading, name in words, odd)
    if odd:
        others = f"; the same is so of {', '.join(name for name, _ in odd[1:])}" if odd[1:] else ""
        raise UserError(f"{odd[0][1]}{others}")
    return table


def check_names(path, names):
    """Check that there are columns, and that no two have one name.

    Raises:
        UserError: if there are none, or two have one name.
    """
    if not names:
        raise UserError(f"{path}: is empty: expected a header and rows")
    repeated = next((name for name, number in collections.Counter(names).items() if number > 1), None)
    if repeated is not None:
        raise UserError(f"{path}: the header contains {repeated} twice: expected another name for each column")


def _read_typed(path, ending, reading):
    """(pandas frame of a file whose columns have types, lines on what was assumed)."""
    import pandas

    (function, options), assumed = TYPED.get(ending, ("", {})), []
    try:
        if ending == ".arrow":
            frame = read_arrow(path)
        elif ending == ".arff":
            from scipy.io import arff

            text = path.read_text(encoding=reading.encoding or "utf-8")
            frame = pandas.DataFrame(arff.loadarff(io.StringIO(_dense(text)))[0])
            for name in frame.select_dtypes(object):
                frame[name] = frame[name].str.decode("utf-8").replace("?", None)  # ARFF's mark of no value
        else:
            frame = getattr(pandas, function)(path, **options)
        if ending == ".xlsx":
            sheets, frame = [*frame], next(iter(frame.values()))
            assumed += [f"the sheet is {sheets[0]}, the first of {', '.join(sheets)}"] if sheets[1:] else []
        elif ending != ".json" and not isinstance(frame.index, pandas.RangeIndex):  # pandas stores it as columns
            names = [name or f"Unnamed: row {number}" for number, name in enumerate(frame.index.names)]
            frame = frame.reset_index(names=names)
    except ImportError as error:
        raise UserError(f"{path}: {ending} needs another package: pip install 'fedmpi[formats]' ({error})") from None
    except Exception as error:  # noqa: BLE001  each library has its own
        raise UserError(
            f"{path}: cannot be read as {ending[1:]}: {short(f'{type(error).__name__}: {error}')}"
        ) from None
    frame.columns = [LINES.sub(" ", str(name)) for name in frame.columns]
    return frame, assumed


def _dense(text):
    """An ARFF file without sparse rows like {0 1.5, 3 yes}: what they leave out is 0, or the first category."""
    from scipy.io import arff

    head, data, rows = re.split(r"(^\s*@data[^\n]*\n)", text, maxsplit=1, flags=re.IGNORECASE | re.MULTILINE)
    if not re.match(r"(\s|%.*)*\{", rows):
        return text
    meta = arff.loadarff(io.StringIO(head + data))[1]
    usual = {str(number): f"'{meta[name][1][0]}'" if meta[name][1] else "0" for number, name in enumerate(meta.names())}
    dense = [(usual | dict(SPARSE.findall(row))).values() for row in rows.splitlines() if "{" in row]
    return head + data + "\n".join(map(",".join, dense))


def read_arrow(folder):
    """The pandas frame of a folder of Hugging Face's datasets; numbers of classes become their names."""
    import pyarrow

    features = json.loads((folder / ARROW).read_text(encoding="utf-8"))["features"]
    files = json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]
    parts = [pyarrow.ipc.open_stream(folder / file["filename"]).read_all() for file in files]
    return named_classes(pyarrow.concat_tables(parts).to_pandas(), features)


def named_classes(frame, features):
    """A pandas frame in which numbers of classes are their names, as Hugging Face's `features` give them."""
    for name, feature in features.items():
        if names := isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature["names"]:
            frame[name] = frame[name].map(dict(enumerate(names)))
    return frame


def _read_text(path, reading, wanted):
    """(`Table` of a CSV file, columns that are words)."""
    import pandas

    opener = OPENERS.get(path.suffix.lower(), open)
    with attempt("read as CSV with a header", path, OSError, ValueError, EOFError, lzma.LZMAError, LookupError):
        with opener(path, "rb") as file:
            begin = file.read(FIRST_BYTES)
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
        "skipinitialspace": True, "keep_default_na": False, "na_values": sorted(reading.marks),
        "decimal": reading.decimal, "on_bad_lines": "error",
        "skiprows": [*(line - 1 for line in reading.skip_lines), header[0] - 1 - "".join(header[1]).count("\n")],
    }  # fmt: skip
    # With thousands=, pandas would read 0.92 as 92.
    dtype = dict.fromkeys({*(chosen if reading.thousands else words), *reading.dates} & {*chosen} | {BEYOND}, str)
    with opener(path, "rb") as file:  # an upper bound: a quoted field may contain some
        pieces = (np.frombuffer(piece, np.uint8) for piece in iter(lambda: file.read(FIRST_BYTES), b""))
        most = 1 + sum(np.count_nonzero((piece == ord("\n")) | (piece == ord("\r"))) for piece in pieces)

    def check_lengths():
        with attempt("read as CSV with a header", path, ValueError, csv.Error):
            for line, row in numbered():
                if len(row) < len(names) or any(field.strip() for field in row[len(names) :]):
                    hint = f"expected {len(names)}, as in the header (line {header[0]}; --skip-lines leaves out titles)"
                    raise UserError(f"{path}: line {line} has {len(row)} fields: {hint}")

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
                    values = _compact(values)
                    column = numbers.setdefault(name, np.empty(most, np.float32))
                    if column.dtype != np.result_type(column, values):
                        numbers[name] = np.empty(most)
                        numbers[name][:start] = column[:start]
                    numbers[name][start:length] = values
    mixed = [name for name, pieces in others.items() if len({*(part.dtype for part in pieces)}) + (name in numbers) > 1]
    words = {name: pandas.concat(pieces, ignore_index=True) for name, pieces in others.items() if pieces}
    columns = {name: numbers[name][:length] if name in numbers else words.get(name, np.empty(0)) for name in names}
    return columns, mixed


def _compact(values):
    """[n] numbers as float32, or as float64 if float32 would change them."""
    exact = np.asarray(values, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        small = exact.astype(np.float32)
        lost = np.fmax.reduce(np.abs(small - exact), initial=0)
        if not lost > 0:
            return small
        known = exact[~np.isnan(exact)] if np.isnan(exact.min()) else exact
        return small if lost <= NEGLIGIBLE * known.std() else exact


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


def _recognise(table, name, reading, is_word, odd):
    """(column, kind) of a column as it was read; what is wrong with it is added to `odd`."""
    import pandas

    values = table.columns[name]
    kind = values.dtype.kind
    if isinstance(values, np.ndarray):
        return values, "numbers" if not np.isnan(values).all() else "empty"
    if kind in "Mm":
        if kind == "m":
            table.assumed.append(f"{name}: times are numbers of days")
            return _compact(values / pandas.Timedelta(days=1)), "numbers"
        if name in reading.dates:
            return _days(values), "dates"
        return values.astype(str).where(values.notna()), "words"
    if is_word and kind != "b" and not isinstance(values.dtype, pandas.StringDtype):
        values = values.astype(object).where(values.notna())
    elif kind in "fiu" or (not is_word and kind == "b"):
        is_bool, values = kind == "b", _compact(values.astype("Float64").to_numpy(np.float64, na_value=np.nan))
        return values, "empty" if np.isnan(values).all() else "true or false" if is_bool else "numbers"
    words = values.map(str, na_action="ignore").astype(object).str.strip()
    words = words.where(~words.isin(reading.marks))
    if name in reading.dates:
        for form in DATES:
            dates = pandas.to_datetime(words, format=form, errors="coerce", utc=True)
            if not (odd_ones := words.notna() & dates.isna()).any():
                return _days(dates), "dates"
        row = int(np.flatnonzero(odd_ones)[0])
        problem = f"{table.place(row)} has {short(words[row], 60)}: expected dates like 2026-01-31 or 31.01.2026"
        raise UserError(f"{table.path}: --date {name}: {problem} in the whole column")
    distinct = words.value_counts()
    if is_word or not len(distinct):
        return words, "words" if len(distinct) else "empty"
    if {*distinct.index.str.lower()} <= {"true", "false"}:
        table.assumed.append(f"{name}: true is 1, false is 0")
        numbers = words.str.lower().map({"true": 1.0, "false": 0.0})
        return numbers.to_numpy(np.float32, na_value=np.nan), "true or false"
    return _numbers(table, name, words, distinct, reading, odd)


def _numbers(table, name, words, distinct, reading, odd):
    """(column, kind) of a column of text that is neither empty nor of truth values."""
    import pandas

    fields = distinct.index.str.replace("\N{MINUS SIGN}", "-")
    if fields.str.endswith("%").all():
        fields = fields.str.rstrip("%").str.strip()
        table.assumed.append(f"{name}: percent signs are left out")
    if reading.thousands:
        fields = fields.str.replace(rf"(?<=\d)(?<!\b0){re.escape(reading.thousands)}(?=\d{{3}}(?!\d))", "", regex=True)
    if reading.decimal != ".":
        fields = fields.str.translate({ord(reading.decimal): ".", ord("."): reading.decimal})
    if reading.censored:
        bounds = pandas.to_numeric(fields.str.replace(r"^[<>≤≥]=?\s*", "", regex=True), errors="coerce")
        below = fields.str.startswith(("<", "≤")) & (reading.censored == "half")
        numbers = np.where(below, bounds / 2, bounds)
    else:
        numbers = np.asarray(pandas.to_numeric(fields, errors="coerce"), np.float64)
    is_number = ~np.isnan(numbers)
    counts = distinct.to_numpy()
    if is_number.all():
        code = next(filter(CODE.fullmatch, distinct.index), None)
        table.assumed += [f"{name}: {code} {AS_NUMBER}"] if code else []
        return _compact(words.map(dict(zip(distinct.index, numbers))).astype(np.float64)), "numbers"
    like = np.array([bool(NUMBER.fullmatch(field)) and any(map(str.isdigit, field)) for field in distinct.index])
    is_mark = distinct.index.str.lower().isin(MARKS)
    others = counts[~is_mark].sum()
    share = counts[(like | is_number) & ~is_mark].sum() / max(1, others)
    if others and share >= MOSTLY:
        field = next(word for word in words if word in {*distinct.index[~is_number]})
        row = int(np.flatnonzero(words == field)[0])
        odd.append((name, _advice(table, name, field, table.place(row), share)))
    return words, "words"


def _advice(table, name, field, place, share):
    """What to do about a field that is no number in a column of numbers."""
    ways = [f"--na {shlex.quote(field)} (it means no value)"]
    if field[:1] in "<>≤≥":
        ways.append("--censored half or bound (<0.3 is 0.15 or 0.3)")
    if re.fullmatch(r"[-+]?\d*,\d+", field):
        ways.append("--decimal ,")
    if found := re.search(r"\d([,.'\s])\d{3}\b", field):
        ways.append(f"--thousands {shlex.quote(found[1])}")
    if place == "line 2" and field[:1].isalpha() and field.lower() not in MARKS:
        ways.append("--skip-lines 2 (it contains units)")
    ways += [f"--one-hot {shlex.quote(name)} (they are categories)", f"--drop {shlex.quote(name)}"]
    return (
        f"{table.path}: {place} has {short(field, 60)} in column {name}, and {share:.0%} of its values are "
        f"numbers: expected a number, or one of {', '.join(ways)}"
    )


def _days(dates):
    """[n] days since 1970-01-01."""
    import pandas

    epoch = pandas.Timestamp("1970-01-01", tz=dates.dt.tz)
    return _compact((dates - epoch) / pandas.Timedelta(days=1))
