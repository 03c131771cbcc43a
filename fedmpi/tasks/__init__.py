"""What is learned: a model, its loss on a batch, and metrics."""

from fedmpi.tasks.base import Place, Task

__all__ = ["Place", "Task"]
