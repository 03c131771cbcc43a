"""The loop of a federation and what it moves: clients, the server, rows, rounds."""

from fedmpi.federation.rounds import Federation

__all__ = ["Federation"]
