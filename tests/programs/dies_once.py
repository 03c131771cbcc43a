"""A program for restarts: its last rank ends as asked, but only if a file is not there yet, which it then makes.

Arguments: the file, and how to end: an exit code or "kill". Rank 0 prints the number of ranks if all goes well.
"""

import os
import pathlib
import signal
import sys

from mpi4py import MPI

world = MPI.COMM_WORLD
marker, how = pathlib.Path(sys.argv[1]), sys.argv[2]
begins = not marker.exists()
world.Barrier()
if begins and world.rank == world.size - 1:
    marker.touch()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    world.Abort(int(how))
if begins:
    world.Barrier()  # which the last rank never reaches
if world.rank == 0:
    print(f"{world.size} ranks, {os.environ['OMP_NUM_THREADS']} threads", flush=True)
