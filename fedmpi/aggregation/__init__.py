"""What becomes of the participants' rows: how they become the server's; ``--aggregation`` chooses by name."""

from fedmpi.aggregation.base import Aggregation, Layout, Moment
from fedmpi.aggregation.sending import Sending

__all__ = ["Aggregation", "Layout", "Moment", "Sending"]
