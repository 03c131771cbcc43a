"""Data sets: make their files, look into them, see and write splits.

python -m fedmpi.data list
python -m fedmpi.data prepare NAME [--from PATH]
python -m fedmpi.data show FILE
python -m fedmpi.data partition DATA [--plot FILE.png] [--write 'silo_{client}.h5'] [settings of the training]
"""

import argparse
import os
import pathlib
import signal
import sys

import numpy as np

from fedmpi.data.download import checksum
from fedmpi.data.imbalanced import ImbalancedBinary
from fedmpi.data.official import OFFICIAL
from fedmpi.data.prepare import prepare, write
from fedmpi.data.source import SPLITS, data_sets, find_file, names_silos, open_source, readable, silo_name
from fedmpi.data.text import Text, is_text
from fedmpi.errors import UserError

WIDEST_TABLE = 20  # classes; of more only the totals are printed
LONGEST_TABLE = 50  # clients
PARTITION_HELP = """further settings are those of the training: --clients N (default: 10), --partition NAME and
its settings, --seed, --data-dir, --config; python -m fedmpi.train --list partitions names the
partitions, --partition NAME --help their settings"""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line like all others."""

    def error(self, message):
        raise UserError(f"{message} ({self.prog} --help)")


def _parser():
    parser = _Parser(
        prog="python -m fedmpi.data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    folder = {"default": os.environ.get("FEDMPI_DATA") or ".", "help": "folder of the data files (FEDMPI_DATA)"}
    one = commands.add_parser("list", help="the known data sets, and which are here")
    one.add_argument("--data-dir", **folder)
    one = commands.add_parser("prepare", help="make the HDF5 file of a data set")
    one.add_argument("name", help=f"{', '.join(OFFICIAL)}, or a name for your own data")
    one.add_argument("--data-dir", **folder)
    one.add_argument(
        "--from", dest="origin", help="official files, or your own: x.npz, x.csv, folder of images or texts"
    )
    one.add_argument("--mirror", help="URL of a folder that holds the official files, instead of their own place")
    one.add_argument("--force", action="store_true", help="make the file again if it is there")
    one.add_argument("--test-share", type=float, default=0.2, help="of one's own data where they are not split (0.2)")
    one.add_argument("--seed", type=int, default=0, help="of the choice of that share")
    one.add_argument("--label", help="CSV: column of the label (the last)")
    one.add_argument("--size", type=int, help="images: bring them to this many pixels a side")
    one = commands.add_parser("show", help="what a data file holds")
    one.add_argument("file", help="path of a file, or name of one in --data-dir")
    one.add_argument("--data-dir", **folder)
    one = commands.add_parser("partition", help="who would hold what", epilog=PARTITION_HELP)
    one.add_argument("data", help="data set, as for training; a text is cut into contiguous parts")
    one.add_argument("--plot", metavar="FILE", help="draw clients by classes; of a text the words of each client")
    one.add_argument("--write", metavar="PATTERN", help="write one file per client, like 'silo_{client}.h5'")
    return parser


def _list(options):
    for name, official in OFFICIAL.items():
        path = pathlib.Path(options.data_dir) / f"{name}.h5"
        here = f"{path} ({path.stat().st_size:,} bytes)" if path.is_file() else "not here"
        print(f"{name:<14} {official.about}\n{'':<14} {here}")
    known = {f"{name}.h5" for name in OFFICIAL}
    for path in sorted(pathlib.Path(options.data_dir).glob("*.h5")):
        if path.name not in known:
            print(f"{path.stem:<14} {_in_short(path)}\n{'':<14} {path} ({path.stat().st_size:,} bytes)")
    print(f"{'digits':<14} 1,438 + 359 handwritten digits of 8x8 pixels, 10 classes\n{'':<14} embedded in scikit-learn")


def _in_short(path):
    """A line about what a file holds."""
    try:
        with readable(path) as file:
            found = [f"{name} {list(data.shape)}" for name, data in data_sets(file)]
    except UserError:
        return "cannot be read as HDF5"
    return ", ".join(name for name in found if "/labels " not in name) or "nothing"


def _prepare(options):
    _show_file(prepare(options.name, pathlib.Path(options.data_dir), options))


def _show(options):
    _show_file(find_file(options.file, options.data_dir))


def _show_file(path):
    print(f"{path}: {path.stat().st_size:,} bytes, sha256 {checksum(path, 'sha256')}")
    with readable(path) as file:
        lines = _description(file)
    print("\n".join(lines))


def _description(file):
    """Lines about what an open HDF5 file holds."""
    lines = []
    for name, value in file.attrs.items():
        text = np.array2string(np.asarray(value), precision=4, threshold=10) if np.ndim(value) else value
        lines.append(f"  {name} = {text}")
    for name, data in data_sets(file):
        chunks = f", chunks {list(data.chunks)}, {data.compression or 'plain'}" if data.chunks else ""
        lines.append(f"  {name:<16} {data.dtype} {list(data.shape)}{chunks}")
        if name.endswith("/labels") and data.ndim == 1 and data.dtype.kind in "iu" and len(data):
            lines.append(f"  {'':<16} per class: {_few(np.bincount(data[:].astype(np.int64)))}")
    return lines


def _few(numbers, most=20):
    text = " ".join(map(str, numbers[:most]))
    return text if len(numbers) <= most else f"{text} ... ({len(numbers)} classes)"


def _partition(options, settings):
    from fedmpi.config.build import read_command_line  # imports torch: only where it is needed

    config = read_command_line(["--data", options.data, *settings])
    if isinstance(config, str):
        print(config)
        return
    if names_silos(options.data):
        raise UserError(f"{options.data}: silo files are split already")
    num_clients = config.run.clients or 10
    paths = _silo_paths(options.write, num_clients) if options.write else None
    task = config.resolved["task"]["name"]
    if task != "auc" and options.data != "digits" and is_text(find_file(options.data, config.run.data_dir)):
        _partition_text(Text(find_file(options.data, config.run.data_dir)), num_clients, paths, options)
        return
    if config.partition is None:
        raise UserError(f"--task {task}: splits no samples, and {options.data} is no text")
    whole = open_source(options.data, config.run.data_dir)
    source = config.task.version(whole, config.run.seed) if hasattr(config.task, "version") else whole
    parts = config.partition.of(source, num_clients, config.run.seed)
    _report(source, parts)
    if options.plot:
        from fedmpi.data.plot import counts_of, draw

        draw(
            options.plot,
            counts_of(parts, source.labels["train"], source.num_classes),
            f"{source.name}, {_in_words(config.resolved['partition'])}, {num_clients} clients",
        )
        print(f"drawn: {options.plot}")
    if options.write:
        _write_silos(whole, [source.file_rows(part) for part in parts], paths)
        print(f"written: {num_clients} files {options.write}")
        if isinstance(source, ImbalancedBinary):
            print("their classes are those of the data set; train with --task auc --task.removed_share 0")


def _in_words(partition):
    """A partition's name and settings: 'dirichlet (concentration 0.3)'."""
    settings = {key: value for key, value in partition.items() if key not in ("name", "min_samples") and value != ""}
    words = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in settings.items())
    return partition["name"] + (f" ({words})" if words else "")


