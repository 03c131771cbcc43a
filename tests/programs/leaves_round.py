"""Several ranks that leave a round: leaves_round.py DOOR ALGORITHM FOLDER [SIGNAL RANK AT [SECONDS]].

DOOR: train, average or join. Rank RANK sends itself SIGNAL after its local step number AT, from 1, of this start; with
SIGKILL, states are written after every local step. SECONDS: of each step of the other ranks.
Prints a sum over the model that it ends with, in hexadecimal.
"""

import itertools
import os
import signal
import sys
import time

import torch
from mpi4py import MPI
from torch import nn

import fedmpi
from fedmpi.federation.turns import Turns
from fedmpi.own_loop import recorded
from fedmpi.runs.checkpoints import writer
from fedmpi.runs.loop import within

DOOR, ALGORITHM, FOLDER, *REST = sys.argv[1:]
SIGNAL, RANK, AT = (REST[0], int(REST[1]), int(REST[2])) if REST else ("", 0, 0)
RANKS, SELF = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
OFTEN = {"checkpoint_minutes": 1e-9 if SIGNAL == "SIGKILL" else 10.0}
ROUNDS, STEPS = 2, 60
made = itertools.count(1)


def may_end():
    """After each local step of this rank."""
    time.sleep(float(REST[3]) if REST[3:] and SELF != RANK else 0.004)
    if next(made) == AT and SELF == RANK:
        os.kill(os.getpid(), getattr(signal, SIGNAL))


def hurry():
    """Rounds are left from their first step on, where a user's would be after some seconds."""
    recorded.LONG = within.LONG = writer.LONG = 0
    recorded.AHEAD = 0.03


def network():
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def samples(number):
    drawn = torch.Generator().manual_seed(number)
    inputs = torch.randn(40, 5, generator=drawn)
    return torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())


def train():
    usual = Turns.after_step

    def after_step(turns, federation, client):
        usual(turns, federation, client)
        may_end()

    Turns.after_step = after_step
    settings = {"algorithm": ALGORITHM, "rounds": ROUNDS, "local_steps": STEPS // 4, "batch_size": 5, "threads": 1}
    data = [samples(number) for number in range(3)]
    out, name = os.path.split(FOLDER)
    result = fedmpi.train(data=data, model=network, out=out, name=name, resume="auto", **settings, **OFTEN)
    print_sum(fedmpi.load(result.folder, network()))


def own_loop():
    torch.manual_seed(0)
    model, drawn = network(), torch.Generator().manual_seed(SELF)
    data = samples(SELF)
    if DOOR == "average":
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 25, 0.8)
        record = fedmpi.Recording(FOLDER, resume=True, objects={"drawn": drawn, "schedule": schedule}, **OFTEN)
        fed = fedmpi.average(model, optimizer, every=STEPS, record=record)
    else:
        record = fedmpi.Recording(FOLDER, resume=True, objects={"drawn": drawn}, **OFTEN)
        fed = fedmpi.join(model, ALGORITHM, local_steps=STEPS, record=record)
    for step in range(fed.steps, ROUNDS * STEPS):
        inputs, labels = data[torch.randint(40, (5,), generator=drawn)]
        assert set(MPI.COMM_WORLD.allgather(step)) == {step}  # a message of the loop's own in every step

        def loss(inputs=inputs, labels=labels):
            return nn.functional.cross_entropy(model(inputs), labels)

        if DOOR == "average":
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
            fed.step()
            schedule.step()
        else:
            fed.step(loss)
        may_end()
    fed.finish()
    print_sum(model)


def print_sum(model):
    total = torch.cat([tensor.double().reshape(-1) for tensor in model.state_dict().values()]).sum().item()
    if SELF == 0:
        print("ended:", total.hex())


if __name__ == "__main__":
    hurry()
    train() if DOOR == "train" else own_loop()
