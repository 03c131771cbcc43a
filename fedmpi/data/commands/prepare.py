"""``python -m fedmpi.data prepare``: make the HDF5 file of a data set."""

import dataclasses
import pathlib

from fedmpi.data.commands import add_data_dir
from fedmpi.data.commands.show import show_file
from fedmpi.data.formats.common import ReaderOptions
from fedmpi.data.formats.features import MISSING
from fedmpi.data.official import OFFICIAL
from fedmpi.data.prepare import prepare


def add_parser(commands):
    parser = commands.add_parser("prepare", help="make the HDF5 file of a data set")
    parser.set_defaults(run=run)
    parser.add_argument("name", help=f"{', '.join(OFFICIAL)}, or a name for your own data")
    add_data_dir(parser)
    text = "folder of the official files; or your own data: x.npz, x.csv, x.parquet, a folder of images or texts"
    parser.add_argument("--from", dest="origin", metavar="PATH", help=text)
    parser.add_argument("--mirror", metavar="URL", help="download the official files from this address instead")
    parser.add_argument("--force", action="store_true", help="replace the HDF5 file if fedmpi wrote it")
    share, seed = ReaderOptions.test_share, ReaderOptions.seed
    text = f"share of the samples that becomes the test set, if your data have none; default: {share}"
    parser.add_argument("--test-share", type=float, metavar="SHARE", default=share, help=text)
    text = f"seed of the random choice of that test set; default: {seed}"
    parser.add_argument("--seed", type=int, metavar="N", default=seed, help=text)
    parser.add_argument("--label", metavar="COLUMN", help="tables: column that contains the label; default: the last")
    text = (
        "tables: what happens to empty fields: refuse (default), median (filled with the column's median), or "
        "category (the same, and a further feature of every column of numbers says where they were)"
    )
    parser.add_argument("--missing", choices=MISSING, default=ReaderOptions.missing, help=text)
    text = "tables: turn this column of words into one feature per category; may be repeated"
    parser.add_argument("--one-hot", action="append", default=[], metavar="COLUMN", help=text)
    text = (
        "tables: JSON file of medians, means, categories and classes (no rows), written if it does not exist; with the "
        "same file, the tables of all silos get the same features"
    )
    parser.add_argument("--columns", metavar="FILE", help=text)
    parser.add_argument("--silo", metavar="NAME", help="name of the silo whose data these are; results show it")
    parser.add_argument("--size", type=int, metavar="N", help="images: resize them to N x N pixels")


def run(options):
    reading = ReaderOptions(**{field.name: getattr(options, field.name) for field in dataclasses.fields(ReaderOptions)})
    folder, origin = pathlib.Path(options.data_dir), options.origin and pathlib.Path(options.origin)
    show_file(prepare(options.name, folder, reading, origin, options.mirror, options.force))
