"""The last rank gives something else than the others: python ranks_differ.py FOLDER; prints "CASE: the line"."""

import os
import sys

import torch
from mpi4py import MPI
from torch import nn

import fedmpi

RANK, LAST = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size - 1
IS_LAST = RANK == LAST


def network(width=300):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, width), nn.BatchNorm1d(width), nn.Linear(width, 2)
    )


def of(last, others):
    return last if IS_LAST else others


def average(model=None, **settings):
    model = network() if model is None else model
    fedmpi.average(model, torch.optim.Adam(model.parameters()), **settings)


def join(model=None, algorithm="fafed", **settings):
    fedmpi.join(network() if model is None else model, algorithm, **settings)


def train(**settings):
    data = [torch.utils.data.TensorDataset(torch.ones(4, 12), torch.zeros(4, dtype=torch.long))] * (LAST + 1)
    common = {"algorithm": "fedavg", "rounds": 2, "threads": 1, "data": data, "name": f"run{len(DONE)}"}
    fedmpi.train(**{"model": nn.Linear(12, 2), **common, **settings})


def changed(change):
    """A network that the last rank has changed."""
    model = network()
    if IS_LAST:
        change(model)
    return model


def freeze(model):
    model[0].weight.requires_grad_(False)


def other_frozen(model):
    model[0].weight.data.mul_(1 + 1e-6)


def both_freeze(model):
    freeze(model)
    return model


class Other(nn.Sequential):
    """Two layers under other names."""


def named(name):
    model = Other()
    model.add_module(name, nn.Linear(3, 2))
    return model


CASES = {
    "outer": lambda: average(outer=of("momentum", "none")),
    "outer step size": lambda: average(outer="momentum", server_step_size=of(0.5, 1.0)),
    "every": lambda: average(every=of(3, 4)),
    "exchange": lambda: average(exchange=of(("exp_avg", "exp_avg_sq"), ("exp_avg_sq", "exp_avg"))),
    "no exchange": lambda: average(exchange=of(3, ())),
    "no optimizer": lambda: fedmpi.average(network(), of(3, None)),
    "no outer": lambda: average(outer=of(["momentum"], "none")),
    "no timeout": lambda: average(timeout=of("60", 25)),
    "algorithm": lambda: join(algorithm=of("scaffold", "fedavg"), step_size=0.1),
    "step size": lambda: join(step_size=of(0.01, 0.1)),
    "clip": lambda: join(clip_norm=of(1.0, None)),
    "decay": lambda: join(weight_decay=of(0.1, 0.0)),
    "local steps": lambda: join(local_steps=of(3, 4)),
    "unknown setting": lambda: join(**of({"step": 1}, {})),
    "shape": lambda: average(network(of(300, 301))),
    "name": lambda: join(named(of("b", "a"))),
    "type": lambda: average(changed(nn.Module.double)),
    "order": lambda: average(changed(lambda model: model.to(memory_format=torch.channels_last))),
    "frozen": lambda: average(changed(freeze)),
    "frozen values": lambda: join(both_freeze(changed(other_frozen))),
    "train step size": lambda: train(**{"algorithm.step_size": of(0.1, 0.2)}),
    "train rounds": lambda: train(rounds=of(2, 900)),
    "train algorithm": lambda: train(algorithm=of("scaffold", "fedavg")),
    "train local steps": lambda: train(local_steps=of(2, 3)),
    "train weighting": lambda: train(weighting=of("samples", "uniform")),
    "train participation": lambda: train(participation=of(0.5, 1.0)),
    "train clip": lambda: train(clip_norm=of(0.5, 1.0)),
    "train holdout": lambda: train(holdout=of(0.2, 0.0)),
    "train aggregation": lambda: train(aggregation=of("mean", "reproducible")),
    "train model": lambda: train(model=nn.Linear(12, of(2, 3))),
}
MAY_DIFFER = {
    "weight": lambda: average(weight=of(2, 1)),
    "values": lambda: join(changed(other_frozen)),
    "threads": lambda: train(threads=of(1, 2)),
    "out": lambda: train(out=of("elsewhere", "runs")),
}
DONE = []
os.chdir(sys.argv[1])
for name, case in {**CASES, **MAY_DIFFER}.items():
    try:
        case()
        found = "nothing" if RANK == 0 else ""
    except fedmpi.UserError as error:
        found = str(error)
    DONE.append(name)
    for turn in range(LAST + 1):  # the ranks' lines do not mix
        MPI.COMM_WORLD.Barrier()
        if turn == RANK and found:
            print(f"{name}: {found}", flush=True)
sys.stdout.flush()
