"""FedAvg as one writes it with mpi4py and PyTorch: mpirun -np 4 python docs/comparison/hand_written_job.py DATA

The job of `whole_job.py` without fedmpi: one flat vector, one Allreduce a round, images in memory, tests on all ranks.
"""

import argparse

import h5py
import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional

LOCAL_STEPS, BATCH_SIZE, STEP_SIZE, EVALUATIONS = 10, 50, 0.1, 20


def samples(path, split, rank, size):
    """This rank's share of a split: images of float32 [n, 1, 28, 28], labels [n]."""
    with h5py.File(path) as file:
        number = len(file[f"{split}/labels"])
        own = slice(number * rank // size, number * (rank + 1) // size)
        images, labels = torch.from_numpy(file[f"{split}/images"][own]), torch.from_numpy(file[f"{split}/labels"][own])
    return images.float().div(255).sub(0.286).div(0.353).unsqueeze(1), labels.long()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--rounds", type=int, default=100)
    asked = parser.parse_args()
    comm = MPI.COMM_WORLD
    images, labels = samples(asked.data, "train", comm.rank, comm.size)
    tests = samples(asked.data, "test", comm.rank, comm.size)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(5, 10, 3), nn.Tanh(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(250, 100), nn.Tanh(), nn.Linear(100, 10),
    )  # fmt: skip
    parameters = list(net.parameters())
    flat = torch.cat([parameter.data.reshape(-1) for parameter in parameters])
    for parameter, piece in zip(parameters, flat.split([parameter.numel() for parameter in parameters])):
        parameter.data = piece.view_as(parameter)
    optimizer = torch.optim.SGD(parameters, lr=STEP_SIZE)
    torch.manual_seed(comm.rank)
    for number in range(1, asked.rounds + 1):
        for batch in torch.randint(len(labels), (LOCAL_STEPS, BATCH_SIZE)):
            optimizer.zero_grad()
            functional.cross_entropy(net(images[batch]), labels[batch]).backward()
            optimizer.step()
        comm.Allreduce(MPI.IN_PLACE, flat.numpy())
        flat /= comm.size
        if number % max(1, asked.rounds // EVALUATIONS) == 0:
            correct = np.zeros(1)
            with torch.no_grad():
                for batch, truth in zip(tests[0].split(1000), tests[1].split(1000)):
                    correct += (net(batch).argmax(1) == truth).sum().item()
            comm.Allreduce(MPI.IN_PLACE, correct)
            if comm.rank == 0:
                print(f"round {number}: accuracy {correct[0] / 10_000:.4f}", flush=True)
    if comm.rank == 0:
        torch.save(net.state_dict(), "hand_written.pt")


if __name__ == "__main__":
    main()
