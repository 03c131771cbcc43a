"""The settings of a run: every section, and what is chosen."""

import dataclasses
from collections.abc import Iterable

from fedmpi.config.build import Chosen, resolve
from fedmpi.config.layers import read_layers
from fedmpi.config.resume import read_resumed
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import command_name
from fedmpi.training.settings import RunSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunSettings, Chosen):
    """A run's resolved settings: its sections, like `config.rounds.local_steps`, and what `Chosen` describes.

    Raises:
        UserError: one line, if the task does not support what was chosen with it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        name, baselines, holdout = command_name(type(self.task)), self.studies.baselines, self.data.holdout
        if not self.task.has_model and self.model_class:
            raise UserError(f"task {name} does not take a model: leave --model out")
        if baselines and not self.task.has_model:
            raise UserError(f"baselines = {baselines}: task {name} has no model to train: leave --baselines out")
        if holdout and not self.task.can_hold_out:
            raise UserError(f"holdout = {holdout}: task {name} has no data to hold out; leave --holdout out")
        if self.partition is not None and self.partition.redeal:
            self._check_redealing(name)

    def _check_redealing(self, task: str) -> None:
        """Check that the task and the run can deal the data anew in every round."""
        given = "partition.redeal = true"
        if not self.task.can_redeal:
            raise UserError(f"{given}: task {task} cannot distribute its data again in every round: leave it out")
        if self.studies.baselines:
            raise UserError(f"{given}: no client has data of its own, to train on alone: leave --baselines out")
        if self.data.weighting == "samples":
            raise UserError(
                f"{given}: --weighting samples needs clients that keep their samples: leave one of them out"
            )
        if self.faults.on_loss == "continue":
            raise UserError(f"{given}: lost clients would still get samples: leave --on-loss continue out")


def read_command_line(arguments: Iterable[str]) -> Config | str:
    """A `Config` from a command line, without the program's name, and the files that it names.

    Or a text to print instead of running (--help, --list, --print_config).

    Raises:
        UserError: one line: what was given, what is allowed.
    """
    layers = read_layers(arguments)
    return resolve(layers, read_resumed(layers.assignments), Config)
