"""The weighted mean of rows that travel in half precision: half of the bytes."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from fedmpi.aggregation.base import Aggregation, Layout
from fedmpi.comm.link import Link

HALF = torch.bfloat16  # the range of float32: squares of small gradients in v do not become 0


@dataclasses.dataclass(kw_only=True)
class Half(Aggregation):
    """The mean of rows in bfloat16 (8 bits); of x, of what it differs by from the last average.

    Each value is rounded once on its way to the rank that adds up its slice, and the mean once on its way back: two
    relative errors of at most 2^-8. x itself keeps its precision; its first average is sent as it is, like
    an exchange of numbers.
    """

    def open(self, link: Link, layout: Layout, clients: Iterable[int]) -> None:
        super().open(link, layout, clients)
        self._x = torch.zeros(layout.dim, dtype=layout.dtype, device=layout.device)  # the last average
        self._knows_x = False

    def average(self, out: torch.Tensor) -> None:
        dim, region, divisor = self.layout.dim, self.moment.region, sum(self.weights.values())
        total, has_x = self.block[region], "x" in self.moment.rows
        begin = self.layout.rows.index("x") * dim - region.start if has_x else 0
        of_x = slice(begin, begin + dim if has_x else begin)
        if len(self.clients) > 1 or not self.kept:  # a single client's rows are there already
            total.zero_()
        for client, rows in self.kept.items():
            rows[of_x].sub_(self._x[: len(rows[of_x])])
            rows.mul_(self.weights[client])
            if len(self.clients) > 1:
                total.add_(rows)
        of_numbers = all(self.layout.kinds.get(row) == "number" for row in self.moment.rows)
        if of_numbers or (has_x and not self._knows_x):
            self.link.average(total, divisor, out)
        else:
            received = torch.empty(out.shape, dtype=HALF, device=out.device)
            sent = [total.to(HALF)] if self.kept else []
            self.link.exchange_slices(sent, lambda slices: torch.stack(slices).to(out).sum(0) / divisor, received)
            out.copy_(received)
        if has_x:
            self._x.copy_(out[of_x].add_(self._x))
            self._knows_x = True

    def state(self) -> dict[str, Any]:
        return {"x": self._x, "knows_x": int(self._knows_x)}

    def restore(self, state: dict[str, Any]) -> None:
        self._x.copy_(state["x"])
        self._knows_x = bool(state["knows_x"])
