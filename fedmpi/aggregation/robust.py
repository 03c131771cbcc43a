"""Rules that a few clients with wrong rows cannot lead astray: each rank reduces a slice of all participants' rows.

Every client counts equally, whatever it says about its data; an exchange of numbers alone gives their mean.
"""

import abc
import dataclasses
from typing import ClassVar

import torch

from fedmpi.aggregation.base import Aggregation
from fedmpi.aggregation.layout import Moment
from fedmpi.aggregation.words import moves
from fedmpi.comm.vectors import Slices
from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import setting


@dataclasses.dataclass(kw_only=True)
class Robust(Aggregation):
    """Base of these rules."""

    is_base = True
    crosses: ClassVar[frozenset[str]] = frozenset({"slices"})
    least_clients: ClassVar[int] = 2
    takes_codecs: ClassVar[bool] = True

    def begin(self, moment: Moment, weights: dict[int, float]) -> None:
        super().begin(moment, weights)
        if len(set(weights.values())) > 1:
            raise UserError(
                f"{self.called} counts all clients equally, and their weights differ: "
                "expected weighting uniform (weight = 1 in loops of your own)"
            )

    def average(self, out: torch.Tensor) -> None:
        if self.are_numbers:
            self.reduce_slices(lambda slices: torch.stack(slices).mean(0), out)
        else:
            self.combine(out)

    @abc.abstractmethod
    def combine(self, out: torch.Tensor) -> None:
        """What `average` does with rows that are no numbers."""


@dataclasses.dataclass(kw_only=True)
class Median(Robust):
    """The median of every coordinate; of an even number of clients, the mean of the two in the middle.

    Source: Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018, Definition 1.
    """

    def combine(self, out: torch.Tensor) -> None:
        self.reduce_slices(lambda slices: trimmed_mean(slices, (len(slices) - 1) // 2), out)


@dataclasses.dataclass(kw_only=True)
class TrimmedMean(Robust):
    """The mean without the largest and the smallest values of every coordinate.

    Source: Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018, Definition 2.
    """

    name = "trimmed_mean"

    trim: int = setting(1, "f, how many values are left out at either end of every coordinate", least=0)

    @property
    def least_clients(self) -> int:  # type: ignore[override]
        return max(2, 2 * self.trim + 1)

    def combine(self, out: torch.Tensor) -> None:
        self.reduce_slices(lambda slices: trimmed_mean(slices, self.trim), out)


@dataclasses.dataclass(kw_only=True)
class CentredClipping(Robust):
    """What the round began with, z, plus the mean of the clients' moves, each shortened to a norm of at most τ.

    z + (1/n) Σ (v_i - z) min(1, τ / |v_i - z|), with one iteration. All rows of an exchange are one vector; the norms
    are computed by those who receive the slices, not by the clients.

    Source: Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021, Algorithm 2.
    """

    name = "centred_clipping"
    crosses: ClassVar[frozenset[str]] = frozenset({"slices", "norms"})
    needs_start = True

    radius: float = setting(1.0, "τ, largest norm of a client's move in an exchange", above=0)

    def combine(self, out: torch.Tensor) -> None:
        squares = torch.zeros(len(self.weights), dtype=torch.float64)

        def measure(slices: Slices) -> torch.Tensor:
            start = self.start[slices.place].to(slices[0].device)
            end = self.end_of_rows - slices.place.start
            squares.add_(torch.stack([moves(piece, start, end).double().square().sum() for piece in slices]).cpu())
            return start

        unused = torch.empty_like(out)
        self.link.exchange_slices([row.clone() for row in self.kept_regions()], measure, unused, kind="slices")
        norms = torch.from_numpy(self.link.allgather(squares.numpy(), "norms")).sum(0).sqrt()
        factors = (self.radius / norms).clamp(max=1).tolist()

        def clip(slices: Slices) -> torch.Tensor:
            start = self.start[slices.place].to(slices[0].device)
            total, end = torch.zeros_like(start), self.end_of_rows - slices.place.start
            for piece, factor in zip(slices, factors, strict=True):
                total.add_(moves(piece, start, end), alpha=factor / len(slices))
            return total.add_(start)

        self.reduce_slices(clip, out)


def trimmed_mean(rows: list[torch.Tensor], trim: int) -> torch.Tensor:
    """[n] the mean of each coordinate's values in some [n] rows, without the `trim` largest and smallest ones.

    The rows are sorted by a network of comparisons of whole rows, which takes a small part of the time of a sort.
    """
    rows = list(rows)
    for a, b in _network(len(rows)):
        rows[a], rows[b] = torch.minimum(rows[a], rows[b]), torch.maximum(rows[a], rows[b])
    middle = rows[trim : len(rows) - trim]
    total = middle[0].clone()
    for row in middle[1:]:
        total.add_(row)
    return total.div_(len(middle))


def _network(num: int) -> list[tuple[int, int]]:
    """Pairs of positions, the smaller first, whose comparisons in this order sort `num` values.

    Source: Batcher's odd-even merge, Knuth, "The Art of Computer Programming" 3, 5.2.2, Algorithm M.
    """
    pairs, top = [], 1 << max(0, (num - 1).bit_length() - 1)
    p = top if num > 1 else 0
    while p:
        q, r, d = top, 0, p
        while True:
            pairs += [(i, i + d) for i in range(num - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return pairs
