"""The weighted mean by sums of whole numbers: the same bits wherever the clients are."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch

from fedmpi.aggregation.base import Aggregation
from fedmpi.aggregation.codecs.fixed import WIDER, factor_of, fraction_bits, put_values, put_words
from fedmpi.aggregation.layout import Layout
from fedmpi.comm.link import Link

PIECE = 1 << 14  # values that become words while they are in a core's cache
TERMS = 8  # at most so many numbers are added beside the rows


@dataclasses.dataclass(kw_only=True)
class Reproducible(Aggregation):
    """The mean with bits that do not depend on the number of ranks, on which rank has which client, nodes or MPI.

    Of n clients, a value u of client i becomes the word rint(w_i u 2^F), F = 62 - E - ⌈log2 n⌉, in 64 bits; E, one for
    each row of an exchange and one for the float buffers, is the lowest multiple of 8 with all |w_i u| < 2^E. Sums of
    words are exact in any order, and never overflow. The mean differs from the exact one by at most
    (n / Σ w_i) 2^-F / 2, and half a unit in its last place. Values below 2^-48 of their row's largest may become 0.
    """

    crosses: ClassVar[frozenset[str]] = frozenset({"whole numbers", "exponents"})
    is_mean: ClassVar[bool] = True
    leaves_out_constants: ClassVar[bool] = True
    keeps_finite: ClassVar[bool] = True
    needs_exponents: ClassVar[bool] = True

    def open(self, link: Link, layout: Layout, clients: Iterable[int]) -> None:
        super().open(link, layout, clients)
        self._words = self._allocate_words(layout.numel + TERMS)
        self._of_piece, self._wide = np.empty((2, PIECE), np.int64), np.empty(PIECE, WIDER[layout.dtype])

    def allocate(self, numel: int) -> torch.Tensor:
        """Where the ranks sum nothing."""
        return torch.zeros(numel, dtype=self.layout.dtype, device=self.layout.device)

    def _allocate_words(self, numel: int) -> torch.Tensor:
        if torch.device(self.layout.device).type == "cpu":
            return self.link.allocate(numel, torch.int64)
        return torch.zeros(numel, dtype=torch.int64)

    def average(self, out: torch.Tensor) -> None:
        words = self._words[: out.numel() + len(self.terms)]
        for piece, total in self._encoded(out.numel(), out.dtype):
            words[piece] = total
        self.link.add_integers(words, "whole numbers")
        self._decode(words, out)

    def _encoded(self, number: int, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
        """(place, the sum of the words of this rank's clients) of consecutive pieces, the terms at last.

        The words are in memory of this process, which may be overwritten, and is used again for the next piece.
        """
        kept, memory = [(self.weights[c], rows.cpu().numpy()) for c, rows in self.kept.items()], self._of_piece
        for piece, fraction in self._pieces(number):
            total, words = memory[:, : piece.stop - piece.start]
            total.fill(0)
            for weight, rows in kept:
                put_words(rows[piece], factor_of(weight, fraction, dtype), self._wide, words)
                total += words
            yield piece, torch.from_numpy(total)
        yield slice(number, number + len(self.terms)), words_of_terms([terms for terms, _ in self.terms], self._units())

    def _decode(self, words: torch.Tensor, out: torch.Tensor) -> None:
        """Put the means into `out`, and the sums of the terms into `sums`."""
        mean = out if out.device.type == "cpu" else torch.empty_like(out, device="cpu")
        for piece, fraction in self._pieces(out.numel()):
            divisor = factor_of(sum(self.weights.values()), fraction, out.dtype)
            put_values(words[piece].numpy(), divisor, self._wide, mean[piece].numpy())
        if mean is not out:
            out.copy_(mean)
        self.sums = values_of_terms(words[out.numel() :], self._units())

    def _units(self) -> list[Any]:
        return units_of([exponent for _, exponent in self.terms], sum(map(len, self.clients_of_ranks)))

    def _pieces(self, number: int) -> Iterator[tuple[slice, Any]]:
        """(place, F) of consecutive short pieces of `number` values; F may be an array, of each value."""
        begin = 0
        lengths, exponents = zip(*self.exponents)
        fractions, ends = [fraction_bits(e, len(self.weights)) for e in exponents], [*itertools.accumulate(lengths)]
        if number <= PIECE:
            yield slice(0, number), np.repeat(fractions, lengths)[:number]
            return
        for end, fraction in zip(ends, fractions):
            while begin < min(end, number):
                piece = slice(begin, min(begin + PIECE, end, number))
                yield piece, fraction
                begin = piece.stop

    def reorder_end(self, order: torch.Tensor) -> None:
        for region in self.kept.values() if self.moment.region.stop == self.layout.numel else ():
            region[len(region) - len(order) :] = region[len(region) - len(order) :][order]


def units_of(exponents: list[int], num_terms: int) -> list[Any]:
    """2^F for each of some sums of float64 numbers."""
    return [factor_of(1, fraction_bits(exponent, num_terms), torch.float64) for exponent in exponents]


def words_of_terms(terms: list[list[float]], units: list[Any]) -> torch.Tensor:
    """The sum of the words of each list of numbers."""
    total, wide = torch.zeros(len(terms), dtype=torch.int64), WIDER[torch.float64]
    for k, (of_sum, unit) in enumerate(zip(terms, units, strict=True)):
        words = np.zeros(len(of_sum), np.int64)
        put_words(np.array(of_sum, np.float64), unit, np.empty(len(of_sum), wide), words)
        total[k] = int(words.sum())
    return total


def values_of_terms(words: torch.Tensor, units: list[Any]) -> list[float]:
    """What sums of `words_of_terms` are."""
    return [float(word / unit) for word, unit in zip(words.tolist(), units, strict=True)]
