"""Messages beyond MPI's limits, by every transport; prints one line for each, or fails.

Arguments: the bytes of a message, and "split" to set the limits of one call so low that such messages need many calls.
"""

import sys

import numpy as np
import torch
from mpi4py import MPI
from transports import check

import fedmpi.comm.sums.mpi
import fedmpi.comm.sums.slices
import fedmpi.comm.sums.topology
from fedmpi.aggregation import Layout, Moment
from fedmpi.aggregation.reproducible import Reproducible
from fedmpi.comm.sums.mpi import MPILink

PERIOD = 1021  # elements; sums of such small whole numbers are exact
CHUNK = PERIOD << 14  # elements that are filled and checked at once, to save memory
PATTERN = (torch.arange(CHUNK) % PERIOD).float()  # what rank 0 puts into each chunk; rank r adds r


def chunks(block):
    """(what rank 0 puts in, the block's own part) of each chunk."""
    for part in block.split(CHUNK):
        yield PATTERN[: part.numel()], part


def fill(block, rank):
    for expected, part in chunks(block):
        part.copy_(expected + rank)


def is_sum(block, size):
    return all(torch.equal(part, expected * size + size * (size - 1) / 2) for expected, part in chunks(block))


def check_sums(transport, numel):
    """A sum in the transport's own order, and one of whole numbers."""
    link = MPILink(transport=transport)
    block = link.allocate(numel, torch.float32)
    fill(block, link.rank)
    link.average(block, 1, block)
    check(is_sum(block, link.size), f"{transport}: the sum")
    del block
    link.close()
    link = MPILink(transport=transport)
    aggregation = Reproducible()
    aggregation.open(link, Layout(("x",), numel, numel, torch.float32, torch.device("cpu")), [link.rank])
    aggregation.begin(Moment(0, 0, ("x",), slice(0, numel)), dict.fromkeys(range(link.size), 1))
    fill(aggregation.block, link.rank)
    aggregation.take(link.rank, aggregation.block)
    aggregation.scale([(numel, 16)], [])
    aggregation.average(aggregation.block)
    aggregation.block.mul_(link.size)
    check(is_sum(aggregation.block, link.size), f"{transport}: the sum of whole numbers")
    del aggregation
    link.close()


def check_rows(nbytes):
    """Rank 0 sends all its rows to the last rank."""
    link = MPILink()
    row = 1000
    rows = np.zeros((nbytes // row if link.rank == 0 else 0, row), np.uint8)
    rows[:] = np.arange(len(rows))[:, None] % 251
    nothing, everything = np.arange(0), np.arange(len(rows))
    received = link.alltoallv(rows, [everything if rank == link.size - 1 else nothing for rank in range(link.size)])
    expected = np.arange(nbytes // row) % 251 if link.rank == link.size - 1 else nothing
    check((received[:, 0] == expected).all() and (received[:, -1] == expected).all(), "alltoallv")
    link.close()


def check_gather_and_broadcast(nbytes):
    link = MPILink()
    mine = np.full(nbytes // 8 // link.size, link.rank, np.float64)
    everyone = link.allgatherv(mine)
    check(all((part == rank).all() for rank, part in enumerate(everyone.reshape(link.size, -1))), "allgatherv")
    everyone[:] = 7 if link.rank == 0 else 0
    link.broadcast(everyone)
    check((everyone == 7).all(), "broadcast")
    link.close()


def main(nbytes, *how):
    if how == ("split",):
        for module in (fedmpi.comm.sums.topology, fedmpi.comm.sums.slices):
            module.PIECE = 1 << 10
        for module in (fedmpi.comm.sums.topology, fedmpi.comm.sums.mpi):
            module.LARGEST_CALL = 1 << 10
    nbytes = int(float(nbytes))
    for name, action in {
        "allreduce": lambda: check_sums("allreduce", nbytes // 4),
        "shared": lambda: check_sums("shared", nbytes // 4),
        "alltoallv": lambda: check_rows(nbytes),
        "allgatherv and broadcast": lambda: check_gather_and_broadcast(nbytes),
    }.items():
        action()
        if MPI.COMM_WORLD.rank == 0:
            print("right:", name, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
