"""What becomes of the participants' rows: how they become the server's; ``--aggregation`` chooses by name."""

from fedmpi.aggregation.base import Aggregation, Layout, Moment

__all__ = ["Aggregation", "Layout", "Moment"]
