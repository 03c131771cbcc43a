"""Two runs of `fedmpi.train` and one that rank 1 ends, in FOLDER: each rank writes what it got to rank-R.json."""

import json
import os
import sys

import torch
from mpi4py import MPI

import fedmpi


def main(folder):
    os.chdir(folder)
    rank, errors = MPI.COMM_WORLD.rank, []
    usual = {"algorithm": "fedavg", "clients": 4, "threads": 1, "local_steps": 2, "rounds": 6, "evaluate_samples": 100}
    runs = [fedmpi.train(**usual), fedmpi.train(**usual, eval_every=2)]
    runs.append(fedmpi.train(**usual, on_round=lambda record: rank == 1 and record["round"] == 4))
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))  # other initial values on each rank
    runs.append(fedmpi.train(**usual, model=net))
    for name, wrong in (("fedavgg", {"algorithm": "fedavgg"}), ("batch_size", {"batch_size": 0})):
        try:
            fedmpi.train(**wrong)
        except fedmpi.UserError as error:
            assert name in str(error)
            errors.append(name)
    found = {
        "records": [run.metrics for run in runs],
        "folders": [str(run.folder) for run in runs],
        "final": [run.final for run in runs],
        "models": [sum(p.double().sum().item() for p in run.model.parameters()) for run in runs],
        "errors": errors,
    }
    with open(f"rank-{rank}.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
