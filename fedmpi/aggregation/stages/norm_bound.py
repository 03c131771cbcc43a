"""A bound on how far one client can move the average."""

import dataclasses
import math
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fedmpi.aggregation.stages.base import NotFinite, Sent, Stage
from fedmpi.ground.settings import setting

SERIAL = 1 << 13  # elements: BLAS takes one thread for them, so that bits do not depend on the number of threads
PIECE = 8 * SERIAL  # whose differences stay in a core's cache
NUMPYS = (torch.float32, torch.float64)


@dataclasses.dataclass(kw_only=True)
class NormBound(Stage):
    """Shorten a client's move, what it sends minus what the round began with, to a norm of at most `bound`.

    All rows of an exchange are one vector: their moves keep their proportions. A move whose norm is too large for a
    floating-point number becomes 0.
    """

    name = "norm_bound"
    needs_start = True
    writes_start: ClassVar[bool] = False
    keeps_finite: ClassVar[bool] = True
    looks: ClassVar[bool] = True

    bound: float = setting(1.0, "C, largest norm of a client's move in an exchange", above=0)

    def apply(self, sent: Sent) -> None:
        start = sent.start or {}
        of_rows = [_norm(row, start[name]) for name, row in sent.rows.items()]
        norm = torch.linalg.vector_norm(torch.stack(of_rows))
        factor = (self.bound / norm).clamp(max=1)
        on_cpu = norm.device.type == "cpu"  # looking at it would make a GPU wait
        if on_cpu and not norm.isfinite() and not all(row.isfinite().all() for row in sent.rows.values()):
            raise NotFinite
        if on_cpu and norm <= self.bound:
            return
        for name, row in sent.rows.items():
            torch.lerp(start[name], row, factor.to(row.dtype), out=row)
            if not on_cpu or factor == 0:  # of a move that is too large for a number
                torch.where(factor == 0, start[name], row, out=row)


def _norm(row: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """|row - start|, 0-d; infinite if it is too large."""
    if row.device.type != "cpu" or row.dtype not in NUMPYS:
        return torch.linalg.vector_norm(row - start, dtype=None if row.itemsize > 2 else torch.float32)
    return torch.tensor(math.sqrt(_square(row.numpy(), start.numpy())), dtype=torch.float64)


def _square(row: npt.NDArray[np.floating], start: npt.NDArray[np.floating]) -> float:
    """|row - start|² in pieces, each added up by BLAS while it is in the cache."""
    size = min(PIECE, -(-len(row) // SERIAL) * SERIAL)
    moves, total = np.zeros(size, row.dtype), 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, len(row), size):
            part = row[begin : begin + size]
            np.subtract(part, start[begin : begin + size], out=moves[: len(part)])
            moves[len(part) :] = 0
            lines = moves.reshape(-1, SERIAL)
            total += float((lines[:, None] @ lines[:, :, None]).sum(dtype=np.float64))
    return total
