"""What a tracker is."""

import abc
import importlib
import pathlib
from typing import Any

from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import find
from fedmpi.runs import trackers
from fedmpi.runs.record import AMOUNTS


class Tracker(abc.ABC):
    """Passes what a run records to another program, on rank 0.

    Attributes:
        module: the package that it needs; extra: the extra of fedmpi that installs it.

    Raises:
        UserError: if the package is not installed.
    """

    module = ""
    extra = ""

    def __init__(self) -> None:
        try:
            self.package: Any = importlib.import_module(self.module)
        except ImportError:
            name = type(self).__name__.lower()
            raise UserError(f"track = {name}: needs a package: pip install 'fedmpi[{self.extra}]'") from None

    @abc.abstractmethod
    def begin(self, folder: pathlib.Path, settings: dict[str, Any], done: int) -> None:
        """A run begins, or goes on after `done` rounds.

        Args:
            folder: path of the run folder. settings: nested dict.
        """

    @abc.abstractmethod
    def round(self, number: int, values: dict[str, float]) -> None:
        """A round has ended.

        Args:
            number: of the round, from 1. values: title -> number, see `titled`.
        """

    def sync(self) -> None:  # noqa: B027  most programs keep nothing back
        """A checkpoint is written: rounds that were passed on so far will not be passed on again."""

    def folder_is_made_again(  # noqa: B027  most programs keep nothing in it
        self, folder: pathlib.Path, settings: dict[str, Any], records: list[dict[str, Any]]
    ) -> None:
        """The run folder was removed and is created again; `records` are those that were passed on so far."""

    @abc.abstractmethod
    def close(self) -> None:
        """The run has ended."""


def make_trackers(names: str | None) -> list[Tracker]:
    """The trackers of a list of names with commas in between, or of dotted paths; None: no tracker.

    Raises:
        UserError: if one is unknown or cannot be used here.
    """
    chosen = [name.strip() for name in (names or "").split(",") if name.strip()]
    return [find("tracker", name, trackers, Tracker)() for name in chosen]


def titled(record: dict[str, Any]) -> dict[str, float]:
    """Title -> number of a record's numbers: metrics as they are, amounts as "run/NAME"."""
    numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
    return {f"run/{name}" if name in AMOUNTS else name: value for name, value in numbers.items()}
