"""What is learned: a model, its loss on a batch, and metrics."""

from fedmpi.tasks.base import BaseTask, RankContext

__all__ = ["RankContext", "BaseTask"]
