"""How a client answers "the gradient of f_i at z on sample ξ".

An algorithm draws a sample, `xi = oracle.draw()`, and asks for gradients on it at any vectors. A
sample fixes the minibatch and the model's random stream (dropout masks), so two gradients on the
same sample differ only by the point. The vectors that an oracle returns are the algorithm's to
overwrite, until its next call.
"""

import dataclasses

import numpy as np
import torch

from fedmpi.streams import derive

FIRST = -1  # the number of the initial, larger batch among a client's samples
WHOLE = -2  # and of the batch that is all its data


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one local step draws: the number of the draw, the minibatch, the seed of its noise."""

    number: int
    batch: object
    noise: int


class AutogradOracle:
    """Gradients of a task's loss on one client's data, by automatic differentiation.

    Args:
        flat: the `FlatModule`, shared by the clients of a rank.
        task: gives `loss(module, batch)` and `batch(client, indices)` (`fedmpi.tasks`).
        client: the client's number.
        sampler: `sampler(number) -> indices` into the client's rows, number = 0, 1, 2, ...,
            FIRST for the initial batch and WHOLE for all rows (`fedmpi.data.sampler`).
        seed: of the run; the noise of sample t is the stream (seed, "noise", client, t).
        rows: [2, dim] where gradients are put; may be shared by the clients of a rank.
        buffers: the vector that holds the working client's float buffers.
        clip_norm: largest norm of a gradient, or None. weight_decay: times z, added after clipping.
    """

    def __init__(self, flat, task, client, sampler, seed, rows, buffers, clip_norm=None, weight_decay=0.0):
        self._flat, self._task, self._client, self._sampler, self._seed = flat, task, client, sampler, seed
        self._rows, self._buffers = rows, buffers
        self._clip_norm, self._weight_decay = clip_norm, weight_decay
        self.num_draws = 0
        self.num_gradients = 0
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=rows.device)
        self._num_losses = 0

    def draw(self):
        """The next sample of this client's stream."""
        sample = self._sample(self.num_draws)
        self.num_draws += 1
        return sample

    def draw_first(self):
        """The initial batch B_0, from a stream of its own; drawing it moves nothing else."""
        return self._sample(FIRST)

    def whole(self):
        """All data of this client as one sample, for exact gradients of f_i."""
        return self._sample(WHOLE)

    def gradient(self, z, xi):
        """∇f_i(z; ξ): a [dim] row that stays valid until the next call."""
        return self._gradient(z, xi, self._rows[0])

    def gradient_pair(self, z, z_prev, xi):
        """(∇f_i(z; ξ), ∇f_i(z_prev; ξ)), two [dim] rows that stay valid until the next call.

        Both see the same minibatch and the same dropout masks; only the first moves the running
        statistics of batch-norm layers and counts as training loss.
        """
        g = self._gradient(z, xi, self._rows[0])
        saved = [(buffer, buffer.clone()) for buffer in self._flat.module.buffers()]
        loss_sum, num_losses = self._loss_sum.clone(), self._num_losses
        g_prev = self._gradient(z_prev, xi, self._rows[1])
        self._loss_sum, self._num_losses = loss_sum, num_losses
        for buffer, value in saved:
            buffer.copy_(value)
        return g, g_prev

    def take_losses(self):
        """(sum, number) of the losses since the last call; forgets them."""
        losses = float(self._loss_sum), self._num_losses
        self._loss_sum.zero_()
        self._num_losses = 0
        return losses

    def _sample(self, number):
        indices = self._sampler(number)
        batch = self._task.batch(self._client, indices)
        return Sample(number, batch, derive(self._seed, "noise", self._client, number))

    def _gradient(self, z, xi, out):
        self._flat.point_at(z, self._buffers)
        self._flat.module.train()
        seed_noise(xi.noise, z.device)
        loss = self._task.loss(self._flat.module, xi.batch)
        self._loss_sum += loss.detach()
        self._num_losses += 1
        self.num_gradients += 1
        self._flat.flatten(torch.autograd.grad(loss, self._flat.parameters), out=out)
        if self._clip_norm is not None:
            out.mul_((self._clip_norm / torch.linalg.vector_norm(out)).clamp(max=1))
        if self._weight_decay:
            out.add_(z, alpha=self._weight_decay)
        return out


def seed_noise(seed, device):
    """Seed the generator that modules on `device` draw dropout masks from."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


class FunctionOracle:
    """Gradients by calling a function; what `fedmpi.simulate` gives to algorithms.

    Args:
        gradient: `gradient(client, x, sample) -> vector`; x is a [dim] tensor.
        client: the client's number.
    """

    def __init__(self, gradient, client):
        self._gradient_of, self._client = gradient, client
        self.num_draws = 0
        self.num_gradients = 0

    def draw(self):
        """The next sample: the number of draws before it."""
        self.num_draws += 1
        return self.num_draws - 1

    def draw_first(self):
        """The initial batch: sample -1."""
        return FIRST

    def whole(self):
        """All data of this client; sample -1 like the initial batch."""
        return FIRST

    def gradient(self, z, xi):
        """The function's value at z as a new [dim] tensor of z's dtype."""
        self.num_gradients += 1
        value = self._gradient_of(self._client, z.clone(), xi)
        return torch.as_tensor(np.asarray(value), dtype=z.dtype).reshape(z.shape).clone()

    def gradient_pair(self, z, z_prev, xi):
        """The values at two vectors on the same sample."""
        return self.gradient(z, xi), self.gradient(z_prev, xi)

    def take_losses(self):
        """No losses are known here."""
        return 0.0, 0
