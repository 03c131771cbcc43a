"""Random inputs: whatever comes is accepted or refused in one line; nothing raises anything else, and nothing hangs.

Short by default, so that it runs with every change; ``-m slow`` tries many more seeds.
"""

import csv
import json
import random
import string

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedmpi.algorithms
import fedmpi.data.partitions
from fedmpi.algorithms import Algorithm
from fedmpi.cli.predict.__main__ import _run as predict
from fedmpi.comm.solo import SoloLink
from fedmpi.config.grammar import read_file
from fedmpi.data.partitions import Even, Partition
from fedmpi.ground.errors import Diverged, UserError
from fedmpi.ground.registry import known
from fedmpi.models.mlp import MLP
from fedmpi.runs.folder import find_runs
from fedmpi.tasks.base import RankContext
from fedmpi.tasks.classification import Classification
from fedmpi.training.build import prepare
from fedmpi.training.config import read_command_line
from fedmpi.training.loop import train
from fedmpi.training.settings import RunSettings

SEEDS = [pytest.param(range(20), id="short"), pytest.param(range(20, 3000), id="long", marks=pytest.mark.slow)]
FEW_SEEDS = [pytest.param(range(4), id="short"), pytest.param(range(4, 400), id="long", marks=pytest.mark.slow)]
KEYS = [
    *RunSettings.declared(),
    "config",
    "algorithm",
    "algorithm.step_size",
    "task",
    "task.data",
    "model",
    "oracle",
    "partition",
    "data",
]
VALUES = [
    "", "0", "-1", "1", "010", "1:30", "1e999", "-0.0", ".nan", "inf", "null", "true", "yes", "[]", "{}", "[1, 2", "'",
    '"', "\\", "$HOME", "%s", "{client}", "../..", "/dev/null", "é", "²", "\x00", "\x1b[31m", "\ud800", "a" * 10_000,
    "9" * 5000, "fafed", "os.system", "fedmpi", ".", "..", "a.b.c", "--rounds", "!!python/none", "*x", "&x", "<<", "~",
]  # fmt: skip


def refused_in_one_line(action, words=()):
    """Whether `action()` raised an error of the user's; any other exception is a failure, with `words` in its notes."""
    try:
        action()
    except (UserError, Diverged) as error:
        text = str(error)
        assert "\n" not in text and 5 < len(text) < 3000, text
        return True
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error} of {words}") from error
    return False


@pytest.mark.parametrize("seeds", SEEDS)
def test_command_lines(seeds):
    for seed in seeds:
        draw = random.Random(seed)
        words = []
        for _ in range(draw.randint(1, 4)):
            key = draw.choice(KEYS)
            if draw.random() < 0.2:
                key = "".join(draw.choices(string.printable, k=draw.randint(0, 8)))
            words += draw.choice([[f"--{key}", draw.choice(VALUES)], [f"--{key}={draw.choice(VALUES)}"], [key]])
        refused_in_one_line(lambda words=words: read_command_line([*words, "--print_config"]))


@pytest.mark.parametrize("seeds", SEEDS)
def test_settings_files(seeds, tmp_path):
    good = "rounds: 3\nseed: 1\nalgorithm: {name: fafed, step_size: 0.01}\ntask:\n  name: classification\n"
    for seed in seeds:
        draw = random.Random(seed)
        text = list(good)
        for _ in range(draw.randint(1, 6)):
            place = draw.randrange(len(text))
            text[place : place + draw.randint(0, 3)] = draw.choice(
                [*VALUES[:42], *string.punctuation, "\n", "\t", "- "]
            )
        path = tmp_path / draw.choice(["it.yaml", "it.toml"])
        path.write_text("".join(text), encoding="utf-8", errors="replace")
        if not refused_in_one_line(lambda path=path: read_file(path)):
            refused_in_one_line(lambda path=path: read_command_line(["--config", str(path), "--print_config"]))


def odd_value(draw):
    shape = [draw.choice([0, 1, 2, 20]) for _ in range(draw.randint(0, 4))]
    kind = draw.choice(["u1", "i8", "f2", "f4", "f8", "?", "S3", "c8", "u8", "i2"])
    return np.full(shape, draw.choice([0, 1, 3, 200]), dtype=kind)


