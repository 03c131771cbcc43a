"""Settings: dataclass fields that carry their help text, their range and their role.

One declaration serves the command line, settings files, the printed help, the check before work
starts, and the programs that compare runs.
"""

import dataclasses
import difflib
import math
import numbers
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from fedmpi.ground.errors import UserError

T = TypeVar("T")

# What a setting is about.
ROLES = {
    "problem": "what is learned; methods are compared within one problem",
    "learning": "how it is learned: another value gives another result",
    "seed": "repeats an experiment with other random numbers",
    "speed": "how fast a run is and how often it is evaluated: the same result, but for rounding",
    "place": "where a run is made and where its files are",
}
MANY = 1_000_000_000  # passes over data, seconds, minutes: some of torch's and the system's functions take no more
LARGEST = 1e30  # of a number: the types that are computed with hold it
_BOUNDS: dict[str, tuple[Callable[[Any, float], bool], str]] = {
    "above": (lambda value, bound: value > bound, ">"),
    "least": (lambda value, bound: value >= bound, ">="),
    "below": (lambda value, bound: value < bound, "<"),
    "most": (lambda value, bound: value <= bound, "<="),
}


def setting(
    default: T,
    help: str,
    *,
    among: Collection[object] | None = None,
    role: str = "learning",
    per_rank: bool = False,
    each_start: bool = False,
    may_change: bool = False,
    **bounds: float,
) -> T:
    """A dataclass field with its help text, its range and its role.

    Args:
        default: the value if the user gives none.
        help: what it means, with its symbol in the paper; shown by ``--help``.
        among: the allowed values.
        role: one of `ROLES`.
        per_rank: whether ranks may have different values.
        each_start: whether it belongs to one start of a run: every start gives it anew, also that of a resumed run.
        may_change: whether a resumed run may have another value, although it influences what is learned.
        bounds: above, least (>=), below, most (<=): the allowed range of a number.

    >>> import dataclasses, fedmpi
    >>> @dataclasses.dataclass(frozen=True)
    ... class WithMomentum(fedmpi.algorithms.FedAvg):
    ...     momentum: float = fedmpi.setting(0.9, "β, weight of the old direction", least=0, below=1)
    >>> WithMomentum().momentum
    0.9
    >>> WithMomentum(momentum=1.0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedmpi.ground.errors.UserError: algorithm.momentum = 1.0: expected a number >= 0 and < 1 ...
    """
    if role not in ROLES or not bounds.keys() <= _BOUNDS.keys():
        raise TypeError(f"setting: role {role}, bounds {list(bounds)}: expected {list(ROLES)} and {list(_BOUNDS)}")
    marks = {"role": role, "per_rank": per_rank, "each_start": each_start, "may_change": may_change}
    metadata = {"help": help, "among": among, **marks, **bounds}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Settings that belong together, beside the code that they are for; see `fedmpi.config.sections`.

    Raises:
        UserError: one line, if a value is not allowed.
    """

    def __post_init__(self) -> None:
        check(self)


def roles(cls: type) -> dict[str, str]:
    """Name -> role of a dataclass's settings."""
    return {field.name: field.metadata.get("role", "learning") for field in dataclasses.fields(cls)}


def per_rank(cls: type) -> set[str]:
    """The settings of a dataclass that ranks may have different values of; empty if `cls` is no dataclass."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return {field.name for field in fields if field.metadata.get("per_rank")}


def check(settings: Any, prefix: str = "") -> None:
    """Check every field of a dataclass instance against its declared range.

    Args:
        settings: a dataclass instance whose fields were made by `setting`.
        prefix: the group it belongs to on the command line, for the message ("algorithm.").

    Raises:
        UserError: one line: the name, the value, what is allowed.
    """
    for cls in type(settings).__mro__:
        for name, value in vars(cls).items():
            if isinstance(value, dataclasses.Field):
                raise UserError(
                    f"{prefix}{name}: class {cls.__name__} is no dataclass: expected @dataclasses.dataclass above it, "
                    "as above the class that it extends"
                )
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        among = field.metadata.get("among")
        if among is not None and value not in among:
            words = [str(word) for word in among]
            shown, hint = (repr(value), "") if str(value) in words else (value, nearest(value, words))  # "1" for 1
            raise UserError(f"{prefix}{field.name} = {shown}: expected one of {', '.join(words)}{hint}")
        bounds = {k: v for k, v in field.metadata.items() if k in _BOUNDS}
        if isinstance(value, int | float) and LARGEST < abs(value) < math.inf:
            about = f"{'-' if value < 0 else ''}10^{math.log10(abs(value)):.0f}"  # an int may have too many digits
            raise UserError(f"{prefix}{field.name} = about {about}: expected a number of at most {LARGEST:g}")
        if not bounds or (value is None and field.default is None):
            continue
        is_number = isinstance(value, numbers.Real) and math.isfinite(value)
        if not is_number or not all(_BOUNDS[k][0](value, v) for k, v in bounds.items()):
            allowed = " and ".join(f"{_BOUNDS[k][1]} {v}" for k, v in bounds.items())
            raise UserError(f"{prefix}{field.name} = {value}: expected a number {allowed} ({field.metadata['help']})")


def nearest(word: object, known: Collection[object], least: float = 0.6) -> str:
    """The end of an error message: the known word that is most similar to `word`, or nothing; least: see difflib."""
    close = difflib.get_close_matches(str(word).lower(), [str(k) for k in known], n=1, cutoff=least)
    return f"; did you mean '{close[0]}'?" if close else ""
