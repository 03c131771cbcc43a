"""Partitions without settings of their own: even blocks, random parts, sorted and dealt in turn, all to all, uneven."""

import dataclasses
import math

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


@dataclasses.dataclass(frozen=True)
class Uneven(Partition):
    """Disjoint random groups of unequal size.

    Every client gets ⌊n/(2N)⌋ samples; the remaining samples are dealt to the clients in random order,
    in amounts uniform on {0, ..., ⌈1.5 n/N⌉}, until none is left.

    Source: the FAFedZO paper; sizes as in the public FedZO code, whose groups may overlap (not here).
    """

    def split(self, labels, num_clients, rng):
        sizes = np.full(num_clients, len(labels) // (2 * num_clients))
        largest = math.ceil(1.5 * len(labels) / num_clients)
        while left := len(labels) - sizes.sum():
            for client in rng.permutation(num_clients):
                amount = min(int(rng.integers(largest, endpoint=True)), left)
                sizes[client] += amount
                left -= amount
        return np.split(rng.permutation(len(labels)), np.cumsum(sizes)[:-1])
