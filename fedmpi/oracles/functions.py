"""Oracles on plain functions: what `fedmpi.simulate` gives to algorithms."""

import numpy as np
import torch

from fedmpi.ground.streams import FIRST, WHOLE
from fedmpi.oracles.base import Oracle
from fedmpi.oracles.module import negate_ascent
from fedmpi.oracles.two_point import add_estimate


class FunctionOracle(Oracle):
    """Gradients by calling a function.

    Args:
        gradient: `gradient(client, x, sample) -> vector`; client is its number, x a [dim] tensor.
        client: a `Client`.
        ascent: the slice of x in which the problem ascends, or None. ascent_scale: see `ModuleOracle`.
    """

    def __init__(self, gradient, client, ascent=None, ascent_scale=1.0):
        super().__init__(client)
        self._gradient_of = gradient
        self._ascent, self._ascent_scale = ascent, ascent_scale

    def draw(self):
        """The next sample: the number of draws before it."""
        self.client.num_draws += 1
        return self.client.num_draws - 1

    def draw_first(self):
        """The initial batch: sample -1."""
        return FIRST

    def whole(self):
        """All data of this client: sample -2."""
        return WHOLE

    def gradient(self, z, xi):
        """The gradient at z as a new [dim] tensor of z's dtype, its ascent block negated."""
        self.client.num_gradients += 1
        g = self._evaluate(z, xi)
        negate_ascent(g, self._ascent, self._ascent_scale)
        return g

    def gradient_pair(self, z, z_prev, xi):
        """The gradients at two vectors on the same sample."""
        return self.gradient(z, xi), self.gradient(z_prev, xi)

    def _evaluate(self, z, xi):
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

    def __init__(self, loss, directions, client, smoothing, ascent=None, ascent_scale=1.0):
        super().__init__(None, client, ascent, ascent_scale)
        self._loss, self._directions, self._smoothing = loss, directions, smoothing

    def _evaluate(self, z, xi):
        v = torch.as_tensor(np.asarray(self._directions(self.client.index, xi)), dtype=z.dtype).reshape(-1, z.numel())
        base = self._loss_at(z, xi)
        losses = torch.stack([self._loss_at(z + self._smoothing * direction, xi) for direction in v])
        return add_estimate(torch.zeros_like(z), losses - base, v, self._smoothing, len(v))

    def _loss_at(self, z, xi):
        return torch.as_tensor(self._loss(self.client.index, z.clone(), xi), dtype=z.dtype).reshape(())
