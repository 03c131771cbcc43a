"""First-order gradients."""

import dataclasses
import functools

import torch

from fedmpi.oracles.base import ModuleOracle, OracleKind
from fedmpi.oracles.stacked import stacked_gradients
from fedmpi.settings import setting


class AutogradOracle(ModuleOracle):
    """Gradients of a task's loss on one client's data, by automatic differentiation.

    Args:
        autocast: whether the loss is evaluated in bfloat16 in the operations that torch considers safe; rows,
            gradients and what an algorithm does with them keep their precision.

    Attributes:
        recordings: the `fedmpi.oracles.graphs.Recordings` from which gradients are replayed, or None.
    """

    def __init__(self, client, objective, rows, autocast=False):
        super().__init__(client, objective, rows)
        self._autocast = autocast
        self.recordings = None

    def _evaluate(self, z, xi, out):
        if self.recordings is not None and xi.number >= 0:  # the first and the whole batch come once
            seed = functools.partial(self._seed_noise, xi)
            loss = self.recordings.evaluate(self._loss, seed, z, self._buffers, xi.batch, out)
            if loss is not None:
                return loss
        self._flat.point_at(z, self._buffers)
        self._seed_noise(xi)
        return self._flat.gradient(lambda module: self._loss(module, xi.batch), out)

    def _loss(self, module, batch):
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

    def workspace(self, x):
        return x.new_zeros(2, x.numel())

    def make(self, client, objective, workspace):
        return AutogradOracle(client, objective, workspace, autocast=self.autocast != "off")

    def stacked(self, flat, task):
        return stacked_gradients(flat, task) if self.autocast == "off" else None
