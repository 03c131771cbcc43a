"""The way of a client's rows to the server's: through stages, in order, into the aggregation."""

import collections
import copy
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

import fedmpi.aggregation
import fedmpi.aggregation.stages
from fedmpi.aggregation.base import Aggregation, Layout
from fedmpi.aggregation.mean import Mean
from fedmpi.aggregation.stages.base import Stage
from fedmpi.comm.link import Link
from fedmpi.errors import UserError
from fedmpi.registry import command_name, find


@dataclasses.dataclass(frozen=True)
class Sending:
    """What the user chose: an `Aggregation` and `Stage`s, none of them open.

    >>> import fedmpi
    >>> from fedmpi.aggregation.stages.norm_bound import NormBound
    >>> sending = fedmpi.Sending(stages=[NormBound(bound=0.5)])
    >>> fedavg = fedmpi.algorithms.FedAvg(step_size=0.5)
    >>> trace = fedmpi.simulate(fedavg, lambda i, x, sample: x - i, x0=[4.0], rounds=1, sending=sending)
    >>> trace[-1]["rows"]["x"].tolist()  # no client moves the mean by more than 0.5
    [[3.5], [3.5], [3.5]]
    """

    aggregation: Aggregation = dataclasses.field(default_factory=Mean)
    stages: Sequence[Stage] = ()

    def as_texts(self) -> dict[str, str]:
        """Name -> text, which differ if ranks were given something else."""
        return {"aggregation": _as_text(self.aggregation), "stages": str([*map(_as_text, self.stages)])}

    def as_objects(self) -> dict[str, Any]:
        """Name -> object: the aggregation and the stages."""
        stages = {f"stage {number}": stage for number, stage in enumerate(self.stages)}
        return {"aggregation": self.aggregation, **stages}

    def opened(self, link: Link, layout: Layout, clients: Iterable[int]) -> tuple[Aggregation, dict[str, Stage]]:
        """(the aggregation, name -> stage), opened copies for one federation. Collective on the link.

        A stage's name is that of its class, with a number if the name is there again.
        """
        aggregation = _unused(self.aggregation)
        stages: dict[str, Stage] = {}
        aggregation.open(link, layout, clients)
        names: collections.Counter[str] = collections.Counter()
        for stage in map(_unused, self.stages):
            name = command_name(type(stage))
            names[name] += 1
            stages[f"{name}-{names[name]}" if names[name] > 1 else name] = stage
            stage.open(link, layout)
            stage.may_warn = link.rank == 0
        return aggregation, stages


def chosen(aggregation: Any, stages: Any) -> Sending:
    """The `Sending` of what a program gives.

    Args:
        aggregation: a name, a dotted path, an `Aggregation` or such a class.
        stages: a list of the same for `Stage`s, or names separated by commas.

    Raises:
        UserError: one line: what was given, what is allowed.
    """
    if isinstance(stages, str):
        stages = [name.strip() for name in stages.split(",") if name.strip()]
    if not isinstance(stages, list | tuple):
        raise UserError(
            f"stages is a {type(stages).__name__}: expected a list of names or objects, like ['norm_bound']"
        )
    whole = _made("aggregation", aggregation, fedmpi.aggregation, Aggregation)
    return Sending(whole, tuple(_made("stage", stage, fedmpi.aggregation.stages, Stage) for stage in stages))


def _unused(part: Any) -> Any:
    """A copy of an aggregation or stage, for which `__post_init__` has made anew what it makes."""
    part = copy.copy(part)
    part.__post_init__()
    return part


def _made(kind: str, given: Any, package: Any, base: type) -> Any:
    found = find(kind, given, package, base) if isinstance(given, str) else given
    if isinstance(found, type) and issubclass(found, base):
        return found()
    if not isinstance(found, base):
        raise UserError(f"{kind} is a {type(found).__name__}: expected a name, or an object of {base.__name__}")
    return found


def _as_text(part: Any) -> str:
    """An aggregation or stage as text, without the places of objects in memory, which differ between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(part))
