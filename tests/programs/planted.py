"""Plants a name in a silo's data, goes through a door, and looks where the name is then: planted.py FOLDER RANK CASE

RANK: the one that plants, or "all"; each plants another name, and writes what it prints into a file of its own. Prints
a line of JSON for each case: where a name was seen outside of its silo, and how many ranks met an error.
"""

import json
import os
import pathlib
import sys
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "machinery"))

import h5py
import numpy as np
import recorder as recording
import torch
from torch.utils.data import TensorDataset

import fedmpi
from fedmpi.cli.doctor.__main__ import main as doctor
from fedmpi.cli.train import main as train
from fedmpi.ground.errors import UserError
from fedmpi.prepare.__main__ import main as data

warnings.simplefilter("ignore")
recorder = recording.install(keeps=True)
from mpi4py import MPI  # noqa: E402

OUT, RAW = pathlib.Path(sys.argv[1]), MPI.Intracomm(MPI.COMM_WORLD)
RANK, SIZE = RAW.rank, RAW.size
PLANTS = sys.argv[2] in ("all", str(RANK))
NAME = f"plAnted-{RANK}-nAme"
ROWS = 40
here = OUT  # folder of the case


def silo(path=None):
    return here / f"rank{RANK}" / (path or "silo.csv")


def pattern(ending):
    return str(here / f"rank{{client}}/silo.{ending}")


