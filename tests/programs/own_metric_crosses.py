"""A task with a metric on the clients' own tests; a second argument: bins (`scores`), or common tests that differ."""

import sys

import torch
from mpi4py import MPI
from torch.utils.data import TensorDataset

import fedmpi


def data(number):
    return TensorDataset(torch.rand(number, 3), torch.arange(number) % 2)


members = {"test_of": lambda client, num: data(9)}
bins = {"scores": "bins"} if "bins" in sys.argv else {}
if len(sys.argv) > 2 and not bins:
    members = {"test": lambda: data(5 + MPI.COMM_WORLD.rank)}
Own = fedmpi.Task.of(
    "Own",
    train=lambda client, num: data(20),
    loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    metrics={"of_all": lambda outputs, targets: len(targets)},
    **members,
)
try:
    words = {"algorithm": "fedavg", "rounds": 1, "threads": 1, **bins}
    run = fedmpi.train(task=Own, model=torch.nn.Linear(3, 2), out=sys.argv[1], **words)
except fedmpi.ground.errors.UserError as error:
    print("LINE", error, flush=True)
