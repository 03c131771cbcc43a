"""Hugging Face's Trainer in a federation: import this module before ``TrainingArguments`` are made.

Their libraries would take the ranks of an mpirun for the workers of one data-parallel job. Where there are several
ranks, the import begins MPI and hides the variables by which they would see that: each rank is a silo of its own.
"""

from fedmpi.comm.start.mpi_library import hide_launcher

hide_launcher()

try:
    from fedmpi.own_loop.trainer import FederatedCallback, FederatedTrainer  # noqa: E402
except ModuleNotFoundError as error:
    from fedmpi.ground.errors import UserError

    raise UserError(f"fedmpi.huggingface needs {error.name}: pip install 'fedmpi[huggingface]'") from None

__all__ = ["FederatedCallback", "FederatedTrainer"]
