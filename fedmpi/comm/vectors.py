"""Vectors that ranks have in common: slices of all of theirs, and one that all of them have."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy.typing as npt
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


class Gathering:
    """What `Link.begin_allgather` has begun.

    Args:
        everyone: [size, n], which has the values of all ranks once the request is complete.
        request: of MPI, or None: it is complete. wait: function that waits for a request.
    """

    def __init__(
        self, everyone: npt.NDArray[Any], request: Any = None, wait: Callable[[Any], None] = lambda request: None
    ) -> None:
        self._everyone, self._request = everyone, request
        self._wait_for: Callable[[Any], None] = wait

    def poll(self) -> npt.NDArray[Any] | None:
        """[size, n] the values of all ranks; None if some have not come yet."""
        return self._everyone if self._request is None or self._request.Test() else None

    def wait(self) -> npt.NDArray[Any]:
        """The same, when all have come."""
        if self._request is not None:
            self._wait_for(self._request)
        return self._everyone