def table(change=None, header=None, ending="\n"):
    """Write this rank's table; `change(rows)` plants something. rows: lists of text."""
    change, header, ending = (change, header, ending) if PLANTS else (None, None, "\n")
    stream = np.random.default_rng(RANK)
    rows = [[f"{stream.normal(60, 9):.1f}", "ab"[k % 2], ("no", "yes")[k // 2 % 2]] for k in range(ROWS)]
    if change:
        change(rows)
    lines = [header or "age,ward,ill", *(",".join(row) for row in rows)]
    silo().write_bytes(ending.join([*lines, ""]).encode("latin-1"))


def statistics(*words, **planted):
    def go():
        table(**planted)
        out = ("--out", str(here / "columns.json"))
        data(["statistics", pattern("csv"), "--label", "ill", "--one-hot", "ward", *out, *words])

    return go


def field(column, value, row=7):
    def change(rows):
        rows[row][column] = value

    return change


def file(change=None, attributes=None):
    """Write this rank's HDF5 file."""
    stream = np.random.default_rng(RANK)
    with h5py.File(silo("silo.h5"), "w") as written:
        written.attrs.update({"num_classes": 2, **(attributes if PLANTS and attributes else {})})
        for split in ("train", "test"):
            labels = np.arange(ROWS) % 2
            written[f"{split}/images"] = (stream.normal(size=(ROWS, 3)) + labels[:, None]).astype("f4")
            written[f"{split}/labels"] = labels
        if change and PLANTS:
            change(written)


COMMON = {"algorithm": "fedavg", "rounds": 2, "local_steps": 2, "batch_size": 8, "threads": 1}


def run_of(*words):
    """A run of fedmpi.train by its command line."""
    common = (f"--{name}={value}" for name, value in {**COMMON, "checkpoint_every": 1}.items())
    train([*common, "--out", str(here), "--name", "run", "--data", pattern("h5"), *words])


def check():
    doctor(["--out", str(here), "--data", pattern("h5")])


def training(*words, door=run_of, **planted):
    def go():
        file(**planted)
        door(*words)

    return go


def texts(*words, of="train", **options):
    """Texts with a planted word; `options`: how it stands there."""

    def go():
        some = " ".join(np.random.default_rng(RANK).choice([f"word{k}" for k in range(20)], 400)) + " "
        word = options.get("as_it_stands", "{}").format(NAME).encode("latin-1")
        with h5py.File(silo("silo.h5"), "w") as written:
            for split in ("train", "test"):
                planted = [word] * options.get("times", 1) if split == of and PLANTS else []
                written[f"{split}/text"] = np.frombuffer(some.encode() + b" ".join(planted), np.uint8)
        run_of("--task", "language", "--task.bptt", "5", *words)

    return go


def own(**members):
    """A task of the user's own."""

    def go():
        def loss(model, batch):
            return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

        def samples(client, number):
            return TensorDataset(torch.randn(20, 3), torch.arange(20) % 2)

        task = fedmpi.Task.of("Own", **{"loss": loss, "train": samples, **members})()
        model = torch.nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.zero_(), model.bias.zero_()
        fedmpi.train(**COMMON, task=task, model=model, out=str(here), name="run")

    return go


def fails(*_):
    if not PLANTS:
        return {}
    raise UserError(f"patient {NAME} has no label")


def breaks(*_):
    if not PLANTS:
        return {}
    raise ValueError(f"{NAME} is no number")


def share(outputs, targets):
    breaks()
    return 1.0


def datasets(item):
    def go():
        sets = [[(torch.zeros(3), k % 2) for k in range(9)] + [item] * PLANTS for _ in range(SIZE)]
        fedmpi.train(**COMMON, data=sets, model=torch.nn.Linear(3, 2), out=str(here), name="run")

    return go


def own_loop(evaluate):
    def go():
        model = torch.nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.zero_(), model.bias.zero_()
        record = fedmpi.Recording(here / "run", evaluate=evaluate)
        fed = fedmpi.average(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1, record=record)
        for _ in range(2):
            model(torch.ones(4, 3)).sum().backward()
            fed.step()
        fed.finish()

    return go


def named(**attributes):
    return {"attributes": attributes}


def further(written):
    """Data sets of names that nobody asks for, and a lack of one."""
    written[NAME] = np.zeros(3)
    del written["train/labels"]


def not_finite(written):
    written[f"train/{NAME}"] = np.zeros(ROWS)
    written["train/images"][5, 1] = np.nan


CODE = 4017.250 + RANK  # a number that a message could quote
CASES = {
    "category": statistics(change=field(1, NAME)),
    "category of many rows": statistics(change=lambda rows: [field(1, NAME, row)(rows) for row in range(9)]),
    "class": statistics(change=field(2, NAME)),
    "column": statistics(header=f"{NAME},ward,ill"),
    "column twice": statistics(header=f"{NAME},{NAME},ill"),
    "label's column": statistics(header=f"age,ward,{NAME}"),
    "title": statistics(ending=f"\n{NAME}\n"),
    "not a number": statistics(change=field(0, NAME)),
    "too large": statistics(change=field(0, f"{CODE}e99")),
    "no date": statistics("--date", "age", change=field(0, NAME)),
    "further field": statistics(change=field(2, f"no,{NAME}")),
    "character NUL": statistics(change=field(1, f"{NAME}\0")),
    "no class": statistics(change=lambda rows: (field(1, NAME)(rows), field(2, "")(rows))),
    "quote": statistics(change=field(1, f'"{NAME}')),
    "letters": statistics(change=field(1, f"{NAME}\xe9")),
    "number with a unit": statistics(change=field(0, f"60 {NAME}")),
    "class that is a number": statistics(change=field(2, f"{CODE}")),
    "feature names": training(**named(feature_names=["a", "b", NAME])),
    "class names": training(**named(class_names=["a", NAME])),
    "class names of statistics": lambda: (file(**named(class_names=["a", NAME])), data(["statistics", pattern("h5")])),
    "columns": training(**named(columns=json.dumps({"missing": "refuse", "classes": ["a", NAME], "columns": {}}))),
    "columns that are none": training(**named(columns=NAME)),
    "data set": training(**named(dataset=NAME)),
    "mean": training(**named(mean=NAME)),
    "number of classes": training(**named(num_classes=NAME)),
    "other attribute": training(**named(source=NAME, account=json.dumps({"from": NAME}), id_columns=[NAME])),
    "names in the file": training(change=further),
    "names in the file, by doctor": training(door=check, change=further),
    "not finite": training(change=not_finite),
    "not finite, by doctor": training(door=check, change=not_finite),
    "metrics": training("--task.metrics", "f1,auroc,confusion", "--baselines", "local"),
    "word": texts(),
    "word of many places": texts(times=30),
    "word of the test": texts(of="test"),
    "word with signs": texts(as_it_stands="({}),"),
    "word that is no UTF-8": texts(as_it_stands="\xe9{}\xff"),
    "word with holdout": texts("--holdout", "0.2"),
    "word and own layers": texts("--least", "2", "--private", "*"),
    "class names of a task": own(class_names=["a", NAME if PLANTS else "b"]),
    "constant of a task": own(metrics={"share": lambda outputs, targets, of=NAME: 1.0}, outputs="scores"),
    "default of a loss": own(loss=lambda model, batch, of=(NAME,): model(batch[0]).sum()),
    "error of a task's data": own(train=fails),
    "error of a task's test data": own(test_of=fails),
    "error of a metric": own(metrics={"share": share}),
    "items": datasets((torch.zeros(3), NAME)),
    "items of another shape": datasets((NAME, 1)),
    "error of an evaluation": own_loop(breaks),
    "error of an evaluation's own": own_loop(fails),
    # What the table says: the recorder has to see it.
    "name of the silo": training(**named(silo=NAME)),
    "word with --least 1": texts("--least", "1"),
}


def outside(name):
    """Where the name of another silo is: lines; of all ranks, on rank 0."""
    case = OUT / f"case-{name.replace(' ', '-')}"
    planted = [f"plAnted-{rank}-nAme" for rank in range(SIZE)] + [f"{4017.250 + rank}" for rank in range(SIZE)]
    found = {f"sent as {kind}" for kind, content in recorder.contents for word in planted if word.encode() in content}
    printed = (case / f"printed-{RANK}.txt").read_bytes()
    others = [word.encode() for k, word in enumerate(planted) if k % SIZE != RANK]
    found |= {f"printed by rank {RANK}" for word in others if word in printed}
    return sorted(found)


def in_files(name):
    """Files of the run folder, and that of columns, that have a name."""
    case = OUT / f"case-{name.replace(' ', '-')}"
    paths = [path for path in [*(case / "run").rglob("*"), case / "columns.json"] if path.is_file()]
    return [path.name for path in paths if b"plAnted" in path.read_bytes() or "plAnted" in path.name]


for name in sys.argv[3:] or CASES:
    here = OUT / f"case-{name.replace(' ', '-')}"
    (here / f"rank{RANK}").mkdir(parents=True)
    before = [os.dup(1), os.dup(2)]
    with open(here / f"printed-{RANK}.txt", "wb") as printed:
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
    has_error = False
    recorder.clear()
    try:
        CASES[name]()
    except (UserError, SystemExit) as error:
        has_error = True
        print(error.__context__ if isinstance(error, SystemExit) else error)  # as a program that catches it may
    sys.stdout.flush(), sys.stderr.flush()
    for stream, old in zip((1, 2), before):
        os.dup2(old, stream)
        os.close(old)
    everyone = RAW.gather((outside(name), has_error))
    if RANK == 0:
        lines = sorted({line for lines, _ in everyone for line in lines} | {f"in {path}" for path in in_files(name)})
        errors = sum(has_error for _, has_error in everyone)
        print("FOUND " + json.dumps({"case": name, "outside": lines, "errors": errors}), flush=True)
    RAW.barrier()
