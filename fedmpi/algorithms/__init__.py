"""The equations of the papers, one file per family: ``from fedmpi.algorithms import FAFED``.

Every public subclass of `Algorithm` in the files of this folder is found when it is used;
there is no list to edit.

>>> import fedmpi
>>> fedmpi.algorithms.FAFED(step_size=0.01).second_moment_decay
0.9
>>> [name for name in dir(fedmpi.algorithms) if name.startswith("FedAd")]
['FedAdagrad', 'FedAdam', 'FedAdamW']
"""

import sys
from typing import Any

from fedmpi.algorithms.base import Algorithm, Exchange
from fedmpi.ground.registry import known


def _classes() -> dict[str, Any]:
    """Class name -> class of every algorithm; imports all files of this folder."""
    return {cls.__name__: cls for cls in known(sys.modules[__name__], Algorithm).values()}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    cls = None if name.startswith("_") else _classes().get(name)
    if cls is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return cls


def __dir__() -> list[str]:
    return sorted([Algorithm.__name__, Exchange.__name__, *_classes()])
