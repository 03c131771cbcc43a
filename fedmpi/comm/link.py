"""Sums over the ranks, and what they cost."""

import dataclasses

import numpy as np
import torch


@dataclasses.dataclass
class Traffic:
    """The account of what a rank handed to collectives.

    Attributes:
        collectives: number of Allreduces of model vectors.
        nbytes: their payload in bytes, per rank.
        largest: payload in bytes of the largest one.
        other_bytes: payload of everything else: losses, metrics, agreements.
    """

    collectives: int = 0
    nbytes: int = 0
    largest: int = 0
    other_bytes: int = 0

    def add(self, nbytes):
        """Count one Allreduce of `nbytes`."""
        self.collectives += 1
        self.nbytes += nbytes
        self.largest = max(self.largest, nbytes)


class SoloLink:
    """The link of a process that holds all clients: nothing to sum, everything counted."""

    rank, size = 0, 1

    def __init__(self):
        self.traffic = Traffic()

    def allocate(self, numel, dtype, device="cpu"):
        """[numel] zeros."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def allreduce(self, block):
        """The sum over one rank is what is there."""
        self.traffic.add(block.numel() * block.element_size())

    def average(self, block, divisor, out):
        """out = block / divisor; `out` may be `block`."""
        self.allreduce(block)
        divide(block, divisor, out)

    def allgather(self, values):
        """[1, n] from [n]."""
        return np.array(values)[None]

    def allgatherv(self, values):
        """What is there, as float64."""
        return np.array(values, dtype=np.float64)

    def alltoallv(self, rows, wanted):
        """The rows that this rank wants of itself."""
        return rows[wanted[0]]


def divide(block, divisor, out):
    """out = block / divisor with as few passes over the memory as that takes."""
    if divisor != 1:
        torch.div(block, divisor, out=out)
    elif out.data_ptr() != block.data_ptr():
        out.copy_(block)
