"""``python -m fedmpi data partition``: show which client gets which part of a data set, and write the parts."""

import pathlib

import numpy as np

from fedmpi.data.imbalanced import ImbalancedBinary
from fedmpi.data.source import ACCOUNT, SILO_NAME, SPLITS, find_file, names_silos, open_source, silo_name
from fedmpi.data.text import Text, is_text
from fedmpi.ground.errors import UserError
from fedmpi.ground.text import printable_line
from fedmpi.prepare.commands.plot import check_plot, draw_class_counts, draw_sizes
from fedmpi.prepare.writer import check_writable, write_file

DEFAULT_CLIENTS = 10
MAX_CLASSES = 20  # columns of the table; with more classes, it has only the total of each client
MAX_CLIENTS = 50  # lines of the table
EPILOG = f"""further options are settings of fedmpi.train: --clients N (default: {DEFAULT_CLIENTS}), --partition NAME
and its settings, --seed, --data-dir, --config; python -m fedmpi.train --list partitions lists the
partitions, and python -m fedmpi.train --partition NAME --help shows the settings of one"""


def add_parser(commands):
    text = "show how a data set is partitioned among clients, and write one file per client"
    parser = commands.add_parser("partition", help=text, epilog=EPILOG)
    parser.set_defaults(run=run)
    parser.add_argument("data", help="data set, as --data of fedmpi.train; a text is cut into contiguous parts")
    text = "plot samples per client and class, or of a text the words per client"
    parser.add_argument("--plot", metavar="FILE", help=text)
    parser.add_argument("--write", metavar="PATTERN", help="write one file per client, like 'silo_{client}.h5'")


def run(options):
    """Print a table with one line per client; draw and write the parts if requested."""
    if options.plot:
        check_plot(options.plot)
    from fedmpi.training.config import read_command_line  # imports torch: the other commands start faster without it

    config = read_command_line(["--data", options.data, *options.settings])
    if isinstance(config, str):
        print(config)
        return
    if names_silos(options.data):
        raise UserError(f"{options.data}: is already one file per client: expected one file for all clients")
    if config.partition is not None and config.partition.redeal:
        raise UserError("partition.redeal = true: there is a split for every round, and none to show: leave it out")
    num_clients = config.data.clients or DEFAULT_CLIENTS
    paths = _silo_paths(options.write, num_clients) if options.write else None
    task = config.resolved["task"]["name"]
    path = None if options.data == "digits" else find_file(options.data, config.data.data_dir)
    if path is not None and task != "auc" and is_text(path):
        _partition_text(Text(path), num_clients, paths, options)
    elif config.partition is None:
        raise UserError(f"--task {task}: has no partition of samples, and {options.data} is not a text")
    else:
        _partition_samples(config, num_clients, paths, options)


def _silo_paths(pattern, num_clients):
    """The paths of the files to write, one per client."""
    if not names_silos(pattern):
        raise UserError(f"--write {pattern}: expected {{client}} in the name, like silo_{{client}}.h5")
    names = [silo_name(pattern, client, f"--write {pattern}") for client in range(num_clients)]
    if len(set(names)) < num_clients:
        raise UserError(f"--write {pattern}: gives several clients one file: expected {{client}} or {{client:03d}}")
    paths = [pathlib.Path(name) for name in names]
    for path in paths:
        check_writable(path)
    return paths


def _partition_samples(config, num_clients, paths, options):
    """Split what the task trains on: a version of the data set, if the task has its own."""
    whole = open_source(options.data, config.data.data_dir)
    source = config.task.version(whole, config.data.seed) if hasattr(config.task, "version") else whole
    parts = config.partition.split_source(source, num_clients, config.data.seed)
    labels = source.labels["train"]
    counts = np.array([np.bincount(labels[part], minlength=source.num_classes) for part in parts])
    names = config.partition.names(source, parts)
    _print_class_counts(counts, len(labels), names)
    if options.plot:
        title = f"{source.name}, {_describe(config.resolved['partition'])}, {num_clients} clients"
        draw_class_counts(options.plot, counts, title, names)
        print(f"plot: {options.plot}")
    if options.write:
        tests = _split_test_set(config.partition, source, parts)
        _write_silos(whole, [source.file_rows(part) for part in parts], tests, names, paths)
        print(f"written: {num_clients} files {options.write}")
        if isinstance(source, ImbalancedBinary):
            print("the files contain the imbalanced data: train on them with --task auc --task.removed_share 0")


