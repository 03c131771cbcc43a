"""A recorded loop with a stage that reads what a round began with: python bounded_loop.py FOLDER STEPS, killed if < 40.

Every rank has data of its own.
"""

import os
import signal
import sys

import torch

import fedmpi
from fedmpi.aggregation.stages.norm_bound import NormBound

folder, until = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
recording = fedmpi.Recording(folder, resume=True, checkpoint_every=1)
fed = fedmpi.average(model, optimizer, every=4, stages=[NormBound(bound=0.05)], record=recording)
while fed.steps < until:
    optimizer.zero_grad()
    (model(torch.eye(3)) - 1 - fed.rank).square().mean().backward()
    optimizer.step()
    fed.step()
if until < 40:
    os.kill(os.getpid(), signal.SIGKILL)
fed.finish()
print("model", [*model.weight.detach().reshape(-1).tolist(), model.bias.item()], flush=True)
