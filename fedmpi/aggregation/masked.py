"""The weighted mean of which no rank sees more than the sum: secure aggregation."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterable
from typing import ClassVar

import torch

from fedmpi.aggregation.codecs.fixed import exponent_above
from fedmpi.aggregation.hidden_sums import HiddenSums
from fedmpi.aggregation.layout import Layout, Moment
from fedmpi.aggregation.masks import Session
from fedmpi.aggregation.reproducible import PIECE, Reproducible, units_of, values_of_terms, words_of_terms
from fedmpi.comm.link import Link
from fedmpi.comm.ranks import RanksLost
from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import setting
from fedmpi.ground.text import Log

log = Log(__name__)


@dataclasses.dataclass(kw_only=True)
class Masked(Reproducible):
    """The mean `reproducible`, to the bit, where a rank sends its sum of words hidden by masks that cancel in the sum.

    Two ranks i < j have a stream of random words in common, which i adds and j subtracts, modulo 2^64. Rows are in
    memory of the process alone. Losses, numbers of gradients and metrics are hidden in the same way; the exponents of
    `reproducible` are not. Where runs go on without ranks that are lost, each rank adds one more mask of its own, and
    opens it only after all have the sums of the exchange: of a sum that is repeated, nobody has seen the first one.

    Source: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, section
    4; Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020.
    """

    exposes_rows: ClassVar[bool] = False
    hides: ClassVar[str] = "each rank's rows, losses and metrics, from the other ranks: they see sums (docs/privacy.md)"
    crosses: ClassVar[frozenset[str]] = frozenset({"masked words", "exponents", "public keys", "opened masks"})

    least_ranks: int = setting(3, "smallest number of ranks with clients that take part", least=1)
    neighbours: int = setting(
        0, "k, others with which each rank has masks: so many have to act together to see its rows; 0: all", least=0
    )
    hidden_weights: bool = setting(
        False, "whether ranks do not know the weights of others, which are a hidden sum: with fedmpi.join and average"
    )
    known_keys: str = setting(
        "", "file of public keys, a line of ssh-keygen -t ed25519 for each rank: who they are", role="place"
    )
    key: str = setting("", "file of a rank's own private key, with known_keys; {rank} becomes its number", role="place")

    def open(self, link: Link, layout: Layout, clients: Iterable[int]) -> None:
        super().open(link, layout, clients)
        self._out: torch.Tensor | None = None
        self._is_beside = False
        of_rows = getattr(link.add_hidden, "__self__", None)
        if of_rows is not None and of_rows.layout.beside is layout:
            self._is_beside, self._hidden, self._rows = True, of_rows._hidden, of_rows
            return
        session, link.add_hidden = Session(link, self.known_keys, self.key), self.add_hidden
        self._hidden = HiddenSums(link, session, self.neighbours, PIECE)
        self._rows = self
        users = link.allgather([link.local_size, os.getuid()], "machinery")
        if link.rank == 0 and (users[:, 0] > 1).any() and len({*users[:, 1].tolist()}) < link.size:
            log.warning(
                f"{self.called}: ranks of one user share a machine: each of them can read the others' memory, "
                "which no mask prevents"
            )

    @property
    def _sends_words(self) -> bool:
        return True

    def begin(self, moment: Moment, weights: dict[int, float]) -> None:
        super().begin(moment, weights)
        self._out = None

    def _check_number(self) -> None:
        super()._check_number()
        number = len(self._ranks())
        if number < self.least_ranks:
            raise UserError(
                f"{self.called} needs at least {self.least_ranks} ranks with clients that take part, not {number}: "
                "with fewer, one can compute another's rows; expected more ranks or participants, or a smaller "
                "aggregation.least_ranks if they may"
            )

    def _ranks(self) -> list[int]:
        """The ranks, as they were started, with clients that take part."""
        return [rank for rank in self.link.members if not self.weights.keys().isdisjoint(self.clients_of_ranks[rank])]

    def average(self, out: torch.Tensor) -> None:
        """See `Aggregation.average`; what is averaged beside the rows is in its `out` after the rows are."""
        self._out, words = out, self._words[: out.numel() + len(self.terms)]
        self._hidden.add(self._encoded(out.numel(), out.dtype), words, self._ranks())
        if self._is_beside:
            return
        self._hidden.open()
        for part in (self, self.beside):
            if isinstance(part, Masked) and part._out is not None:
                part._decode(part._words[: part._out.numel() + len(part.terms)], part._out)
                part._out = None

    def _sum_of_weights(self) -> float:
        """With `hidden_weights`, what all ranks have added up; it is in the words of the rows, not in those beside."""
        if not self.hidden_weights:
            return super()._sum_of_weights()
        return float(self._rows.sums[-1])

    def add_hidden(self, terms: list[list[float]]) -> list[float]:
        """See `Link.add_hidden`; it is repeated among the ranks that are left, if others are lost."""
        finite = [[term for term in of_sum if math.isfinite(term)] for of_sum in terms]
        terms = finite + [[float(len(of_sum) - len(rest))] for of_sum, rest in zip(terms, finite)]
        largest = [exponent_above(max(map(abs, of_sum), default=0)) for of_sum in terms]
        exponents = self.link.allgather(largest, "exponents").max(0).astype(int).tolist()
        units = units_of(exponents, max(len(self.clients_of_ranks), sum(map(len, self.clients_of_ranks))))
        own, words = words_of_terms(terms, units), torch.zeros(len(terms), dtype=torch.int64)
        while True:
            with contextlib.suppress(RanksLost):
                self._hidden.add([(slice(0, len(terms)), own.clone())], words, list(self.link.members))
                self._hidden.open()
                sums = values_of_terms(words, units)
                return [math.nan if bad else total for total, bad in zip(sums, sums[len(finite) :])]
