"""``python -m fedmpi data show``: what a data file contains."""

import json
import sys

import numpy as np

from fedmpi.data.source import ACCOUNT, find_file
from fedmpi.ground.files.checksum import checksum
from fedmpi.ground.files.hdf5 import data_sets, readable
from fedmpi.ground.text import printable_json, printable_line, short
from fedmpi.prepare.commands import add_data_dir

MANY = 30  # columns or classes that the closing block names
MAX_CLASSES = 20  # classes whose numbers of samples are printed


def add_parser(commands):
    parser = commands.add_parser("show", help="show what a data file contains")
    parser.set_defaults(run=run)
    parser.add_argument("file", help="path of a file ending in .h5, or the name of one in the data folder")
    parser.add_argument("--json", action="store_true", help="print what data prepare decided as JSON")
    add_data_dir(parser)


def run(options):
    path = find_file(options.file, options.data_dir, given="show ")
    show_account(path, as_json=True) if options.json else show_file(path)


def show_account(path, as_json=False):
    """Print what `data prepare` decided about a file; everything in the file, if it is an official data set or a text.

    Raises:
        UserError: if it cannot be read.
    """
    with readable(path) as file:
        account = json.loads(file.attrs.get(ACCOUNT, "null"))
    if as_json:
        print(printable_json(account, indent=1))
    elif account is None:
        show_file(path)
    else:
        print(f"{printable_line(path)}: {path.stat().st_size:,} bytes, sha256 {checksum(path)}")
        print("\n".join(map(printable_line, _lines(account, MANY))))


def _lines(account, most):
    """What was decided; of each list the first `most` entries."""

    def shortened(words):
        words = [str(word) for word in words]
        return ", ".join(words[:most]) + (f" and {len(words) - most} more (data show)" if len(words) > most else "")

    rows, classes = account["rows"], account["classes"]
    of = f" of {account['label']}" if "label" in account else ""
    lines = [
        f"  rows: {rows['train']} to train, {rows['test']} to test ({account['test_rows']})",
        f"  {len(classes)} classes{of}: " + shortened(f"{name} ({count})" for name, count in classes.items()),
    ]
    if "features" in account:
        features = [f"{name} ({kind})" for name, kind in account["features"].items()]
        lines.append(f"  features, {len(features)} columns: {shortened(features)}")
    lines += [f"  stored, not learned from: {shortened(account['stored'])}"] if account.get("stored") else []
    left_out = [f"  not used: {name}: {why}" for name, why in account.get("not_used", {}).items()]
    lines += left_out[:most] + ([f"  not used: {len(left_out) - most} more (data show)"] if left_out[most:] else [])
    lines += [f"  assumed: {'; '.join(account['assumed'])}"] if account.get("assumed") else []
    lines += [f"  note: {line}" for line in account.get("notes", ())]
    return [*lines, f"  the same again: {account['command']}"]


def show_file(path):
    """Print size, checksum, attributes and data sets of an HDF5 file.

    Raises:
        UserError: if it cannot be read.
    """
    print(f"{printable_line(path)}: {path.stat().st_size:,} bytes, sha256 {checksum(path)}")
    with readable(path) as file:
        lines = _describe(file)
    print("\n".join(map(printable_line, lines)))


def _describe(file):
    """One line per attribute and data set of an open HDF5 file, and one more for labels."""
    lines = []
    if ACCOUNT in file.attrs:
        lines += _lines(json.loads(file.attrs[ACCOUNT]), sys.maxsize)
    for name, value in file.attrs.items():
        if name == ACCOUNT:
            continue
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
