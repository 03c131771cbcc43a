"""Weights & Biases."""

import os
import pathlib
from typing import Any

from fedmpi.runs.trackers.base import Tracker


class WandB(Tracker):
    """A run of Weights & Biases, kept in the run folder (offline) unless WANDB_MODE says otherwise; ``wandb sync``."""

    module = "wandb"
    extra = "wandb"

    def begin(self, folder: pathlib.Path, settings: dict[str, Any], done: int) -> None:
        self._run = self.package.init(
            project=os.environ.get("WANDB_PROJECT", "fedmpi"),
            name=folder.name,
            dir=str(folder),
            config=settings,
            mode=os.environ.get("WANDB_MODE", "offline"),
        )

    def round(self, number: int, values: dict[str, float]) -> None:
        self._run.log(values, step=number)

    def close(self) -> None:
        self._run.finish()
