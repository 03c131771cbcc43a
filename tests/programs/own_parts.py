"""Runs with parts that a program adds: own_parts.py FOLDER, on any number of ranks; prints what rank 0 finds."""

import pathlib
import sys

import torch
from mpi4py import MPI

import fedmpi

OUT, RANK = pathlib.Path(sys.argv[1]), MPI.COMM_WORLD.rank


class Distance(fedmpi.Part):
    """Adds a number to every record, and keeps where the model began."""

    first = None

    def begin(self, run):
        self.model = run.federation.server.x
        self.first = self.model.clone() if self.first is None else self.first

    def after_round(self, now):
        now.facts["distance"] = (self.model - self.first).norm().item()

    def state(self):
        return {"first": self.first}

    def restore(self, state):
        self.first = state["first"]


class Writer(fedmpi.Part):
    """Writes a file, on one rank, which alone calls its methods."""

    writes = True

    def __init__(self):
        self.calls = []

    def begin(self, run):
        self.folder = run.folder

    def request(self):
        assert RANK == 0
        return 0

    def state(self):
        assert RANK == 0
        return {"calls": len(self.calls)}

    def restore(self, state):
        assert RANK == 0 and state["calls"] == 4

    def before_round(self, number):
        self.calls.append(f"before {number}")

    def after_round(self, now):
        self.calls.append(f"after {now.round} {sorted(now.metrics)[:1]}")

    def end(self, now):
        (self.folder / "calls.txt").write_text("\n".join(self.calls))


class Until(fedmpi.Part):
    """Ends the run after a round, which one rank alone knows."""

    def __init__(self, last):
        self.last = last

    def after_round(self, now):
        if now.round == self.last and RANK == 0:
            now.is_last = True


def shown(records):
    return [(record["round"], round(record["distance"], 9), "accuracy" in record) for record in records]


def train(name, **settings):
    given = {"algorithm": "fedavg", "clients": 4, "rounds": 4, "eval_every": 2, "checkpoint_every": 1, "threads": 1}
    return fedmpi.train(out=str(OUT), **({"name": name} if name else {}), **given | settings)


whole = train("whole", parts=[Distance(), Writer()])
train("halves", parts=[Distance(), Writer()], rounds=2)
halves = train(None, parts=[Distance(), Writer()], resume=str(OUT / "halves"))
early = train("early", parts=[Until(3), Distance()])
files = [path.name for path in (OUT / "whole").iterdir() if path.name == "calls.txt"]
everywhere = MPI.COMM_WORLD.allgather(shown(whole.metrics))

model = torch.nn.Linear(2, 1)
torch.nn.init.zeros_(model.weight)
measured = {"evaluate": lambda: {"accuracy": 1.0}, "eval_every": 2}
recording = fedmpi.Recording(OUT / "loop", parts=[Distance(), Writer()], **measured)
fed = fedmpi.join(model, "fedavg", local_steps=2, step_size=0.5, record=recording)
for _ in range(6):
    fed.step(lambda: (model(torch.eye(2)) - 1).square().mean())
fed.finish()
if RANK == 0:
    print("whole", shown(whole.metrics))
    print("halves", shown(halves.metrics))
    print("early", shown(early.metrics), len(early.final) > 0)
    print("equal", all(one == everywhere[0] for one in everywhere), files)
    print("calls", (OUT / "whole/calls.txt").read_text().split("\n"))
    print("loop", shown(fedmpi.load_run(OUT / "loop").records), (OUT / "loop/calls.txt").read_text().split("\n"))
