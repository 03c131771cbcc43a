"""What an oracle is; and what all oracles on a task's module share: drawing samples, collecting losses, clipping."""

import abc
import collections
import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fedmpi.ground.part import Part
from fedmpi.ground.settings import check
from fedmpi.ground.streams import FIRST, WHOLE, derive

if TYPE_CHECKING:
    from fedmpi.oracles.flat_module import FlatModule

AHEAD = 1 << 20  # bytes of minibatches that are made at once, which is faster than one by one between gradients

# Layers that draw no random numbers; a model of these alone needs no seed per gradient.
_NEVER_DRAW = {
    nn.Flatten, nn.Identity, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool2d,
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm,
}  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one local step draws.

    Attributes:
        number: of the draw, 0, 1, 2, ..., FIRST or WHOLE (`fedmpi.ground.streams`). batch: as the task makes it.
        noise: seed of what the model and the oracle draw at random on this sample.
    """

    number: int
    batch: Any
    noise: int


@dataclasses.dataclass(frozen=True)
class LocalObjective:
    """What a client minimises, and how its gradients are treated before an algorithm sees them.

    Args:
        flat: the `FlatModule`, shared by the clients of a rank.
        task: gives `loss(module, batch)` and `batch(client, indices)` (`fedmpi.tasks`).
        sampler: `sampler(number) -> indices` into the client's rows, number = 0, 1, 2, ...,
            FIRST for the initial batch and WHOLE for all rows (`fedmpi.data.sampler`).
        seed: of the run; the noise of sample t is the stream (seed, "noise", client, t).
        clip_norm: largest norm of a gradient, or None. weight_decay: times z, added after clipping.
        ascent: the slice of a row in which the problem ascends, or None.
        ascent_scale: factor of the gradient in that block: the step size there over that of the rest, for
            algorithms that have only one step size.
    """

    flat: "FlatModule"
    task: Any
    sampler: Callable[[int], Any]
    seed: int = 0
    clip_norm: float | None = None
    weight_decay: float = 0.0
    ascent: slice | None = None
    ascent_scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class OracleKind(Part):
    """Base of the ways to compute a gradient; its settings are its fields."""

    def __post_init__(self) -> None:
        check(self, "oracle.")

    def workspace(self, flat: "FlatModule") -> Any:
        """Memory that all oracles of a rank share, because clients work in turn; `flat` is the model as a `FlatModule`.

        Raises:
            UserError: if the settings do not suit the model's device.
        """
        raise NotImplementedError

    def make(self, client: Any, objective: LocalObjective, workspace: Any) -> "Oracle":
        """The `Oracle` of one `Client` with its `LocalObjective`; `workspace` is what the method returned."""
        raise NotImplementedError


class Oracle(abc.ABC):
    """How a client answers for its data: samples, and gradients on them. Not collective.

    What it must remember from one round to the next it keeps in its client, which owns it:
    `num_draws`, `num_gradients`, `counters`, `carried`.

    Args:
        client: a `fedmpi.federation.client.Client`.

    Attributes:
        kind: the `OracleKind` that made it, or None.
    """

    kind: OracleKind | None = None

    def __init__(self, client: Any) -> None:
        self.client = client

    def expect(self, num_draws: int) -> None:  # noqa: B027  most oracles make nothing ahead
        """Prepare for `num_draws` draws, as far as is known. It changes no sample."""

    def adopt(self) -> None:  # noqa: B027  most oracles have no model
        """Take what the model has become into the vectors, before what its client sends is made.

        Raises:
            UserError: if it has other parameters than at the beginning.
        """

    @abc.abstractmethod
    def draw(self) -> Sample:
        """The next sample ξ of this client's stream."""

    @abc.abstractmethod
    def draw_first(self) -> Sample:
        """The initial batch B_0, from a stream of its own; drawing it changes no other sample."""

    @abc.abstractmethod
    def whole(self) -> Sample:
        """All data of this client as one sample, for exact gradients of f_i."""

    @abc.abstractmethod
    def gradient(self, z: torch.Tensor, xi: Sample) -> torch.Tensor:
        """∇f_i(z; ξ): a [dim] row that stays valid until the next call; its ascent block is negated."""

    @abc.abstractmethod
    def gradient_pair(self, z: torch.Tensor, z_prev: torch.Tensor, xi: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        """(∇f_i(z; ξ), ∇f_i(z_prev; ξ)), two [dim] rows that stay valid until the next call.

        Both see the same minibatch, dropout masks and directions; only the first updates the running
        statistics of batch-norm layers and counts as training loss.
        """

    def take_losses(self) -> list[torch.Tensor]:
        """The losses since the last call, 0-d tensors; forgets them."""
        return []


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


def may_draw(module: nn.Module) -> bool:
    """Whether a pass through a module may draw random numbers: unless all its parts are known never to.

    Known are some of torch's layers, if neither they nor their parameters have hooks, and Sequentials of them.
    """
    if any(getattr(nn.modules.module, f"_global{kind}") for kind in _HOOKS):
        return True
    hooked = any(parameter._backward_hooks for parameter in module.parameters())
    return hooked or not all(map(_never_draws, module.modules()))


def _never_draws(part: nn.Module) -> bool:
    is_sequential = type(part).forward is nn.Sequential.forward and type(part).__call__ is nn.Module.__call__
    is_known = type(part) in _NEVER_DRAW or is_sequential
    return is_known and "forward" not in vars(part) and not any(getattr(part, kind) for kind in _HOOKS)


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


def seed_noise(seed: int, device: torch.device) -> None:
    """Seed the generator that modules on `device` draw dropout masks from."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device).default_generators[device.index or 0].manual_seed(seed)


def seed_all(seed: int, device: torch.device) -> None:
    """Seed all generators that a user's code draws from: torch's on `device` and on the CPU, numpy's and Python's."""
    seed_noise(seed, device)
    if device.type != "cpu":
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def states_outside_torch() -> tuple[Any, ...]:
    """The states of numpy's and Python's generators, which can be compared."""
    key: Any
    _, key, *rest = np.random.get_state()
    return key.tolist(), rest, random.getstate()


@contextlib.contextmanager
def generators_kept(devices: Any = None) -> Iterator[None]:
    """A context at whose end torch's (of some GPUs, None: all), numpy's and Python's generators are as they were."""
    of_numpy, of_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)


def noise_kept(device: torch.device) -> Any:
    """A context at whose end the generators that modules on `device` draw from are as they were."""
    on_gpu = device.type != "cpu"
    return torch.random.fork_rng([device] if on_gpu else [], device_type=device.type if on_gpu else "cuda")
