"""A user's own loop with a run folder: recorded_loop.py WAY FOLDER STEPS [SIGNAL AT]; prints what it ends with."""

import copy
import os
import signal
import sys

import torch
from mpi4py import MPI
from torch import nn

import fedmpi

RANK = MPI.COMM_WORLD.rank
WAY, FOLDER, STEPS = sys.argv[1], sys.argv[2], int(sys.argv[3])
SIGNAL, AT = (sys.argv[4], int(sys.argv[5])) if len(sys.argv) > 4 else ("", -1)


def main():
    torch.manual_seed(RANK)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    drawn = torch.Generator().manual_seed(10 + RANK)

    def evaluate():
        return {"error": float(RANK + 1), "size": float(sum(p.detach().square().sum() for p in model.parameters()))}

    def loss(inputs):
        return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()

    aggregation = os.environ.get("AGGREGATION", "mean")
    common = {"resume": True, "evaluate": evaluate, "eval_every": 2, "checkpoint_every": 2}
    if WAY == "average":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        record = fedmpi.Recording(FOLDER, objects={"schedule": schedule, "drawn": drawn}, **common)
        fed = fedmpi.average(
            model, optimizer, 3, ("exp_avg",), weight=1 + 2 * RANK, record=record, aggregation=aggregation
        )
    else:
        record = fedmpi.Recording(FOLDER, objects={"drawn": drawn}, **common)
        fed = fedmpi.join(
            model, WAY, 3, step_size=0.01, weight=1 + 2 * RANK, record=record, private="3", aggregation=aggregation
        )
    first = fed.steps
    for step in range(first, STEPS):
        if step == AT and RANK == 1:
            os.kill(os.getpid(), getattr(signal, SIGNAL))
        if WAY == "average":
            optimizer.zero_grad()
            value = loss(torch.randn(8, 4, generator=drawn))
            value.backward()
            optimizer.step()
            schedule.step()
            fed.step(value)
        else:
            inputs = torch.randn(8, 4, generator=drawn)
            fed.step(lambda inputs=inputs: loss(inputs))
    fed.finish()
    total = torch.cat([tensor.double().reshape(-1) for tensor in model.state_dict().values()]).sum().item()
    lines = MPI.COMM_WORLD.allgather(f"from {first}, rank {RANK}: {total!r}")
    loaded = fedmpi.load(FOLDER, copy.deepcopy(model), None if WAY == "average" else RANK)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
    if RANK == 0:
        print(*lines, sep="\n")


if __name__ == "__main__":
    main()