def _partition_text(text, num_clients, paths, options):
    """Contiguous parts as training cuts them; drawn and written where asked for."""
    parts, edges = text.parts("train", num_clients)
    sizes = np.diff(edges)
    print("client      words  bytes of text for training")
    for client in list(range(num_clients))[:LONGEST_TABLE]:
        print(f"{client:<8}{sizes[client]:>9}{len(parts[client]):>11}")
    if num_clients > LONGEST_TABLE:
        print(f"... and {num_clients - LONGEST_TABLE} more")
    print(f"words per client: {sizes.min()} to {sizes.max()}, {sizes.sum()} in all")
    if options.plot:
        from fedmpi.data.plot import draw_sizes

        draw_sizes(options.plot, sizes, "words", f"{text.path.stem}, contiguous parts, {num_clients} clients")
        print(f"drawn: {options.plot}")
    if options.write:
        _write_texts(text, paths, options.write)


def _write_texts(text, paths, pattern):
    """One file per client; the test text is cut in the same way."""
    parts = {split: text.parts(split, len(paths))[0] for split in SPLITS}
    for client, path in enumerate(paths):
        splits = {f"{split}/text": of_clients[client] for split, of_clients in parts.items()}
        write(path, splits, {"dataset": text.path.stem})
    print(f"written: {len(paths)} files {pattern}")


def _report(source, parts):
    from fedmpi.data.plot import counts_of, table

    counts = counts_of(parts, source.labels["train"], source.num_classes)
    lines = table(counts if source.num_classes <= WIDEST_TABLE else counts.sum(1, keepdims=True)).splitlines()
    print("\n".join(lines[: LONGEST_TABLE + 1]))
    if len(lines) > LONGEST_TABLE + 1:
        print(f"... and {len(lines) - LONGEST_TABLE - 1} more")
    sizes = counts.sum(1)
    print(f"samples per client: {sizes.min()} to {sizes.max()}, {sizes.sum()} of {len(source.labels['train'])} in all")


def _silo_paths(pattern, num_clients):
    """The files to write, one per client.

    Raises:
        UserError: if the pattern names no client, or the same file twice.
    """
    if not names_silos(pattern):
        raise UserError(f"--write {pattern}: expected {{client}} in the name, like silo_{{client}}.h5")
    names = [silo_name(pattern, client, f"--write {pattern}") for client in range(num_clients)]
    if len(set(names)) < num_clients:
        raise UserError(f"--write {pattern}: names one file for several clients: expected {{client}} or {{client:03d}}")
    return [pathlib.Path(name) for name in names]


def _write_silos(source, parts, paths):
    """One file per client, with the columns and attributes of the source; the test set is dealt in turn."""
    num_test, columns = len(source.labels["test"]), source.columns()
    for client, (part, path) in enumerate(zip(parts, paths)):
        rows = {"train": part, "test": np.arange(client, num_test, len(parts))}
        splits = {f"{split}/images": source.read(split, rows[split]) for split in SPLITS}
        splits |= {f"{split}/labels": source.labels[split][rows[split]] for split in SPLITS}
        splits |= {f"train/{name}": values[part] for name, values in columns.items()}
        facts = {"dataset": source.name, "num_classes": source.num_classes, "mean": source.mean, "std": source.std}
        write(path, splits, source.attributes | facts)


def main(arguments=None):
    """Entry point; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        options, rest = _parser().parse_known_args(arguments)
        if options.command == "partition":
            _partition(options, rest)
        elif rest:
            raise UserError(f"unknown option {rest[0]} (python -m fedmpi.data {options.command} --help)")
        else:
            {"list": _list, "prepare": _prepare, "show": _show}[options.command](options)
    except UserError as error:
        print(f"fedmpi: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # "| head" is no error
    sys.exit(main())
