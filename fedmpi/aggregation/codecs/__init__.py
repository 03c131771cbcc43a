"""How rows are written for their way to the others; ``--codec`` chooses by name."""

from fedmpi.aggregation.codecs.base import Codec

__all__ = ["Codec"]
