"""The figure of the README: python docs/pictures/accuracy.py writes accuracy.svg beside this file (some minutes).

Five methods with their default settings on the digits, 10 clients with unlike shares of the classes, three seeds.
"""

import pathlib
import tempfile

import fedmpi

LABELS = {"fafed": "FAFED", "fedavg": "FedAvg", "scaffold": "SCAFFOLD", "fedadam": "FedAdam", "stem": "STEM"}

with tempfile.TemporaryDirectory() as folder:
    for name in LABELS:
        for seed in range(3):
            partition = {"name": "dirichlet", "concentration": 0.3}
            fedmpi.train(
                algorithm=name,
                clients=10,
                partition=partition,
                rounds=60,
                seed=seed,
                eval_every=2,
                threads=1,
                out=folder,
            )
    style = {"width": 360, "height": 210, "size": 10, "labels": LABELS}
    path = pathlib.Path(__file__).with_suffix(".svg")
    fedmpi.figure(folder, "accuracy", axis="bytes", path=path, **style)
print(path)
