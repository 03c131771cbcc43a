"""Partitions without settings of their own: even blocks, random parts, sorted and dealt in turn, all to all."""

import dataclasses

import numpy as np

from fedmpi.data.partitions.base import Partition


@dataclasses.dataclass(frozen=True)
class Even(Partition):
    """Contiguous blocks of the file whose sizes differ by at most one; each has all classes if the file is shuffled.

    Each client's samples are one contiguous piece of the file.

    Source: the FAFED paper's "moderate" heterogeneity for MNIST and Fashion-MNIST.
    """

    def split(self, labels, num_clients, rng):
        return np.array_split(np.arange(len(labels)), num_clients)


@dataclasses.dataclass(frozen=True)
class IID(Partition):
    """Random parts whose sizes differ by at most one: all clients have the same distribution."""

    def split(self, labels, num_clients, rng):
        return np.array_split(rng.permutation(len(labels)), num_clients)


@dataclasses.dataclass(frozen=True)
class Shared(Partition):
    """Every client holds the full data set.

    Source: the "low" heterogeneity of the FAFED authors' code (the paper says 95 % similarity).
    """

    def split(self, labels, num_clients, rng):
        return [np.arange(len(labels))] * num_clients


@dataclasses.dataclass(frozen=True)
class Stride(Partition):
    """Samples sorted by class (stable) and dealt in turn: all clients hold equal shares of all classes.

    Source: the FAFED paper's "moderate" heterogeneity for CIFAR-10 (public code).
    """

    def split(self, labels, num_clients, rng):
        by_class = np.argsort(labels, kind="stable")
        return [by_class[client::num_clients] for client in range(num_clients)]
