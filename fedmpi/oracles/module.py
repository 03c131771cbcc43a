"""Gradients of a task's loss on one client's data, as all oracles on a module find them."""

import torch

from fedmpi.ground.streams import FIRST, WHOLE, derive
from fedmpi.oracles.ahead import Ahead
from fedmpi.oracles.base import Client, LocalObjective, Oracle, Sample
from fedmpi.oracles.keeping import buffers_kept
from fedmpi.oracles.noise import Noise
from fedmpi.oracles.treatment import clip_and_decay, negate_ascent


class ModuleOracle(Oracle[Sample]):
    """Gradients of a task's loss on one client's data; subclasses say how a gradient is found (`_evaluate`).

    Args:
        client: a `Client`. objective: its `LocalObjective`.
        rows: [2, dim] where gradients are put; may be shared by the clients of a rank.

    Attributes:
        losses: 0-d tensors, since `take_losses`.
    """

    def __init__(self, client: Client, objective: LocalObjective, rows: torch.Tensor) -> None:
        super().__init__(client)
        self._objective, self._flat, self._task = objective, objective.flat, objective.task
        self._rows = rows.unbind()  # the same two tensors at every call: their views are made once
        self._buffers = client.buffers
        client.counters = [counter.clone() for counter in self._flat.counters]
        self._ahead = Ahead(lambda number: self.sample(number))
        self._noise = Noise(self._task, self._flat.module, self._buffers.device)
        self._carries = getattr(self._task, "carries", False)
        self.losses: list[torch.Tensor] = []

    def expect(self, num_draws: int) -> None:
        self._ahead.expect(num_draws)

    def adopt(self) -> None:
        self._flat.check()

    def draw(self) -> Sample:
        sample = self._ahead.draw(self.client.num_draws)
        self.client.num_draws += 1
        return sample

    def draw_first(self) -> Sample:
        return self.sample(FIRST)

    def whole(self) -> Sample:
        return self.sample(WHOLE)

    def sample(self, number: int) -> Sample:
        """Sample `number` of this client's stream: 0, 1, 2, ..., FIRST or WHOLE."""
        objective, client = self._objective, self.client
        self._noise.before_batch(objective.seed, client.index, number)
        carried = (client.carried,) if self._carries else ()
        batch = self._task.batch(client.index, objective.sampler(number), *carried)
        return Sample(number, batch, derive(objective.seed, "noise", client.index, number))

    def gradient(self, z: torch.Tensor, xi: Sample) -> torch.Tensor:
        self._begin_pass()
        return self._end_pass(self._evaluate(z, xi, self._rows[0]), z, self._rows[0])

    def gradient_pair(self, z: torch.Tensor, z_prev: torch.Tensor, xi: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        self._begin_pass()
        g = self._end_pass(self._evaluate(z, xi, self._rows[0]), z, self._rows[0])
        with buffers_kept(self._flat, self.client):
            self._begin_pass()
            g_prev = self._end_pass(self._evaluate(z_prev, xi, self._rows[1]), z_prev, self._rows[1])
        self.losses.pop()  # only the loss at z counts
        return g, g_prev

    def take_losses(self) -> list[torch.Tensor]:
        losses, self.losses = self.losses, []
        return losses

    def _begin_pass(self) -> None:
        """The model is now this client's, in training mode."""
        if not self._flat.module.training:
            self._flat.train()
        self._flat.point_counters_at(self.client.counters)

    def _evaluate(self, z: torch.Tensor, xi: Sample, out: torch.Tensor) -> torch.Tensor:
        """Put ∇F_i(z; ξ) into `out` and return F_i(z; ξ) without a graph."""
        raise NotImplementedError

    def _end_pass(self, loss: torch.Tensor, z: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Count the pass, and make of the loss's gradient what the algorithm sees."""
        objective = self._objective
        self.losses.append(loss)
        self.client.num_gradients += 1
        self.client.counters = self._flat.counters
        negate_ascent(out, objective.ascent, objective.ascent_scale)
        return clip_and_decay(out, z, objective.clip_norm, objective.weight_decay)
