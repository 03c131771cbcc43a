"""First-order gradients."""

import dataclasses

import torch

from fedmpi.oracles.base import ModuleOracle, OracleKind, seed_noise


class AutogradOracle(ModuleOracle):
    """Gradients of a task's loss on one client's data, by automatic differentiation."""

    def _evaluate(self, z, xi, out):
        self._flat.point_at(z, self._buffers)
        seed_noise(xi.noise, z.device)
        loss = self._task.loss(self._flat.module, xi.batch)
        self._flat.flatten(torch.autograd.grad(loss, self._flat.parameters), out=out)
        return loss.detach()


@dataclasses.dataclass(frozen=True)
class Autograd(OracleKind):
    """Exact gradients on the minibatch, by automatic differentiation."""

    def workspace(self, x):
        return x.new_zeros(2, x.numel())

    def make(self, flat, task, client, sampler, seed, workspace, buffers, **options):
        return AutogradOracle(flat, task, client, sampler, seed, workspace, buffers, **options)
