"""What must hold on every rank: python -m checks MODULE CHECK ... FOLDER; rank 0 prints "CHECK: ok" for each that does.

A check is a function `check_CHECK` of the module. It may take `api`, "average" or "join", which is the part after the
colon in MODULE:API, and `width`, of which each in the module's WIDTHS is checked. FOLDER is for what checks write.
"""

import importlib
import inspect
import sys

from mpi4py import MPI


def main(module, *names):
    module, _, api = module.partition(":")
    module = importlib.import_module(module)
    for name in names:
        check = getattr(module, f"check_{name}")
        taken = inspect.signature(check).parameters
        for width in module.WIDTHS if "width" in taken else [None]:
            check(**{key: value for key, value in {"api": api, "width": width}.items() if key in taken})
        MPI.COMM_WORLD.Barrier()
        if MPI.COMM_WORLD.rank == 0:
            print(f"{name}: ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:-1])