def write_data(path, draw):
    """A small data set with something odd, or only damaged bytes."""
    with h5py.File(path, "w") as file:
        for split, number in (("train", 20), ("test", 8)):
            file[f"{split}/images"] = np.arange(number * 16, dtype=np.uint8).reshape(number, 4, 4)
            file[f"{split}/labels"] = np.arange(number) % 3
        for _ in range(draw.randint(1, 3)):
            key = draw.choice(["train/images", "train/labels", "test/images", "test/labels", "train", "more"])
            if draw.random() < 0.6:
                if key in file:
                    del file[key]
                if draw.random() < 0.8 and not isinstance(file.get("train"), h5py.Dataset):
                    file[key] = odd_value(draw)
            else:
                name = draw.choice(["mean", "std", "num_classes", "dataset", "class_names"])
                file.attrs[name] = draw.choice([odd_value(draw), np.nan, -1, 2.5, "x", 1e-300, 10**12, [0.1, 0.2]])
    if draw.random() < 0.3:
        content = bytearray(path.read_bytes())
        for _ in range(draw.randint(1, 30)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content[: draw.choice([len(content), draw.randrange(len(content))])])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", SEEDS)
def test_data_files(seeds, tmp_path):
    context = RankContext(2, range(2), 0, 1, 0, None, torch.device("cpu"), torch.float32)

    def load(path):
        loaded = Classification(data=str(path)).load(context, Even())
        loaded.synchronise(SoloLink())
        inputs, labels = loaded.batch(0, torch.zeros(2, dtype=torch.int64))
        assert inputs.isfinite().all() and (labels < loaded.num_classes).all()

    for seed in seeds:
        path = tmp_path / f"{seed}.h5"
        write_data(path, random.Random(seed))
        refused_in_one_line(lambda path=path: load(path))
        path.unlink()


@pytest.mark.parametrize("seeds", SEEDS)
def test_run_folders(seeds, tmp_path):
    record = {"round": 1, "iteration": 5, "loss": 1.5, "accuracy": 0.5, "seconds": 1.0, "bytes": 80, "gradients": 10}
    odd = [None, -1, 10**400, 1e308, float("nan"), "x", [], {}, True, "\x1b[31m", [[]] * 3, {"a": {"b": 1}}]
    for seed in seeds:
        draw, folder = random.Random(seed), tmp_path / str(seed)
        folder.mkdir()
        settings = {"algorithm": {"name": "fafed"}, "task": {"name": "classification", "data": "digits"}, "rounds": 3}
        for _ in range(draw.randint(0, 2)):
            settings[draw.choice([*settings, "seed", "model", "paper", "x" * 300])] = draw.choice(odd)
        (folder / "settings.yaml").write_text(json.dumps(settings))
        lines = [json.dumps({**record, draw.choice([*record, "new", "=x", ""]): draw.choice(odd)}) for _ in range(3)]
        text = "\n".join(lines) + draw.choice(["", "\n", "\x00", "{", "[" * 9999 + "\n"])
        (folder / "metrics.jsonl").write_text(text[: draw.choice([len(text), draw.randrange(len(text))])])
    runs, complaints = find_runs([tmp_path])
    assert len(runs) + len(complaints) == len(list(seeds))
    assert all(line.isprintable() for line in complaints)


def damaged(path, draw):
    """Change some bytes of a file, most at its beginning, or cut it."""
    content = bytearray(path.read_bytes())
    for _ in range(draw.randint(0, 9)):
        content[draw.randrange(draw.choice([8, 300, len(content)])) % len(content)] = draw.randrange(256)
    path.write_bytes(content[: draw.choice([len(content), draw.randrange(len(content))])])


def change_somewhere(content, draw):
    """Give an entry of nested dicts and lists an odd value, or remove it."""
    odd = [
        None,
        True,
        -1,
        0,
        2.5,
        10**400,
        1e308,
        float("nan"),
        "x",
        "=1",
        "\ud800",
        [],
        {},
        [[]] * 3,
        [1, 8, 8],
        10**9,
    ]
    key = draw.choice(list(content) if isinstance(content, dict) else range(len(content)))
    if isinstance(content[key], dict | list) and content[key] and draw.random() < 0.8:
        change_somewhere(content[key], draw)
    elif draw.random() < 0.2:
        del content[key]
    else:
        content[key] = draw.choice(odd)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", SEEDS)
