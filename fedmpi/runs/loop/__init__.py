"""The loop of a run as a list of parts: what `fedmpi.train` and recorded own loops do around their rounds."""

from fedmpi.runs.loop.part import Now, Part

__all__ = ["Now", "Part"]
