"""Settings: dataclass fields that carry their help text and their range.

One declaration serves the command line, the configuration file, the printed help and the check
before work starts.
"""

import dataclasses
import difflib
import math
import numbers

from fedmpi.errors import UserError


def setting(default, help, *, above=None, least=None, below=None, most=None, among=None):
    """A dataclass field with its help text and the range of its numbers.

    Args:
        default: the value if nobody says otherwise.
        help: what it means, with its symbol in the paper; shown by ``--help``.
        above, least, below, most: open and closed bounds of a number.
        among: the allowed words.
    """
    bounds = {"above": above, "least": least, "below": below, "most": most}
    metadata = {"help": help, "among": among, **{k: v for k, v in bounds.items() if v is not None}}
    return dataclasses.field(default=default, metadata=metadata)


_BOUNDS = {
    "above": (lambda value, bound: value > bound, ">"),
    "least": (lambda value, bound: value >= bound, ">="),
    "below": (lambda value, bound: value < bound, "<"),
    "most": (lambda value, bound: value <= bound, "<="),
}


def check(settings, prefix=""):
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


def nearest(word, known):
    """The end of an error message: the known word that looks most like `word`, or nothing."""
    close = difflib.get_close_matches(str(word).lower(), [str(k) for k in known], n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
