"""Gradients of a loss that the user's own code computes: what `fedmpi.join` gives to algorithms."""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from fedmpi.ground.errors import UserError
from fedmpi.oracles.base import Client, Oracle
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.oracles.treatment import clip_and_decay

Closure = Callable[[], Any]  # it returns the loss, or an object that has it
RandomStates = tuple[Any, ...]  # of torch, numpy, Python, and of torch on a GPU


@dataclasses.dataclass
class ClosureSample:
    """A minibatch as a closure holds it.

    Attributes:
        closure: computes the loss. noise: the states of the random generators before its first evaluation.
    """

    closure: Closure
    noise: RandomStates | None = None


class ClosureOracle(Oracle[ClosureSample]):
    """Gradients of the loss that `closure()` returns, evaluated as often as an algorithm asks for.

    A second evaluation on the same sample begins with the same states of torch's, numpy's and Python's random
    generators, so that it has the same dropout masks, and leaves batch-norm statistics as they were.

    Args:
        client: a `Client`. flat: the `FlatModule`; its float buffers are those of the client already.
        rows: [2, dim] where gradients are put.
        clip_norm: largest norm of a gradient, or None. weight_decay: times z, added after clipping.

    Attributes:
        closure: of the current step. whole_closure: of the mean loss over all of the client's data, or None.
        loss: that the closure returned last, without a graph. losses: 0-d tensors, since `take_losses`.
    """

    def __init__(
        self,
        client: Client,
        flat: FlatModule,
        rows: torch.Tensor,
        clip_norm: float | None = None,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(client)
        self._flat, self._rows = flat, rows.unbind()
        self._clip_norm, self._weight_decay = clip_norm, weight_decay
        client.counters = flat.counters
        self.closure: Closure | None = None
        self.whole_closure: Closure | None = None
        self.loss: torch.Tensor = None
        self.losses: list[torch.Tensor] = []

    def adopt(self) -> None:
        self._flat.check()
        self.client.counters = self._flat.counters

    def draw(self) -> ClosureSample:
        """The current closure; it is drawn once.

        Raises:
            UserError: if the algorithm draws more than one sample a step.
        """
        closure, self.closure = self.closure, None
        if closure is None:
            raise UserError("this algorithm draws samples of its own between local steps: use it with fedmpi.train")
        self.client.num_draws += 1
        return ClosureSample(closure)

    def draw_first(self) -> ClosureSample:
        assert self.closure is not None
        return ClosureSample(self.closure)

    def whole(self) -> ClosureSample:
        if self.whole_closure is None:
            raise UserError(
                "this algorithm needs a gradient over all data of the client: assign fed.whole = CLOSURE before the "
                "first step"
            )
        return ClosureSample(self.whole_closure)

    def gradient(self, z: torch.Tensor, xi: ClosureSample) -> torch.Tensor:
        g = self._gradient(z, xi, self._rows[0])
        self.losses.append(self.loss.to(z.dtype))
        return g

    def gradient_pair(
        self, z: torch.Tensor, z_prev: torch.Tensor, xi: ClosureSample
    ) -> tuple[torch.Tensor, torch.Tensor]:
        g = self.gradient(z, xi)
        loss = self.loss
        with self._buffers_restored():
            g_prev = self._gradient(z_prev, xi, self._rows[1])
        self.loss = loss
        return g, g_prev

    def take_losses(self) -> list[torch.Tensor]:
        losses, self.losses = self.losses, []
        return losses

    def _gradient(self, z: torch.Tensor, xi: ClosureSample, out: torch.Tensor) -> torch.Tensor:
        self._flat.point_at(z)
        if xi.noise is None:
            xi.noise = _random_states(z.device)
        else:
            _set_random_states(z.device, xi.noise)
        self.loss = self._evaluate(xi.closure, out)
        self._flat.adopt()
        self.client.num_gradients += 1
        clip_and_decay(out, z, self._clip_norm, self._weight_decay)
        for parameter, segment in zip(self._flat.parameters, self._flat.segments):
            if not parameter.requires_grad:  # frozen since: it does not decay either
                out[segment] = 0
        return out

    @torch.enable_grad()
    def _evaluate(self, closure: Closure, out: torch.Tensor) -> torch.Tensor:
        """Put the gradient of the closure's loss into `out`, and return the loss without a graph."""
        parameters = self._flat.parameters
        for parameter in parameters:
            parameter.grad = None
        loss = closure()
        loss = getattr(loss, "loss", loss)  # a model's output object
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UserError(f"the closure returned {_in_words(loss)}: expected the loss, a tensor with one element")
        gradients = [parameter.grad for parameter in parameters]
        if all(gradient is None for gradient in gradients):  # it has not called backward() itself
            if not loss.requires_grad:
                raise UserError("the closure's loss does not depend on a trainable parameter of the model")
            # Not torch.autograd.grad, which runs no post-accumulate hooks and reaches no reentrant checkpoint.
            loss.backward()
            gradients = [parameter.grad for parameter in parameters]
            if all(gradient is None for gradient in gradients):
                self._flat.check()
                raise UserError(
                    "the closure's loss gives no trainable parameter of the model a gradient, or a hook removes it"
                )
        for parameter in parameters:
            parameter.grad = None
        gradients = [torch.zeros_like(p) if g is None else _dense(g) for p, g in zip(parameters, gradients)]
        self._flat.flatten(gradients, out=out)
        return loss.detach().reshape(())

    @contextlib.contextmanager
    def _buffers_restored(self) -> Iterator[None]:
        """A context that leaves the float and integer buffers as they are."""
        buffers, counters = self.client.buffers.clone(), [counter.clone() for counter in self.client.counters]
        try:
            yield
        finally:
            self.client.buffers.copy_(buffers)
            for counter, before in zip(self.client.counters, counters):
                counter.copy_(before)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient  # of nn.Embedding(sparse=True)


def _in_words(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _random_states(device: torch.device) -> RandomStates:
    on_device = torch.get_device_module(device).get_rng_state(device) if device.type != "cpu" else None
    return torch.get_rng_state(), np.random.get_state(), random.getstate(), on_device


def _set_random_states(device: torch.device, states: RandomStates) -> None:
    of_torch, of_numpy, of_python, on_device = states
    torch.set_rng_state(of_torch)
    np.random.set_state(of_numpy)
    random.setstate(of_python)
    if on_device is not None:
        torch.get_device_module(device).set_rng_state(on_device, device)
