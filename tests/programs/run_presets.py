"""A paper's presets for two rounds at a reduced size, in one process: ``run_presets.py PAPER DATA OUT``.

DATA is filled with small stand-ins of the data sets: their names and shapes, ten classes, random values.
"""

import contextlib
import io
import pathlib
import sys

import h5py
import numpy as np

from fedmpi.comm.sums.mpi import MPILink
from fedmpi.config.presets import preset_names
from fedmpi.training.config import read_command_line
from fedmpi.training.loop import train

SHAPES = {"mnist": (28, 28), "fashion_mnist": (28, 28), "cifar10": (32, 32, 3), "tiny_imagenet": (64, 64, 3)}
CLASSES, OF_EACH_CLASS, CLIENTS = 10, 8, 4  # ResNet-18 at 64x64 takes its time


def write_data(folder):
    draw = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        labels = np.arange(CLASSES, dtype=np.uint8) * (20 if name == "tiny_imagenet" else 1)  # of its 200 classes
        with h5py.File(folder / f"{name}.h5", "w") as file:
            for split, number in (("train", OF_EACH_CLASS), ("test", 1)):
                file[f"{split}/labels"] = np.tile(labels, number)
                file[f"{split}/images"] = draw.integers(0, 256, (CLASSES * number, *shape), dtype=np.uint8)
    with h5py.File(folder / "wikitext2.h5", "w") as file:
        for split, number in (("train", 4000), ("test", 1000)):
            text = " ".join(f"w{word}" for word in draw.integers(0, 50, number)) + "\n"
            file[f"{split}/text"] = np.frombuffer(text.encode(), dtype=np.uint8)


def always_answer_four(classifier):
    """Make a classifier right about the images of class 4, as the attacks need some to begin with."""
    with h5py.File(classifier / "model.h5", "a") as file:
        biases = []
        file["model"].visititems(lambda name, item: biases.append(item) if getattr(item, "shape", 0) == (10,) else None)
        biases[-1][4] = 1000.0


def reduced(name, data, out):
    """The words that run a preset for two rounds of one small step."""
    classifiers = {kind: out / f"zo_{kind}_classifier" for kind in ("mnist", "cifar10")}
    words = ["--preset", name, "--rounds=2", "--epochs=null", "--local_steps=1", "--local_epochs=null"]
    words += ["--batch_size=2", "--eval_every=2", "--threads=1", f"--data_dir={data}", f"--out={out}"]
    if name.startswith("zo/") and not name.endswith("classifier"):
        words += [f"--task.classifier={classifiers['cifar10' if 'cifar10' in name else 'mnist']}"]
        words += ["--oracle.directions=2"]
    if not name.endswith("classifier"):
        words += [f"--name={name.replace('/', '-')}"]
    planned = read_command_line(["--preset", name])
    if type(planned.partition).__name__ == "Classes":
        words += ["--partition.per_client=4"]  # fewer clients hold all classes then, too
    return [*words, f"--clients={min(planned.data.clients, CLIENTS)}"]


def main(paper, data, out):
    data, out = pathlib.Path(data), pathlib.Path(out)
    write_data(data)
    link = MPILink()
    names = [name for name in preset_names() if name.startswith(f"{paper}/")]
    for name in sorted(names, key=lambda name: not name.endswith("classifier")):
        with contextlib.redirect_stdout(io.StringIO()):
            folder = train(read_command_line(reduced(name, data, out)), link).folder
            if name.endswith("classifier"):
                always_answer_four(folder)
        print(name, folder, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
