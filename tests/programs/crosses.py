"""Goes through doors of fedmpi with a recorder around MPI: crosses.py FOLDER DOOR ...; on two ranks.

Without a DOOR through all `DOORS`; COMBINATIONS K N stands for those of tasks with options,
every Nth from the Kth on, see `combinations`.

Prints for each door a line of JSON: the kinds of messages that were seen, those in crossed.json, those that the
settings say ("" if there are none), and lines about messages that nothing declares.
"""

import contextlib
import functools
import itertools
import json
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
from fedmpi import aggregation, algorithms
from fedmpi.aggregation import Aggregation, codecs, stages
from fedmpi.aggregation.codecs import Codec
from fedmpi.aggregation.stages import Stage
from fedmpi.algorithms import Algorithm
from fedmpi.cli.doctor.__main__ import main as doctor
from fedmpi.cli.evaluate.__main__ import main as evaluate
from fedmpi.cli.train import main as train_main
from fedmpi.ground.errors import Diverged, UserError
from fedmpi.ground.registry import known
from fedmpi.prepare.__main__ import main as data_main
from fedmpi.training import loop
from fedmpi.training.crossing import kinds_of

warnings.simplefilter("ignore")
recorder = recording.install()
from mpi4py import MPI  # noqa: E402

OUT, COMM = pathlib.Path(sys.argv[1]), MPI.COMM_WORLD
SECRET = "planted"  # in names and words of silo 1
configs, SIZES = [], {"train": 40, "test": 30}


def trained(config, *arguments, usual=loop.train, **options):
    configs.append(config)
    return usual(config, *arguments, **options)


loop.train = trained


def raw(action):
    """What `action(communicator)` returns, unrecorded."""
    return action(MPI.Intracomm(COMM))


def files(name, write):
    """The pattern of new files, one per silo, which `write(file, client)` fills."""
    folder = OUT / f"data-{name}"
    if COMM.rank == 0 and not folder.exists():
        folder.mkdir()
        for client in range(COMM.size):
            with h5py.File(folder / f"silo_{client}.h5", "w") as file:
                write(file, client)
    raw(lambda comm: comm.barrier())
    return str(folder / "silo_{client}.h5")


def table(file, client):
    stream = np.random.default_rng(client)
    file.attrs["num_classes"], file.attrs["silo"] = 4, f"Silo {client}"
    for split, number in SIZES.items():
        labels = stream.integers(0, 4, number)
        file[f"{split}/images"] = (stream.standard_normal((number, 6)) + labels[:, None]).astype("float32")
        file[f"{split}/labels"] = labels


def text(file, client):
    words = np.random.default_rng(client).choice([f"word{k}" for k in range(20)], 900)
    words = " ".join([*words, SECRET] if client else words)
    file["train/text"] = np.frombuffer(words.encode(), np.uint8)
    file["test/text"] = np.frombuffer(words[:900].encode(), np.uint8)


def masks(file, client):
    stream = np.random.default_rng(client)
    file.attrs["num_classes"] = 2
    for split in SIZES:
        images = stream.integers(0, 255, (12, 8, 8)).astype("uint8")
        file[f"{split}/images"], file[f"{split}/labels"] = images, np.zeros(12, int)
        file[f"{split}/masks"] = (images > 128).astype("uint8")


def pixels(shape, num_classes):
    return torch.nn.Conv2d(shape[0], num_classes, 1)


def data(client, number=30):
    drawn = torch.Generator().manual_seed(client)
    inputs = torch.randn(number, 4, generator=drawn)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def numbers(client):
    inputs, classes = data(client).tensors
    return TensorDataset(inputs, classes.float())


def net():
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
    return torch.nn.Sequential(*layers)


def digits_net(shape, num_classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))


