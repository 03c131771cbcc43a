"""A recorded loop whose `evaluate` fails or gives something else than numbers: bad_evaluate.py FOLDER HOW."""

import sys

import numpy as np
import torch

import fedmpi

FOLDER, HOW = sys.argv[1:]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def evaluate():
    if HOW == "raises" and fed.rank == 1:
        raise ZeroDivisionError("no positive cases")
    given = {"list": [0.1, 0.2], "none": None, "word": "0.5", "array": np.ones(3), "complex": 1j}
    given |= {"numbers": torch.tensor([0.5], requires_grad=True), "raises": 0.5}
    return [1.0] if HOW == "no dict" else {"recall": given.get(HOW), "accuracy": np.float32(0.5)}


fed = fedmpi.average(model, optimizer, every=1, record=fedmpi.Recording(FOLDER, evaluate=evaluate))
optimizer.zero_grad()
model(torch.ones(2, 4)).square().mean().backward()
optimizer.step()
fed.step()
fed.finish()
if fed.rank == 0:
    print(fedmpi.load_run(FOLDER).records[-1]["recall"], flush=True)
