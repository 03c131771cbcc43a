"""What is learned: a model, its loss on a batch, and metrics."""

from fedmpi.tasks.base import RankContext, Task

__all__ = ["RankContext", "Task"]
