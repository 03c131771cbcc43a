"""A way to compute gradients, as a choice of a run."""

import dataclasses
from typing import Any

from fedmpi.ground.part import Part
from fedmpi.ground.settings import check
from fedmpi.oracles.base import Client, LocalObjective, Oracle
from fedmpi.oracles.flat_module import FlatModule


@dataclasses.dataclass(frozen=True)
class OracleKind(Part):
    """Base of the ways to compute a gradient; its settings are its fields."""

    def __post_init__(self) -> None:
        check(self, "oracle.")

    def workspace(self, flat: FlatModule) -> Any:
        """Memory that all oracles of a rank share, because clients work in turn; `flat` is the model as a `FlatModule`.

        Raises:
            UserError: if the settings do not suit the model's device.
        """
        raise NotImplementedError

    def make(self, client: Client, objective: LocalObjective, workspace: Any) -> Oracle[Any]:
        """The `Oracle` of one `Client` with its `LocalObjective`; `workspace` is what the method returned."""
        raise NotImplementedError
