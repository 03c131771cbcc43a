"""What one client's rows pass before the aggregation gets them; ``--stages`` names them, in order."""

from fedmpi.aggregation.stages.base import SecretStream, Sent, Stage

__all__ = ["SecretStream", "Sent", "Stage"]
