"""The weighted mean where rows travel in a codec, and what clients know of what is read."""

import dataclasses

import torch

from fedmpi.aggregation.base import Aggregation
from fedmpi.aggregation.codecs.base import Codec
from fedmpi.aggregation.layout import Moment
from fedmpi.aggregation.stages.base import Sent, Stage
from fedmpi.aggregation.words import of_length
from fedmpi.comm.vectors import Slices
from fedmpi.ground.errors import AgreedUserError, UserError


@dataclasses.dataclass(kw_only=True)
class MeanOfWords(Aggregation):
    """The mean of rows in a linear codec: words are added up, and only their sum is read.

    Float buffers travel as they are, behind the words.
    """

    is_base = True  # `mean` becomes it
    name = "mean"
    crosses = frozenset({"rows"})
    is_mean = True

    def begin(self, moment: Moment, weights: dict[int, float]) -> None:
        super().begin(moment, weights)
        dim = self.layout.dim
        self._rows = {row: slice(k * dim, (k + 1) * dim) for k, row in enumerate(moment.rows)}
        self._end, self._total = self.end_of_rows, self.block[moment.region][:0]

    def add(self, client: int, region: torch.Tensor, weight: float) -> None:
        words = self._written(region).mul_(weight)
        if len(self._total) not in (0, len(words)):
            uncoded = len(region) - self._end
            raise UserError(
                f"{self.called}: encode returned {len(words) - uncoded} words of client {client}, and "
                f"{len(self._total) - uncoded} of one before it: expected as many of each, since their words are added"
            )
        if len(self._total):
            self._total.add_(words)
        else:
            self._total = self.block[self.moment.region][: len(words)].copy_(words)

    def _written(self, region: torch.Tensor) -> torch.Tensor:
        """The words of all rows, and what is not coded behind them."""
        assert self.codec is not None
        words = [self.codec.encode(region[place] - self.start[place]) for place in self._rows.values()]
        for of_row in words:
            of_length(min(len(words[0]), self.layout.dim), of_row, f"{self.called}: encode returned", region.dtype)
        return torch.cat([*words, region[self._end :]])

    def _check_equal(self, number: int) -> None:
        """Check that all ranks have as many words. Collective.

        Raises:
            AgreedUserError: on all ranks, if they have not.
        """
        first, *others = self.link.allgather([number], "machinery")[:, 0].astype(int).tolist()
        other = next((other for other in others if other != first), first)
        if other != first:
            raise AgreedUserError(
                f"{self.called}: encode returned {other} words on one rank, and {first} on another: expected as many "
                "of each client, since their words are added",
                self.link.rank == 0,
            )

    def average(self, out: torch.Tensor) -> None:
        assert self.codec is not None
        if not len(self._total):  # none of this rank's clients takes part
            words = self._written(self.start)
            self._total = self.block[self.moment.region][: len(words)].zero_()
        total = self._total
        self._check_equal(len(total) - (len(out) - self._end))
        self.link.average(total, sum(self.weights.values()), total, "rows")
        num_words = len(total) - (len(out) - self._end)
        behind, words = total[num_words:].clone(), total[:num_words].clone()  # `out` may be the same memory
        out[self._end :] = behind
        for (row, place), of_row in zip(self._rows.items(), words.chunk(max(1, len(self._rows))), strict=False):
            read = self.codec.decode(of_row)
            moved = of_length(self.layout.dim, read, f"{self.called}: decode returned", out.dtype)
            if self.layout.kinds.get(row, "point") == "point":
                moved.div_(self.codec.share)
            torch.add(moved, self.start[place], out=out[place])
        self.clamp_squares(out)


@dataclasses.dataclass(kw_only=True)
class MeanOfSlices(Aggregation):
    """The mean of rows in a codec that is not linear: every client's words are read where a slice is reduced."""

    is_base = True  # `mean` becomes it
    name = "mean"
    crosses = frozenset({"slices"})
    is_mean = True

    def average(self, out: torch.Tensor) -> None:
        self.reduce_slices(self._mean, out)

    def _mean(self, slices: Slices) -> torch.Tensor:
        total = torch.zeros_like(slices[0])
        for client, rows in zip(slices.clients, slices, strict=True):
            total.add_(rows, alpha=self.weights[client])
        return total.div_(sum(self.weights.values()))


@dataclasses.dataclass(kw_only=True)
class AsRead(Stage):
    """The last stage where differences are exchanged and rows travel in a codec: differences become what is read."""

    is_base = True  # the codec brings it along

    codec: Codec

    def apply(self, sent: Sent) -> None:
        for name, row in sent.rows.items():
            if sent.kinds[name] == "difference":
                read = self.codec.decode(self.codec.encode(row))
                row.copy_(of_length(len(row), read, f"{self.called}: decode returned", row.dtype))
