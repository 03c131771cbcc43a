"""Partitions that give clients different classes, or mixtures of them."""

import dataclasses
import math

import numpy as np

from fedmpi.data.partitions.base import Partition
from fedmpi.data.partitions.even import IID, Stride
from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import setting

# The first half's classes in the FAFED paper's "high" heterogeneity, by data set (public code).
FIRST_CLASSES = {"fashion_mnist": "0,1,2,3,4", "mnist": "0,1,2,5,9", "cifar10": "9,1,2,3,4"}


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


@dataclasses.dataclass(frozen=True)
class Dirichlet(Partition):
    """Every client draws its own mixture of classes; sizes differ by at most one.

    Client i draws p_i ~ Dir(α 1), then labels from p_i without replacement; the weight of a class
    whose samples are used up becomes 0. Small α: few classes per client. Large α: like a random even split.

    Source: Hsu et al. 2019, arXiv:1909.06335 (not the variant that splits every class by p and so
    makes unequal sizes).
    """

    by_class = True

    concentration: float = setting(0.5, "α, how similar the clients' mixtures of classes are", above=0, most=1e6)

    def split(self, labels, num_clients, rng):
        stock = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
        taken = np.zeros(len(stock), dtype=int)
        class_sizes = np.array([len(samples) for samples in stock])
        parts = []
        for size in map(len, np.array_split(labels, num_clients)):  # they differ by at most one
            mixture = rng.dirichlet(np.full(len(stock), self.concentration))
            counts = self._draw_counts(mixture, size, class_sizes - taken, rng)
            parts.append(np.concatenate([s[t : t + c] for s, t, c in zip(stock, taken, counts)]))
            taken += counts
        return parts

    @staticmethod
    def _draw_counts(mixture, size, left, rng):
        """[num_classes] samples that a client takes of each class: `size` in total, at most `left` of each.

        Draws that exceed what is left of a class are drawn again: the same distribution as drawing
        label by label.
        """
        counts = np.zeros(len(left), dtype=int)
        while missing := size - counts.sum():
            weights = np.where(counts < left, mixture, 0)
            if weights.sum() == 0:  # all classes of the client's mixture are used up
                weights = (left - counts).astype(float)
            counts = np.minimum(counts + rng.multinomial(missing, weights / weights.sum()), left)
        return counts


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
