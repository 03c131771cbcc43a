"""Random parts of unequal size."""

import dataclasses
import math

import numpy as np

from fedmpi.data.partitions.base import Partition


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
