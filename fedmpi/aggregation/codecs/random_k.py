"""A random share of the values, the same on all ranks."""

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from fedmpi.aggregation.codecs.base import Codec
from fedmpi.aggregation.layout import Layout, Moment
from fedmpi.comm.link import Link
from fedmpi.ground.settings import setting
from fedmpi.ground.streams import generator


@dataclasses.dataclass(kw_only=True)
class RandomK(Codec):
    """The moves of k of all d coordinates, the same on all ranks, drawn for every exchange by the run's seed.

    Of points they are multiplied by d / k: on average, the move. Other rows have fresh values in these coordinates,
    and keep the server's, which are older, in the others. In the start, where the server has none, all are sent.

    Source: Konečný et al., "Federated Learning: Strategies for Improving Communication Efficiency", 2016,
    arXiv:1610.05492, section 2 (random mask).
    """

    name = "random_k"
    is_linear = True

    fraction: float = setting(0.1, "k / d, fraction of the coordinates that are sent; at least one is", above=0, most=1)

    def open(self, link: Link, layout: Layout) -> None:
        super().open(link, layout)
        self._number = max(1, round(self.fraction * layout.dim))

    def begin(self, moment: Moment) -> None:
        super().begin(moment)
        if moment.round_index < 0:
            self.share, self._places = 1.0, torch.arange(self.layout.dim, device=self.layout.device)
            return
        self.share = self._number / self.layout.dim
        draw = generator(moment.seed, "random_k", moment.round_index, moment.number)
        self._places = torch.from_numpy(subset(draw, self.layout.dim, self._number)).to(self.layout.device)

    def encode(self, moves: torch.Tensor) -> torch.Tensor:
        return moves[self._places]

    def decode(self, words: torch.Tensor) -> torch.Tensor:
        return words.new_zeros(self.layout.dim).index_copy_(0, self._places, words)


def subset(draw: np.random.Generator, dim: int, number: int) -> npt.NDArray[np.intp]:
    """[number] different places below `dim`, in order, every set of them as likely as any other.

    Places that are still missing are drawn again, as often as it takes: no place is preferred to another one. That is
    faster than ``draw.choice``.
    """
    is_complement = number > dim // 2  # most places would be drawn again and again
    wanted = dim - number if is_complement else number
    is_drawn = np.zeros(dim, dtype=bool)
    while missing := wanted - int(np.count_nonzero(is_drawn)):
        is_drawn[draw.integers(dim, size=missing)] = True
    return np.flatnonzero(~is_drawn if is_complement else is_drawn)
