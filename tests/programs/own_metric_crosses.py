"""A task with a metric on the clients' own tests; with a second argument its common tests differ between ranks."""

import sys

import torch
from mpi4py import MPI
from torch.utils.data import TensorDataset

import fedmpi


def data(number):
    return TensorDataset(torch.rand(number, 3), torch.arange(number) % 2)


members = {"test_of": lambda client, num: data(9)}
if len(sys.argv) > 2:
    members = {"test": lambda: data(5 + MPI.COMM_WORLD.rank)}
Own = fedmpi.Task.of(
    "Own",
    train=lambda client, num: data(20),
    loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    metrics={"of_all": lambda outputs, targets: len(targets)},
    **members,
)
try:
    run = fedmpi.train(task=Own, model=torch.nn.Linear(3, 2), algorithm="fedavg", rounds=1, threads=1, out=sys.argv[1])
except fedmpi.ground.errors.UserError as error:
    print("LINE", error, flush=True)
