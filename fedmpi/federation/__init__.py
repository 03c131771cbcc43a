"""The loop of a federation and what it moves: clients, the server, rows, rounds."""

from fedmpi.federation.participation import Plan
from fedmpi.federation.rounds import Federation, Variables

__all__ = ["Federation", "Plan", "Variables"]
