"""How one data set is split over clients: pure functions of labels, number of clients and seed."""

import dataclasses

import numpy as np

from fedmpi.errors import UserError
from fedmpi.settings import check, setting


@dataclasses.dataclass(frozen=True)
class Partition:
    """Base of all partitions.

    A partition is called as `partition(labels, num_clients, seed)`: labels [n] integers of the
    training set in file order; it returns one sorted int64 index array per client.

    Raises:
        UserError: if the split is not possible or leaves a client without samples.
    """

    def __post_init__(self):
        check(self, "partition.")

    def __call__(self, labels, num_clients, seed):
        if num_clients > len(labels):
            raise UserError(f"clients = {num_clients}: expected at most one per training sample, {len(labels)}")
        parts = [np.sort(np.asarray(part, dtype=np.int64)) for part in self.split(labels, num_clients, seed)]
        empty = [client for client, part in enumerate(parts) if len(part) == 0]
        if empty:
            raise UserError(f"partition leaves client {empty[0]} of {num_clients} without samples: use fewer clients")
        return parts

    def split(self, labels, num_clients, seed):
        """One index array per client; written by each partition."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Even(Partition):
    """Blocks of the file's order whose sizes differ by at most one; every block holds all classes
    if the file is not sorted. Each client reads one piece of the file.

    Source: the FAFED paper's "moderate" heterogeneity for MNIST and Fashion-MNIST.
    """

    def split(self, labels, num_clients, seed):
        return np.array_split(np.arange(len(labels)), num_clients)


@dataclasses.dataclass(frozen=True)
class Halves(Partition):
    """The first half of the clients shares one half of the classes, the second half the others.

    Inside a half, samples are sorted by class (stable) and dealt in turn, so that its clients hold
    equal shares of its classes.

    Source: the FAFED paper's "high" heterogeneity (disjoint, 5 of 10 classes).
    """

    first_classes: str = setting(
        "", "classes of the first half of the clients, like 0,1,2,5,9; empty: the lower half of the labels"
    )

    def split(self, labels, num_clients, seed):
        if num_clients % 2:
            raise UserError(f"clients = {num_clients}: expected an even number for partition halves")
        classes = np.unique(labels)
        try:
            named = [int(c) for c in self.first_classes.split(",")] if self.first_classes else None
        except ValueError:
            raise UserError(f"partition.first_classes = {self.first_classes}: expected integers like 0,1,2") from None
        first = classes[: len(classes) // 2] if named is None else np.array(named)
        if not set(first.tolist()) < set(classes.tolist()) or len(first) == 0:
            raise UserError(
                f"partition.first_classes = {self.first_classes}: expected some but not all of the labels "
                f"{classes.min()}..{classes.max()}"
            )
        half = num_clients // 2
        by_class = np.argsort(labels, kind="stable")
        in_first = np.isin(labels[by_class], first)
        first_half, second_half = by_class[in_first], by_class[~in_first]
        return [first_half[i::half] for i in range(half)] + [second_half[i::half] for i in range(half)]
