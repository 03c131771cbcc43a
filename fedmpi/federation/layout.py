"""Where what clients send lies in a block, and beside it."""

from typing import Any

import torch

from fedmpi.aggregation.layout import Layout
from fedmpi.algorithms.base import Algorithm
from fedmpi.algorithms.check import block_order, most_numbers
from fedmpi.federation.buffers import SentBuffers

NUMBERS = "numbers"  # their name in the layout of what is beside the rows


def layout_of(
    algorithm: Algorithm,
    dim: int,
    sent: SentBuffers,
    dtype: torch.dtype,
    device: torch.device | str,
    local_steps: int = 1,
    parameters: tuple[Any, Any, Any] = ((), (), ()),
) -> Layout:
    """The `Layout` of what clients send.

    Args:
        local_steps: the largest number of a client in a round. parameters: segments, names and shapes, see `Layout`.
            For the others see `fedmpi.federation.rows.RowStore`.

    Raises:
        UserError: if the algorithm declares its numbers in a wrong way.
    """
    names, beside, num_numbers = block_order(algorithm), None, most_numbers(algorithm, local_steps)
    if num_numbers + sent.sizes[1]:
        row = (NUMBERS,) if num_numbers else ()
        kinds = dict.fromkeys(row, "number")
        beside = Layout(row, num_numbers, num_numbers + sent.sizes[1], torch.float64, device, kinds=kinds)
    kinds = {row: algorithm.kinds.get(row, "point") for row in names}
    return Layout(names, dim, len(names) * dim + sent.sizes[0], dtype, device, *parameters, kinds, beside)
