"""fedmpi: cross-silo federated learning over MPI."""

from fedmpi.simulation import simulate

__version__ = "0.1.0"
__all__ = ["simulate"]