def test_predictions(seeds, tmp_path, monkeypatch):
    """Whatever the run folder and the samples contain: probabilities, or one line and no table."""
    monkeypatch.chdir(tmp_path)
    model = {"class": "fedmpi.models.mlp.MLP", "arguments": {"shape": [1, 4, 4], "num_classes": 3, "hidden": 5}}
    inputs = {"shape": [1, 4, 4], "divide_by": 255, "mean": [0.3], "std": [0.4]}
    columns = {"missing": "median", "classes": ["a"], "columns": {"c": {"median": 1, "mean": 0, "std": 1}, "w": ["u"]}}
    about = {"task": "classification", "model": model, "input": inputs, "class_names": ["=a", "b", "c"]}
    for seed in seeds:
        draw, folder = random.Random(seed), tmp_path / str(seed)
        samples, out = folder / draw.choice(["it.npz", "it.h5", "it.csv"]), folder / "out.csv"
        folder.mkdir()
        save_file(MLP(**model["arguments"]).state_dict(), folder / "model.safetensors")
        content = json.loads(json.dumps({**about, "columns": columns} if draw.random() < 0.2 else about))
        values = odd_value(draw) if draw.random() < 0.5 else np.full((5, 4, 4), draw.choice([0, 9, np.nan, 1e300]))
        arrays = {draw.choice(["x", "x", "x_test"]): values} | ({"y": odd_value(draw)} if draw.random() < 0.2 else {})
        if samples.suffix == ".npz":
            np.savez(samples, **arrays)
        elif samples.suffix == ".h5":
            with h5py.File(samples, "w") as file:
                file[draw.choice(["images", "images", "test/images", "test"])] = values
                file["labels"] = odd_value(draw)
        else:
            words = draw.choices(["1", "2.5", "", "nan", "u", "1e400", ",", "\n", '"', "\x00"], [9, 9, *[1] * 8], k=16)
            samples.write_text(",".join(["c", "w", *map(str, range(14))]) + "\n" + ",".join(words) + "\n")
        for _ in range(draw.choice([0, 1, 1, 2])):
            change_somewhere(content, draw)
        (folder / "model.json").write_text(json.dumps(content) if draw.random() < 0.9 else "[" * 99_999)
        if draw.random() < 0.4:
            damaged(draw.choice([samples, folder / "model.safetensors", folder / "model.json"]), draw)
        words = [
            str(folder),
            str(samples),
            "--out",
            str(out),
            *draw.choice([[], [], ["--label", "w"], ["--split", ""]]),
        ]
        if refused_in_one_line(lambda words=words: predict(words), words):
            assert not out.exists()
        else:
            rows = list(csv.DictReader(out.read_text(encoding="utf-8").splitlines()))
            assert rows and all(0 < float(row["probability"]) <= 1 and row["predicted"] != "=a" for row in rows), seed


