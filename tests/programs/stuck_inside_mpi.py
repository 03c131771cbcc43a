"""A rank that goes on without lost ones waits inside MPI for a process that is stopped, and afterwards for nobody."""

import subprocess
import sys
import time

import numpy as np
from mpi4py import MPI

from fedmpi.comm.faults import rollcall
from fedmpi.ground.machine.processes import describe_process


class RollCall(rollcall.RollCall):
    """One whose rank 1 is a process that has stopped itself."""

    def _others(self):
        return [1]


describe = (
    "from fedmpi.ground.machine import processes; import os, signal; print(*processes.describe_process(), flush=True)"
)
stopped = subprocess.Popen(
    [sys.executable, "-c", f"{describe}; os.kill(os.getpid(), signal.SIGSTOP)"], stdout=subprocess.PIPE, text=True
)
process = [int(word) for word in stopped.stdout.readline().split()]
rollcall.GRACE = 0.1
roll_call = RollCall(MPI.COMM_SELF, 0.1, lambda rank: f"rank {rank}", lambda: ("a test", ""))
roll_call._processes = np.array([describe_process(), process], np.int64)
roll_call.goes_on = True
with roll_call.inside_mpi():
    print(f"ended by signal {-stopped.wait()}", flush=True)
    time.sleep(60)
