"""Half of the clients hold half of the classes, the other half holds the others."""

import dataclasses

import numpy as np

from fedmpi.data.partitions.base import Partition
from fedmpi.data.partitions.even import IID, Stride
from fedmpi.errors import UserError
from fedmpi.settings import setting

# The first half's classes in the FAFED paper's "high" heterogeneity, by data set (public code).
FIRST_CLASSES = {"fashion_mnist": "0,1,2,3,4", "mnist": "0,1,2,5,9", "cifar10": "9,1,2,3,4"}


@dataclasses.dataclass(frozen=True)
class Halves(Partition):
    """The first half of the clients shares one half of the classes, the second half the others.

    Within a half, samples are sorted by class (stable) and dealt in turn, so that its clients hold
    equal shares of its classes; or, as in the code for MNIST, shuffled and cut into even blocks.

    Source: the FAFED paper's "high" heterogeneity (disjoint, 5 of 10 classes).
    """

    by_class = True

    first_classes: str = setting(
        "",
        "classes of the first half of the clients, like 0,1,2,5,9, or a data set whose classes in the paper's "
        "public code are meant: fashion_mnist, mnist or cifar10; empty: those classes if the data set is one of these, "
        "otherwise the lower half of the labels",
    )
    deal: str = setting(
        "stride",
        "how the samples of a half are given to its clients: in turn (stride) or at random (shuffle)",
        among=("stride", "shuffle"),
    )

    def split(self, labels, num_clients, rng):
        if num_clients % 2:
            raise UserError(f"clients = {num_clients}: expected an even number for partition halves")
        in_first = np.isin(labels, self._first(np.unique(labels)))
        deal = Stride().split if self.deal == "stride" else IID().split
        halves = [np.flatnonzero(in_first), np.flatnonzero(~in_first)]
        return [half[part] for half in halves for part in deal(labels[half], num_clients // 2, rng)]

    def for_data_set(self, name):
        in_paper = not self.first_classes and name in FIRST_CLASSES
        return dataclasses.replace(self, first_classes=name) if in_paper else self

    def _first(self, classes):
        """The classes of the first half; `classes` are all classes of the data, sorted."""
        if not self.first_classes:
            return classes[: len(classes) // 2]
        given = f"partition.first_classes = {self.first_classes}"
        try:
            first = [int(label) for label in FIRST_CLASSES.get(self.first_classes, self.first_classes).split(",")]
        except ValueError:
            names = ", ".join(FIRST_CLASSES)
            raise UserError(f"{given}: expected integers like 0,1,2 or one of {names}") from None
        if not set(first) < set(classes.tolist()):
            raise UserError(f"{given}: expected some but not all of the labels {classes.min()}..{classes.max()}")
        return first