def own_task(**members):
    def loss(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def measure(outputs, targets):
        return (outputs.argmax(1) == targets).double().mean()

    members = {"metrics": {"right": measure}, "outputs": "scores", **members}
    members = {"train": lambda client, number: data(client), **members}
    return fedmpi.Task.of("Own", loss=loss, **members)()


def run(*words):
    """A run of fedmpi.train by its command line."""

    def go(name):
        common = "--algorithm fedavg --rounds 3 --local-steps 2 --batch-size 8 --threads 1 --eval-every 2"
        train_main(
            [
                *common.split(),
                "--out",
                str(OUT),
                "--name",
                name,
                *(each() if callable(each) else each for each in words),
            ]
        )

    return go


def call(**settings):
    """The same by Python."""

    def go(name):
        common = {"algorithm": "fedavg", "rounds": 3, "local_steps": 2, "batch_size": 8, "threads": 1, "eval_every": 2}
        given = {key: each() if callable(each) and key != "model" else each for key, each in settings.items()}
        fedmpi.train(**{**common, "out": str(OUT), "name": name, **given})

    return go


def loop_of(door, recorded=True, **settings):
    """A loop of the user's own."""

    def go(name):
        model, given = net(), data(COMM.rank)
        others = {key: each() if callable(each) else each for key, each in settings.items()}
        record = fedmpi.Recording(OUT / name, evaluate=lambda: {"loss": 1.0}, checkpoint_every=2) if recorded else None
        if door == "join":
            fed = fedmpi.join(model, "fedavg", local_steps=2, record=record, **others)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            fed = fedmpi.average(model, optimizer, every=2, record=record, **others)
        for _ in range(4):
            batch = given[:8]
            if door == "join":
                fed.step(lambda batch=batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]))
            else:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
                optimizer.step()
                fed.step()
        fed.mean(1.0)
        fed.any(False)
        list(fed.batches(torch.utils.data.DataLoader(given, 10)))
        fed.finish()

    return go


def resumed(name):
    run("--checkpoint-every", "1")(name)
    train_main(["--resume", str(OUT / name), "--rounds", "4"])


def measured(name):
    run()(name)
    configs.clear()
    recorder.clear()
    evaluate([str(OUT / name)])


def measured_silos(name):
    run("--data", silos, "--task.metrics", "f1,auroc", "--checkpoint-every", "1")(name)
    configs.clear()
    recorder.clear()
    evaluate([str(OUT / name)])


def each_of(*names):
    """A run with each of some algorithms."""

    def go(name):
        for algorithm in names:
            run("--algorithm", algorithm)(f"{name}--{algorithm}")

    return go


def begun_from(name):
    run("--model", "mlp")(f"{name}--first")
    run("--model", "mlp", "--init", str(OUT / f"{name}--first" / "model.safetensors"))(f"{name}--second")


def wrong_data(name):
    """One silo's file cannot be read."""

    def write(file, client):
        table(file, client)
        if client:
            file["train/images"][3, 0] = np.nan

    with contextlib.suppress(SystemExit):
        run("--data", lambda: files("wrong", write))(name)


def labels(client):
    inputs, _ = data(client).tensors
    return TensorDataset(inputs, (inputs[:, :2] > 0).float())


def words_of(file, client):
    """A text whose words stand in the file of a vocabulary, too."""
    text(file, client)
    (OUT / "vocabulary.txt").write_text("word1 word2 word3\n")


def attacked(name):
    run("--model", "mlp")(name)
    train_main(
        f"--task attack --task.classifier {OUT / name} --task.target-class 1 --algorithm fedzo --rounds 2 "
        f"--threads 1 --out {OUT / name} --name attack".split()
    )


def failing(name):
    """One rank has an error before the run."""
    members = {"train": lambda client, number: data(client, 30 if client == 0 else 0)}
    with contextlib.suppress(UserError):
        call(task=lambda: own_task(**members), model=net)(name)


def silos():
    return files("table", table)


def scattered():
    """One file whose samples of a client lie in many chunks."""
    path = OUT / "scattered.h5"
    if COMM.rank == 0:
        labels = np.arange(80) % 4
        with h5py.File(path, "w") as file:
            for split in SIZES:
                file.create_dataset(f"{split}/images", data=np.random.default_rng(0).random((80, 6)), chunks=(8, 6))
                file[f"{split}/labels"] = labels
    raw(lambda comm: comm.barrier())
    return str(path)


