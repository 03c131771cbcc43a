"""A bound on how far one client can move the average."""

import dataclasses

import torch

from fedmpi.aggregation.stages.base import Sent, Stage
from fedmpi.settings import setting


@dataclasses.dataclass(kw_only=True)
class NormBound(Stage):
    """Shorten a client's move, what it sends minus what the round began with, to a norm of at most `bound`.

    All rows of an exchange are one vector: their moves keep their proportions.
    """

    name = "norm_bound"
    needs_start = True

    bound: float = setting(1.0, "C, largest norm of a client's move in an exchange", above=0)

    def apply(self, sent: Sent) -> None:
        start = sent.start or {}
        norms = [torch.linalg.vector_norm(row - start[name]) for name, row in sent.rows.items()]
        factor = (self.bound / torch.linalg.vector_norm(torch.stack(norms))).clamp(max=1)
        for name, row in sent.rows.items():
            torch.lerp(start[name], row, factor, out=row)  # with a factor of 1, row as it is
