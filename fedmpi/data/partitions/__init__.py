"""Partitions split one data set over clients; each is found by its name (`fedmpi.ground.registry`).

Every partition is a pure function of one column of the training set, the number of clients and the seed.
"""

from fedmpi.data.partitions.base import Partition, write_partition
from fedmpi.data.partitions.by_class import Classes, Dirichlet, Halves, Similarity
from fedmpi.data.partitions.column import Column
from fedmpi.data.partitions.even import IID, Even, Shared, Stride, Uneven

__all__ = [
    "IID", "Classes", "Column", "Dirichlet", "Even", "Halves", "Partition", "Shared", "Similarity", "Stride", "Uneven",
    "write_partition",
]  # fmt: skip
