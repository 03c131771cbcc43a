"""First-order gradients."""

import dataclasses
import functools

import torch

from fedmpi.oracles.base import ModuleOracle, OracleKind
from fedmpi.settings import setting


class AutogradOracle(ModuleOracle):
    """Gradients of a task's loss on one client's data, by automatic differentiation.

    Args:
        autocast: whether the loss is evaluated in bfloat16 in the operations that torch considers safe; rows,
            gradients and what an algorithm does with them keep their precision.
        module: what is called for a pass; None: the model itself.
    """

    def __init__(self, client, objective, rows, autocast=False, module=None):
        super().__init__(client, objective, rows)
        self._autocast = autocast
        self._module = module or self._flat.module

    def _evaluate(self, z, xi, out):
        self._flat.point_at(z, self._buffers)
        self._seed_noise(xi)
        return self._flat.gradient(lambda module: self._loss(xi.batch), out)

    def _loss(self, batch):
        if not self._autocast:
            return self._task.loss(self._module, batch)
        with torch.autocast(self._buffers.device.type, torch.bfloat16):
            return self._task.loss(self._module, batch)


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
        "mode of torch.compile for the model: default, or reduce-overhead, which uses CUDA graphs on a GPU; needs a "
        "C++ compiler, and time at the start; the last digits may differ; short form: --compile",
        among=("off", "default", "reduce-overhead"),
    )

    def workspace(self, x):
        return x.new_zeros(2, x.numel())

    def make(self, client, objective, workspace):
        called = self.called(objective.flat.module)
        return AutogradOracle(client, objective, workspace, self.autocast != "off", called)

    def called(self, module):
        """What is called for a pass of a module: itself, or compiled."""
        return module if self.compile == "off" else _compiled(module, self.compile)
