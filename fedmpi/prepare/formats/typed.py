"""Tables whose columns have types: Parquet, Feather, Excel, JSON, ARFF, and Hugging Face's folders of Arrow."""

import io
import itertools
import json
import re
import zipfile

from fedmpi.ground.errors import UserError
from fedmpi.ground.files.limits import PIECE, check_file, check_members, check_unpacked
from fedmpi.ground.text import short

AS_IT_IS = {"dtype": False, "convert_dates": False}  # otherwise pandas takes "01" for 1, and `updated_at` for a date
TYPED = {
    ".parquet": ("", {}),  # by pyarrow
    ".feather": ("read_feather", {}),
    ".xlsx": ("", {}),
    ".json": ("read_json", AS_IT_IS),
    ".jsonl": ("read_json", {"lines": True, **AS_IT_IS}),
    ".arff": ("", {}),  # by scipy
}
ARROW, ARROW_OF_SPLITS = "dataset_info.json", "dataset_dict.json"
BLANK = re.compile(r"Unnamed: \d+")  # what pandas calls a column of Excel without a name
LINES = re.compile(r"\s*[\r\n]\s*")
# Number and value of an attribute in a sparse row of ARFF.
SPARSE = re.compile(r"""(\d+)\s+('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s,}]+)""")
SHEET = re.compile(r"xl/worksheets/[^/]+\.xml")
ROW, COLUMN = re.compile(rb'<row [^>]*?\br="(\d+)"'), re.compile(rb'<c [^>]*?\br="([A-Z]+)')
LONGEST_CELL = 200  # bytes of the beginning of a row or cell
FIELD = 8  # bytes of a number in memory
BATCH = 64 << 20  # bytes of Parquet that are unpacked together


def read_typed(path, ending, reading):
    """(pandas frame of a file whose columns have types, lines on what was assumed)."""
    import pandas

    if ending != ".arrow":
        check_file(path)
    (function, options), assumed = TYPED.get(ending, ("", {})), []
    try:
        if ending == ".arrow":
            frame = read_arrow(path)
        elif ending == ".parquet":
            frame = read_parquet(path).to_pandas()
        elif ending == ".xlsx":
            frame, assumed = _read_excel(path, reading.skip_lines)
        elif ending == ".arff":
            from scipy.io import arff

            text = path.read_text(encoding=reading.encoding or "utf-8")
            frame = pandas.DataFrame(arff.loadarff(io.StringIO(_dense(text)))[0])
            for name in frame.select_dtypes(object):
                frame[name] = frame[name].str.decode("utf-8").replace("?", None)  # ARFF's mark of no value
        else:
            frame = getattr(pandas, function)(path, **options)
        if ending not in (".json", ".xlsx") and not isinstance(frame.index, pandas.RangeIndex):
            names = [name or f"Unnamed: row {number}" for number, name in enumerate(frame.index.names)]
            frame = frame.reset_index(names=names)  # pandas stores it as columns
    except ImportError as error:
        raise UserError(f"{path}: {ending} needs another package: pip install 'fedmpi[formats]' ({error})") from None
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  each library has its own
        raise UserError(
            f"{path}: cannot be read as {ending[1:]}: {short(f'{type(error).__name__}: {error}')}"
        ) from None
    frame.columns = [LINES.sub(" ", str(name)) for name in frame.columns]
    return frame, assumed


def _read_excel(path, skip_lines):
    """(pandas frame of the first sheet, lines on what was assumed)."""
    import pandas

    check_members(path)
    _check_cells(path)
    with pandas.ExcelFile(path) as book:
        sheets = book.sheet_names
        skipped = {line - 1 for line in skip_lines}
        frame = book.parse(sheets[0], skiprows=[*skipped])
        if len(frame) and all(BLANK.fullmatch(str(name)) for name in frame.columns):  # blank rows before the header
            blank = int(frame.notna().any(axis=1).to_numpy().argmax())
            begin = itertools.islice((row for row in itertools.count() if row not in skipped), 1 + blank)
            frame = book.parse(sheets[0], skiprows=[*skipped, *begin])
    return frame, [f"the sheet is {sheets[0]}, the first of {', '.join(sheets)}"] if sheets[1:] else []


def _check_cells(path):
    """Check that the last cell of an Excel file is not so far away that all cells before it fill the memory."""
    rows, columns = 1, {b"A"}
    with zipfile.ZipFile(path) as book:
        for name in filter(SHEET.fullmatch, book.namelist()):
            with book.open(name) as sheet:
                rest = b""
                for piece in iter(lambda sheet=sheet: sheet.read(PIECE), b""):
                    text = rest + piece
                    rows = max(rows, *map(int, ROW.findall(text)), 1)
                    columns.update(COLUMN.findall(text))
                    rest = text[-LONGEST_CELL:]
    longest = max(columns, key=lambda letters: (len(letters), letters))
    last = 0
    for letter in longest:
        last = 26 * last + letter - ord("A") + 1
    check_unpacked(path, rows * last * FIELD, path.stat().st_size)


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


def read_parquet(path):
    """The pyarrow table of a Parquet file, read piece by piece, so that it ends before it fills the memory.

    Raises:
        UserError: if it unpacks to too much. Exception: of many kinds, if it cannot be read.
    """
    from pyarrow import parquet

    check_file(path)
    packed = path.stat().st_size
    with parquet.ParquetFile(path) as file:
        facts = file.metadata
        check_unpacked(path, facts.num_rows * facts.num_columns * FIELD, packed)
        size = sum(facts.row_group(number).total_byte_size for number in range(facts.num_row_groups))
        rows = max(1, min(1 << 16, BATCH * facts.num_rows // max(1, size)))
        return _bounded(path, file.iter_batches(rows), file.schema_arrow, packed)


def _bounded(path, batches, schema, packed):
    """The pyarrow table of batches, whose sizes are checked one by one."""
    import pyarrow

    taken, size = [], 0
    for batch in batches:
        size += sum(map(_unpacked_bytes, batch.columns))
        check_unpacked(path, size, packed)
        taken.append(batch)
    return pyarrow.Table.from_batches(taken, schema)


def _unpacked_bytes(column):
    """Bytes of a pyarrow array; those of words that stand in a dictionary, as often as they occur."""
    import pyarrow
    from pyarrow import compute

    kind = getattr(column.type, "value_type", None)
    if not isinstance(column, pyarrow.DictionaryArray) or not (
        pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_binary(kind)
    ):
        return column.nbytes
    lengths = compute.binary_length(column.dictionary)
    return column.nbytes + (compute.sum(lengths.take(column.indices)).as_py() or 0)


def read_arrow(folder):
    """The pandas frame of a folder of Hugging Face's datasets; numbers of classes become their names."""
    import pyarrow

    for name in (ARROW, "state.json"):
        check_file(folder / name)
    features = json.loads((folder / ARROW).read_text(encoding="utf-8"))["features"]
    names = [
        file["filename"] for file in json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]
    ]
    parts = []
    for name in names:
        path = folder / name
        if path.parent != folder or name in ("", ".", ".."):
            raise UserError(f"{folder}: state.json names the file {name}: expected one in this folder")
        check_file(path)
        with pyarrow.ipc.open_stream(path) as stream:
            parts.append(_bounded(path, stream, stream.schema, path.stat().st_size))
    return named_classes(pyarrow.concat_tables(parts).to_pandas(), features)


def named_classes(frame, features):
    """A pandas frame in which numbers of classes are their names, as Hugging Face's `features` give them."""
    for name, feature in features.items():
        if names := isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature["names"]:
            frame[name] = frame[name].map(dict(enumerate(names)))
    return frame