class RandomModule(nn.Module):
    """A few layers, drawn from many, and something that a forward pass does beside them."""

    def __init__(self, seed: int = 0):
        super().__init__()
        draw = random.Random(seed)
        width, layers = 64, [nn.Flatten()]
        for _ in range(draw.randint(0, 3)):
            new = draw.randint(1, 9)
            layers.append(draw.choice([nn.Linear(width, new), nn.LazyLinear(new)]))
            layers.append(draw.choice([nn.ReLU(), nn.Dropout(0.3), nn.BatchNorm1d(new), nn.PReLU(), nn.LayerNorm(new)]))
            width = new
        self.layers = nn.Sequential(*layers, nn.Linear(width, draw.choice([10, 10, 10, 3])))
        self.what = draw.choice(
            ["", "", "unused", "buffer", "data", "detach", "grow", "freeze", "nan", "raise", "twice"]
        )
        self.register_buffer("seen", draw.choice([torch.zeros(1), torch.tensor(0), torch.zeros(1, dtype=torch.bool)]))
        self.unused = nn.Linear(2, 2) if self.what == "unused" else None

    def forward(self, inputs):
        outputs = self.layers(inputs)
        if self.what == "buffer":
            self.seen = self.seen + 1
        if self.what == "data":
            self.layers[-1].weight.data = self.layers[-1].weight.data * 0.9
        if self.what == "grow":
            self.seen = torch.cat([self.seen, self.seen])
        if self.what == "freeze":
            self.layers[-1].bias.requires_grad_(False)
        if self.what == "raise" and self.training:
            raise KeyError("odd\nwords")
        if self.what == "twice":
            outputs = outputs + self.layers(inputs)
        return {"detach": outputs.detach(), "nan": outputs * torch.nan}.get(self.what, outputs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", FEW_SEEDS)
def test_modules(seeds):
    words = "--algorithm fedavg --clients 2 --local-steps 2 --batch-size 8 --threads 1 --model test_fuzz.RandomModule"
    for seed in seeds:

        def run(seed=seed):
            job = prepare(read_command_line([*words.split(), "--model.seed", str(seed)]), SoloLink())
            job.federation.start()
            job.federation.run_round()
            assert job.federation.server.x.isfinite().all()

        refused_in_one_line(run)


# Settings that are allowed each for itself -> some of their values.
LEGAL = {
    "algorithm": sorted(known(fedmpi.algorithms, Algorithm)),
    "task": ["classification"] * 3 + ["auc", "language", "quadratic", "counterexample", "saddle_quadratic"],
    "oracle": ["autograd", "two_point"],
    "partition": sorted(known(fedmpi.data.partitions, Partition)),
    "model": ["mlp", "lstm", "test_fuzz.RandomModule", "batchnorm.Net"],
    "clients": [1, 2, 3, 5],
    "participation": [0.01, 0.5, 0.99],
    "local_steps": [1, 3],
    "local_epochs": [0.2],
    "epochs": [0.1, 1],
    "batch_size": [1, 7, 1000],
    "first_batch_size": [1, 1000],
    "weighting": ["samples"],
    "clip_norm": [1e-30, 0.1],
    "weight_decay": [0.1],
    "result": ["best", "uniform"],
    "private": ["*bias", "nothing.*", "bn"],
    "freeze": ["*weight", "*"],
    "holdout": [0.1, 0.99],
    "eval_every": [1, 2, 100],
    "evaluate_samples": [1, 50],
    "evaluate": ["full"],
    "stop": ["accuracy>=0", "nothing<1", "train_loss<=1e9"],
    "patience": [1],
    "checkpoint_every": [1],
    "checkpoint_clients": ["{client}", "here"],
    "dtype": ["float64"],
    "aggregation": ["reproducible"],
    "check_replicas": [1],
    "track": ["tensorboard"],
    "seed": [2**63, 12345],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", FEW_SEEDS)
def test_whole_runs(seeds, tmp_path, monkeypatch):
    """Settings that are each allowed, in any combination: a run that ends with its result, or one line."""
    monkeypatch.chdir(tmp_path)
    text = " ".join(f"w{number % 23}" for number in range(900))
    with h5py.File("text.h5", "w") as file:
        file["train/text"] = file["test/text"] = np.frombuffer(text.encode(), np.uint8)
    for seed in seeds:
        draw, words = random.Random(seed), f"--threads 1 --rounds 2 --name {seed}".split()
        chosen = {key: draw.choice(LEGAL[key]) for key in draw.sample([*LEGAL], draw.randint(1, 7))}
        if chosen.get("task") == "language":
            chosen |= {"task.data": "text.h5", "model.hidden": 4, "model": "lstm"}
        words += [word for key, value in chosen.items() for word in (f"--{key}", str(value))]
        if not refused_in_one_line(lambda words=words: train(read_command_line(words), SoloLink()), words):
            (run,), complaints = find_runs([tmp_path / "runs" / str(seed)])
            assert run.is_complete and not complaints, words
            losses = [record["train_loss"] for record in run.records if "train_loss" in record]
            assert losses and np.isfinite(losses).all(), words
