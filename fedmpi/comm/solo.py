"""The link of one process, and what a rank computes by itself in a sum."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedmpi.comm.crosses import OWN, Crossed
from fedmpi.comm.link import Link
from fedmpi.comm.traffic import Traffic
from fedmpi.comm.vectors import Reduce, Slices
from fedmpi.ground.machine.cores import count_at_a_time, usable_cores


class SoloLink(Link):
    """The link of one process that holds all clients: nothing is sent, everything is counted."""

    def __init__(self) -> None:
        self.traffic, self.crossed = Traffic(), Crossed()
        self.usable_cores = count_at_a_time(usable_cores())
        self.free_cores = self.usable_cores

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def average(self, block: torch.Tensor, divisor: float, out: torch.Tensor, kind: str = OWN) -> None:
        self.traffic.add(block.numel() * block.element_size())
        divide(block, divisor, out)

    def add_integers(self, block: torch.Tensor, kind: str = OWN) -> None:
        self.traffic.add(block.nbytes)

    def exchange_slices(
        self,
        vectors: list[torch.Tensor],
        reduce: Reduce,
        out: torch.Tensor,
        dtype: torch.dtype | None = None,
        kind: str = OWN,
    ) -> None:
        self.traffic.add_slices(vectors, out)
        if out.numel():
            out.copy_(reduce(Slices(vectors, slice(0, out.numel()))))

    def allgather_vectors(self, vector: torch.Tensor, kind: str = OWN) -> list[torch.Tensor]:
        self.traffic.add(vector.nbytes)
        return [vector.clone()]

    def allgather(self, values: npt.ArrayLike, kind: str = OWN) -> npt.NDArray[Any]:
        return np.array(values, dtype=np.float64)[None]

    def allgatherv(self, values: npt.ArrayLike, kind: str = OWN) -> npt.NDArray[Any]:
        return np.array(values, dtype=np.float64)

    def alltoallv(
        self, rows: npt.NDArray[Any], wanted: Sequence[npt.NDArray[Any]], kind: str = OWN
    ) -> npt.NDArray[Any]:
        arrived: npt.NDArray[Any] = rows[wanted[0]]
        return arrived

    def broadcast(self, array: npt.NDArray[Any], kind: str = OWN) -> None:
        """There is one rank."""

    def barrier(self) -> None:
        """A single process never waits."""

    def close(self) -> None:
        """Nothing was opened."""


def divide(block: torch.Tensor, divisor: float, out: torch.Tensor) -> None:
    """out = block / divisor with as few passes over the memory as possible."""
    if divisor != 1:
        torch.div(block, as_operand(divisor, block), out=out)
    elif out.data_ptr() != block.data_ptr():
        out.copy_(block)


def as_operand(divisor: float, block: torch.Tensor) -> torch.Tensor | float:
    """The divisor as something by which a device divides with the CPU's bits.

    By a number a GPU does not divide: torch multiplies by its reciprocal there, which rounds differently.
    """
    if block.device.type == "cpu":
        return divisor
    return torch.full((), divisor, dtype=block.dtype, device=block.device)
