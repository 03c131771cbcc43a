"""Gradients of several clients in one pass, exact or estimated."""

import torch
from torch.func import functional_call, grad_and_value, vmap

from fedmpi.oracles.base import LossModule


def stacked_gradients(flat, task):
    """`gradients(points [k, dim], samples) -> ([k, dim], [k])`: the gradients of k losses, and the losses, at once.

    Drawing random numbers within it is an error.

    Args:
        flat, task: see `loss_function`. `samples` is a list of k samples whose minibatches have the same shapes.
    """
    at_once = vmap(grad_and_value(loss_function(flat, task)))
    return lambda points, samples: at_once(points, stack_batches(samples, points))


def loss_function(flat, task):
    """`loss(point [dim], batch)` for the transformations of `torch.func`.

    Args:
        flat: a `FlatModule` without buffers. task: gives the loss; its minibatches are tensors, numbers, or tuples of
            them.
    """
    module = LossModule(flat.module, task)

    def loss_at(point, batch):
        values = flat.named_views(point, flat.buffers)
        return functional_call(module, {f"module.{name}": value for name, value in values.items()}, (batch,))

    return loss_at


def stack_batches(samples, like):
    """The minibatches of samples as one, with a first dimension for the samples; numbers get the dtype of `like`."""
    return _stack([sample.batch for sample in samples], like)


def _stack(batches, like):
    if isinstance(batches[0], tuple):
        return tuple(_stack(parts, like) for parts in zip(*batches))
    if isinstance(batches[0], torch.Tensor):
        return torch.stack(batches)
    return like.new_tensor(batches)  # numbers


class StackedOracle:
    """Answers like an `Oracle`, for several clients at once.

    A vector of all clients is [k, dim], one that they share [dim]; a sample is a list of k samples. Minibatches of
    different sizes are evaluated one after the other.

    Args:
        gradients: what `OracleKind.stacked` returned. oracles: the clients' `ModuleOracle`s.
    """

    def __init__(self, gradients, oracles):
        self._gradients, self._oracles = gradients, oracles

    def draw(self):
        """The next sample of every client."""
        return [oracle.draw() for oracle in self._oracles]

    def draw_first(self):
        """The initial batch of every client."""
        return [oracle.draw_first() for oracle in self._oracles]

    def gradient(self, z, xi):
        """[k, dim]: row j is client j's gradient at its vector on its sample."""
        z = self._spread(z)
        if not _is_even(xi):
            return torch.stack([oracle.gradient(*its).clone() for oracle, *its in zip(self._oracles, z, xi)])
        g, losses = self._evaluate(z, xi)
        for oracle, loss in zip(self._oracles, losses):
            oracle.count(loss)
        return g

    def gradient_pair(self, z, z_prev, xi):
        """Two of them on the same samples; only the first counts as training loss."""
        z, z_prev = self._spread(z), self._spread(z_prev)
        if not _is_even(xi):
            everyone = zip(self._oracles, z, z_prev, xi)
            pairs = [torch.stack(oracle.gradient_pair(*its)) for oracle, *its in everyone]  # each [2, dim]
            return torch.stack(pairs, dim=1).unbind()
        g = self.gradient(z, xi)
        g_prev, _ = self._evaluate(z_prev, xi)
        for oracle in self._oracles:
            oracle.count()
        return g, g_prev

    def _spread(self, z):
        """z as [k, dim], without a copy."""
        return z.expand(len(self._oracles), z.shape[-1])

    def _evaluate(self, z, xi):
        g, losses = self._gradients(z, xi)
        return self._oracles[0].treat(g, z), losses


def _is_even(samples):
    """Whether the minibatches of samples can be stacked: their tensors have the same shapes."""
    return len({_shape(sample.batch) for sample in samples}) == 1


def _shape(batch):
    if isinstance(batch, tuple):
        return tuple(map(_shape, batch))
    return batch.shape if isinstance(batch, torch.Tensor) else None
