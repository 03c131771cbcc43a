"""A minibatch in parts, so that the activations of one part at a time need memory."""

from typing import Any

import torch

from fedmpi.ground.errors import UserError

Parts = list[tuple[float, Any]]


def micro_batches(batch: Any, number: int) -> Parts:
    """[(share of the samples, part of the minibatch)], `number` of them or one for each sample; the shares add up to 1.

    Args:
        batch: a tensor with the samples along dimension 0, or tuples, lists and dicts of such tensors, all of one
            length. Numbers and texts among them belong to every part.

    Raises:
        UserError: for any other minibatch.
    """
    lengths = {_length(tensor) for tensor in _tensors(batch)}
    if len(lengths) != 1 or 0 in lengths:
        found = f"tensors of lengths {sorted(lengths)}" if lengths else f"a {type(batch).__name__}"
        raise UserError(
            f"accumulate = {number}: a minibatch is {found}: expected tensors with the samples along dimension 0, or "
            "tuples, lists and dicts of them"
        )
    length = lengths.pop()
    bounds = torch.arange(length).tensor_split(min(number, length))
    return [(len(at) / length, _part(batch, slice(int(at[0]), int(at[-1]) + 1))) for at in bounds]


def _length(tensor: torch.Tensor) -> int:
    return len(tensor) if tensor.dim() else 0


def _tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    parts = batch.values() if isinstance(batch, dict) else batch if type(batch) in (tuple, list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _part(batch: Any, at: slice) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[at]
    if isinstance(batch, dict):
        return {name: _part(value, at) for name, value in batch.items()}
    return type(batch)(_part(value, at) for value in batch) if type(batch) in (tuple, list) else batch
