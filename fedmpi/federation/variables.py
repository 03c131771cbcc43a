"""What a federation optimises, and the averaged models that it remembers."""

import dataclasses
import math

import torch

from fedmpi.ground.errors import UserError
from fedmpi.oracles.flat_module import BufferPart


@dataclasses.dataclass(frozen=True)
class Variables:
    """What is optimised: one vector, and how it is divided.

    Args:
        x: [dim] the initial model, the same on every rank.
        buffers: [num_buffers] the initial float buffers (batch-norm statistics); None: there are none.
        segments: slices of the parameter tensors in x, for layer-wise methods; None: x is one layer.
        ascent: the slice of x in which a min-max problem ascends; None: a minimisation.
        buffer_parts: [`BufferPart`] of `buffers`; None: they are one part.
        private, private_buffers: slices of x and of the buffers that stay with their client, see `PrivateParts`.
        names, shapes: of the parameters of the segments, for aggregations; () if unknown.
    """

    x: torch.Tensor
    buffers: torch.Tensor | None = None
    segments: list[slice] | None = None
    ascent: slice | None = None
    private: tuple[slice, ...] = ()
    private_buffers: tuple[slice, ...] = ()
    buffer_parts: list[BufferPart] | None = None
    names: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass
class Iterate:
    """An averaged model that was selected as a candidate for the result.

    Attributes:
        round: number of rounds after which it was the average. x: [dim]; buffers: [num_buffers].
        value: of the metric by which it was selected, larger is better; nan if it was selected by its round.
    """

    round: int
    x: torch.Tensor
    buffers: torch.Tensor
    value: float = math.nan


def blocks(dim: int, ascent: slice | None) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """(primal, dual): the slices of a [dim] row in which a problem descends, and those in which it ascends.

    `ascent` is a slice of the row, or None in a minimisation.

    Raises:
        UserError: if the slice has a step or is empty.
    """
    if ascent is None:
        return (slice(0, dim),), ()
    start, stop, step = ascent.indices(dim)
    if step != 1 or start >= stop:
        raise UserError(f"ascent = {ascent}: expected a slice without a step that contains some of the {dim} variables")
    around = (slice(0, start), slice(stop, dim))
    return tuple(block for block in around if block.start < block.stop), (slice(start, stop),)
