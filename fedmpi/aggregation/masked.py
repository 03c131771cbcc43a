"""The weighted mean of which no rank sees more than the sum: secure aggregation."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator
from typing import ClassVar

import numpy as np
import torch

from fedmpi.aggregation.codecs.fixed import exponent_above
from fedmpi.aggregation.layout import Layout, Moment
from fedmpi.aggregation.masks import KEY, TAG, WORD, Session, Stream, with_tag
from fedmpi.aggregation.reproducible import PIECE, Reproducible, units_of, values_of_terms, words_of_terms
from fedmpi.comm.link import Link
from fedmpi.comm.ranks import RanksLost
from fedmpi.ground.errors import UserError
from fedmpi.ground.part import BLOCK
from fedmpi.ground.settings import setting
from fedmpi.ground.text import Log

log = Log(__name__)

OTHERS = 1 << 62  # nonces of other sums than the averages begin here
SLOT = (KEY + TAG) // WORD  # words of a key that is opened


@dataclasses.dataclass(kw_only=True)
class Masked(Reproducible):
    """The mean `reproducible`, to the bit, where a rank sends its sum of words hidden by masks that cancel in the sum.

    Two ranks i < j have a stream of random words in common, which i adds and j subtracts, modulo 2^64. Rows are in
    memory of the process alone. Losses and numbers of gradients are hidden in the same way; the exponents of
    `reproducible` are not. Where runs go on without ranks that are lost, each rank adds one more mask of its own, and
    opens it only after all have the sum: of a sum that is repeated, nobody has seen the first one.

    Source: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, section
    4; Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020.
    """

    exposes_rows: ClassVar[bool] = False
    hides: ClassVar[str] = "each rank's rows, losses and metrics, from the other ranks: they see sums (docs/privacy.md)"

    least_ranks: int = setting(3, "smallest number of ranks with clients that take part", least=1)
    neighbours: int = setting(
        0, "k, others with which each rank has masks: so many have to act together to see its rows; 0: all", least=0
    )
    known_keys: str = setting(
        "", "file of public keys, a line of ssh-keygen -t ed25519 for each rank: who they are", role="place"
    )
    key: str = setting("", "file of a rank's own private key, with known_keys; {rank} becomes its number", role="place")

    def open(self, link: Link, layout: Layout, clients: Iterable[int]) -> None:
        super().open(link, layout, clients)
        self._rank, self._last, self._others = link.members[link.rank], -1, 0
        link.add_hidden = self.add_hidden
        self._session = Session(link, self.known_keys, self.key)
        self._zeros, self._memory = bytes(WORD * PIECE), np.empty(WORD * PIECE + BLOCK, np.uint8)
        users = link.allgather([link.local_size, os.getuid()])
        if link.rank == 0 and (users[:, 0] > 1).any() and len({*users[:, 1].tolist()}) < link.size:
            log.warning(
                f"{self.called}: ranks of one user share a machine: each of them can read the others' memory, "
                "which no mask prevents"
            )

    def begin(self, moment: Moment, weights: dict[int, float]) -> None:
        super().begin(moment, weights)
        if moment.serial <= self._last:
            raise RuntimeError(f"exchange {moment.serial} after {self._last}: its masks may have been used")
        self._last = moment.serial

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
        number = out.numel()
        words, pieces = self._words[: number + len(self.terms)], self._encoded(number, out.dtype)
        self._add_hidden(pieces, words, self._ranks(), self.moment.serial)
        self._decode(words, out)

    def add_hidden(self, terms: list[list[float]]) -> list[float]:
        """See `Link.add_hidden`; it is repeated among the ranks that are left, if others are lost."""
        largest = [exponent_above(max(map(abs, of_sum), default=0)) for of_sum in terms]
        exponents = self.link.allgather(largest).max(0).astype(int).tolist()
        units = units_of(exponents, sum(map(len, self.clients_of_ranks)))
        own, words = words_of_terms(terms, units), torch.zeros(len(terms), dtype=torch.int64)
        while True:
            self._others += 1
            with contextlib.suppress(RanksLost):
                pieces = iter([(slice(0, len(terms)), own.clone())])
                self._add_hidden(pieces, words, list(self.link.members), OTHERS + self._others)
                return values_of_terms(words, units)

    def _add_hidden(
        self, pieces: Iterator[tuple[slice, torch.Tensor]], words: torch.Tensor, ranks: list[int], nonce: int
    ) -> None:
        """Fill `words` with the sum over all ranks of the words in their pieces, which are overwritten. Collective.

        Args:
            pieces: (place, words), consecutive. ranks: that have words other than 0. nonce: a number that no other sum
                of this session has.
        """
        others = self._session.neighbours(ranks, self.neighbours)
        masks = [(1 if self._rank < other else -1, Stream(self._session.between(other), nonce)) for other in others]
        own = os.urandom(KEY) if self.link.survives and self._rank in ranks else b""
        masks += [(1, Stream(own, nonce))] if own else []
        for place, hidden in pieces:
            for sign, stream in masks:
                self._add_mask(hidden, sign, stream)
            words[place] = hidden  # what lies there, others may read
        self.link.add_integers(words)
        if self.link.survives:
            opened = self._opened(ranks, own, nonce)
            for piece in words.split(PIECE):
                for stream in opened:
                    self._add_mask(piece, -1, stream)

    def _add_mask(self, words: torch.Tensor, sign: int, stream: Stream) -> None:
        zeros = self._zeros[: WORD * len(words)] if len(words) < PIECE else self._zeros
        mask = torch.from_numpy(stream.fill(zeros, self._memory))
        words.add_(mask, alpha=sign)

    def _opened(self, ranks: list[int], own: bytes, nonce: int) -> list[Stream]:
        """The masks of their own that `ranks` have added, after all have the sum with them.

        If a rank is lost meanwhile whose key some others have received, these give it to all: the sum counts then.

        Raises:
            RanksLost: on all ranks that are left, if none has it: nobody has seen the sum.
        """
        slots = torch.zeros(len(self.clients_of_ranks), SLOT, dtype=torch.int64)
        own_slot = torch.frombuffer(bytearray(with_tag(own, nonce, self._rank)), dtype=torch.int64) if own else None
        if own_slot is not None:
            slots[self._rank] = own_slot
        try:
            self.link.add_integers(slots.view(-1))
        except RanksLost:
            if own_slot is not None:
                slots[self._rank] = own_slot
            tables = self.link.allgather(slots.view(torch.uint8).view(-1).numpy()).astype(np.uint8)
            everyone = [torch.from_numpy(table).view(torch.int64).view_as(slots) for table in tables]
            keys = [
                next(filter(None, (_key_of(table[rank], nonce, rank) for table in everyone)), b"") for rank in ranks
            ]
            if not all(keys):
                raise
        else:
            keys = [_key_of(slots[rank], nonce, rank) for rank in ranks]
        return [Stream(key, nonce) for key in keys]


def _key_of(slot: torch.Tensor, nonce: int, rank: int) -> bytes:
    """The key in a slot; b"" if it is not whole."""
    found = slot.numpy().tobytes()
    return found[:KEY] if with_tag(found[:KEY], nonce, rank) == found else b""
