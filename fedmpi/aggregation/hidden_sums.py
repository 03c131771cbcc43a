"""Sums over the ranks of which no rank sees more than the sum."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from fedmpi.aggregation.masks import KEY, TAG, WORD, Session, Stream, with_tag
from fedmpi.comm.link import Link
from fedmpi.comm.ranks import RanksLost
from fedmpi.ground.part import BLOCK

SLOT = (KEY + TAG) // WORD  # words of a key that is opened


@dataclasses.dataclass
class Sum:
    """A sum that is made: of which ranks, under which nonce, and this rank's own mask in it, [n] or []."""

    words: torch.Tensor
    ranks: Sequence[int]
    nonce: int
    own_mask: torch.Tensor


class HiddenSums:
    """The sums of one start of the ranks: what each sends has masks that cancel in the sum. Collective on the link.

    Where runs go on without ranks that are lost, each rank adds one more mask of its own, whose key it has drawn since
    the last `open`. `open` gives the keys to all: what was added before counts then, or is never seen by anyone.

    Args:
        link: the `Link`. session: the `Session`. neighbours: see `Session.neighbours`. most: words of a piece.
    """

    def __init__(self, link: Link, session: Session, neighbours: int, most: int) -> None:
        self._link, self._session, self._neighbours = link, session, neighbours
        self._rank, self._num_slots, self._nonce = link.members[link.rank], max(link.members) + 1, 0
        self._zeros, self._memory = bytes(WORD * most), np.empty(WORD * most + BLOCK, np.uint8)
        self._sums: list[Sum] = []
        self._own = b""

    def add(self, pieces: Iterable[tuple[slice, torch.Tensor]], words: torch.Tensor, ranks: Sequence[int]) -> None:
        """Fill `words` with the sum over all ranks of the words in their pieces; to be read after `open`.

        Args:
            pieces: (place, words), consecutive; the words are overwritten. ranks: that have words other than 0.

        Raises:
            RanksLost: on all ranks that are left, if others are lost; nobody has seen the sum.
        """
        if not self._sums:
            self._own = os.urandom(KEY) if self._link.survives else b""
        self._nonce += 1  # of all ranks, the same one, and never again
        nonce, takes_part = self._nonce, self._rank in ranks
        others = self._session.neighbours(ranks, self._neighbours) if takes_part else []
        masks = [(1 if self._rank < other else -1, Stream(self._session.between(other), nonce)) for other in others]
        own = Stream(self._own, nonce) if self._own and takes_part else None
        own_mask = torch.empty(len(words) if own is not None else 0, dtype=torch.int64)
        for place, hidden in pieces:
            for sign, stream in masks:
                hidden.add_(self._mask(stream, len(hidden)), alpha=sign)
            if own is not None:
                own_mask[place] = self._mask(own, len(hidden))
                hidden.add_(own_mask[place])
            words[place] = hidden  # what lies there, others may read
        self._sums.append(Sum(words, ranks, nonce, own_mask))
        with self._forgetting():
            self._link.add_integers(words, "masked words")

    def _mask(self, stream: Stream, number: int) -> torch.Tensor:
        """The next words of a stream, in memory that is used again."""
        return torch.from_numpy(stream.fill(memoryview(self._zeros)[: WORD * number], self._memory))

    def open(self) -> None:
        """Take the ranks' own masks off what was added since the last time.

        Raises:
            RanksLost: on all ranks that are left, if others are lost whose keys none of them has.
        """
        keys: dict[int, bytes] = {}
        if self._own:
            with self._forgetting():
                keys = self._opened()
        sums, self._sums = self._sums, []
        for made in sums if keys else ():
            streams = [Stream(keys[rank], made.nonce) for rank in made.ranks if rank != self._rank]
            if len(made.own_mask):
                made.words.sub_(made.own_mask)
            for piece in made.words.split(len(self._zeros) // WORD):
                for stream in streams:
                    piece.sub_(self._mask(stream, len(piece)))

    @contextlib.contextmanager
    def _forgetting(self) -> Iterator[None]:
        """A context in which sums do not count, and their keys are never opened, if ranks are lost."""
        try:
            yield
        except RanksLost:
            self._sums, self._own = [], b""
            raise

    def _opened(self) -> dict[int, bytes]:
        """Rank -> the key of its own masks, after all have the sums with them.

        If a rank is lost meanwhile whose key some others have received, these give it to all: the sums count then.
        """
        ranks, nonce = {rank for made in self._sums for rank in made.ranks}, self._sums[0].nonce
        slots = torch.zeros(self._num_slots, SLOT, dtype=torch.int64)
        own = torch.frombuffer(bytearray(with_tag(self._own, nonce, self._rank)), dtype=torch.int64)
        slots[self._rank] = own if self._rank in ranks else 0
        tables = [slots]
        try:
            self._link.add_integers(slots.view(-1), "opened masks")
        except RanksLost:
            slots[self._rank] = own if self._rank in ranks else 0
            everyone = self._link.allgather(slots.view(-1).view(torch.uint8).numpy(), "opened masks")
            tables = [torch.from_numpy(table.astype(np.uint8)).view(torch.int64).view_as(slots) for table in everyone]
        found = {rank: [_key_of(table[rank], nonce, rank) for table in tables] for rank in ranks}
        keys = {rank: next(filter(None, of_rank), b"") for rank, of_rank in found.items()}
        if not all(keys.values()):
            raise RanksLost
        return keys


def _key_of(slot: torch.Tensor, nonce: int, rank: int) -> bytes:
    """The key in a slot; b"" if it is not whole."""
    found = slot.numpy().tobytes()
    return found[:KEY] if with_tag(found[:KEY], nonce, rank) == found else b""
