"""fedmpi.train where the last rank finds its node's shared memory full; with three ranks it is alone on a node."""

import functools

from mpi4py import MPI

import fedmpi.comm.window
from fedmpi.comm.mpi import MPILink
from fedmpi.train import main

world = MPI.COMM_WORLD
if world.rank == world.size - 1:
    fedmpi.comm.window._free_bytes = lambda: 0
if world.size == 3:
    MPILink.__init__ = functools.partialmethod(MPILink.__init__, colour=world.rank // 2)

if __name__ == "__main__":
    main()
