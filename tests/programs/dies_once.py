"""A program for restarts: its last rank ends as asked, but only if a file is not there yet, which it then makes.

Arguments: the file, and how to end: an exit code, "kill", or "launcher": it kills mpirun. Rank 0 prints the number of
ranks if all goes well.
"""

import os
import pathlib
import signal
import sys
import time

from mpi4py import MPI

from fedmpi.ground.machine.processes import ancestors

world = MPI.COMM_WORLD
marker, how = pathlib.Path(sys.argv[1]), sys.argv[2]
begins = not marker.exists()
world.Barrier()
if begins and world.rank == world.size - 1:
    marker.touch()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "launcher":
        os.kill([number for number, name in ancestors() if name in ("mpirun", "mpiexec", "prterun")][-1], 9)
        time.sleep(100)
    world.Abort(int(how))
if begins:
    world.Barrier()  # which the last rank never reaches
if world.rank == 0:
    print(f"{world.size} ranks, {os.environ['OMP_NUM_THREADS']} threads", flush=True)
