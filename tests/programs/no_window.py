"""fedmpi.train on a node whose shared memory is full, as rank 1 finds out."""

from mpi4py import MPI

import fedmpi.comm.window
from fedmpi.train import main

if MPI.COMM_WORLD.rank == 1:
    fedmpi.comm.window._free_bytes = lambda: 0

if __name__ == "__main__":
    main()
