"""What a federation optimises, and the averaged models that it remembers."""

import dataclasses
import math

import torch


@dataclasses.dataclass(frozen=True)
class Variables:
    """What is optimised: one vector, and how it is divided.

    Args:
        x: [dim] the initial model, the same on every rank.
        buffers: [num_buffers] the initial float buffers (batch-norm statistics); None: there are none.
        segments: slices of the parameter tensors in x, for layer-wise methods; None: x is one layer.
        ascent: the slice of x in which a min-max problem ascends; None: a minimisation.
        buffer_parts: [`fedmpi.oracles.flat_module.BufferPart`] of `buffers`; None: they are one part.
        private, private_buffers: slices of x and of the buffers that stay with their client, see `PrivateParts`.
        names, shapes: of the parameters of the segments, for aggregations; () if unknown.
    """

    x: torch.Tensor
    buffers: torch.Tensor | None = None
    segments: list | None = None
    ascent: slice | None = None
    private: tuple = ()
    private_buffers: tuple = ()
    buffer_parts: list | None = None
    names: tuple = ()
    shapes: tuple = ()


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
