"""Oracles on plain functions: what `fedmpi.simulate` gives to algorithms."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedmpi.ground.streams import FIRST, WHOLE
from fedmpi.oracles.base import Client, Oracle
from fedmpi.oracles.treatment import negate_ascent
from fedmpi.oracles.two_point import add_estimate


class FunctionOracle(Oracle[int]):
    """Gradients by calling a function.

    Args:
        gradient: `gradient(client, x, sample) -> vector`; client is its number, x a [dim] tensor.
        client: a `Client`.
        ascent: the slice of x in which the problem ascends, or None. ascent_scale: see `ModuleOracle`.
    """

    def __init__(
        self, gradient: Callable[..., Any], client: Client, ascent: slice | None = None, ascent_scale: float = 1.0
    ) -> None:
        super().__init__(client)
        self._gradient_of = gradient
        self._ascent, self._ascent_scale = ascent, ascent_scale

    def draw(self) -> int:
        """The next sample: the number of draws before it."""
        self.client.num_draws += 1
        return self.client.num_draws - 1

    def draw_first(self) -> int:
        """The initial batch: sample -1."""
        return FIRST

    def whole(self) -> int:
        """All data of this client: sample -2."""
        return WHOLE

    def gradient(self, z: torch.Tensor, xi: int) -> torch.Tensor:
        """The gradient at z as a new [dim] tensor of z's dtype, its ascent block negated."""
        self.client.num_gradients += 1
        g = self._evaluate(z, xi)
        negate_ascent(g, self._ascent, self._ascent_scale)
        return g

    def gradient_pair(self, z: torch.Tensor, z_prev: torch.Tensor, xi: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients at two vectors on the same sample."""
        return self.gradient(z, xi), self.gradient(z_prev, xi)

    def _evaluate(self, z: torch.Tensor, xi: int) -> torch.Tensor:
        value = self._gradient_of(self.client.index, z.clone(), xi)
        value = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
        return value.to(z.dtype).reshape(z.shape).clone()


class LossFunctionOracle(FunctionOracle):
    """Two-point estimates by calling a loss function at perturbed points.

    Args:
        loss: `loss(client, x, sample) -> number`; x is a [dim] tensor.
        directions: `directions(client, sample) -> [b2, dim]`, used as they are.
        client: a `Client`. smoothing: μ.
        ascent, ascent_scale: see `FunctionOracle`.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        directions: Callable[[int, int], Any],
        client: Client,
        smoothing: float,
        ascent: slice | None = None,
        ascent_scale: float = 1.0,
    ) -> None:
        super().__init__(loss, client, ascent, ascent_scale)
        self._loss, self._directions, self._smoothing = loss, directions, smoothing

    def _evaluate(self, z: torch.Tensor, xi: int) -> torch.Tensor:
        v = torch.as_tensor(np.asarray(self._directions(self.client.index, xi)), dtype=z.dtype).reshape(-1, z.numel())
        base = self._loss_at(z, xi)
        losses = torch.stack([self._loss_at(z + self._smoothing * direction, xi) for direction in v])
        return add_estimate(torch.zeros_like(z), losses - base, v, self._smoothing, len(v))

    def _loss_at(self, z: torch.Tensor, xi: int) -> torch.Tensor:
        return torch.as_tensor(self._loss(self.client.index, z.clone(), xi), dtype=z.dtype).reshape(())
