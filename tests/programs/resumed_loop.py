"""An own loop by epochs whose schedule and mean model come after fed.step: resumed_loop.py FOLDER HOW [SIGNAL AT].

HOW: "batches" reads fed.batches(loader), "plain" the loader itself, "other" begins with another step size.
Prints what it ends with: steps, learning rate and a sum over the mean model, in hexadecimal.
"""

import os
import signal
import sys

import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import fedmpi

FOLDER, HOW = sys.argv[1:3]
SIGNAL, AT = (sys.argv[3], int(sys.argv[4])) if len(sys.argv) > 3 else ("SIGTERM", -1)
PASS = 8  # batches of the longest loader


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if HOW == "other" else 0.05, momentum=0.9)
    schedule, mean, shuffle = ExponentialLR(optimizer, 0.97), AveragedModel(model), torch.Generator()
    objects = {"schedule": schedule, "mean": mean, "shuffle": shuffle}
    record = fedmpi.Recording(FOLDER, resume=True, objects=objects, checkpoint_every=1, verbose=True)
    fed = fedmpi.average(model, optimizer, every=3, record=record)
    if not fed.steps:
        shuffle.manual_seed(fed.rank)
    inputs = torch.randn(32 - 13 * fed.rank, 4, generator=torch.Generator().manual_seed(fed.rank))
    loader = DataLoader(TensorDataset(inputs), 4, shuffle=True, generator=shuffle, drop_last=True)
    for _ in range(fed.steps // PASS, 3):
        for (batch,) in loader if HOW == "plain" else fed.batches(loader):
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if fed.steps == AT and fed.rank == 1:
                os.kill(os.getpid(), getattr(signal, SIGNAL))
            fed.step(loss)
            mean.update_parameters(model)
            schedule.step()
    steps = fed.steps
    fed.finish()
    total = sum(value.double().sum().item() for value in mean.state_dict().values())
    if fed.rank == 0:
        print(f"ended: {steps} {schedule.last_epoch} {optimizer.param_groups[0]['lr'].hex()} {total.hex()}")


if __name__ == "__main__":
    main()
