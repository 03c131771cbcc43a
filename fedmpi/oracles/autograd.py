"""First-order gradients."""

import dataclasses
import functools
import typing

import torch

from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import setting
from fedmpi.oracles.base import OracleKind
from fedmpi.oracles.captured import CapturedGradients
from fedmpi.oracles.module import ModuleOracle


class Workspace(typing.NamedTuple):
    """What the oracles of a rank share.

    Attributes:
        rows: [2, dim] where gradients are put.
        captured: `CapturedGradients`, or None.
        fixed: [dim] where a compiled model finds its parameters, or None if they are wherever the point is.
    """

    rows: torch.Tensor
    captured: CapturedGradients | None = None
    fixed: torch.Tensor | None = None


class AutogradOracle(ModuleOracle):
    """Gradients of a task's loss on one client's data, by automatic differentiation.

    Args:
        rows: [2, dim] where gradients are put.
        autocast: whether the loss is evaluated in bfloat16 in the operations that torch considers safe; rows,
            gradients and what an algorithm does with them keep their precision.
        module: what is called for a pass; None: the model itself.
        captured, fixed: see `Workspace`.
    """

    def __init__(self, client, objective, rows, autocast=False, module=None, captured=None, fixed=None):
        super().__init__(client, objective, rows)
        self._captured, self._fixed = captured, fixed
        self._autocast = autocast
        self._module = module

    def _evaluate(self, z, xi, out):
        if self._captured is not None:
            seed = functools.partial(self._seed_noise, xi)
            loss = self._captured.gradient(self._loss, seed, z, self._buffers, xi.batch, out)
            if loss is not None:
                return loss
        if self._fixed is not None:
            z = self._fixed.copy_(z)
        self._flat.point_at(z, self._buffers)
        self._seed_noise(xi)
        return self._flat.gradient(lambda module: self._loss(module, xi.batch), out)

    def _loss(self, module, batch):
        module = module if self._module is None else self._module
        if not self._autocast:
            return self._task.loss(module, batch)
        with torch.autocast(self._buffers.device.type, torch.bfloat16):
            return self._task.loss(module, batch)


_modes = set()  # of `compile` that this process has used on a GPU


@functools.lru_cache(maxsize=1)  # the clients of a rank have one model
def _compiled(module, mode):
    return torch.compile(module, mode=mode)


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
    def uses_torch_compile(self):
        return self.compile not in ("off", "cuda_graph")

    def workspace(self, flat):
        rows, is_captured = flat.x.new_zeros(2, flat.dim), self.compile == "cuda_graph"
        if flat.x.device.type == "cuda" and self.compile != "off":
            others = _modes - {self.compile} if is_captured else _modes & {"cuda_graph"}
            if others:  # CUDA's errors come late, at some other call
                raise UserError(
                    f"compile = {self.compile} and {others.pop()} do not work in one process: start another"
                )
            _modes.add(self.compile)
        elif is_captured:
            raise UserError(f"compile = cuda_graph: this rank computes on {flat.x.device}: leave it out, or use a GPU")
        # Compiled code expects each parameter at an address that is aligned as at its first call.
        fixed = torch.empty_like(flat.x) if self.uses_torch_compile else None
        return Workspace(rows, CapturedGradients(flat) if is_captured else None, fixed)

    def make(self, client, objective, workspace):
        called = self.called(objective.flat.module)
        rows, *others = workspace
        return AutogradOracle(client, objective, rows, self.autocast != "off", called, *others)

    def called(self, module):
        """What is called for a pass of a module: itself, or compiled."""
        return _compiled(module, self.compile) if self.uses_torch_compile else module
