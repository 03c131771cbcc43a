"""A minibatch in parts, so that the activations of one part at a time need memory."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedmpi.ground.errors import UserError
from fedmpi.oracles.base import LocalObjective
from fedmpi.oracles.flat_module import FlatModule

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


def accumulated(
    flat: FlatModule,
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    parts: Parts,
    out: torch.Tensor,
    row: torch.Tensor,
) -> torch.Tensor:
    """The loss of a minibatch in parts, without a graph; its gradient goes into `out` [dim].

    `loss_of(module, part)` is a mean over the samples. `row` [dim] is overwritten.
    """
    total = out.new_zeros(())
    for number, (share, part) in enumerate(parts):
        total += flat.gradient(functools.partial(_share_of, loss_of, part, share), row if number else out)
        if number:
            out.add_(row)
    return total


def _share_of(
    loss_of: Callable[[nn.Module, Any], torch.Tensor], part: Any, share: float, module: nn.Module
) -> torch.Tensor:
    return loss_of(module, part) * share


def check_parts(objective: LocalObjective, number: int) -> None:
    """Raise UserError if a minibatch in parts has another meaning than as a whole."""
    given, flat = f"accumulate = {number}", objective.flat
    if getattr(objective.task, "carries", False):
        raise UserError(f"{given}: a sample of this task leaves a state to the next one: leave it out")
    for name, part in flat.module.named_modules():
        if isinstance(part, _BatchNorm) and part not in flat.frozen_parts:
            raise UserError(f"{given}: '{name}' has statistics of a whole minibatch: freeze it, or leave this out")


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
