"""Trains on files and Datasets that differ by rank, and looks at every message and every shared segment.

usage: watches_data.py FOLDER CLIENTS_PER_RANK

Each rank's rows contain numbers that occur nowhere else, and its files words. A rank searches what it sends, and what
it writes into memory that others see, for its own ones. Prints a line per case: its name, what left its rank ("rows",
"words", "nothing"), and how it ended; and "done" at the end.
"""

import os
import pathlib
import shutil
import sys

import h5py
import numpy as np
import torch
from mpi4py import MPI
from torch.utils.data import Dataset, TensorDataset

import fedmpi
import fedmpi.data.partitions
from fedmpi.cli.evaluate.__main__ import main as evaluate
from fedmpi.comm.sums import window
from fedmpi.data.partitions.base import Partition
from fedmpi.ground.registry import known

SENDING = ("send", "cast", "gather", "scatter", "alltoall", "reduce", "scan")
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
NUM_ROWS, NUM_TESTS = 120, 40
WORD = f"Xq{'ABCD'[RANK]}zjk"  # begins this rank's words


class Watch:
    """What this rank has let go since `reset`: "rows" and "words" of its own."""

    def __init__(self):
        self.patterns, self.found, self.segments = np.empty(0, np.uint64), set(), []

    def reset(self, rows):
        """`rows`: list of arrays of this rank's own samples; any eight bytes that are in a row are searched for."""
        self.patterns = np.unique(np.concatenate([patterns_of(part) for part in rows]))
        self.found.clear()
        self.segments.clear()

    def look(self, data):
        """Search bytes, and what they are if they are float64 numbers, as small messages are sent."""
        self._search(data)
        if len(data) % 8 == 0 and len(data):
            numbers = np.frombuffer(data, np.float64)
            with np.errstate(all="ignore"):
                self._search(numbers.astype(np.float32).tobytes())
                if ((numbers >= 0) & (numbers < 256) & (numbers % 1 == 0)).all():
                    self._search(numbers.astype(np.uint8).tobytes())

    def _search(self, data):
        if WORD.encode() in data:
            self.found.add("words")
        for offset in (0, 4):  # rows begin at whole float32 numbers
            whole = data[offset : offset + (len(data) - offset) // 8 * 8]
            if np.isin(np.frombuffer(whole, np.uint64), self.patterns).any():
                self.found.add("rows")

    def look_at_segments(self):
        for memory in self.segments:
            self.look(bytes(memory))


def patterns_of(rows):
    """Eight bytes from the beginning and eight from the end of each row that is not constant."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    edges = [np.ascontiguousarray(flat[:, edge]) for edge in (slice(8), slice(-8, None))]
    return np.concatenate([edge.view(np.uint64)[:, 0] for edge in edges])


WATCH = Watch()


def bytes_of(argument):
    """The bytes of an argument of MPI's functions: a buffer, or a list with one."""
    argument = argument[0] if isinstance(argument, list | tuple) and argument else argument
    try:
        return memoryview(argument).cast("B").tobytes()
    except TypeError:
        return b""


class Watched(MPI.Intracomm):
    """A communicator that shows what is given to it to send."""

    def Split(self, *arguments, **options):
        return watched(super().Split(*arguments, **options))

    def Split_type(self, *arguments, **options):
        return watched(super().Split_type(*arguments, **options))


def watched(comm):
    return Watched(comm) if comm != MPI.COMM_NULL else comm


def watch_method(name):
    def method(self, *arguments, **options):
        WATCH.look_at_segments()
        is_received = "bcast" in name.lower() and self.rank != 0  # fedmpi's are all from rank 0
        sent = [argument for argument in arguments if argument is not MPI.IN_PLACE][:1]
        for argument in sent if not is_received else ():
            WATCH.look(bytes_of(argument))
        return getattr(MPI.Intracomm, name)(self, *arguments, **options)

    setattr(Watched, name, method)


for name in dir(MPI.Intracomm):
    if name[0].isupper() and any(kind in name.lower() for kind in SENDING):
        watch_method(name)

map_together = window._map_together


def mapped(node, nbytes):
    WATCH.segments.append(map_together(node, nbytes))
    return WATCH.segments[-1]


window._map_together = mapped


def numbers(seed, shape, kind):
    rng = np.random.default_rng(seed)
    return rng.integers(1, 255, shape, np.uint8) if kind == "images" else rng.standard_normal(shape).astype(np.float32)


def write(path, seed, kind, word, masks=False):
    """A file of labelled samples; its rows, [n, ...]."""
    shape = (4, 4) if kind == "images" else (6,)
    rows = {split: numbers([seed, n], (n, *shape), kind) for split, n in (("train", NUM_ROWS), ("test", NUM_TESTS))}
    with h5py.File(path, "w") as file:
        file.attrs["num_classes"] = 2
        file.attrs["dataset"] = word
        for split, values in rows.items():
            file.create_dataset(f"{split}/images", data=values, chunks=(10, *shape))
            file[f"{split}/labels"] = np.arange(len(values)) % 2
            file[f"{split}/{word}"] = np.arange(len(values)) % 3
            file[f"{split}/group"] = np.arange(len(values)) % 4
            if masks:
                file[f"{split}/masks"] = (values > 128).astype(np.uint8)
    return list(rows.values())


def write_text(path, word):
    text = " ".join(f"{word}{number % 50}" for number in range(400)) + "\n"
    with h5py.File(path, "w") as file:
        for split in ("train", "test"):
            file[f"{split}/text"] = np.frombuffer(text.encode(), np.uint8)


class Lazy(Dataset):
    """Items that are made when they are read."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return torch.from_numpy(self.rows[index]), int(index % 2)


class Noisy(Lazy):
    """Each reading gives other items."""

    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return inputs + float(np.random.default_rng().normal()), label


class Bits(Lazy):
    """Items with two labels each."""

    def __getitem__(self, index):
        return torch.from_numpy(self.rows[index]), torch.tensor([index % 2, 1.0])


class Own(fedmpi.Task):
    """Every rank has rows of its own."""

    metrics = {"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).double().mean()}
    num_classes = 2
    model = "mlp"
    rows = tests = None
    is_common = True

    def train(self, client, num_clients):
        return Lazy(self.rows)

    def test(self):
        return Lazy(self.tests) if self.is_common else None

    def test_of(self, client, num_clients):
        return None if self.is_common else Lazy(self.tests)

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


class OwnTests(Own):
    is_common = False


def case(title, rows, **settings):
    """Train two rounds, and say what has left this rank; returns the parameters, if there are any."""
    WATCH.reset(rows)
    ended, run = "trained", None
    common = {"rounds": 2, "local_steps": 1, "algorithm": "fedavg", "threads": 1, "out": OUT, "timeout": 60}
    try:
        run = fedmpi.train(comm=Watched(MPI.COMM_WORLD), **{"clients": SIZE * PER_RANK, **common, **settings})
    except fedmpi.UserError as error:
        ended = str(error)
    WATCH.look_at_segments()
    everyone = MPI.COMM_WORLD.gather((sorted(WATCH.found), ended))
    if RANK == 0:
        ends = {end for _, end in everyone if "which that rank prints" not in end}  # others may have met no error
        assert len(ends) == 1, everyone
        left = sorted({what for found, _ in everyone for what in found})
        print(f"{title}: {' and '.join(left) or 'nothing'}: {ends.pop()}", flush=True)
    return [] if run is None or run.models else [value.clone() for value in run.model.parameters()]


folder, PER_RANK = pathlib.Path(sys.argv[1]), int(sys.argv[2])
OUT, here = str(folder / "runs"), folder / f"rank{RANK}"
here.mkdir(parents=True, exist_ok=True)
os.chdir(here)

# The watch works: of one and the same file, rows are exchanged.
common_rows = write("same.h5", 99, "table", "one")
case("same table", common_rows, data="same.h5", partition="iid", model="mlp", name="base")

own_tables, own_images = (write(f"{kind}.h5", RANK, kind, WORD, kind == "images") for kind in ("table", "images"))
write_text("text.h5", WORD)
for name in known(fedmpi.data.partitions, Partition):
    case(f"table, {name}", own_tables, data="table.h5", model="mlp", partition={"name": name})
case("table, dealt", own_tables, data="table.h5", model="mlp", partition={"name": "iid", "redeal": True})
convolution = {"name": "torch.nn.Conv2d", "in_channels": 1, "out_channels": 2, "kernel_size": 1}
case("images", own_images, data="images.h5", partition="iid", model="mlp")
case("auc", own_tables, task="auc", data="table.h5", model="mlp")
case("segmentation", own_images, task="segmentation", data="images.h5", model=convolution)
case("text", own_tables, task="language", data="text.h5", model={"name": "lstm", "hidden": 4})
case("private", own_tables, data="table.h5", model="mlp", private="*", partition="iid")
case("a folder of each rank", own_tables, data="table", data_dir=str(here), partition="iid", model="mlp")

# The same file, but it shows rows of another one, which differs; and a file that only rank 0 has.
if RANK == 0:
    with h5py.File("view.h5", "w") as file, h5py.File("table.h5") as table:
        for split in ("train", "test"):
            layout = h5py.VirtualLayout(table[f"{split}/images"].shape, np.float32)
            layout[:] = h5py.VirtualSource("table.h5", f"{split}/images", layout.shape)
            file.create_virtual_dataset(f"{split}/images", layout)
            file[f"{split}/labels"] = table[f"{split}/labels"][:]
    shutil.copy("table.h5", "lacking.h5")
MPI.COMM_WORLD.barrier()
if RANK:
    shutil.copy(folder / "rank0" / "view.h5", "view.h5")
case("view", own_tables, data="view.h5", model="mlp", partition="iid")
case("lacking", own_tables, data="lacking.h5", model="mlp", partition="iid")

# A trained model that one rank has another one of.
shutil.copytree(folder / "runs" / "base", "base")
for name in ("model.h5", "model.safetensors") if RANK else ():
    with open(f"base/{name}", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([file.read(1)[0] ^ 1]))
case("init", common_rows, data="same.h5", model="mlp", init="base/model.safetensors")
case("attack", common_rows, task={"name": "attack", "classifier": "base"})

own_tests = [TensorDataset(torch.from_numpy(own_tables[1]), torch.arange(NUM_TESTS) % 2), Lazy(own_tables[1])]
for kind, test in zip(("tensors", "items"), own_tests):
    case(f"Datasets, {kind}", own_tables, data=lambda k: Lazy(own_tables[0]), test_data=test, model="mlp")
case("targets", own_tables, task="multilabel", data=lambda k: Bits(own_tables[0]), test_data=Bits(own_tables[1]))
case("noisy tests", own_tables, data=lambda k: Lazy(own_tables[0]), test_data=Noisy(common_rows[1]), model="mlp")
Own.rows, Own.tests = own_tables
case("task", own_tables, task=Own())
case("task, own tests", own_tables, task=OwnTests())

# Files of their own, by either way to say so: no row leaves its rank, and both give the same bits.
for client in range(RANK * PER_RANK, RANK * PER_RANK + PER_RANK):
    shutil.copy("table.h5", f"client_{client}.h5")
    shutil.copy("images.h5", f"image_{client}.h5")
    shutil.copy("text.h5", f"text_{client}.h5")
compared = {
    "files": ("table.h5", "client", {"model": "mlp", "holdout": 0.2, "algorithm": "fafed"}),
    "private": ("table.h5", "client", {"model": "mlp", "private": "*"}),
    "pooled": ("table.h5", "client", {"model": "mlp", "baselines": "pooled", "transport": "allreduce"}),
    "auc": ("table.h5", "client", {"model": "mlp", "task": "auc"}),
    "images": ("images.h5", "image", {"model": "mlp"}),
    "segmentation": ("images.h5", "image", {"task": "segmentation", "model": convolution}),
    "text": ("text.h5", "text", {"task": "language", "model": {"name": "lstm", "hidden": 4}}),
}
for name, (path, stem, settings) in compared.items():
    rows = own_images if path == "images.h5" else own_tables
    by_pattern = case(f"own {name}, by pattern", rows, data=f"{stem}_{{client}}.h5", **settings)
    own = case(f"own {name}", rows, data=path, own_files=True, **settings)
    if PER_RANK == 1:
        assert all(map(torch.equal, by_pattern, own)) and len(by_pattern) == len(own)

if PER_RANK == 1:  # a run on own files goes on with the same bits
    settings = {"data": "table.h5", "own_files": True, "model": "mlp", "algorithm": "fafed"}
    whole = case("own, at once", own_tables, rounds=4, **settings)
    case("own, first half", own_tables, rounds=2, checkpoint_every=1, name="half", **settings)
    resumed = case("own, second half", own_tables, rounds=4, algorithm="fafed", resume=f"{OUT}/half")
    assert all(map(torch.equal, whole, resumed))
if RANK == 0:
    print("done", flush=True)
if PER_RANK == 1:
    evaluate([str(folder / "runs" / "half")])  # ends the program
