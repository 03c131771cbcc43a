"""First-order gradients."""

import functools
from typing import Any

import torch
from torch import nn

from fedmpi.oracles import compiled
from fedmpi.oracles.base import Client, LocalObjective, Sample
from fedmpi.oracles.micro_batches import accumulated, micro_batches
from fedmpi.oracles.module import ModuleOracle


class AutogradOracle(ModuleOracle):
    """Gradients of a task's loss on one client's data, by automatic differentiation.

    Args:
        rows: [2, dim] where gradients are put, or the `Workspace` of a faster way.
        autocast: whether the loss is evaluated in bfloat16 in the operations that torch considers safe; rows,
            gradients and what an algorithm does with them keep their precision.
        module: what is called for a pass; None: the model itself.
        accumulate: parts in which the gradient of a minibatch is computed, see `micro_batches`.
    """

    def __init__(
        self,
        client: Client,
        objective: LocalObjective,
        rows: torch.Tensor | compiled.Workspace,
        autocast: bool = False,
        module: nn.Module | None = None,
        accumulate: int = 1,
    ) -> None:
        workspace = rows if isinstance(rows, compiled.Workspace) else compiled.Workspace(rows)
        super().__init__(client, objective, workspace.rows)
        self._captured, self._fixed = workspace.captured, workspace.fixed
        self._autocast, self._module, self._accumulate = autocast, module, accumulate
        self._part = torch.empty_like(self._rows[0]) if accumulate > 1 else None  # the gradient of one of the parts

    def _evaluate(self, z: torch.Tensor, xi: Sample, out: torch.Tensor) -> torch.Tensor:
        if self._captured is not None:
            seed = functools.partial(self._noise.before_pass, xi.noise)
            loss = self._captured.gradient(self._loss, seed, z, self._buffers, xi.batch, out)
            if loss is not None:
                return loss
        if self._fixed is not None:
            z = self._fixed.copy_(z)
        self._flat.point_at(z, self._buffers)
        self._noise.before_pass(xi.noise)
        if self._part is not None:
            return accumulated(self._flat, self._loss, micro_batches(xi.batch, self._accumulate), out, self._part)
        return self._flat.gradient(functools.partial(self._loss, batch=xi.batch), out)

    def _loss(self, module: nn.Module, batch: Any) -> torch.Tensor:
        module = module if self._module is None else self._module
        if not self._autocast:
            return self._task.loss(module, batch)
        with torch.autocast(self._buffers.device.type, torch.bfloat16):
            return self._task.loss(module, batch)
