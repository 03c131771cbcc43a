"""Zeroth-order gradients: from values of the loss alone, at nearby points on the same sample."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedmpi.ground.settings import setting
from fedmpi.ground.streams import derive
from fedmpi.oracles.base import Client, LocalObjective, Sample, Task
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.oracles.keeping import buffers_kept
from fedmpi.oracles.kind import OracleKind
from fedmpi.oracles.module import ModuleOracle

Size = int | tuple[int, ...]  # of a window: of all its sides, or of each
# Parts of torch's messages about operations that vmap does not support.
NO_BATCHED_FORM = ("Batching rule not implemented", "inside of vmap", "under vmap")


def add_estimate(
    out: torch.Tensor, differences: torch.Tensor, directions: torch.Tensor, smoothing: float, num_directions: int
) -> torch.Tensor:
    """out += d / (μ b2) Σ_n [F(z + μ v_n) - F(z)] v_n, the two-point estimate of ∇F(z).

    The factor d is that of directions on the unit sphere, where E v vᵀ = I / d.

    Args:
        out: [d]. differences: [n] of the losses. directions: [n, d], some or all of them.
        smoothing: μ > 0. num_directions: b2 of the whole estimate.

    Source: Fang et al., "Communication-Efficient Stochastic Zeroth-Order Optimization for Federated
    Learning", IEEE TSP 2022; Eq. (4) of the FAFedZO paper.
    """
    return out.addmv_(directions.T, differences, alpha=out.numel() / (smoothing * num_directions))


class Directions:
    """Random directions, of which those drawn last are in memory.

    Args:
        num: b2, directions of a sample. memory: [n, dim] for n directions at a time.
    """

    def __init__(self, num: int, memory: torch.Tensor) -> None:
        self._num, self._memory = num, memory
        self._generator = torch.Generator(memory.device)
        self._drawn: tuple[int, int] | None = None  # (noise, number of the first direction) of what `_memory` contains

    def of(self, noise: int) -> Iterator[torch.Tensor]:
        """The b2 directions of `noise`, a few at a time, each uniform on the unit sphere.

        Direction n is the stream (noise, "direction", n), however many are in memory at a time; directions
        are drawn again only if others were drawn in between.
        """
        for first in range(0, self._num, len(self._memory)):
            v = self._memory[: min(len(self._memory), self._num - first)]
            if self._drawn != (noise, first):
                for number, direction in enumerate(v, first):
                    direction.normal_(generator=self._generator.manual_seed(derive(noise, "direction", number)))
                v.div_(torch.linalg.vector_norm(v, dim=1, keepdim=True))
                self._drawn = noise, first
            yield v


class Workspace:
    """The vectors that the two-point oracles of a rank share, and the directions drawn last.

    Args:
        x: [dim], for length, dtype and device. num_directions: b2. at_once: how many directions are
            in memory at a time.
    """

    def __init__(self, x: torch.Tensor, num_directions: int, at_once: int) -> None:
        self.num_directions, at_once = num_directions, min(at_once, num_directions)
        self.rows = x.new_zeros(2, x.numel())
        self.points = x.new_zeros(at_once + 1, x.numel())
        self.directions = Directions(num_directions, x.new_zeros(at_once, x.numel()))


class LossModule(nn.Module):
    """A task's loss as a module around the task's module, so that `torch.func.functional_call` reaches it."""

    def __init__(self, module: nn.Module, task: Task) -> None:
        super().__init__()
        self.module, self._task = module, task

    def forward(self, batch: Any) -> torch.Tensor:
        return self._task.loss(self.module, batch)


class TwoPointOracle(ModuleOracle):
    """Gradient estimates of a task's loss from forward passes: no graph is ever built.

    ∇̃f(z; ξ, V) = d/(μ b2) Σ_n [F(z + μ v_n; ξ) - F(z; ξ)] v_n. The directions V belong to the sample ξ:
    all samples of the minibatch and both points of a pair share them, and the dropout masks too.

    Args:
        client, objective: see `ModuleOracle`.
        workspace: a `Workspace`, shared by the clients of a rank.
        smoothing: μ > 0.
        evaluation: "batched" evaluates all perturbed vectors at once by `torch.func.vmap`, or in turn
            if torch has no batched form of a part of the module (LSTMs); "one_by_one" in turn. Both give
            the same numbers, but may draw another dropout mask if images lie in channels-last order.
    """

    def __init__(
        self,
        client: Client,
        objective: LocalObjective,
        workspace: Workspace,
        smoothing: float,
        evaluation: str = "batched",
    ) -> None:
        super().__init__(client, objective, workspace.rows)
        self._workspace, self._smoothing = workspace, smoothing
        self._losses_at = {"batched": self._losses_at_once, "one_by_one": self._losses_in_turn}[evaluation]
        self._loss_module = LossModule(objective.flat.module, objective.task)
        self.num_evaluations = 0  # forward passes on one minibatch

    @torch.no_grad()
    def _evaluate(self, z: torch.Tensor, xi: Sample, out: torch.Tensor) -> torch.Tensor:
        self._update_statistics(z, xi)
        out.zero_()
        base, points = out[:0], self._workspace.points
        points[0].copy_(z)
        for v in self._workspace.directions.of(xi.noise):
            torch.add(z, v, alpha=self._smoothing, out=points[1 : len(v) + 1])
            if not base.numel():  # z goes with the first directions: the same kernels, the same dropout masks
                base, losses = self._losses_at(points[: len(v) + 1], xi).tensor_split([1])
            else:
                losses = self._losses_at(points[1 : len(v) + 1], xi)
            add_estimate(out, losses - base, v, self._smoothing, self._workspace.num_directions)
        return base[0]

    def _update_statistics(self, z: torch.Tensor, xi: Sample) -> None:
        """Update the running statistics of batch-norm layers, if there are any, by a forward pass of their own."""
        if self._buffers.numel():
            self._loss_alone(z, xi)

    def _losses_at_once(self, points: torch.Tensor, xi: Sample) -> torch.Tensor:
        """[n] losses at the rows of `points`, by one batched forward pass."""
        self.num_evaluations += len(points)
        self._noise.seed(xi.noise)

        def loss_at(point: torch.Tensor, buffers: torch.Tensor) -> torch.Tensor:
            values = self._flat.named_views(point, buffers)
            return functional_call(self._loss_module, {f"module.{k}": v for k, v in values.items()}, (xi.batch,))

        try:
            with buffers_kept(self._flat, self.client), _QuickPooling():
                return vmap(loss_at, randomness="same")(points, self._buffers.repeat(len(points), 1))
        except RuntimeError as error:
            if not any(words in str(error) for words in NO_BATCHED_FORM):
                raise
            self._losses_at = self._losses_in_turn
            return self._losses_in_turn(points, xi)

    def _losses_in_turn(self, points: torch.Tensor, xi: Sample) -> torch.Tensor:
        """[n] losses at the rows of `points`, by one forward pass after the other."""
        with buffers_kept(self._flat, self.client):
            return torch.stack([self._loss_alone(point, xi) for point in points])

    def _loss_alone(self, point: torch.Tensor, xi: Sample) -> torch.Tensor:
        self.num_evaluations += 1
        self._flat.point_at(point, self._buffers)
        self._noise.seed(xi.noise)
        loss = self._task.loss(self._flat.module, xi.batch)
        self._flat.adopt()
        return loss


class _QuickPooling(TorchFunctionMode):
    """Within it, max pooling of windows that do not overlap is a maximum over slices: the same numbers.

    torch's kernel needs 9.6 ms, and this 0.6 ms, for the first layer of the FAFED paper's
    Fashion-MNIST network at 21 points on one core: a batched convolution lays out its images
    channel by channel.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in (functional.max_pool2d, torch.max_pool2d):
            images, *size = _windows(*args, **kwargs)
            if size:
                return _largest(_largest(images, size[0], -2), size[1], -1)
        return function(*args, **kwargs)


