"""The versions of what runs here."""

import functools
import hashlib
import os
import platform

import numpy as np
import torch

from fedmpi.ground.version import PACKAGE, __version__


def versions() -> dict[str, str]:
    """Name -> version of what a run's bits depend on."""
    found = {"fedmpi": __version__, "python": platform.python_version()}
    return found | {"torch": torch.__version__, "numpy": np.__version__}


@functools.cache
def source_digest() -> str:
    """Eight characters that differ if the Python files of two installations differ."""
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(PACKAGE):
        folders.sort()
        for name in sorted(name for name in names if name.endswith(".py")):
            with open(f"{folder}/{name}", "rb") as file:
                digest.update(f"{os.path.basename(folder)}/{name}\n".encode() + file.read())
    return digest.hexdigest()[:8]
