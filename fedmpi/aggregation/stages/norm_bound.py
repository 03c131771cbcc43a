"""A bound on how far one client can move the average."""

import dataclasses
from typing import ClassVar

import torch

from fedmpi.aggregation.stages.base import Sent, Stage
from fedmpi.settings import setting

PIECE = 1 << 15  # elements


@dataclasses.dataclass(kw_only=True)
class NormBound(Stage):
    """Shorten a client's move, what it sends minus what the round began with, to a norm of at most `bound`.

    All rows of an exchange are one vector: their moves keep their proportions.
    """

    name = "norm_bound"
    needs_start = True
    writes_start: ClassVar[bool] = False

    bound: float = setting(1.0, "C, largest norm of a client's move in an exchange", above=0)

    def apply(self, sent: Sent) -> None:
        start = sent.start or {}
        norms = [norm for name, row in sent.rows.items() for norm in _norms(row, start[name])]
        factor = (self.bound / torch.linalg.vector_norm(torch.stack(norms))).clamp(max=1)
        if factor.device.type == "cpu" and factor == 1:  # looking at it would make a GPU wait
            return
        for name, row in sent.rows.items():
            torch.lerp(start[name], row, factor, out=row)  # with a factor of 1, row as it is


def _norms(row: torch.Tensor, start: torch.Tensor) -> list[torch.Tensor]:
    """The norms of the parts of a row's move; on a CPU the differences of a part stay in its cache."""
    size = PIECE if row.device.type == "cpu" else max(1, len(row))
    return [torch.linalg.vector_norm(a - b) for a, b in zip(row.split(size), start.split(size), strict=True)]
