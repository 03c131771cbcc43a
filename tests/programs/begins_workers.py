"""A program that begins MPI at its top, which its workers import anew: python begins_workers.py METHOD."""

# ruff: isort: skip_file

import multiprocessing
import sys

from fedmpi.comm.start.mpi_library import begin
from mpi4py import MPI

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def place(number):
    begin()
    return RANK, SIZE, number


if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        (found,) = pool.map(place, [RANK])
    assert found == (0, 1, RANK), found
    print(f"worker of {MPI.COMM_WORLD.allreduce(1)}")
