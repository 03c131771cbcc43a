"""Gradients of small models made faster: by `torch.compile`, or replayed from a CUDA graph."""

import functools
import typing

import torch
from torch import nn

from fedmpi.ground.errors import UserError
from fedmpi.oracles.captured import CapturedGradients
from fedmpi.oracles.flat_module import FlatModule

_modes: set[str] = set()  # of `compile` that this process has used on a GPU


class Workspace(typing.NamedTuple):
    """What the oracles of a rank share.

    Attributes:
        rows: [2, dim] where gradients are put.
        captured: `CapturedGradients`, or None.
        fixed: [dim] where a compiled model finds its parameters, or None if they are wherever the point is.
    """

    rows: torch.Tensor
    captured: CapturedGradients | None = None
    fixed: torch.Tensor | None = None


def make_workspace(flat: FlatModule, mode: str) -> Workspace:
    """The `Workspace` of a model in a mode of the setting `compile`.

    Raises:
        UserError: if the mode does not suit the model's device, or one that was used before.
    """
    rows, is_captured = flat.x.new_zeros(2, flat.dim), mode == "cuda_graph"
    if flat.x.device.type == "cuda" and mode != "off":
        others = _modes - {mode} if is_captured else _modes & {"cuda_graph"}
        if others:  # CUDA's errors come late, at some other call
            raise UserError(f"compile = {mode} and {others.pop()} do not work in one process: start another")
        _modes.add(mode)
    elif is_captured:
        raise UserError(f"compile = cuda_graph: this rank computes on {flat.x.device}: leave it out, or use a GPU")
    # Compiled code expects each parameter at an address that is aligned as at its first call.
    fixed = torch.empty_like(flat.x) if uses_torch_compile(mode) else None
    return Workspace(rows, CapturedGradients(flat) if is_captured else None, fixed)


def uses_torch_compile(mode: str) -> bool:
    """Whether a mode is one of `torch.compile`."""
    return mode not in ("off", "cuda_graph")


def called(module: nn.Module, mode: str) -> nn.Module:
    """What is called for a pass of a module: itself, or compiled."""
    return _compiled(module, mode) if uses_torch_compile(mode) else module


@functools.lru_cache(maxsize=1)  # the clients of a rank have one model
def _compiled(module: nn.Module, mode: str) -> nn.Module:
    return torch.compile(module, mode=mode)
