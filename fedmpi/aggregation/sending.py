"""The way of a client's rows to the server's: through stages, in order, into the aggregation."""

import copy
import dataclasses
from collections.abc import Iterable, Sequence

from fedmpi.aggregation.base import Aggregation, Layout
from fedmpi.aggregation.mean import Mean
from fedmpi.aggregation.stages.base import Stage
from fedmpi.comm.link import Link
from fedmpi.registry import command_name


@dataclasses.dataclass(frozen=True)
class Sending:
    """What the user chose: an `Aggregation` and `Stage`s, none of them open."""

    aggregation: Aggregation = dataclasses.field(default_factory=Mean)
    stages: Sequence[Stage] = ()

    def opened(self, link: Link, layout: Layout, clients: Iterable[int]) -> tuple[Aggregation, dict[str, Stage]]:
        """(the aggregation, name -> stage), opened copies for one federation. Collective on the link.

        A stage's name is that of its class, with a number if the class is there again.
        """
        aggregation, stages = copy.copy(self.aggregation), {}
        aggregation.open(link, layout, clients)
        for stage in map(copy.copy, self.stages):
            name = command_name(type(stage))
            before = sum(type(other) is type(stage) for other in stages.values())
            stages[f"{name}-{before + 1}" if before else name] = stage
            stage.open(link, layout)
        return aggregation, stages
