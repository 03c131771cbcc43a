"""The weighted mean by sums of whole numbers: the same bits wherever the clients are."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from fedmpi.aggregation.base import Aggregation
from fedmpi.aggregation.codecs.fixed import fraction_bits, put_mean_of_two, put_values, put_words, scratch, unit_of
from fedmpi.aggregation.layout import Layout
from fedmpi.comm.link import Link
from fedmpi.comm.vectors import Slices

PIECE = 1 << 15  # values that become words while they are in a core's cache
TERMS = 8  # at most so many numbers are added beside the rows


@dataclasses.dataclass(kw_only=True)
class Reproducible(Aggregation):
    """The mean with bits that do not depend on the number of ranks, on which rank has which client, nodes or MPI.

    Of n clients, a value u of client i becomes the word rint(w_i u 2^F), F = 62 - E - ⌈log2 n⌉, in 64 bits; E, one for
    each row of an exchange and one for the float buffers, is the lowest multiple of 8 with all |w_i u| < 2^E. Sums of
    words are exact in any order, and never overflow. The mean differs from the exact one by at most
    (n / Σ w_i) 2^-F / 2, and half a unit in its last place. Values below 2^-48 of their row's largest may become 0.

    Where each rank has at most one client, it makes the words of a slice of all clients, and adds them; otherwise each
    rank adds the words of its clients, and the ranks' sums are added.
    """

    crosses: ClassVar[frozenset[str]] = frozenset({"whole numbers", "slices", "exponents"})
    is_mean: ClassVar[bool] = True
    leaves_out_constants: ClassVar[bool] = True
    keeps_finite: ClassVar[bool] = True
    needs_exponents: ClassVar[bool] = True

    def open(self, link: Link, layout: Layout, clients: Iterable[int]) -> None:
        super().open(link, layout, clients)
        self._words = self._allocate_words((layout.numel if self._sends_words else 0) + TERMS)
        self._of_piece = np.empty((2, PIECE), np.int64)
        self._scratch, self._mean = scratch(PIECE), torch.empty(0, dtype=layout.dtype)

    @property
    def _sends_words(self) -> bool:
        """Whether the ranks add words, and not slices of values."""
        return max(map(len, self.clients_of_ranks)) > 1

    def allocate(self, numel: int) -> torch.Tensor:
        """Where the ranks exchange slices; of this process, if they add words."""
        if self._sends_words:
            return torch.zeros(numel, dtype=self.layout.dtype, device=self.layout.device)
        return super().allocate(numel)

    def _allocate_words(self, numel: int) -> torch.Tensor:
        if torch.device(self.layout.device).type == "cpu":
            return self.link.allocate(numel, torch.int64)
        return torch.zeros(numel, dtype=torch.int64)

    def average(self, out: torch.Tensor) -> None:
        if not self._sends_words and out.numel():
            vectors = [region[: out.numel()] for region in self.kept_regions()]
            self.link.exchange_slices(vectors, self._mean_of, out, kind="slices")
        number = out.numel() if self._sends_words else 0
        words = self._words[: number + len(self.terms)]
        if not len(words):
            return
        for piece, total in self._encoded(number, out.dtype):
            words[piece] = total
        self.link.add_integers(words, "whole numbers")
        self._decode(words, out[:number])

    def _mean_of(self, slices: Slices) -> torch.Tensor:
        """The mean of one client of each rank, in a slice."""
        of_ranks = (client for rank in self.link.members for client in self.clients_of_ranks[rank])
        weights = [self.weights[client] for client in of_ranks if client in self.weights]
        place = slices.place
        if not len(slices):  # all that take part are lost; the round is made again
            return torch.zeros(place.stop - place.start, dtype=self.layout.dtype, device=self.layout.device)
        if len(self._mean) < len(slices[0]):
            self._mean = torch.empty_like(slices[0])
        mean, divisor = self._mean[: len(slices[0])], self._sum_of_weights()
        values = [(weight, vector.numpy()) for weight, vector in zip(weights, slices, strict=True)]
        for piece, unit in self._pieces(place.start, place.stop):
            here = slice(piece.start - place.start, piece.stop - place.start)
            pieces, of_mean = [(weight, rows[here]) for weight, rows in values], mean[here].numpy()
            if not put_mean_of_two(pieces, unit, divisor, self._scratch, of_mean):
                put_values(self._total(pieces, unit, len(of_mean)), divisor * unit, self._scratch, of_mean)
        return mean

    def _encoded(self, number: int, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
        """(place, the sum of the words of this rank's clients) of consecutive pieces, the terms at last.

        The words are in memory of this process, which may be overwritten, and is used again for the next piece.
        """
        kept = [(self.weights[client], rows.cpu().numpy()) for client, rows in self.kept.items()]
        for piece, unit in self._pieces(0, number):
            total = self._total([(weight, rows[piece]) for weight, rows in kept], unit, piece.stop - piece.start)
            yield piece, torch.from_numpy(total)
        yield slice(number, number + len(self.terms)), words_of_terms([terms for terms, _ in self.terms], self._units())

    def _total(self, values: Sequence[tuple[float, Any]], unit: Any, number: int) -> Any:
        """The sum of the words of [(weight, [number] values)], in memory that is used again."""
        total, words = self._of_piece[:, :number]
        if not values:
            total.fill(0)
        for position, (weight, of_client) in enumerate(values):
            put_words(of_client, weight, unit, self._scratch, words if position else total)
            if position:
                np.add(total, words, out=total)
        return total

    def _decode(self, words: torch.Tensor, out: torch.Tensor) -> None:
        """Put the means into `out`, and the sums of the terms into `sums`."""
        self.sums = values_of_terms(words[out.numel() :], self._units())
        mean, divisor = out if out.device.type == "cpu" else torch.empty_like(out, device="cpu"), self._sum_of_weights()
        for piece, unit in self._pieces(0, out.numel()):
            put_values(words[piece].numpy(), divisor * unit, self._scratch, mean[piece].numpy())
        if mean is not out:
            out.copy_(mean)

    def _sum_of_weights(self) -> float:
        return sum(self.weights.values())

    def _units(self) -> list[Any]:
        return units_of([exponent for _, exponent in self.terms], sum(map(len, self.clients_of_ranks)))

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[slice, Any]]:
        """(place, 2^F) of consecutive short pieces from `begin` to `end`; 2^F may be an array, of each value."""
        lengths, exponents = zip(*self.exponents)
        units = [unit_of(fraction_bits(e, len(self.weights)), self.layout.dtype) for e in exponents]
        if sum(lengths) <= PIECE:
            yield slice(begin, end), np.repeat(units, lengths)[begin:end]
            return
        for stop, unit in zip(itertools.accumulate(lengths), units):
            while begin < min(stop, end):
                piece = slice(begin, min(begin + PIECE, stop, end))
                yield piece, unit
                begin = piece.stop

    def reorder_end(self, order: torch.Tensor) -> None:
        for region in self.kept.values():
            if self.moment.region.stop == self.layout.numel:
                region[len(region) - len(order) :] = region[len(region) - len(order) :][order]


def units_of(exponents: list[int], num_terms: int) -> list[Any]:
    """2^F for each of some sums of float64 numbers."""
    return [unit_of(fraction_bits(exponent, num_terms), torch.float64) for exponent in exponents]


def words_of_terms(terms: list[list[float]], units: list[Any]) -> torch.Tensor:
    """The sum of the words of each list of numbers."""
    total = torch.zeros(len(terms), dtype=torch.int64)
    for k, (of_sum, unit) in enumerate(zip(terms, units, strict=True)):
        words = np.zeros(len(of_sum), np.int64)
        put_words(np.array(of_sum, np.float64), 1, unit, scratch(len(of_sum)), words)
        total[k] = int(words.sum())
    return total


def values_of_terms(words: torch.Tensor, units: list[Any]) -> list[float]:
    """What sums of `words_of_terms` are."""
    return [float(word / unit) for word, unit in zip(words.tolist(), units, strict=True)]
