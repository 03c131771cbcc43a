"""Write the final rows of every algorithm and task to a JSON file: under mpirun, FILE [DTYPE ...].

Each row is kept as three numbers (its norm and its products with two fixed vectors) and a SHA-256 of its bytes: the
numbers are compared across processors to 1e-9 (those of float64 alone, see test_golden.py), the hashes on one machine
to the last bit.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import sys
import tempfile

import h5py
import numpy as np
import torch

import fedmpi
import fedmpi.algorithms
import fedmpi.train
from fedmpi.runs.record import CLIENTS_KEY

CLOCKS = ("seconds", "local_seconds", "communication_seconds", "evaluation_seconds")
TEXT = " ".join(f"w{number * number % 37} w{number % 11}" for number in range(600))
# task -> its settings; FOLDER stands for a folder with files made below
TASKS = {
    "classification": "--algorithm fafed --participation 0.75 --first-batch-size 80",
    "classification-dropout": "--algorithm stem --model mlp --model.dropout 0.3 --partition dirichlet",
    "classification-batchnorm": "--algorithm scaffold --model batchnorm.Net --result best --holdout 0.1",
    "classification-images": "--algorithm fedavg --data FOLDER/images.h5 --task.crop_padding 2 --task.flip true "
    "--model fashion_cnn --weighting samples",
    "auc": "--task auc --algorithm coda --algorithm.stage_rounds 2 --algorithm.dual_restart true",
    "attack": "--task attack --task.classifier FOLDER/runs/classifier --algorithm fafedzo --task.target_class 4",
    "language": "--task language --data FOLDER/text.h5 --model lstm --model.hidden 8 --batch-size 4 --task.bptt 5 "
    "--clip-norm 0.25 --algorithm scaffold_m_vr",
    "quadratic": "--task quadratic --algorithm local_amsgrad --result uniform",
    "counterexample": "--task counterexample --algorithm naive_adaptive_fedavg --clients 3",
    "saddle_quadratic": "--task saddle_quadratic --algorithm fmgda",
    "slow": "--task slow --algorithm stem",
    "saddle": "--task saddle --algorithm fmgda",
    "two_parameter_auc": "--task two_parameter_auc --algorithm codasca",
    "two_point": "--algorithm fedzo --oracle two_point --oracle.directions 3 --weight-decay 0.01",
}
# With their own step sizes the losses of two-point runs explode, and rounding errors grow by a factor of 1e10.
STEADY = " --algorithm.step_size 0.001"


def simulated(name, dtype):
    """The rows after three rounds of an algorithm with its own settings on bent quadratics of three clients."""
    layers, i = [slice(0, 2), slice(2, 3), slice(3, 5)], torch.arange(5, dtype=dtype)

    def gradient(client, x, sample):
        noise = torch.sin(3 * sample + 2 * client + i)
        curvature = 1 + 0.5 * torch.cos(client + i) + 0.3 * noise
        return curvature * (x - 0.5 * client + 0.2 * i) + 0.2 * torch.sin(x + sample) + 0.1 * noise

    trace = fedmpi.simulate(
        getattr(fedmpi.algorithms, name)(),
        gradient,
        [1.0, -0.5, 0.0, 2.0, 0.3],
        num_clients=3,
        rounds=3,
        local_steps=3,
        participants=lambda r: [[0, 1, 2], [1, 2], [0, 2]][r],
        dtype=dtype,
        segments=layers,
        ascent=slice(4, 5) if getattr(fedmpi.algorithms, name).__module__.endswith("minmax") else None,
    )
    return trace[-1]["rows"]


def trained(settings, folder, name):
    """The rows, parameters and records of a run."""
    fedmpi.train.main(f"{settings} --out {folder}/runs --name {name}".split())
    run, values = pathlib.Path(folder) / "runs" / name, {}
    with h5py.File(run / "model.h5") as file:
        file.visititems(lambda key, item: values.update({key: item[()]}) if isinstance(item, h5py.Dataset) else None)
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for key in set(record) - {*CLOCKS, CLIENTS_KEY}:
            values[f"metrics/{key}/{record['round']}"] = np.array(record[key], dtype=np.float64)
    return values


def summary(values):
    """Name -> [norm, two products, hash]."""
    found = {}
    for name, value in sorted(values.items()):
        value = np.ascontiguousarray(value)
        flat = value.astype(np.float64).reshape(-1)
        at = np.arange(flat.size)
        numbers = [float(np.linalg.norm(flat)), float(flat @ np.cos(at)), float(flat @ np.sin(3 * at + 1))]
        found[name] = [*numbers, hashlib.sha256(value.tobytes()).hexdigest()]
    return found


def make_files(folder):
    """The data files of the runs, drawn from fixed seeds."""
    draw = np.random.default_rng(0)
    with h5py.File(f"{folder}/images.h5", "w") as file:
        for split, number in (("train", 230), ("test", 60)):
            labels = draw.integers(0, 10, number)
            bar = np.arange(28) // 2 == 2 + labels[:, None]  # where it stands says the class
            file[f"{split}/images"] = (draw.integers(0, 60, (number, 28, 28)) + 150 * bar[:, None]).astype(np.uint8)
            file[f"{split}/labels"] = labels
        file.attrs["num_classes"] = 10
    with h5py.File(f"{folder}/text.h5", "w") as file:
        for split in ("train", "test"):
            file[f"{split}/text"] = np.frombuffer(TEXT.encode(), np.uint8)


def main(path, dtypes):
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    folder = os.path.join(tempfile.gettempdir(), f"fedmpi-final-rows-{os.getppid()}-{os.path.basename(path)}")
    if rank == 0:
        os.makedirs(f"{folder}/runs")
        make_files(folder)
    MPI.COMM_WORLD.Barrier()
    usual = "--clients 4 --local-steps 3 --rounds 3 --eval-every 1 --evaluate-samples 2000 --threads 1"
    usual += " --device cpu --ranks 2 --dtype"
    names = sorted(set(fedmpi.algorithms.__all__) - {"Algorithm", "Exchange"})
    portable = dtypes == ["float64"]
    if portable:  # initial parameters, too: those drawn in float32 differ between processors in their last bit
        torch.set_default_dtype(torch.float64)
    found = {}
    with contextlib.redirect_stdout(None):
        classifier = f"--algorithm fedavg --data {folder}/images.h5 --model mlp"
        trained(f"{usual.replace('rounds 3', 'rounds 100')} {dtypes[0]} {classifier}", folder, "classifier")
        for dtype in dtypes:
            for name in names:
                found[f"simulate/{name}/{dtype}"] = summary(simulated(name, getattr(torch, dtype)))
                words = f"{usual} {dtype} --algorithm fedmpi.algorithms.{name} --participation 0.75"
                words += STEADY if portable and name in ("FedZO", "FAFedZO") else ""
                task = "--task saddle_quadratic" if name in ("CODA", "CODASCA") else "--task classification"
                found[f"train/{name}/{dtype}"] = summary(trained(f"{words} {task}", folder, f"{name}-{dtype}"))
            for task, settings in TASKS.items():
                words = f"{usual} {dtype} {settings.replace('FOLDER', folder)}"
                words = words.replace("--clients 4", "") if "--clients 3" in settings else words
                words += STEADY if portable and task in ("attack", "two_point") else ""
                found[f"task/{task}/{dtype}"] = summary(trained(words, folder, f"{task}-{dtype}"))
    MPI.COMM_WORLD.Barrier()
    if rank == 0:
        pathlib.Path(path).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or ["float32", "float64"])
