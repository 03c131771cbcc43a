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
import pandas
import recorder as recording
import torch
from torch.utils.data import TensorDataset

import fedmpi
from fedmpi.cli.doctor.__main__ import main as doctor
from fedmpi.cli.evaluate.__main__ import main as evaluate
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


def table(change=None, header=None, ending="\n", names=False):
    """Write this rank's table; `change(rows)` plants something. rows: lists of text; `names`: a column of names."""
    change, header, ending = (change, header, ending) if PLANTS else (None, None, "\n")
    stream = np.random.default_rng(RANK)
    rows = [[f"{stream.normal(60, 9):.1f}", "ab"[k % 2], ("no", "yes")[k // 2 % 2]] for k in range(ROWS)]
    if names:
        header, rows = "name,age,ward,ill", [[f"{NAME if PLANTS else 'p'}{k}", *row] for k, row in enumerate(rows)]
    if change:
        change(rows)
    header = header or "age,ward,ill"
    silo().write_bytes(ending.join([header, *(",".join(row) for row in rows), ""]).encode("latin-1"))


def statistics(*words, kind="csv", **planted):
    def go():
        table(**planted)
        write_as(kind)
        out = ("--out", str(here / "columns.json"))
        data(["statistics", pattern(kind), "--label", "ill", "--one-hot", "ward", *out, *words])

    return go


def write_as(kind):
    """Write this rank's table in another format, too."""
    if kind == "csv":
        return
    rows = pandas.read_csv(silo())
    if kind == "parquet":
        for name in ("ward", "ill"):
            rows[name] = rows[name].astype("category").cat.add_categories([f"{NAME}-in-no-row"] if PLANTS else [])
        rows.attrs["planted"] = NAME if PLANTS else ""
        rows.index = pandas.Index([f"{NAME if PLANTS else 'p'}{k}" for k in range(len(rows))], name="patient")
        rows.to_parquet(silo(f"silo.{kind}"))
    elif kind == "xlsx":
        rows.to_excel(silo(f"silo.{kind}"), index=False, sheet_name=NAME if PLANTS else "p")
    else:
        rows.to_json(silo(f"silo.{kind}"), orient="records", lines=True)


def prepared(*words, **planted):
    """The tables become files one after the other, as the page on data says, and train together."""

    def go():
        table(**planted)
        for rank in range(SIZE):
            if rank == RANK:
                out, columns = ("--data-dir", str(silo().parent)), ("--columns", str(here / "columns.json"))
                given = ("--label", "ill", "--one-hot", "ward", "--missing", "category", *words)
                data(["prepare", "silo", "--from", str(silo()), *out, *columns, *given])
            RAW.barrier()
        run_of("--rounds", "2", "--task.metrics", "f1")

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


def masks(attributes):
    """Write this rank's images with masks, and train."""

    def go():
        with h5py.File(silo("silo.h5"), "w") as written:
            written.attrs.update({"num_classes": 2, **(attributes if PLANTS else {})})
            for split in ("train", "test"):
                images = np.random.default_rng(RANK).integers(0, 255, (6, 4, 4)).astype("u1")
                written[f"{split}/images"], written[f"{split}/labels"] = images, np.zeros(6, int)
                written[f"{split}/masks"] = (images > 128).astype("u1")
        task = {"task": "segmentation", "model": pixels, "data": pattern("h5")}
        fedmpi.train(**COMMON, **task, out=str(here), name="run")

    return go


def pixels(shape, num_classes):
    return torch.nn.Conv2d(shape[0], num_classes, 1)


def module(text, go=lambda: run_of("--algorithm", "reads_data.Mine")):
    """A module of the user's own that reads data: `text` is what it does then, in the silo that plants."""
    usual = (
        "import dataclasses\nimport fedmpi\nfrom fedmpi.algorithms import FedAvg\n\n\n"
        "@dataclasses.dataclass(frozen=True)\nclass Mine(FedAvg):\n    pass\n"
    )

    def with_module():
        file()
        silo("reads_data.py").write_text(usual + text.format(NAME) * PLANTS)
        sys.path.insert(0, str(silo().parent))
        sys.dont_write_bytecode = True
        try:
            go()
        finally:
            sys.path.pop(0)
            sys.modules.pop("reads_data", None)

    return with_module


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


class Batches:
    """A loader of the user's own, whose length depends on its data."""

    def __len__(self):
        return fails() or 3

    def __iter__(self):
        return iter([torch.ones(4, 3)] * 3)


def loader_without_length():
    fed = fedmpi.average(torch.nn.Linear(3, 2), every=1, record=here / "run")
    list(fed.batches(Batches()))


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


def structure(written):
    """Samples whose values have names."""
    del written["train/images"]
    written["train/images"] = np.zeros(ROWS, dtype=[(NAME, "f4"), ("b", "f4")])


def links(written):
    """A link to a file that does not exist, in the place of labels."""
    del written["train/labels"]
    written["train/labels"] = h5py.ExternalLink(f"{NAME}.h5", f"/{NAME}")


def notes(written):
    """What files say about themselves where nothing of fedmpi looks."""
    for place in ("train", "train/images", "train/labels"):
        written[place].attrs["patient"] = NAME
    written["train"].create_group(NAME)["notes"] = np.array([NAME.encode()])


def named_labels(written):
    del written["train/labels"]
    kind = h5py.enum_dtype({NAME: 0, "b": 1}, basetype="i8")
    written.create_dataset("train/labels", data=np.arange(ROWS) % 2, dtype=kind)


def dates(rows):
    for k, row in enumerate(rows):
        row[0] = f"2020-01-{k % 28 + 1:02d}" if k != 7 else f"2020-01-08 {NAME}"


def text_labels(written):
    del written["train/labels"]
    written["train/labels"] = np.array([NAME.encode()] * ROWS)


def damaged(*words):
    """A file that is none."""

    def go():
        file()
        if PLANTS:
            silo("silo.h5").write_bytes(f"{NAME}, 1, 2\n".encode() * 99)
        run_of(*words)

    return go


class Named(TensorDataset):
    """Data that say their classes, of which one silo has other ones."""

    classes = ["a", NAME if PLANTS else "b"]


def classes_of_datasets():
    sets = [Named(torch.zeros(9, 3), torch.arange(9) % 2) for _ in range(SIZE)]
    fedmpi.train(**COMMON, data=sets, model=torch.nn.Linear(3, 2), out=str(here), name="run")


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
    "category of one of the files of tables": prepared(change=field(1, NAME)),
    "categories of the files of tables": prepared(
        change=lambda rows: [field(1, f"{NAME}{k}", k)(rows) for k in range(9)]
    ),
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
    "names of what is measured": own_loop(lambda: {NAME if PLANTS else "loss": 1.0}),
    "names of an own metric": own(
        metrics={NAME if PLANTS else "share": lambda outputs, targets: 1.0}, outputs="scores"
    ),
    "classes of Datasets": classes_of_datasets,
    "labels that are text": training(change=text_labels),
    "values with names": training(change=structure),
    "link to another file": training(change=links),
    "file that is none": damaged(),
    "file that is none, with baselines": damaged("--baselines", "local", "--holdout", "0.2"),
    "category that is a number": prepared(change=field(1, f"{CODE}")),
    "mark of no value": statistics("--na-in", f"age={NAME}" if PLANTS else "age=?", change=field(0, NAME)),
    "group of one file": training(
        "--holdout",
        "0.2",
        change=lambda written: written.__setitem__("train/who", np.array([NAME.encode(), b"b"] * (ROWS // 2))),
        attributes={"group_column": "who"},
    ),
    "comment before the header": statistics(header=f"# {NAME}\nage,ward,ill"),
    "comment among rows": statistics(change=field(0, f"# {NAME}\n60")),
    "header with a mark of order": statistics(header="\xef\xbb\xbfage,ward,ill", change=field(1, f"M\xfcller {NAME}")),
    "category of two lines": statistics(change=field(1, f'"{NAME}\nb"')),
    "date with a name": statistics("--date", "age", change=dates),
    "number that is a code": statistics(change=field(0, f"{CODE}")),
    "column of names": statistics("--id", "name", names=True),
    "column of names that are categories": statistics("--one-hot", "name", names=True),
    "groups with names": prepared("--group", "name", names=True),
    "names of samples": prepared("--id", "name", names=True),
    "categories of pandas": statistics(kind="parquet", change=field(1, NAME)),
    "class of pandas": statistics(kind="parquet", change=field(2, NAME)),
    "name of a sheet": statistics(kind="xlsx", change=field(1, NAME)),
    "no number in JSON": statistics(kind="jsonl", change=field(0, NAME)),
    "attributes of data sets": training(change=notes),
    "labels of a type with names": training(change=named_labels),
    "letters in class names": training(**named(class_names=["a", f"M\xfcller {NAME} \u540d"])),
    "class names, by doctor": training(door=check, **named(class_names=["a", NAME])),
    "class names of auc": training("--task", "auc", **named(class_names=["a", NAME])),
    "class names of masks": masks({"class_names": ["a", NAME]}),
    "attributes of masks": masks({"source": NAME, "dataset": NAME}),
    "attributes, with baselines": training("--baselines", "local,tuned", "--cross-site", "true", **named(source=NAME)),
    "tracker": training("--track", "tensorboard", "--task.metrics", "f1", **named(source=NAME, dataset=NAME)),
    "word after a space of another kind": texts(as_it_stands="word1\xa0{}"),
    "word beside a known one": texts(as_it_stands="word1-{}"),
    "word that is a number": texts(as_it_stands=f"{CODE}"),
    "module that reads data": module("raise ValueError('{} is no number')\n"),
    "class that reads data": module(
        "    def __post_init__(self):\n        raise fedmpi.UserError('{} has no label')\n"
    ),
    "class whose file is missing": module("    def __post_init__(self):\n        open('/nowhere/{}.csv')\n"),
    "module of an evaluation": module(
        "open('/nowhere/{}.csv')\n", lambda: evaluate([str(here / "run"), "--import", "reads_data"])
    ),
    "length of a loader": loader_without_length,
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
    """Files of the run folder, and that of columns, that have a name, and a silo's own files that have another's."""
    case = OUT / f"case-{name.replace(' ', '-')}"
    paths = [path for path in [*(case / "run").rglob("*"), case / "columns.json"] if path.is_file()]
    found = [path.name for path in paths if b"plAnted" in path.read_bytes() or "plAnted" in path.name]
    for rank in range(SIZE):
        for path in (case / f"rank{rank}").iterdir():
            there = path.read_bytes()
            found += [path.name for k in range(SIZE) if k != rank and f"plAnted-{k}-nAme".encode() in there]
    return found


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
