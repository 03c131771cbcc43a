"""Samples that are made ahead: several minibatches at once are made faster than one by one between gradients."""

import collections
from collections.abc import Callable
from typing import Any

import torch

from fedmpi.oracles.base import Sample

AHEAD = 1 << 20  # bytes of minibatches that are made at once


class Ahead:
    """The samples of one client that are made and not yet drawn.

    Args:
        make: `make(number) -> Sample`.
    """

    def __init__(self, make: Callable[[int], Sample]) -> None:
        self._make, self._expected = make, 1
        self._made: collections.deque[Sample] = collections.deque()

    def expect(self, num_draws: int) -> None:
        """Forget what is made; so many samples will be drawn next."""
        self._expected = num_draws
        self._made.clear()

    def draw(self, number: int) -> Sample:
        """Sample `number`: the one after that of the last call."""
        if not self._made:
            sample = self._make(number)
            num_made = min(self._expected, AHEAD // max(1, _num_bytes(sample.batch)))
            self._made.append(sample)
            self._made.extend(self._make(number + later) for later in range(1, num_made))
        self._expected -= 1
        return self._made.popleft()


def _num_bytes(batch: Any) -> int:
    """Bytes of a tensor or of a tuple of them; of other batches `AHEAD`, so that they are made one by one."""
    if isinstance(batch, torch.Tensor):
        return int(batch.nbytes)
    return sum(map(_num_bytes, batch)) if isinstance(batch, tuple) else AHEAD
