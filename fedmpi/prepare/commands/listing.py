"""``python -m fedmpi data list``: the official data sets, and the files in the data folder."""

import pathlib

from fedmpi.ground.errors import UserError
from fedmpi.ground.files.hdf5 import data_sets, readable
from fedmpi.ground.text import printable_line
from fedmpi.prepare.commands import add_data_dir
from fedmpi.prepare.official import OFFICIAL


def add_parser(commands):
    parser = commands.add_parser("list", help="list the official data sets and the files in the data folder")
    parser.set_defaults(run=run)
    add_data_dir(parser)


def run(options):
    """Print two lines per data set: its name and content, and its file."""
    folder = pathlib.Path(options.data_dir)
    for name, official in OFFICIAL.items():
        path = folder / f"{name}.h5"
        _print(name, official.about, _file_and_size(path) if path.is_file() else f"no file {path}")
    for path in sorted(folder.glob("*.h5")):
        if path.stem not in OFFICIAL and path.is_file():
            _print(path.stem, _summary(path), _file_and_size(path))
    _print("digits", "1,438 + 359 handwritten digits of 8x8 pixels, 10 classes", "embedded in scikit-learn")


def _print(name, about, place):
    print(printable_line(f"{name:<14} {about}"), printable_line(f"{'':<14} {place}"), sep="\n")


def _file_and_size(path):
    return f"{path} ({path.stat().st_size:,} bytes)"


def _summary(path):
    """One line that names the data sets of a file and their shapes, without labels."""
    try:
        with readable(path) as file:
            shapes = [f"{name} {list(data.shape)}" for name, data in data_sets(file) if not name.endswith("/labels")]
    except UserError:
        return "cannot be read as HDF5"
    return ", ".join(shapes) or "contains no data"
