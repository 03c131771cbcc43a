"""Which of a client's samples are in its t-th minibatch."""

import dataclasses

import numpy as np
import torch

from fedmpi.ground.streams import FIRST, WHOLE, generator


def to_device(array, device):
    """A numpy array as a tensor on a device; the CPU does not wait for the copy."""
    tensor = torch.from_numpy(array)
    on_cpu = torch.device(device).type == "cpu"
    return tensor.to(device) if on_cpu else tensor.pin_memory().to(device, non_blocking=True)


@dataclasses.dataclass(frozen=True)
class LastBatch:
    """What happens with the samples that are left at the end of a pass.

    Attributes:
        rule: "keep": they are a minibatch; "merge": they join the one before it; "drop": this pass is without them.
        least: fewer samples than that join the minibatch before, also with "keep".
    """

    rule: str = "keep"
    least: int = 1

    def cut(self, num_samples, batch_size):
        """(number of minibatches in a pass, where the last one ends)."""
        whole, left = divmod(num_samples, batch_size)
        if not whole or (self.rule == "keep" and left >= self.least):
            return whole + 1, num_samples
        return whole, whole * batch_size if self.rule == "drop" else num_samples

    def piece(self, order, position, batch_size):
        """Minibatch number `position` of a pass: a part of `order`."""
        num, end = self.cut(len(order), batch_size)
        begin = position * batch_size
        return order[begin : end if position == num - 1 else begin + batch_size]


class EpochSampler:
    """Minibatches of a client: each pass over its data is in a new random order, without replacement.

    The last minibatch of a pass has the samples that are left, see `LastBatch`. Draws can be requested by number in any
    order, because the order of pass e is the stream (seed, "order", client, e).

    Args:
        num_samples: of the client, >= 1.
        batch_size: b; a client with fewer samples uses all of them in every step.
        first_batch_size: B, drawn once without replacement; capped at num_samples.
        seed: of the run. client: the client's number.
        device: of the indices.

    Attributes:
        last_batch: a `LastBatch`, which the training loop sets. batches_per_pass: minibatches in a pass.
    """

    last_batch = LastBatch()

    def __init__(self, num_samples, batch_size, first_batch_size, seed, client, device="cpu"):
        self._num_samples, self._batch_size = num_samples, min(batch_size, num_samples)
        self._first_batch_size = min(first_batch_size, num_samples)
        self._seed, self._client, self._device = seed, client, device
        self._pass, self._order = None, None

    @property
    def batches_per_pass(self):
        return self.last_batch.cut(self._num_samples, self._batch_size)[0]

    def __call__(self, number):
        """[b] int64 indices of draw `number`: 0, 1, 2, ..., FIRST or WHOLE."""
        if number == WHOLE:
            return to_device(np.arange(self._num_samples), self._device)
        if number == FIRST:
            order = generator(self._seed, "first batch", self._client).permutation(self._num_samples)
            return to_device(order[: self._first_batch_size], self._device)
        pass_index, position = divmod(number, self.batches_per_pass)
        if pass_index != self._pass:
            order = generator(self._seed, "order", self._client, pass_index).permutation(self._num_samples)
            self._pass, self._order = pass_index, to_device(order, self._device)
        return self.last_batch.piece(self._order, position, self._batch_size)


class SequentialSampler:
    """Minibatches of a sequence, in its order: every pass reads the same pieces one after the other.

    The sequence is cut into columns of equal length; what remains at its end is dropped. A draw is
    the next `steps` positions of every column. The target of a position is the next one in its column.

    Args:
        num_positions: length of the sequence, >= 2.
        batch_size: b, number of columns; at most one per two positions.
        first_batch_size: B, columns of the initial draw.
        steps: positions of each column in a draw; the last draw of a pass has those that are left.
        device: of the positions.
    """

    def __init__(self, num_positions, batch_size, first_batch_size, steps, device="cpu"):
        self._num_positions, self._steps, self._device = num_positions, steps, device
        self._columns, self._first_columns = (min(size, num_positions // 2) for size in (batch_size, first_batch_size))
        self._length = num_positions // self._columns - 1  # positions of a column that have a target
        self.batches_per_pass = -(-self._length // steps)

    def __call__(self, number):
        """[steps, b] int64 positions of draw `number`: 0, 1, 2, ..., FIRST or WHOLE."""
        if number == WHOLE:
            return self._positions(0, self._length, self._columns)
        if number == FIRST:
            length = self._num_positions // self._first_columns - 1
            return self._positions(0, min(self._steps, length), self._first_columns)
        begin = number % self.batches_per_pass * self._steps
        return self._positions(begin, min(begin + self._steps, self._length), self._columns)

    def _positions(self, begin, end, columns):
        starts = torch.arange(columns, device=self._device) * (self._num_positions // columns)
        return torch.arange(begin, end, device=self._device)[:, None] + starts
