"""Vectors that ranks have in common: slices of all of theirs, and one that all of them have."""

from collections.abc import Callable, Iterable, Sequence

import torch


class Slices(list[torch.Tensor]):
    """A slice of every vector, all of the same place.

    Attributes:
        place: where they lie in the vectors. clients: whose vectors these are, if an aggregation reduces them.
    """

    clients: Sequence[int] = ()

    def __init__(self, vectors: Iterable[torch.Tensor], place: slice) -> None:
        super().__init__(vectors)
        self.place = place


Reduce = Callable[[Slices], torch.Tensor]  # see `Link.exchange_slices`


class Copy:
    """A vector for values that all ranks have.

    Attributes:
        vector: [n], zeros at first; to be read, and to be written to by all ranks at once and equally.
    """

    def __init__(self, vector: torch.Tensor) -> None:
        self.vector = vector

    def take(self, values: torch.Tensor) -> None:
        """Let it have other [n] values, the same on all ranks; collective."""
        self.vector.copy_(values)
