"""What minibatches and models draw at random depends on the sample alone: the generators are seeded before each."""

import functools
from typing import Any

import torch
from torch import nn

from fedmpi.ground.generators import seed_all, seed_noise
from fedmpi.ground.streams import derive
from fedmpi.oracles.drawing import may_draw


class Noise:
    """Seeds the generators for one client.

    Args:
        task: says what it draws: `random_batches`, `user_batches`, `random_loss`, `draws_outside_torch`
            (`fedmpi.tasks.base`). module: the model. device: where it draws.

    Attributes:
        seed: `seed(number)` seeds what minibatch and model draw.
    """

    def __init__(self, task: Any, module: nn.Module, device: torch.device) -> None:
        self._random_batches = getattr(task, "random_batches", True)
        self._user_batches = getattr(task, "user_batches", False)
        self._random_loss = getattr(task, "random_loss", True) or may_draw(module)
        draws_outside_torch = getattr(task, "draws_outside_torch", False)
        self._device = device
        self.seed = functools.partial(seed_all if draws_outside_torch else seed_noise, device=device)

    def before_batch(self, seed: int, client: int, number: int) -> None:
        """Seed what minibatch `number` of a client draws, like crops: both gradients of a pair see the same ones."""
        if self._random_batches:
            of_batch = derive(seed, "augmentation", client, number)
            self.seed(of_batch)
            if self._user_batches:
                seed_all(of_batch, self._device)

    def before_pass(self, noise: int) -> None:
        """Seed what a pass of the model draws on a sample with this `noise`."""
        if self._random_loss:
            self.seed(noise)
