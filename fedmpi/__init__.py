"""fedmpi: cross-silo federated learning over MPI."""

__version__ = "0.1.0"
__all__ = ["simulate"]


def __getattr__(name):
    """`fedmpi.simulate`, fetched when asked for: programs that only read files start without torch."""
    if name == "simulate":
        from fedmpi.federation.simulate import simulate

        return simulate
    raise AttributeError(f"module 'fedmpi' has no attribute {name!r}")
