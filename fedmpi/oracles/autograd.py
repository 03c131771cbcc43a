"""First-order gradients."""

import dataclasses
import functools
from typing import Any

import torch
from torch import nn

from fedmpi.ground.settings import setting
from fedmpi.oracles import compiled
from fedmpi.oracles.base import Client, LocalObjective, OracleKind, Sample
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.oracles.module import ModuleOracle


class AutogradOracle(ModuleOracle):
    """Gradients of a task's loss on one client's data, by automatic differentiation.

    Args:
        rows: [2, dim] where gradients are put, or the `Workspace` of a faster way.
        autocast: whether the loss is evaluated in bfloat16 in the operations that torch considers safe; rows,
            gradients and what an algorithm does with them keep their precision.
        module: what is called for a pass; None: the model itself.
    """

    def __init__(
        self,
        client: Client,
        objective: LocalObjective,
        rows: torch.Tensor | compiled.Workspace,
        autocast: bool = False,
        module: nn.Module | None = None,
    ) -> None:
        workspace = rows if isinstance(rows, compiled.Workspace) else compiled.Workspace(rows)
        super().__init__(client, objective, workspace.rows)
        self._captured, self._fixed = workspace.captured, workspace.fixed
        self._autocast, self._module = autocast, module

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
        return self._flat.gradient(functools.partial(self._loss, batch=xi.batch), out)

    def _loss(self, module: nn.Module, batch: Any) -> torch.Tensor:
        module = module if self._module is None else self._module
        if not self._autocast:
            return self._task.loss(module, batch)
        with torch.autocast(self._buffers.device.type, torch.bfloat16):
            return self._task.loss(module, batch)


@dataclasses.dataclass(frozen=True)
class Autograd(OracleKind):
    """Exact gradients on the minibatch, by automatic differentiation."""

    autocast: str = setting(
        "off",
        "bf16: let torch.autocast evaluate the loss in bfloat16; faster on some processors, less precise; short "
        "form: --autocast",
        among=("off", "bf16"),
    )

    compile: str = setting(
        "off",
        "how gradients of small models are made faster. cuda_graph: a GPU replays each gradient from a CUDA graph. "
        "default, reduce-overhead: modes of torch.compile, which needs a C++ compiler, and time at the start; the last "
        "digits may differ; short form: --compile",
        among=("off", "cuda_graph", "default", "reduce-overhead"),
    )

    @property
    def uses_torch_compile(self) -> bool:
        return compiled.uses_torch_compile(self.compile)

    def workspace(self, flat: FlatModule) -> compiled.Workspace:
        return compiled.make_workspace(flat, self.compile)

    def make(self, client: Client, objective: LocalObjective, workspace: compiled.Workspace) -> AutogradOracle:
        return AutogradOracle(client, objective, workspace, self.autocast != "off", self.called(objective.flat.module))

    def called(self, module: nn.Module) -> nn.Module:
        """What is called for a pass of a module: itself, or compiled."""
        return compiled.called(module, self.compile)
