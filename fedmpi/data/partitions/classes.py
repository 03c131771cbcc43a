"""A few classes per client."""

import dataclasses

import numpy as np

from fedmpi.data.partitions.base import Partition
from fedmpi.errors import UserError
from fedmpi.settings import setting


@dataclasses.dataclass(frozen=True)
class Classes(Partition):
    """k classes per client: client i holds classes ik, ik+1, ..., ik+k-1 modulo the number of classes.

    Each class is shuffled and split evenly over the clients that hold it. k = 1 gives client i class i mod 10
    of a data set with 10 classes.

    With redeal, in every round clients and classes are in a random order: of 25 clients with k = 1, five random
    classes of ten have three clients and the others two. A round with too few clients for all classes has random ones.

    Source: the Fed-LAMB paper's non-iid setting (k = 1); its clients' data are dealt anew in every round.
    """

    by_class = True

    per_client: int = setting(1, "k, number of classes that each client holds", least=1)

    def split(self, labels, num_clients, rng):
        classes, k = np.unique(labels), self.per_client
        if k > len(classes):
            raise UserError(f"partition.per_client = {k}: expected at most the {len(classes)} classes of the data")
        if num_clients * k < len(classes):
            raise UserError(
                f"clients = {num_clients} with {k} classes each: expected at least {-(-len(classes) // k)} clients for "
                f"{len(classes)} classes; with fewer, some samples belong to no client"
            )
        return self._assign(labels, num_clients, rng)

    def split_round(self, labels, num_clients, rng):
        classes, codes = np.unique(labels, return_inverse=True)
        return self._assign(rng.permutation(len(classes))[codes], num_clients, rng)

    def _assign(self, labels, num_clients, rng):
        """One array of sample indices per client; the samples of a class that no client holds are left out."""
        classes, k = np.unique(labels), self.per_client
        held = [[(client * k + j) % len(classes) for j in range(k)] for client in range(num_clients)]
        parts = [[] for _ in range(num_clients)]
        for class_index, label in enumerate(classes):
            holders = [client for client in range(num_clients) if class_index in held[client]]
            samples = rng.permutation(np.flatnonzero(labels == label))
            for client, share in zip(holders, np.array_split(samples, max(1, len(holders)))):
                parts[client].append(share)
        return [np.concatenate(part) for part in parts]
