"""Runs of three clients whose parts keep state, killed in an exchange: killed_parts.py FOLDER WAY EXCHANGES.

EXCHANGES, such as 0,1,2: a run for each, of which the last, if "kill" is appended, is killed in that exchange. Without
"kill", those of the list go on from their last checkpoints and print digests of their models, and so does one that
nothing ended.
"""

import dataclasses
import hashlib
import os
import signal
import sys

import torch
from torch.utils.data import TensorDataset

import fedmpi
from fedmpi.aggregation import Aggregation
from fedmpi.aggregation.codecs import Codec
from fedmpi.aggregation.stages import Stage

SERIAL = [-1]  # the exchange in which a rank is killed


class Counts:
    """A state of the part, and one of each client."""

    def open(self, *given):
        super().open(*given)
        self.calls, self.of_client = 0, {}

    def count(self, client=None):
        self.calls += 1
        if client is not None:
            self.of_client[client] = self.of_client.get(client, 0) + 1

    def state(self):
        return {"calls": self.calls}

    def restore(self, state):
        self.calls = state["calls"]

    def client_state(self, client):
        return {"calls": self.of_client.get(client, 0)}

    def restore_client(self, client, state):
        self.of_client[client] = state["calls"]


@dataclasses.dataclass(kw_only=True)
class Feedback(Counts, Stage):
    """Rounded moves of points, whose errors are fed back; finer with every exchange of the client."""

    needs_start = True
    kept_rows = ("error",)

    def state(self):
        return {}  # of its clients only: ranks call it as often as they have clients

    def restore(self, state):
        pass

    def apply(self, sent):
        if sent.moment.serial == SERIAL[0] and sent.client == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count(sent.client)
        grain = 0.01 / self.of_client[sent.client]
        for name, row in sent.rows.items():
            if sent.kinds[name] == "point":
                error, start = sent.kept["error"][name], sent.start[name]
                wanted = row + error
                row.copy_(start + ((wanted - start) / grain).round() * grain)
                error.copy_(wanted - row)


@dataclasses.dataclass(kw_only=True)
class Coarser(Counts, Codec):
    """Moves whose last bits go, more of them in every second exchange."""

    def begin(self, moment):
        super().begin(moment)
        self.count()

    def encode(self, moves):
        return moves.to(torch.float32 if self.calls % 2 else torch.bfloat16, copy=True).to(torch.float32)

    def decode(self, words):
        return words.to(self.layout.dtype, copy=True)


@dataclasses.dataclass(kw_only=True)
class Momentum(Counts, Aggregation):
    """The median's moves, with what is left of those of former exchanges of the same rows."""

    needs_start = True
    takes_codecs = True

    def open(self, *given):
        super().open(*given)
        self.before = {}

    def state(self):
        return {**super().state(), **{name: value.clone() for name, value in self.before.items()}}

    def restore(self, state):
        self.before = {name: value for name, value in state.items() if name != "calls"}
        super().restore(state)

    def average(self, out):
        self.count()
        self.reduce_slices(lambda slices: torch.stack([*slices]).median(0).values, out)
        if set(self.moment.rows) <= {"x"}:
            move = out - self.start
            if "x" in self.before:
                move += self.before["x"] * (0.5 + 0.1 / self.calls)
            self.before["x"] = move.clone()
            out.copy_(self.start + move)


WAYS = {
    "rule": {"algorithm": {"name": "fafed", "step_size": 0.003}, "aggregation": Momentum, "codec": Coarser},
    "mean": {"algorithm": {"name": "fedavg_m", "step_size": 0.01}, "codec": "random_k"},
    "two": {"algorithm": {"name": "mimeadam", "step_size": 0.01}, "aggregation": Momentum, "codec": Coarser},
}

folder, way, exchanges, *kill = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(3)
data = [TensorDataset(inputs, inputs.sum(1).sin()) for inputs in torch.randn(3, 40, 5)]
given = {"task": "regression", "data": data, "test_data": data[1], "dtype": "float64", "out": folder, "rounds": 3}
given |= {"local_steps": 2, "batch_size": 20, "checkpoint_every": 1, "resume": "auto", **WAYS[way]}
if kill:
    SERIAL[0] = int(exchanges)
for name in exchanges.split(",") if kill else ["whole", *exchanges.split(",")]:
    run = fedmpi.train(name=f"killed-{name}", **{k: v() if isinstance(v, type) else v for k, v in given.items()},
                       stages=[Feedback()])  # fmt: skip
    values = torch.cat([row.detach().reshape(-1) for row in run.model.parameters()])
    os.write(1, f"ends {name} {hashlib.sha256(values.numpy().tobytes()).hexdigest()}\n".encode())  # at once
