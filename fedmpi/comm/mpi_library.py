"""MPI itself: it begins when it is first used, not when a module is imported."""

from typing import Any

from fedmpi.comm.shared_memory import check_shared_memory, remove_remains
from fedmpi.errors import UserError


class _Library:
    """mpi4py's module `MPI`, whose import would begin MPI in this process."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of Python, which looks at objects in many ways
            raise AttributeError(name)
        if not vars(self):
            remove_remains()
            check_shared_memory()
        try:
            from mpi4py import MPI as library
        except (ImportError, RuntimeError) as error:
            if "libmpi" not in str(error):
                raise
            hint = "pip install mpich, or load your cluster's module of an MPI"
            raise UserError(f"mpi4py finds no MPI library: {hint}") from None
        return vars(self).setdefault(name, getattr(library, name))


MPI = _Library()
