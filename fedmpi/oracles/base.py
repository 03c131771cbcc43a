"""What the oracles of a task's module have in common: samples, the loss account, the ascent block."""

import collections
import contextlib
import dataclasses

import torch
from torch import nn

from fedmpi.settings import check
from fedmpi.streams import FIRST, WHOLE, derive

AHEAD = 1 << 20  # bytes of minibatches that are made at once; each is faster than by itself between gradients

_NEVER_DRAW = {
    layer.forward
    for layer in (
        nn.Sequential, nn.Flatten, nn.Identity, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d,
        nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool2d,
        nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus,
        nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm,
    )
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one local step draws: the number of the draw, the minibatch, the seed of its noise."""

    number: int
    batch: object
    noise: int


@dataclasses.dataclass(frozen=True)
class OracleKind:
    """Base of the ways to come to a gradient; its settings are its fields."""

    def __post_init__(self):
        check(self, "oracle.")

    def workspace(self, x):
        """Vectors like `x` [dim] that all oracles of a rank share: clients work in turn."""
        raise NotImplementedError

    def make(self, flat, task, client, sampler, seed, workspace, buffers, **options):
        """The oracle of one client; see `ModuleOracle`."""
        raise NotImplementedError


class ModuleOracle:
    """Gradients of a task's loss on one client's data; subclasses say how a gradient is found.

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
        ascent: the slice of a row in which the problem ascends, or None.
        ascent_scale: times the gradient of that block: its step size over that of the rest, where
            the algorithm has one step size for all.
    """

    def __init__(
        self,
        flat,
        task,
        client,
        sampler,
        seed,
        rows,
        buffers,
        clip_norm=None,
        weight_decay=0.0,
        ascent=None,
        ascent_scale=1.0,
    ):
        self._flat, self._task, self._client, self._sampler, self._seed = flat, task, client, sampler, seed
        self._rows = rows.unbind()  # the same two tensors at every call: their views are made once
        self._buffers = buffers
        self._clip_norm, self._weight_decay = clip_norm, weight_decay
        self._ascent, self._ascent_scale = ascent, ascent_scale
        self.num_draws = 0
        self.num_gradients = 0
        self._expected = 1
        self._ahead = collections.deque()  # samples that are made and not yet drawn
        self._random_batches = getattr(task, "random_batches", True)
        self._random_loss = getattr(task, "random_loss", True) or may_draw(flat.module)
        self._losses = []  # 0-d tensors, since `take_losses`

    def expect(self, num_draws):
        """Be told how many draws are about to follow, as far as is known. It changes no sample."""
        self._expected = num_draws
        self._ahead.clear()

    def draw(self):
        """The next sample of this client's stream."""
        if not self._ahead:
            sample = self._sample(self.num_draws)
            number = min(self._expected, AHEAD // max(1, _num_bytes(sample.batch)))
            self._ahead.append(sample)
            self._ahead.extend(self._sample(self.num_draws + later) for later in range(1, number))
        self.num_draws += 1
        self._expected -= 1
        return self._ahead.popleft()

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

        Both see the same minibatch, dropout masks and directions; only the first moves the running
        statistics of batch-norm layers and counts as training loss.
        """
        g = self._gradient(z, xi, self._rows[0])
        with self._unmoved():
            g_prev = self._gradient(z_prev, xi, self._rows[1])
        self._losses.pop()
        return g, g_prev

    def take_losses(self):
        """(sum, number) of the losses since the last call; forgets them."""
        losses, self._losses = self._losses, []
        return sum(torch.stack(losses).tolist()) if losses else 0.0, len(losses)

    def _sample(self, number):
        indices = self._sampler(number)
        if self._random_batches:
            # The batch is made once, so both gradients of a pair see the same crops and flips.
            seed_noise(derive(self._seed, "augmentation", self._client, number), self._buffers.device)
        batch = self._task.batch(self._client, indices)
        return Sample(number, batch, derive(self._seed, "noise", self._client, number))

    def _gradient(self, z, xi, out):
        """Fill `out` with the gradient that the algorithm sees."""
        if not self._flat.module.training:
            self._flat.module.train()
        self._flat.hold_counters(self._client)
        self._losses.append(self._evaluate(z, xi, out))
        self.num_gradients += 1
        negate_ascent(out, self._ascent, self._ascent_scale)
        if self._clip_norm is not None:
            out.mul_((self._clip_norm / torch.linalg.vector_norm(out)).clamp(max=1))
        if self._weight_decay:
            out.add_(z, alpha=self._weight_decay)
        return out

    def _evaluate(self, z, xi, out):
        """Put ∇F_i(z; ξ) into `out` and return F_i(z; ξ) without a graph."""
        raise NotImplementedError

    def _seed_noise(self, xi):
        """See that what the module draws at random depends on the sample only."""
        if self._random_loss:
            seed_noise(xi.noise, self._buffers.device)

    def _unmoved(self):
        """A context that leaves the module's buffers as they are."""
        vectors = [self._buffers, *self._flat.counters] if self._flat.num_buffers else self._flat.counters
        return _restored(vectors) if vectors else contextlib.nullcontext()


@contextlib.contextmanager
def _restored(vectors):
    saved = [(vector, vector.clone()) for vector in vectors]
    yield
    for vector, value in saved:
        vector.copy_(value)


def may_draw(module):
    """Whether a pass through a module may draw random numbers.

    Surely not if every part of it is one of torch's layers that never do, and has no hooks.
    """
    return not all(
        type(part).forward in _NEVER_DRAW and not (part._forward_hooks or part._forward_pre_hooks)
        for part in module.modules()
    )


def _num_bytes(batch):
    """Of a tensor or a tuple of them; of other batches, which are made one by one, infinitely many."""
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    return sum(map(_num_bytes, batch)) if isinstance(batch, tuple) else AHEAD


def negate_ascent(gradient, ascent, scale=1.0):
    """Change the sign of the ascent block of a gradient, in place: descending there is ascending.

    Args:
        gradient: [dim]. ascent: a slice of it, or None. scale: further factor of the block.
    """
    if ascent is not None:
        gradient[ascent].mul_(-scale)


def seed_noise(seed, device):
    """Seed the generator that modules on `device` draw dropout masks from."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
