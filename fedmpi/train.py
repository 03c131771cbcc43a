"""Train a model over silos: ``mpirun -np 4 python -m fedmpi.train``; the module is the function `fedmpi.train`."""

import sys
from typing import Any, cast

from fedmpi.cli.train import main, train

__all__ = ["main", "train"]

if __name__ == "__main__":
    main()
else:
    sys.modules[__name__] = cast(Any, train)  # Python takes this one for the module, also as `fedmpi.train`
