"""What one client's rows pass before the aggregation gets them; ``--stages`` names them, in order."""

from fedmpi.aggregation.stages.base import Sent, Stage
from fedmpi.ground.part import SecretStream

__all__ = ["SecretStream", "Sent", "Stage"]
