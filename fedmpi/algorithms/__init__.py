"""The equations of the papers, one file per family: ``from fedmpi.algorithms import FAFED``.

Every public subclass of `Algorithm` in the files of this folder is found by itself, at its first use;
there is no list to edit.
"""

import functools
import sys
from typing import Any

from fedmpi.algorithms.base import Algorithm, Exchange
from fedmpi.registry import known


@functools.cache
def _found() -> dict[str, Any]:
    """Class name -> class of every algorithm; imports all files of this folder."""
    return {cls.__name__: cls for cls in known(sys.modules[__name__], Algorithm).values()}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name.startswith("_") or name not in _found():
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return _found()[name]


def __dir__() -> list[str]:
    return sorted([Algorithm.__name__, Exchange.__name__, *_found()])
