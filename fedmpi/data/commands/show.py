"""``python -m fedmpi.data show``: what a data file contains."""

import numpy as np

from fedmpi.data.checksum import checksum
from fedmpi.data.commands import add_data_dir
from fedmpi.data.hdf5 import data_sets, readable
from fedmpi.data.source import find_file
from fedmpi.text import short

MAX_CLASSES = 20  # classes whose numbers of samples are printed


def add_parser(commands):
    parser = commands.add_parser("show", help="show what a data file contains")
    parser.set_defaults(run=run)
    parser.add_argument("file", help="path of a file ending in .h5, or the name of one in the data folder")
    add_data_dir(parser)


def run(options):
    show_file(find_file(options.file, options.data_dir, given="show "))


def show_file(path):
    """Print size, checksum, attributes and data sets of an HDF5 file.

    Raises:
        UserError: if it cannot be read.
    """
    print(f"{path}: {path.stat().st_size:,} bytes, sha256 {checksum(path)}")
    with readable(path) as file:
        lines = _describe(file)
    print("\n".join(lines))


def _describe(file):
    """One line per attribute and data set of an open HDF5 file, and one more for labels."""
    lines = []
    for name, value in file.attrs.items():
        text = np.array2string(np.asarray(value), precision=4, threshold=10) if np.ndim(value) else short(value)
        lines.append(f"  {name} = {text}")
    for name, data in data_sets(file):
        chunks = f", chunks {list(data.chunks)}, {data.compression or 'uncompressed'}" if data.chunks else ""
        lines.append(f"  {name:<16} {data.dtype} {list(data.shape)}{chunks}")
        if name.endswith("/labels") and data.ndim == 1 and data.dtype.kind in "iu" and len(data):
            counts = np.bincount(data[:].astype(np.int64))
            more = f" ... ({len(counts)} classes)" if len(counts) > MAX_CLASSES else ""
            lines.append(f"  {'':<16} per class: {' '.join(map(str, counts[:MAX_CLASSES]))}{more}")
    return lines
