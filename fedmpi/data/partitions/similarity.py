"""A share of the samples dealt at random, the rest sorted by class."""

import dataclasses
import math

import numpy as np

from fedmpi.data.partitions.base import Partition
from fedmpi.settings import setting


@dataclasses.dataclass(frozen=True)
class Similarity(Partition):
    """A share of the data is dealt at random; the rest is sorted by label and cut into one block per client.

    percent = 100 is a random even split; percent = 0 is sorted.

    Source: Karimireddy et al. 2020 (SCAFFOLD); 95 is the FAFED paper's "low" heterogeneity.
    """

    by_class = True

    percent: float = setting(95.0, "s, percentage of the samples that is distributed at random", least=0, most=100)

    def split(self, labels, num_clients, rng):
        order = rng.permutation(len(labels))
        num_random = math.floor(self.percent * len(labels) / 100)
        rest = order[num_random:]
        blocks = np.array_split(rest[np.argsort(labels[rest], kind="stable")], num_clients)
        random_parts = np.array_split(order[:num_random], num_clients)
        # array_split makes its first parts larger: reversed, the larger parts of one join the smaller of the other.
        return [np.concatenate(pair) for pair in zip(random_parts[::-1], blocks)]
