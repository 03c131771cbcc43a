"""A bound on how far one client can move the average."""

import dataclasses
import math
from typing import ClassVar

import numpy as np
import torch

from fedmpi.aggregation.stages.base import Sent, Stage
from fedmpi.settings import setting

PIECE = 1 << 15  # elements, whose differences stay in a core's cache
NUMPYS = (torch.float32, torch.float64)
SERIAL = 1 << 13  # elements: BLAS takes one thread for them, so that bits do not depend on the number of threads


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

    bound: float = setting(1.0, "C, largest norm of a client's move in an exchange", above=0)

    def apply(self, sent: Sent) -> None:
        start = sent.start or {}
        if all(row.device.type == "cpu" and row.dtype in NUMPYS for row in sent.rows.values()):
            norm = math.sqrt(sum(_square(row.numpy(), start[name].numpy()) for name, row in sent.rows.items()))
            if norm > self.bound:
                for name, row in sent.rows.items():
                    _shorten(row, start[name], torch.tensor(self.bound / norm))
            return
        norms = [torch.linalg.vector_norm(row - start[name]) for name, row in sent.rows.items()]
        factor = (self.bound / torch.linalg.vector_norm(torch.stack(norms))).clamp(max=1)
        for name, row in sent.rows.items():  # looking at the factor would make a GPU wait
            _shorten(row, start[name], factor)


def _square(row: np.ndarray, start: np.ndarray) -> float:
    """|row - start|², infinite if it is too large for the numbers' type."""
    difference, total = np.empty(PIECE, row.dtype), 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, len(row), PIECE):
            part = slice(begin, begin + PIECE)
            moved = np.subtract(row[part], start[part], out=difference[: len(row[part])])
            for place in range(0, len(moved), SERIAL):
                short = moved[place : place + SERIAL]
                total += float(np.dot(short, short))
    return total


def _shorten(row: torch.Tensor, start: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply a row's move, in place; with a factor of 1 it stays as it is, with 0 no overflow matters."""
    torch.lerp(start, row, factor.to(row.dtype), out=row)
    if row.device.type != "cpu" or factor == 0:
        torch.where(factor == 0, start, row, out=row)
