"""The way of a client's rows to the server's: through stages, in order, into the aggregation."""

import collections
import copy
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from fedmpi import aggregation as own_aggregations
from fedmpi.aggregation import codecs as own_codecs
from fedmpi.aggregation import stages as own_stages
from fedmpi.aggregation.base import Aggregation
from fedmpi.aggregation.codecs.base import Codec
from fedmpi.aggregation.codecs.fixed import Fixed
from fedmpi.aggregation.coded import AsRead, MeanOfSlices, MeanOfWords
from fedmpi.aggregation.layout import Layout
from fedmpi.aggregation.mean import Mean
from fedmpi.aggregation.reproducible import Reproducible
from fedmpi.aggregation.stages.base import Stage
from fedmpi.comm.link import Link
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import command_name, find

FAULTY = ("end", "leave_out")


@dataclasses.dataclass(frozen=True)
class Sending:
    """What the user chose: an `Aggregation`, `Stage`s and a `Codec` or None, none of them open.

    `faulty`: what becomes of a client with a loss or row that is not finite: "end" ends the run, "leave_out" makes the
    average without the client, which goes on, with its next samples, as if it had not taken part. What the round has
    averaged before stays.

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
    codec: Codec | None = None
    faulty: str = "end"

    def __post_init__(self) -> None:
        """Raises UserError if something else is given, or the aggregation does not work with the codec."""
        parts = [("aggregation", self.aggregation, Aggregation), *(("stage", stage, Stage) for stage in self.stages)]
        for kind, part, base in parts + ([] if self.codec is None else [("codec", self.codec, Codec)]):
            if not isinstance(part, base):
                given = f"class {part.__name__}" if isinstance(part, type) else f"a {type(part).__name__}"
                raise UserError(f"{kind} is {given}: expected an object of {base.__name__}")
        if self.faulty not in FAULTY:
            raise UserError(f"faulty = {self.faulty!r}: expected {' or '.join(FAULTY)}")
        is_mean = type(self.aggregation) is Mean
        if isinstance(self.codec, Fixed) and (is_mean or isinstance(self.aggregation, Reproducible)):
            # What writes words itself: the mean in this codec, hidden or not.
            object.__setattr__(self, "aggregation", Reproducible() if is_mean else self.aggregation)
            object.__setattr__(self, "codec", None)
        if in_codec(self.aggregation, self.codec) is None:
            whole, codec = command_name(type(self.aggregation)), command_name(type(self.codec))
            raise UserError(
                f"codec {codec} does not work with aggregation {whole}: expected --aggregation mean, or another codec "
                "(docs/aggregation.md has a table)"
            )

    def as_texts(self) -> dict[str, str]:
        """Name -> text, which differ if ranks were given something else."""
        codec = "none" if self.codec is None else _as_text(self.codec)
        stages = str([*map(_as_text, self.stages)])
        return {"aggregation": _as_text(self.aggregation), "stages": stages, "codec": codec, "faulty": self.faulty}

    def as_objects(self) -> dict[str, Any]:
        """Name -> object: the aggregation and the stages."""
        stages = {f"stage {number}": stage for number, stage in enumerate(self.stages)}
        return {"aggregation": self.aggregation, **stages} | ({"codec": self.codec} if self.codec else {})

    def opened(self, link: Link, layout: Layout, clients: Iterable[int]) -> tuple[Aggregation, dict[str, Stage]]:
        """(the aggregation, name -> stage), opened copies for one federation. Collective on the link.

        A stage's name is that of its class, with a number if the name is there again.
        """
        codec = _unused(self.codec)
        aggregation = _unused(in_codec(self.aggregation, codec))
        link.add_hidden = None
        aggregation.open(link, layout, clients)
        aggregation.codec = codec
        if layout.beside is not None:
            aggregation.beside = _unused(self.aggregation)
            aggregation.beside.open(link, layout.beside, clients)
        passed = [*map(_unused, self.stages)]
        if codec is not None:
            codec.open(link, layout)
            passed += [AsRead(codec=codec)] if "difference" in layout.kinds.values() else []
        stages: dict[str, Stage] = {}
        names: collections.Counter[str] = collections.Counter()
        for stage in passed:
            kind, part = ("codec", codec) if isinstance(stage, AsRead) else ("stage", stage)
            name = command_name(type(part))
            names[name] += 1
            name = f"{name}-{names[name]}" if names[name] > 1 else name
            stages[name], stage.called = stage, f"{kind} {name}"
            stage.open(link, layout)
            stage.may_warn = link.rank == 0
        return aggregation, stages


def in_codec(aggregation: Aggregation, codec: Codec | None) -> Aggregation | None:
    """The aggregation that does the same where rows travel in a codec; None if there is none."""
    if codec is None:
        return aggregation
    if type(aggregation) is Mean:
        return MeanOfWords() if codec.is_linear else MeanOfSlices()
    return aggregation if aggregation.takes_codecs and not codec.is_linear else None


def chosen(aggregation: Any, stages: Any, codec: Any = None, faulty: str = "end") -> Sending:
    """The `Sending` of what a program gives.

    Args:
        aggregation: a name, a dotted path, an `Aggregation` or such a class.
        stages: a list of the same for `Stage`s, or names separated by commas.
        codec: the same for a `Codec`; None or "none": rows travel as they are. faulty: see `Sending`.

    Raises:
        UserError: one line: what was given, what is allowed.
    """
    if isinstance(stages, str):
        stages = [name.strip() for name in stages.split(",") if name.strip()]
    if not isinstance(stages, list | tuple):
        raise UserError(
            f"stages is a {type(stages).__name__}: expected a list of names or objects, like ['norm_bound']"
        )
    whole = _made("aggregation", aggregation, own_aggregations, Aggregation)
    made = tuple(_made("stage", stage, own_stages, Stage) for stage in stages)
    written = None if codec in (None, "none") else _made("codec", codec, own_codecs, Codec)
    return Sending(whole, made, written, faulty)


def _unused(part: Any) -> Any:
    """A copy of a part, for which `__post_init__` has made anew what it makes; of None, None."""
    part = copy.copy(part)
    if part is not None:
        vars(part).pop("kept_of", None)
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
