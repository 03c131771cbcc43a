"""Settings: dataclass fields that carry their help text and their range.

One declaration serves the command line, the configuration file, the printed help and the check
before work starts.
"""

import dataclasses
import difflib
import math
import numbers
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from fedmpi.errors import UserError

T = TypeVar("T")


def setting(
    default: T,
    help: str,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    among: Collection[object] | None = None,
) -> T:
    """A dataclass field with its help text and the range of its numbers.

    Args:
        default: the value if nobody says otherwise.
        help: what it means, with its symbol in the paper; shown by ``--help``.
        above, least, below, most: open and closed bounds of a number.
        among: the allowed words.

    >>> import dataclasses, fedmpi
    >>> @dataclasses.dataclass(frozen=True)
    ... class WithMomentum(fedmpi.algorithms.FedAvg):
    ...     momentum: float = fedmpi.setting(0.9, "β, weight of the old direction", least=0, below=1)
    >>> WithMomentum().momentum
    0.9
    >>> WithMomentum(momentum=1.0)
    Traceback (most recent call last):
    fedmpi.errors.UserError: algorithm.momentum = 1.0: expected a number >= 0 and < 1 (β, weight of the old direction)
    """
    bounds = {"above": above, "least": least, "below": below, "most": most}
    metadata = {"help": help, "among": among, **{k: v for k, v in bounds.items() if v is not None}}
    return dataclasses.field(default=default, metadata=metadata)


_BOUNDS: dict[str, tuple[Callable[[Any, float], bool], str]] = {
    "above": (lambda value, bound: value > bound, ">"),
    "least": (lambda value, bound: value >= bound, ">="),
    "below": (lambda value, bound: value < bound, "<"),
    "most": (lambda value, bound: value <= bound, "<="),
}


def check(settings: Any, prefix: str = "") -> None:
    """Check every field of a dataclass instance against its declared range.

    Args:
        settings: a dataclass instance whose fields were made by `setting`.
        prefix: the group it stands in on the command line, for the message ("algorithm.").

    Raises:
        UserError: one line: the name, the value, what is allowed.
    """
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        among = field.metadata.get("among")
        if among is not None and value not in among:
            words = [str(word) for word in among]
            shown, hint = (repr(value), "") if str(value) in words else (value, nearest(value, words))  # "1" for 1
            raise UserError(f"{prefix}{field.name} = {shown}: expected one of {', '.join(words)}{hint}")
        bounds = {k: v for k, v in field.metadata.items() if k in _BOUNDS}
        if not bounds or (value is None and field.default is None):
            continue
        is_number = isinstance(value, numbers.Real) and math.isfinite(value)
        if not is_number or not all(_BOUNDS[k][0](value, v) for k, v in bounds.items()):
            allowed = " and ".join(f"{_BOUNDS[k][1]} {v}" for k, v in bounds.items())
            raise UserError(f"{prefix}{field.name} = {value}: expected a number {allowed} ({field.metadata['help']})")


def nearest(word: object, known: Collection[object]) -> str:
    """The end of an error message: the known word that looks most like `word`, or nothing."""
    close = difflib.get_close_matches(str(word).lower(), [str(k) for k in known], n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
