"""What limits moves from the start of a round, on several ranks; prints what each case ends with."""

import itertools
import math

import torch

import fedmpi
from fedmpi.aggregation.robust import CentredClipping
from fedmpi.aggregation.stages.norm_bound import NormBound


class Net(torch.nn.Module):
    def __init__(self, table=None):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(3))
        self.norm = torch.nn.BatchNorm1d(1, affine=False)
        if table is not None:
            self.register_buffer("table", table)


def begin(door, model, step_size, **sending):
    """(federation, a function that makes a step of every rank's own)."""

    def loss():
        return -(model.w * (1.0 + fed.rank)).sum()

    if door == "join":
        fed = fedmpi.join(model, "fedavg", local_steps=1, step_size=step_size, **sending)
        return fed, lambda: fed.step(loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=step_size)
    fed = fedmpi.average(model, optimizer, every=1, **sending)

    def step():
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        fed.step()

    return fed, step


def show(fed, name, model):
    fed.finish()
    if fed.rank == 0:
        print(
            name, [round(value, 3) for value in model.w.tolist()], round(model.norm.running_mean.item(), 2), flush=True
        )


for door, value in itertools.product(("join", "average"), (None, 1000.0, -math.inf)):
    model = Net(None if value is None else torch.full((4,), value))
    fed, step = begin(door, model, 1.0, aggregation=CentredClipping(radius=10.0))
    for _ in range(2):
        step()
    show(fed, "constant", model)

for door, sending in itertools.product(
    ("join", "average"), ({"stages": [NormBound(bound=1.0)]}, {"aggregation": CentredClipping(radius=1.0)})
):
    model = Net()
    fed, step = begin(door, model, 1e-9, **sending)
    for round_index in range(3):
        if round_index == 1 and fed.rank == 1:
            model.w.data[0] = 5.0
        if round_index == 2 and fed.rank == 1:
            model.norm(torch.full((4, 1), 100.0))  # a forward in training mode between two rounds
        step()
    show(fed, "between", model)
