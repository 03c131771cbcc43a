"""Slices of rows that travel in a codec, and checks of what a part of the user's takes and returns."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from fedmpi.aggregation.codecs.base import Codec
from fedmpi.comm.vectors import Reduce, Slices
from fedmpi.ground.errors import UserError


def reduce_words(aggregation: Any, codec: Codec, reduce: Reduce, out: torch.Tensor) -> None:
    """`Aggregation.reduce_slices` where clients' words are read with their slices, and results are written again."""
    start, end = aggregation.start, aggregation.end_of_rows
    # Clients know what was read of their differences; what all know of the mean must be the mean of these.
    is_exact = "difference" in map(aggregation.layout.kinds.get, aggregation.moment.rows)

    def write(values: torch.Tensor) -> torch.Tensor:
        return of_length(len(values), codec.encode(values), f"{aggregation.called}: encode returned")

    def read(words: torch.Tensor) -> torch.Tensor:
        return of_length(len(words), codec.decode(words), f"{aggregation.called}: decode returned", start.dtype)

    def of_words(words: Slices) -> torch.Tensor:
        began = start[words.place].to(words[0].device)
        result = reduce(Slices((read(each).add_(began) for each in words), words.place))
        return result if is_exact else write(moves(result, began, end - words.place.start))

    # A codec may overwrite what it is given.
    sent, written = [write(moves(rows, start, end)) for rows in aggregation.kept_regions()], write(start.clone())
    result = torch.empty_like(out if is_exact else written)
    aggregation.link.exchange_slices(sent, of_words, result, written.dtype, "slices")
    out.copy_(result if is_exact else read(result).add_(start))
    aggregation.clamp_squares(out)


def of_length(length: int, found: object, who: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A vector that a part of the user's has returned.

    Raises:
        UserError: if it is none of this length, or of another type than `dtype`; `who` begins the message.
    """
    if isinstance(found, torch.Tensor) and found.shape == (length,):
        if dtype not in (None, found.dtype):
            raise UserError(f"{who} a tensor of {found.dtype}: expected the rows' type, {dtype}")
        return found
    given = f"a tensor of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
    raise UserError(f"{who} {given}: expected a tensor of shape [{length}]")


def moves(rows: torch.Tensor, start: torch.Tensor, num_finite: int) -> torch.Tensor:
    """The difference; behind `num_finite` values, 0 also where both are equally infinite: a mask among the buffers."""
    difference, end = rows - start, max(0, num_finite)
    if end < len(rows):
        difference[end:] = torch.where(rows[end:] == start[end:], 0, difference[end:])
    return difference


def takes_weight(add: Callable[..., None], who: str) -> bool:
    """Whether an aggregation's `add` is to get the weight, too.

    Raises:
        UserError: if it takes other arguments; `who` begins the message.
    """
    parameters = inspect.signature(add)
    for arguments in ((0, None, 1.0), (0, None)):
        with contextlib.suppress(TypeError):
            parameters.bind(*arguments)
            return len(arguments) > 2
    raise UserError(f"{who}: add{parameters}: expected add(client, region, weight) or add(client, region)")
