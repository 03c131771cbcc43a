"""First-order gradients."""

import dataclasses
import functools
from typing import Any

import torch
from torch import nn

from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import setting
from fedmpi.oracles import compiled
from fedmpi.oracles.base import Client, LocalObjective, OracleKind, Sample
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.oracles.micro_batches import accumulated, check_parts, micro_batches
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

    accumulate: int = setting(
        1,
        "parts in which the gradient of a minibatch is computed, one after the other, so that the activations of one "
        "part need memory; the loss must be a mean over the samples; short form: --accumulate",
        least=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accumulate > 1 and self.compile == "cuda_graph":
            raise UserError(f"accumulate = {self.accumulate}: a CUDA graph is of one whole minibatch: leave one out")

    @property
    def uses_torch_compile(self) -> bool:
        return compiled.uses_torch_compile(self.compile)

    def workspace(self, flat: FlatModule) -> compiled.Workspace:
        return compiled.make_workspace(flat, self.compile)

    def make(self, client: Client, objective: LocalObjective, workspace: compiled.Workspace) -> AutogradOracle:
        module = objective.flat.module
        if self.accumulate > 1:
            check_parts(objective, self.accumulate)
        return AutogradOracle(
            client, objective, workspace, self.autocast != "off", self.called(module), self.accumulate
        )

    def called(self, module: nn.Module) -> nn.Module:
        """What is called for a pass of a module: itself, or compiled."""
        return compiled.called(module, self.compile)
