"""What becomes of the participants' rows: how they become the server's; ``--aggregation`` chooses by name."""

from fedmpi.aggregation.base import Aggregation
from fedmpi.aggregation.layout import Layout, Moment

__all__ = ["Aggregation", "Layout", "Moment"]