class Counting(torch.nn.Module):
    """A model with a buffer that float32 cannot sum."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.register_buffer("seen", torch.full((3,), 1e9))

    def forward(self, inputs):
        if self.training:
            self.seen += inputs.shape[0]
        return self.layer(inputs)


def faulty(client, number):
    """The data of a client, of which the last one has inputs that are not finite."""
    found = data(client)
    found.tensors[0][:] = torch.nan if client == number - 1 else found.tensors[0]
    return found


LANGUAGE = ("--task", "language", "--task.bptt", "5", "--data")
DOORS = {
    "digits": run(),
    "metrics": run("--task.metrics", "f1,auroc"),
    "scattered": run("--partition", "iid", "--data", scattered),
    "attack": attacked,
    "error": failing,
    "silos": run("--data", silos),
    "silos in shared memory": run("--data", silos, "--transport", "shared"),
    "silos with metrics": run("--data", silos, "--task.metrics", "f1,auroc", "--holdout", "0.2"),
    "silos weighted": run("--data", silos, "--task.class-weights", "balanced", "--weighting", "samples"),
    "private": run("--private", "*"),
    "cross-site": run("--data", silos, "--private", "*", "--cross-site", "true"),
    "baselines": run("--data", silos, "--baselines", "local,pooled,tuned", "--cross-site", "true"),
    "auc": run("--task", "auc", "--holdout", "0.2"),
    "auc of silos": run("--task", "auc", "--data", silos),
    "language of silos": run(*LANGUAGE, lambda: files("text", text)),
    "language": run(*LANGUAGE, lambda: files("text", text).format(client=0)),
    "segmentation": call(task="segmentation", model=pixels, data=lambda: files("masks", masks)),
    "segmentation of one file": call(
        task="segmentation", model=pixels, data=lambda: files("masks", masks).format(client=0)
    ),
    "quadratic": run("--task", "quadratic"),
    "saddle": run("--task", "saddle", "--algorithm", "local_sgda"),
    "median": run("--aggregation", "median", "--data", silos),
    "median in shared memory": run("--aggregation", "median", "--transport", "shared"),
    "clipping": run("--aggregation", "centred_clipping", "--clients", "4"),
    "reproducible": run("--aggregation", "reproducible", "--clients", "4", "--transport", "shared"),
    "masked": run("--aggregation", "masked", "--aggregation.least-ranks", "2", "--data", silos),
    "half": run("--codec", "half"),
    "random k": run("--codec", "random_k"),
    "left out": call(
        task=lambda: own_task(train=faulty, metrics={}),
        model=net,
        faulty="leave_out",
        checkpoint_every=1,
        check_replicas=1,
        clients=2 * COMM.size,
    ),
    "buffers": call(task=lambda: own_task(test=lambda: data(5)), model=Counting),
    "silos with outputs": run("--data", silos, "--task.metrics", "f1,auroc", "--scores", "samples"),
    "auc of silos with outputs": run("--task", "auc", "--data", silos, "--scores", "samples", "--holdout", "0.2"),
    "every word": run(*LANGUAGE, lambda: files("text", text), "--least", "1"),
    "vocabulary": run(
        *LANGUAGE, lambda: files("known", words_of), "--task.vocabulary", lambda: str(OUT / "vocabulary.txt")
    ),
    "few take part": run("--data", silos, "--clients", "2", "--participation", "0.5"),
    "stages": run("--data", silos, "--stages", "norm_bound", "--codec", "random_k"),
    "stopped early": run("--data", silos, "--holdout", "0.3", "--patience", "1", "--result", "best"),
    "algorithms": each_of("fednova", "scaffnew", "mimeadam", "feddyn", "fed_lamb"),
    "from a model": begun_from,
    "wrong data": wrong_data,
    "several clients": run("--data", silos, "--partition", "even", "--task.metrics", "confusion,calibration"),
    "multilabel": call(
        data=lambda: [labels(client) for client in range(COMM.size)],
        test_data=lambda: labels(9),
        task="multilabel",
        model=torch.nn.Linear(4, 2),
    ),
    "own task with outputs": call(
        task=lambda: own_task(
            metrics={"auc": "sklearn.metrics.roc_auc_score", "r2": "sklearn.metrics.r2_score"},
            predict=lambda model, batch: (model(batch[0])[:, 1], batch[1].float()),
            outputs="values",
            test_of=lambda client, number: data(5 + client),
        ),
        model=net,
    ),
    "statistics": lambda name: data_main(["statistics", silos()]),
    "doctor of silos": lambda name: doctor(["--out", str(OUT), "--data", silos(), "--task.metrics", "f1"]),
    "dealt again": run("--partition.redeal", "true"),
    "tracked": run("--data", silos, "--track", "tensorboard"),
    "resumed": resumed,
    "fixed": run("--data", silos, "--weighting", "samples", "--codec", "fixed"),
    "evaluate of silos": measured_silos,
    "checkpoints within rounds": run("--data", silos, "--local-steps", "300", "--checkpoint-minutes", "0.0001"),
    "clip and decay": run("--data", silos, "--clip-norm", "1", "--weight-decay", "0.1", "--stop", "train_loss<9"),
    "evaluate": measured,
    "doctor": lambda name: doctor(["--out", str(OUT)]),
    "datasets": call(data=lambda: [data(k) for k in range(COMM.size)], test_data=lambda: data(5), model=net),
    "regression": call(
        data=lambda: [numbers(client) for client in range(COMM.size)],
        test_data=lambda: numbers(9),
        task="regression",
        model=torch.nn.Linear(4, 1),
    ),
    "own task": call(task=lambda: own_task(test_of=lambda client, number: data(5 + client)), model=net),
    "own task without tests": call(task=own_task, model=net),
    "own task with common tests": call(task=lambda: own_task(test=lambda: data(5)), model=net),
    "module": call(data="digits", model=digits_net),
    "join": loop_of("join", weight=1 + COMM.rank),
    "average": loop_of("average", buffers="average"),
    "average unrecorded": loop_of("average", recorded=False, buffers="rank0"),
}


TASKS = {
    "digits": {},
    "silos": {"data": silos},
    "auc": {"task": "auc"},
    "auc of silos": {"task": "auc", "data": silos},
    "language": {"task": {"name": "language", "bptt": 5}, "data": lambda: files("text", text).format(client=0)},
    "language of silos": {"task": {"name": "language", "bptt": 5}, "data": lambda: files("text", text)},
    "segmentation of silos": {"task": "segmentation", "model": pixels, "data": lambda: files("masks", masks)},
    "Datasets": {"data": lambda: [data(k) for k in range(COMM.size)], "test_data": lambda: data(5), "model": net},
    "regression": {
        "task": "regression",
        "data": lambda: [numbers(client) for client in range(COMM.size)],
        "test_data": lambda: numbers(9),
        "model": torch.nn.Linear(4, 1),
    },
    "own task": {"task": lambda: own_task(test_of=lambda client, number: data(5 + client)), "model": net},
    "quadratic": {"task": "quadratic"},
}
RULED = ("silos", "language of silos", "own task")
OPTIONS = {
    "baselines": {"baselines": "local,pooled,tuned", "cross_site": True},
    "own layers": {"private": "*", "cross_site": True},
    "held out": {"holdout": 0.3, "patience": 1, "result": "best"},
    "scores of samples": {"scores": "samples"},
    "some at a time": {"participation": 0.5, "weighting": "samples"},
    "faulty ones left out": {"faulty": "leave_out", "checkpoint_every": 1, "check_replicas": 1},
}
LEAST_RANKS = {"masked": {"least_ranks": 2}}  # as many as there are here


def made(package, base):
    """Name -> function that makes it, of every part in a package."""
    classes = known(package, base)
    return {name: functools.partial(kind, **LEAST_RANKS.get(name, {})) for name, kind in classes.items()}


def combinations():
    """Name -> door: every task with every option, some with every aggregation, loops and silos with every part."""
    rules = {f"aggregation {name}": {"aggregation": make} for name, make in made(aggregation, Aggregation).items()}
    parts = {f"codec {name}": {"codec": make} for name, make in made(codecs, Codec).items()}
    parts |= {f"stage {name}": {"stages": lambda make=make: [make()]} for name, make in made(stages, Stage).items()}
    pairs = [*itertools.product(TASKS, OPTIONS.items()), *itertools.product(RULED, rules.items())]
    pairs += itertools.product(["silos"], parts.items())
    doors = {f"{task} with {name}": call(**TASKS[task], **given) for task, (name, given) in pairs}
    for door, (name, given) in itertools.product(("join", "average"), [*rules.items(), *parts.items()]):
        doors[f"{door} with {name}"] = loop_of(door, **given)
    return doors | {f"algorithm {name}": call(algorithm=name) for name in known(algorithms, Algorithm)}


def refused(door, name):
    """Go through a door; whether the settings do not fit together."""
    try:
        door(name)
    except (UserError, SystemExit, Diverged):
        return True
    return False


def through(name):
    """Go through a door; what was seen of it on all ranks, on rank 0."""
    configs.clear()
    recorder.clear()
    folder = name.replace(" ", "-")
    is_refused = refused(COMBINATIONS[name], folder) if name in COMBINATIONS else DOORS[name](folder)
    everyone = raw(lambda comm: comm.gather((dict(recorder.sent), recorder.wrong)))
    if COMM.rank:
        return
    found = {"door": name, "seen": sorted({kind for sent, _ in everyone for kind, (_, size) in sent.items() if size})}
    found["refused"] = bool(is_refused)
    found["wrong"] = sorted({line for _, wrong in everyone for line in wrong})
    folders = [OUT / folder, *OUT.glob(f"{folder}--*")]
    paths = [path for each in folders for path in each.rglob("crossed.json")]
    written = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    found["crossed"] = sorted(set().union(*written)) if written else None
    found["said"] = sorted(set().union(*map(kinds_of, configs))) if configs else None
    print("FOUND " + json.dumps(found), flush=True)


COMBINATIONS = combinations()
names = sys.argv[2:] or [*DOORS]
if names[0] == "COMBINATIONS":
    names = [*COMBINATIONS][int(names[1]) :: int(names[2])]
for door in names:
    through(door)
