"""An aggregation and a stage of a user, as docs/aggregation.md describes them."""

import dataclasses

import torch

import fedmpi
from fedmpi.aggregation import Aggregation
from fedmpi.aggregation.stages import Stage


@dataclasses.dataclass(kw_only=True)
class TrimmedMean(Aggregation):
    """The mean without the largest and the smallest values."""

    trim: int = fedmpi.setting(1, "f, how many values are left out at either end", least=0)

    def average(self, out):
        def trimmed(slices):
            values = torch.stack(slices).sort(dim=0).values
            return values[self.trim : len(values) - self.trim].mean(dim=0)

        return self.reduce_slices(trimmed, out)

    def facts(self):
        return {"left_out": 2 * self.trim}


@dataclasses.dataclass(kw_only=True)
class Rounding(Stage):
    """Rounding to multiples of a unit, with error feedback."""

    kept_rows = ("error",)

    unit: float = fedmpi.setting(0.01, "distance of the values that are sent", above=0)

    def apply(self, sent):
        for name, row in sent.rows.items():
            error = sent.kept["error"][name]
            row += error
            error.copy_(row)
            row.div_(self.unit).round_().mul_(self.unit)
            error -= row
