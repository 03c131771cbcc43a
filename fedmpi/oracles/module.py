"""Gradients of a task's loss on one client's data, as all oracles on a module find them."""

import collections
import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from fedmpi.ground.generators import seed_all, seed_noise
from fedmpi.ground.streams import FIRST, WHOLE, derive
from fedmpi.oracles.base import LocalObjective, Oracle, Sample
from fedmpi.oracles.drawing import may_draw

AHEAD = 1 << 20  # bytes of minibatches that are made at once, which is faster than one by one between gradients


class ModuleOracle(Oracle):
    """Gradients of a task's loss on one client's data; subclasses say how a gradient is found.

    Args:
        client: a `Client`. objective: its `LocalObjective`.
        rows: [2, dim] where gradients are put; may be shared by the clients of a rank.

    Attributes:
        random_batches: whether a minibatch draws random numbers, like crops.
        seed: `seed(number)` seeds what minibatch and model draw at random.
        losses: 0-d tensors, since `take_losses`.
    """

    def __init__(self, client: Any, objective: LocalObjective, rows: torch.Tensor) -> None:
        super().__init__(client)
        self._objective, self._flat, self._task = objective, objective.flat, objective.task
        self._rows = rows.unbind()  # the same two tensors at every call: their views are made once
        self._buffers = client.buffers
        client.counters = [counter.clone() for counter in self._flat.counters]
        self._expected = 1
        self._ahead: collections.deque[Sample] = collections.deque()  # samples that are made and not yet drawn
        self.random_batches = getattr(self._task, "random_batches", True)
        self._user_batches = getattr(self._task, "user_batches", False)
        self._random_loss = getattr(self._task, "random_loss", True) or may_draw(self._flat.module)
        self._carries = getattr(self._task, "carries", False)
        self.losses: list[torch.Tensor] = []
        draws_outside_torch = getattr(self._task, "draws_outside_torch", False)
        self.seed = functools.partial(seed_all if draws_outside_torch else seed_noise, device=self._buffers.device)

    def expect(self, num_draws: int) -> None:
        self._expected = num_draws
        self._ahead.clear()

    def adopt(self) -> None:
        self._flat.check()

    def draw(self) -> Sample:
        first = self.client.num_draws
        if not self._ahead:
            sample = self.sample(first)
            number = min(self._expected, AHEAD // max(1, _num_bytes(sample.batch)))
            self._ahead.append(sample)
            self._ahead.extend(self.sample(first + later) for later in range(1, number))
        self.client.num_draws += 1
        self._expected -= 1
        return self._ahead.popleft()

    def draw_first(self) -> Sample:
        return self.sample(FIRST)

    def whole(self) -> Sample:
        return self.sample(WHOLE)

    def gradient(self, z: torch.Tensor, xi: Sample) -> torch.Tensor:
        return self._gradient(z, xi, self._rows[0])

    def gradient_pair(self, z: torch.Tensor, z_prev: torch.Tensor, xi: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        g = self._gradient(z, xi, self._rows[0])
        with self._keeping_buffers():
            g_prev = self._gradient(z_prev, xi, self._rows[1])
        self.losses.pop()  # only the loss at z counts
        return g, g_prev

    def take_losses(self) -> list[torch.Tensor]:
        losses, self.losses = self.losses, []
        return losses

    def sample(self, number: int) -> Sample:
        """Sample `number` of this client's stream: 0, 1, 2, ..., FIRST or WHOLE."""
        if self.random_batches:
            # The batch is made once, so both gradients of a pair see the same crops and flips.
            of_batch = derive(self._objective.seed, "augmentation", self.client.index, number)
            self.seed(of_batch)
            if self._user_batches:
                seed_all(of_batch, self._buffers.device)
        carried = (self.client.carried,) if self._carries else ()
        batch = self._task.batch(self.client.index, self._objective.sampler(number), *carried)
        return Sample(number, batch, derive(self._objective.seed, "noise", self.client.index, number))

    def _gradient(self, z: torch.Tensor, xi: Sample, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` with the gradient that the algorithm sees."""
        flat = self._flat
        if not flat.module.training:
            flat.train()
        flat.point_counters_at(self.client.counters)
        self.losses.append(self._evaluate(z, xi, out))
        self.client.num_gradients += 1
        self.client.counters = flat.counters
        objective = self._objective
        negate_ascent(out, objective.ascent, objective.ascent_scale)
        return clip_and_decay(out, z, objective.clip_norm, objective.weight_decay)

    def _evaluate(self, z: torch.Tensor, xi: Sample, out: torch.Tensor) -> torch.Tensor:
        """Put ∇F_i(z; ξ) into `out` and return F_i(z; ξ) without a graph."""
        raise NotImplementedError

    def _seed_noise(self, xi: Sample) -> None:
        """Make what the module draws at random depend on the sample only."""
        if self._random_loss:
            self.seed(xi.noise)

    def _keeping_buffers(self) -> AbstractContextManager[None]:
        """A context after which the client's float and integer buffers are as before it."""
        return self._restoring_buffers() if self._flat.num_buffers or self.client.counters else contextlib.nullcontext()

    @contextlib.contextmanager
    def _restoring_buffers(self) -> Iterator[None]:
        state = self._buffers, *self.client.counters
        before = [value.clone() for value in state]
        counters = self.client.counters
        try:
            yield
        finally:
            for value, old in zip(state, before):
                value.copy_(old)
            self.client.counters = counters
            self._flat.point_counters_at(counters)


def _num_bytes(batch: Any) -> Any:
    """Bytes of a tensor or of a tuple of them; of other batches `AHEAD`, so that they are made one by one."""
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    return sum(map(_num_bytes, batch)) if isinstance(batch, tuple) else AHEAD


def clip_and_decay(
    gradient: torch.Tensor, z: torch.Tensor, clip_norm: float | None, weight_decay: float
) -> torch.Tensor:
    """Shorten a [dim] gradient to the norm `clip_norm` unless that is None, then add weight_decay times z; in place."""
    if clip_norm is not None:
        gradient.mul_((clip_norm / torch.linalg.vector_norm(gradient)).clamp(max=1))
    if weight_decay:
        gradient.add_(z, alpha=weight_decay)
    return gradient


def negate_ascent(gradient: torch.Tensor, ascent: slice | None, scale: float = 1.0) -> None:
    """Change the sign of the ascent block of a gradient, in place: descending there is ascending.

    Args:
        gradient: [dim]. ascent: a slice of it, or None. scale: further factor of the block.
    """
    if ascent is not None:
        gradient[ascent].mul_(-scale)