def _windows(
    input: torch.Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Any, ...]:
    """(input, height, width) of the windows of `max_pool2d`, if they just touch; otherwise (input,)."""
    size, stride, padding, dilation = (_pair(n) for n in (kernel_size, stride or kernel_size, padding, dilation))
    usual = padding == (0, 0) and dilation == (1, 1) and not ceil_mode and not return_indices
    fits = input.shape[-2] >= size[0] and input.shape[-1] >= size[1]
    return (input, *size) if usual and stride == size and fits and input.device.type == "cpu" else (input,)


def _pair(number: Size) -> tuple[int, ...]:
    return (number, number) if isinstance(number, int) else tuple(number)


def _largest(images: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """The largest of every `size` neighbours along `dim`; what is left over at its end is dropped."""
    number = images.shape[dim] // size
    return functools.reduce(
        torch.maximum, images.narrow(dim, 0, number * size).unflatten(dim, (number, size)).unbind(dim)
    )


@dataclasses.dataclass(frozen=True)
class TwoPoint(OracleKind):
    """Gradients estimated from loss values at nearby points: forward passes only."""

    name = "two_point"

    directions: int = setting(
        20, "b2, random directions per gradient estimate, which costs b2 + 1 forward passes", least=1
    )
    smoothing: float = setting(1e-3, "μ, distance of the nearby points", above=0)
    evaluation: str = setting(
        "batched",
        "batched: all nearby points in one pass, if the model supports it; one_by_one: slower, less memory",
        among=("batched", "one_by_one"),
    )
    at_once: int = setting(32, "largest number of directions in memory at a time", least=1)

    def workspace(self, flat: FlatModule) -> Workspace:
        return Workspace(flat.x, self.directions, self.at_once)

    def make(self, client: Client, objective: LocalObjective, workspace: Workspace) -> TwoPointOracle:
        return TwoPointOracle(client, objective, workspace, self.smoothing, self.evaluation)