def _describe(partition):
    """A partition's name and settings: 'dirichlet (concentration 0.3)'."""
    own = {key: value for key, value in partition.items() if key not in ("name", "min_samples", "redeal")}
    settings = {key: value for key, value in own.items() if value != ""}
    text = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in settings.items())
    return partition["name"] + (f" ({text})" if text else "")


def _print_class_counts(counts, num_samples, names):
    """Print the number of samples per client and class, `counts` [num_clients, num_classes], and the clients' names."""
    sizes = counts.sum(1)
    columns = counts if counts.shape[1] <= MAX_CLASSES else counts[:, :0]
    width = max(6, len(str(counts.max())) + 1)
    print(f"{'client':<8}{'samples':>9}" + "".join(f"{label:>{width}}" for label in range(columns.shape[1])))
    for client in range(min(len(counts), MAX_CLIENTS)):
        print(f"{client:<8}{sizes[client]:>9}" + "".join(f"{count or '.':>{width}}" for count in columns[client]),
              *([f" {printable_line(names[client])}"] if names else []))  # fmt: skip
    _print_rest(len(counts))
    print(f"samples per client: {sizes.min()} to {sizes.max()}, {sizes.sum()} of {num_samples} in total")


def _print_rest(num_clients):
    if num_clients > MAX_CLIENTS:
        print(f"... and {num_clients - MAX_CLIENTS} more")


def _split_test_set(partition, source, parts):
    """The test rows of each client: like its training rows, or dealt in turn if the test set lacks the column."""
    try:
        return partition.split_test_set(source, parts)
    except UserError as error:
        if f"test/{partition.column}" not in str(error):
            raise
        print(f"the test set has no column {partition.column}: its rows are given to the clients in turn")
        return [np.arange(client, len(source.labels["test"]), len(parts)) for client in range(len(parts))]


def _write_silos(source, parts, tests, names, paths):
    """Write one file per client, with the columns and attributes of the source, and the client's name."""
    columns = {split: source.columns(split) for split in SPLITS}
    for client, path in enumerate(paths):
        rows = {"train": parts[client], "test": tests[client]}
        splits = {f"{split}/images": source.read(split, rows[split]) for split in SPLITS}
        splits |= {f"{split}/labels": source.labels[split][rows[split]] for split in SPLITS}
        splits |= {f"{split}/{name}": v[rows[split]] for split in SPLITS for name, v in columns[split].items()}
        facts = {"dataset": source.name, "num_classes": source.num_classes, "mean": source.mean, "std": source.std}
        attributes = {key: value for key, value in source.attributes.items() if key != ACCOUNT}
        write_file(path, splits, attributes | facts | ({SILO_NAME: names[client]} if names else {}))


def _partition_text(text, num_clients, paths, options):
    """Cut a text into the contiguous parts that training uses."""
    parts, edges = text.parts("train", num_clients)
    sizes = np.diff(edges)
    print("client      words  bytes of training text")
    for client, (size, part) in enumerate(zip(sizes[:MAX_CLIENTS], parts)):
        print(f"{client:<8}{size:>9}{len(part):>11}")
    _print_rest(num_clients)
    print(f"words per client: {sizes.min()} to {sizes.max()}, {sizes.sum()} in total")
    if options.plot:
        draw_sizes(options.plot, sizes, "words", f"{text.path.stem}, contiguous parts, {num_clients} clients")
        print(f"plot: {options.plot}")
    if options.write:
        parts = {split: text.parts(split, num_clients)[0] for split in SPLITS}
        for client, path in enumerate(paths):
            splits = {f"{split}/text": parts[split][client] for split in SPLITS}
            write_file(path, splits, {"dataset": text.path.stem})
        print(f"written: {num_clients} files {options.write}")
