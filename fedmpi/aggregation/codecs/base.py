"""What a codec is: it writes what a client sends in fewer bytes, and reads it again."""

import abc
import dataclasses
from typing import ClassVar

import torch

from fedmpi.aggregation.layout import Layout, Moment
from fedmpi.comm.link import Link
from fedmpi.ground.part import Part
from fedmpi.ground.settings import check


@dataclasses.dataclass(kw_only=True)
class Codec(Part):
    """Base of all codecs; its settings are its fields.

    A codec writes what rows have moved by since the round began as words, and reads these. It is linear if
    ``decode(encode(a) + encode(b)) = decode(encode(a)) + decode(encode(b))``: the words of all clients are then added
    up, and only the sum is read. Otherwise it writes one word for each value: every client's are read where a slice of
    them is reduced, and the result is written for its way back.

    Float buffers travel as they are beside the words of a linear codec. Of rows that are differences
    the algorithm gets what was read of them, so that what a client keeps and what the server knows stay equal.

    Attributes:
        link, layout: after `open`. moment: the current `Moment`.
        share: what part of a move `decode` gives on average; moves of points are divided by it. Other rows are not:
            estimates with momentum would grow without limit.
    """

    is_linear: ClassVar[bool] = False
    share = 1.0

    def __post_init__(self) -> None:
        check(self, "codec.")

    def open(self, link: Link, layout: Layout) -> None:
        """Called once, before the first exchange. Collective on the link."""
        self.link, self.layout = link, layout

    def begin(self, moment: Moment) -> None:
        """Prepare an exchange. The same on every rank; not collective."""
        self.moment = moment

    @abc.abstractmethod
    def encode(self, moves: torch.Tensor) -> torch.Tensor:
        """Words of some moves, which it may overwrite: [n] of [n]; of a linear codec [k] of a row [dim] in its type."""

    @abc.abstractmethod
    def decode(self, words: torch.Tensor) -> torch.Tensor:
        """What `encode` was given, as far as the words tell, in the layout's dtype and in memory of its own."""
