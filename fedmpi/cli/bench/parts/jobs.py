"""A whole training job, from reading the data to the saved model, against a loop written without fedmpi."""

import contextlib
import pathlib
import shutil
import tempfile
import time

import h5py
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedmpi.cli.bench.baselines import Loop, flat_loop
from fedmpi.cli.bench.results import format_ratio
from fedmpi.cli.bench.timing import Times
from fedmpi.comm.agreement import agree, share
from fedmpi.comm.start.mpi_library import MPI
from fedmpi.comm.sums.mpi import MPILink
from fedmpi.ground.text import format_table
from fedmpi.training import loop
from fedmpi.training.config import read_command_line

TARGET = 0.6  # of the hand-written loop's time
SIZES = {False: (60_000, 10_000, 100), True: (4_000, 1_000, 20)}  # quick -> training and test images, rounds
LOCAL_STEPS, BATCH_SIZE, EVALUATIONS, STEP_SIZE = 10, 50, 20, 1e-3


def measure(bench):
    """Print the table. Collective."""
    num_train, num_test, rounds = SIZES[bench.quick]
    folder = pathlib.Path(share(bench.link, lambda: tempfile.mkdtemp(prefix="fedmpi-bench-")))
    try:
        agree(bench.link, lambda: bench.link.rank == 0 and _write_images(folder / "images.h5", num_train, num_test))
        both = f"--eval_every {max(1, rounds // EVALUATIONS)} --evaluate_samples {num_test}"
        jobs = {
            "loop": lambda: hand_written(bench.link.comm, folder / "images.h5", rounds),
            "fedmpi": lambda: _fedmpi(bench.link, folder, rounds, both),
            "fedmpi, its default evaluations": lambda: _fedmpi(bench.link, folder, rounds, ""),
        }
        seconds = {name: [] for name in jobs}
        for _ in range(1 if bench.quick else 3):
            for name, job in jobs.items():
                bench.link.barrier()
                begun = time.perf_counter()
                job()
                seconds[name].append(float(bench.link.allgather([time.perf_counter() - begun]).max()))
    finally:
        bench.link.barrier()
        if bench.link.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    _print(bench, {name: Times(values) for name, values in seconds.items()}, (num_train, num_test, rounds))


def _print(bench, times, sizes):
    num_train, num_test, rounds = sizes
    rows = []
    for name, job_times in times.items():
        ratio = job_times / times["loop"]
        bench.results.record(f"jobs/{name}", job_times)
        bench.results.record(f"jobs/{name} to loop", ratio, "")
        rows.append([name, f"{job_times.median:.2f}", format_ratio(ratio)])
    bench.results.print(
        "",
        f"whole jobs: FedAvg, a client per rank, {num_train:,} + {num_test:,} images, {rounds} rounds",
        f"  of {LOCAL_STEPS} steps with batch {BATCH_SIZE}, {EVALUATIONS} evaluations on all test images",
        "  (fedmpi: on as many training images, too); without the start of Python and its imports",
        *format_table(["job", "s", f"/loop (target {TARGET})"], rows),
    )


def _write_images(path, num_train, num_test):
    """Images of the size of Fashion-MNIST, of noise and a bar that says the class."""
    draw = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for split, number in (("train", num_train), ("test", num_test)):
            labels = draw.integers(0, 10, number)
            bar = np.arange(28) // 2 == 2 + labels[:, None]
            noise = draw.integers(0, 60, (number, 28, 28), dtype=np.uint8)
            file[f"{split}/images"] = noise + 150 * bar[:, None].astype(np.uint8)
            file[f"{split}/labels"] = labels
        file.attrs["num_classes"] = 10


def _fedmpi(link, folder, rounds, evaluation):
    """The job by fedmpi. Collective."""
    words = f"--algorithm fedavg --algorithm.step_size {STEP_SIZE} --model fashion_cnn --data {folder}/images.h5 "
    words += f"--rounds {rounds} --local_steps {LOCAL_STEPS} --batch_size {BATCH_SIZE} --out {folder} {evaluation}"
    with contextlib.redirect_stdout(None):
        own = MPILink(link.comm)
        loop.train(agree(own, lambda: read_command_line(words.split())), own)
        own.close()


def hand_written(comm, path, rounds):
    """The job as people write it: torch.optim, one Allreduce of a flat vector per round, a test on all ranks."""
    rank, size = comm.rank, comm.size
    parts = {}
    with h5py.File(path) as file:
        for split in ("train", "test"):
            number = len(file[f"{split}/labels"])
            own_slice = slice(number * rank // size, number * (rank + 1) // size)
            images = torch.from_numpy(file[f"{split}/images"][own_slice]).float().div(255).sub(0.2).div(0.3)
            parts[split] = images.unsqueeze(1), torch.from_numpy(file[f"{split}/labels"][own_slice])
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(5, 10, 3), nn.Tanh(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(250, 100), nn.Tanh(), nn.Linear(100, 10),
    )  # fmt: skip
    run_round = flat_loop(comm, Loop(net, [parts["train"]], size, LOCAL_STEPS, BATCH_SIZE, STEP_SIZE))
    for number in range(1, rounds + 1):
        run_round()
        if number % max(1, rounds // EVALUATIONS) == 0:
            sums = np.zeros(2)
            with torch.no_grad():
                for images, labels in zip(*(part.split(1000) for part in parts["test"])):
                    scores = net(images)
                    sums += functional.cross_entropy(scores, labels, reduction="sum").item(), len(labels)
            comm.Allreduce(MPI.IN_PLACE, sums)
    return sums[0] / sums[1]
