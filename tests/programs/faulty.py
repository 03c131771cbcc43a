"""A model that fails in training on one rank only, in the ways that jobs fail."""

import os
import signal
import sys
import time

from mpi4py import MPI

from fedmpi.models.mlp import MLP


class Faulty(MLP):
    """An MLP that fails at its fifth training step on rank `rank`, or before the first, as `kind` says."""

    def __init__(self, shape, num_classes, kind: str = "exception", rank: int = 1):
        super().__init__(shape, num_classes, hidden=10)
        self._kind, self._is_here, self._steps = kind, MPI.COMM_WORLD.rank == rank, 0
        if kind == "early" and self._is_here:
            raise ValueError("the silo is not there")

    def forward(self, inputs):
        scores = super().forward(inputs)
        self._steps += self.training
        if not self._is_here or self._steps < 5:
            return scores
        if self._steps == 5:
            print(f"fails at {time.monotonic()}", flush=True)  # a clock that all processes of a machine share
        if self._kind == "exception":
            raise RuntimeError("the silo is on fire")
        if self._kind == "exit":
            sys.exit(3)
        if self._kind == "exit0":
            sys.exit(0)
        if self._kind == "exit_at_once":
            os._exit(0)
        if self._kind in ("kill", "stop"):
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self._kind])
        return scores * float("nan")
