"""Exact gradients as a choice: its settings, and the oracles that it makes."""

import dataclasses

from torch import nn

from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import setting
from fedmpi.oracles import compiled
from fedmpi.oracles.autograd import AutogradOracle
from fedmpi.oracles.base import Client, LocalObjective
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.oracles.kind import OracleKind
from fedmpi.oracles.micro_batches import check_parts


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
