"""A rank of an unfinished job ends without a word to fedmpi: ends.py HOW RANK DOOR [FOLDER].

DOOR is how the ranks have met: "watch" (only fedmpi's watch, without torch), "average" (an own loop), "train"
(`fedmpi.train` in a folder). HOW is a key of `ENDS`.
"""

import ctypes
import os
import pathlib
import signal
import sys
import time

from fedmpi.comm.start.mpi_library import MPI

C = ctypes.CDLL(None)
ENDS = {
    "_exit": lambda: C._exit(0),
    "exit": lambda: C.exit(0),
    "exit3": lambda: C._exit(3),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "exec and stay": lambda: os.execv("/bin/sleep", ["sleep", "100"]),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segmentation fault": lambda: ctypes.string_at(0),
    "abort": lambda: MPI.COMM_WORLD.Abort(),
    "os._exit": lambda: os._exit(status=0),
    "child": lambda: os.fork() or os._exit(0),  # not this process: nothing happens
}
HOW, RANK, DOOR, *FOLDER = sys.argv[1:]


def end():
    if MPI.COMM_WORLD.rank == int(RANK):
        ENDS[HOW]()


def watch():
    from fedmpi.comm.faults.rollcall import RollCall

    roll_call = RollCall(MPI.COMM_WORLD, 60, lambda rank: f"rank {rank}", lambda: ("a test", ""))
    MPI.COMM_WORLD.Barrier()
    end()
    if HOW != "child":
        time.sleep(60)
    roll_call.close()
    assert "torch" not in sys.modules


def average():
    import torch

    import fedmpi

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fed = fedmpi.average(model, optimizer, every=5, timeout=60)
    for step in range(30):
        if step == 7:
            end()
        model(torch.ones(3)).square().sum().backward()
        optimizer.step()
        fed.step()
    fed.finish()


def train():
    import torch

    import fedmpi

    class Net(torch.nn.Linear):
        def forward(self, images):
            if pathlib.Path(FOLDER[0], "it", "metrics.jsonl").exists():
                end()
            return super().forward(images.flatten(1))

    fedmpi.train(model=Net(64, 10), out=FOLDER[0], name="it", rounds=100000, clients=MPI.COMM_WORLD.size, threads=1)


if __name__ == "__main__":
    {"watch": watch, "average": average, "train": train}[DOOR]()
