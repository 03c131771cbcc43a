"""A run that prints the calls of the package around a local step, a gradient and MPI's Allreduce: frames.py WORDS.

The lists begin with `run_round`.
"""

import json
import pathlib
import sys
import traceback

import fedmpi
from fedmpi.algorithms import FAFED
from fedmpi.comm.sums.topology import Communicator
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.train import main

PACKAGE = str(pathlib.Path(fedmpi.__file__).parent)
FOUND = {}


def note(owner, method, name):
    """Let a method note the calls around it, if they are those of a round."""
    usual = getattr(owner, method)

    def noting(*arguments, **options):
        frames = [frame.name for frame in traceback.extract_stack() if frame.filename.startswith(f"{PACKAGE}/")]
        if "run_round" in frames and name not in FOUND:
            FOUND[name] = frames[frames.index("run_round") :]
        return usual(*arguments, **options)

    setattr(owner, method, noting)


if __name__ == "__main__":
    note(FAFED, "local_step", "local_step")
    note(FlatModule, "gradient", "gradient")
    note(Communicator, "allreduce", "Allreduce")
    main(sys.argv[1:])
    FOUND["Allreduce"] = [*FOUND["Allreduce"], "allreduce"]  # that of the communicator, which calls MPI's
    print(json.dumps(FOUND), flush=True)
