"""The loop of a federation and what it moves: clients, the server, rows, rounds."""

from fedmpi.federation.participation import Plan
from fedmpi.federation.rounds import Federation
from fedmpi.federation.variables import Variables

__all__ = ["Federation", "Plan", "Variables"]
