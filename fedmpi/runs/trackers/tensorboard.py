"""TensorBoard's event files."""

import pathlib
from typing import Any

import yaml

from fedmpi.runs.trackers.base import Tracker, titled


class TensorBoard(Tracker):
    """Event files in the folder `tensorboard` of the run folder: ``tensorboard --logdir runs``."""

    module = "torch.utils.tensorboard"
    extra = "tensorboard"

    def begin(self, folder: pathlib.Path, settings: dict[str, Any], done: int) -> None:
        self._writer = self.package.SummaryWriter(folder / "tensorboard", purge_step=done + 1 if done else None)
        self._writer.add_text("settings", f"```yaml\n{yaml.safe_dump(settings, sort_keys=False)}```", done)

    def round(self, number: int, values: dict[str, float]) -> None:
        for title, value in values.items():
            self._writer.add_scalar(title, value, number)

    def folder_is_made_again(
        self, folder: pathlib.Path, settings: dict[str, Any], records: list[dict[str, Any]]
    ) -> None:
        self._writer.close()
        self.begin(folder, settings, 0)
        for record in records:
            self.round(record["round"], titled(record))

    def sync(self) -> None:
        self._writer.flush()  # it keeps up to 120 s in memory

    def close(self) -> None:
        self._writer.close()
