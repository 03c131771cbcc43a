"""``python -m fedmpi data prepare``: make the HDF5 file of a data set."""

import dataclasses
import pathlib

from fedmpi.ground.files.limits import VARIABLE
from fedmpi.prepare.commands import add_data_dir
from fedmpi.prepare.commands.show import show_account
from fedmpi.prepare.formats import ENDINGS
from fedmpi.prepare.formats.common import LEAST, ReaderOptions
from fedmpi.prepare.formats.features import MISSING
from fedmpi.prepare.formats.frames import Reading
from fedmpi.prepare.official import OFFICIAL
from fedmpi.prepare.prepare import prepare

# option -> (attribute of `Reading`, how its text is read, help)
READING = {
    "na": ("MARKS", str, "fields that mean no value, separated by commas, like '?,-'; besides empty ones, NA and null"),
    "na-in": ("COLUMN=FIELDS", [str], "the same for one column, like crp=-999"),
    "decimal": ("MARK", str, "decimal mark in numbers; default: .; '.,' if some have a point and others a comma"),
    "unit": ("TEXT", [str], "what is left out after numbers, like mg/L in 12 mg/L"),
    "thousands": ("MARK", str, "mark between thousands in numbers, like , in 1,234.5"),
    "censored": (None, ("half", "bound"), "what <0.3 is in a column of numbers: half of it, or the bound itself"),
    "date": ("COLUMN", [str], "this column of dates (2026-01-31) becomes days since 1970-01-01"),
    "separator": ("MARK", str, "separator of CSV; default: what the first lines suggest"),
    "encoding": ("NAME", str, "encoding of CSV, like latin-1; default: what the first bytes suggest"),
    "skip-lines": ("N", [int], "numbers of lines of CSV or Excel that are left out, like those of a title or of units"),
}  # fmt: skip
# option -> help, of those that name a column and may be repeated
COLUMNS = {
    "one-hot": "turn this column of words into one feature per category",
    "drop": "leave this column out",
    "id": "this column is not learned from, but stored, and written to predictions",
    "keep": "this column is not learned from, but stored, to assign samples to clients by",
    "features": "use this column, and of the others only those that are named so",
}


def add_parser(commands):
    parser = commands.add_parser("prepare", help="make the HDF5 file of a data set")
    parser.set_defaults(run=run)
    parser.add_argument("name", help=f"{', '.join(OFFICIAL)}, or a name for your own data")
    add_data_dir(parser)
    text = f"folder of the official files; or your own data: a folder of images or texts, or a file {ENDINGS}, .npz"
    parser.add_argument("--from", dest="origin", metavar="PATH", help=text)
    parser.add_argument("--mirror", metavar="URL", help="download the official files from this address instead")
    parser.add_argument("--force", action="store_true", help="replace the HDF5 file if fedmpi wrote it")
    parser.add_argument("--json", action="store_true", help="print what was decided as JSON")
    share, seed = ReaderOptions.test_share, ReaderOptions.seed
    text = f"share of each class that becomes the test set, if your data have none; default: {share}"
    parser.add_argument("--test-share", type=float, metavar="SHARE", default=share, help=text)
    text = f"seed of the random choice of that test set; default: {seed}"
    parser.add_argument("--seed", type=int, metavar="N", default=seed, help=text)
    parser.add_argument("--silo", metavar="NAME", help="name of the silo whose data these are; results show it")
    parser.add_argument("--size", type=int, metavar="N", help="images: resize them to N x N pixels")
    parser.add_argument("--mode", help="images: convert them to this mode of pillow, like L, RGB or RGBA")
    text = "folder with a mask for each image, of the same name: the pixels' classes, for --task segmentation"
    parser.add_argument("--masks", metavar="FOLDER", type=pathlib.Path, help=text)
    text = "arrays: letters of their axes, like nchw or nhwc, with c for channels and d for depth"
    parser.add_argument("--layout", metavar="AXES", help=text)
    text = "images: read those outside of the folder, where symbolic links lead to"
    parser.add_argument("--follow-links", action="store_true", help=text)
    tables = add_reading(parser)
    tables.add_argument("--test-from", metavar="PATH", type=pathlib.Path, help="table of the test set")
    text = (
        "JSON file of medians, means, categories, classes and aliases (no rows), written if it does not exist; with "
        "the same file, the tables of all silos get the same features"
    )
    tables.add_argument("--columns", metavar="FILE", help=text)
    text = (
        "rows that a category must have to become a feature, others are unknown; a median is that of as many rows; "
        f"default: {LEAST} with --columns, otherwise 1"
    )
    tables.add_argument("--least", type=int, metavar="N", help=text)


def add_reading(parser):
    """Add the options that say how a table is read; returns their group."""
    text = "classes of all silos, in the order of their labels, separated by commas; default: those of the data"
    parser.add_argument("--classes", metavar="A,B,C", type=_names, default=(), help=text)
    text = "GiB that a file may unpack to; default: 100 times its size, and at least 1 (for all programs: the variable "
    parser.add_argument("--max-unpacked", metavar="GIB", type=float, help=f"{text}{VARIABLE})")
    tables = parser.add_argument_group("tables")
    tables.add_argument("--label", metavar="COLUMN", help="column that contains the label; default: the last")
    text = (
        "what happens to empty fields: refuse (default), median (filled with the column's median), or "
        "category (the same, and a further feature of every column of numbers says where they were)"
    )
    tables.add_argument("--missing", choices=MISSING, help=text)
    for name, text in COLUMNS.items():
        text = f"{text}; may be repeated"
        tables.add_argument(f"--{name}", action="append", default=[], metavar="COLUMN", help=text)
    text = "rows with one value of this column, like those of a patient, are never divided; it is not learned from"
    tables.add_argument("--group", metavar="COLUMN", help=text)
    for name, (mark, kind, text) in READING.items():
        how = {"choices": kind} if isinstance(kind, tuple) else {}
        if isinstance(kind, list):
            how, text = {"action": "append", "default": [], "type": kind[0]}, f"{text}; may be repeated"
            how |= {"action": "extend", "nargs": "+"} if kind == [int] else {}
        tables.add_argument(f"--{name}", metavar=mark, help=text, **how)
    return tables


def _names(text):
    return [*map(str.strip, text.split(","))]


def reader_options(options):
    """The `ReaderOptions` of a program's options."""
    given = dict(vars(options))
    if given["least"] is None:
        given["least"] = LEAST if options.columns else 1  # a file for other silos is written or read
    reading = {name.replace("-", "_"): given[name.replace("-", "_")] for name in READING}
    reading["dates"], reading["units"] = reading.pop("date"), reading.pop("unit")
    reading = {key: tuple(value) if isinstance(value, list) else value for key, value in reading.items() if value}
    names = {field.name for field in dataclasses.fields(ReaderOptions)} - {"reading"}
    return ReaderOptions(**{name: given[name] for name in names & {*given}}, reading=Reading(**reading))


def run(options):
    folder, origin = pathlib.Path(options.data_dir), options.origin and pathlib.Path(options.origin)
    reader = reader_options(options)
    path = prepare(options.name, folder, reader, origin, options.mirror, options.force)
    show_account(path, options.json)
