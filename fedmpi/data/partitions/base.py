"""How one data set is split over clients: pure functions of one column, number of clients and seed."""

import dataclasses
import math

import h5py
import numpy as np

from fedmpi.errors import UserError
from fedmpi.settings import check, setting
from fedmpi.streams import generator

# The first half's classes in the FAFED paper's "high" heterogeneity, by data set (public code).
FIRST_CLASSES = {"fashion_mnist": "0,1,2,3,4", "mnist": "0,1,2,5,9", "cifar10": "9,1,2,3,4"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partition:
    """Base of all partitions.

    A partition is called as `partition(labels, num_clients, seed)`: labels [n] of the training set
    in file order (or the column that the partition's `column` names); it returns one sorted int64
    index array per client. It draws from the stream (seed, "partition") only.

    Raises:
        UserError: if the split is not possible, or leaves a client with fewer than min_samples.
    """

    min_samples: int = setting(1, "a split that leaves a client with fewer samples is an error", least=1)

    column = "labels"  # the data set train/<column> of the file that the split looks at

    def __post_init__(self):
        check(self, "partition.")

    def __call__(self, labels, num_clients, seed):
        if num_clients > len(labels):
            raise UserError(f"clients = {num_clients}: expected at most one per training sample, {len(labels)}")
        parts = self.split(np.asarray(labels), num_clients, generator(seed, "partition"))
        parts = [np.sort(np.asarray(part, dtype=np.int64)) for part in parts]
        for client, part in enumerate(parts):
            if len(part) < self.min_samples:
                holds = f"{len(part)} samples" if len(part) else "no samples"
                raise UserError(
                    f"partition leaves client {client} of {num_clients} with {holds}: expected at least "
                    f"{self.min_samples}; use fewer clients, another seed or another partition"
                )
        return parts

    def of(self, source, num_clients, seed):
        """The same for the training set of a `fedmpi.data.source.Source`, whose column it reads."""
        return self.for_data(source.name)(source.column(self.column), num_clients, seed)

    def for_data(self, name):
        """The partition as it is meant for a data set of that name."""
        return self

    def split(self, labels, num_clients, draw):
        """One index array per client; written by each partition. `draw` is a numpy Generator."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Even(Partition):
    """Blocks of the file's order whose sizes differ by at most one; all classes if the file is not sorted.

    Each client reads one piece of the file.

    Source: the FAFED paper's "moderate" heterogeneity for MNIST and Fashion-MNIST.
    """

    def split(self, labels, num_clients, draw):
        return np.array_split(np.arange(len(labels)), num_clients)


@dataclasses.dataclass(frozen=True)
class IID(Partition):
    """Random parts whose sizes differ by at most one: every client sees the same distribution."""

    def split(self, labels, num_clients, draw):
        return np.array_split(draw.permutation(len(labels)), num_clients)


@dataclasses.dataclass(frozen=True)
class Shared(Partition):
    """Every client holds the full data set.

    Source: the "low" heterogeneity of the FAFED group's code (the paper says 95 % similarity).
    """

    def split(self, labels, num_clients, draw):
        return [np.arange(len(labels))] * num_clients


@dataclasses.dataclass(frozen=True)
class Stride(Partition):
    """Samples sorted by class (stable) and dealt in turn: all clients hold all classes alike.

    Source: the FAFED paper's "moderate" heterogeneity for CIFAR-10 (public code).
    """

    def split(self, labels, num_clients, draw):
        by_class = np.argsort(labels, kind="stable")
        return [by_class[client::num_clients] for client in range(num_clients)]


@dataclasses.dataclass(frozen=True)
class Similarity(Partition):
    """A share of the data is dealt at random; the rest is sorted by label and cut into one block per client.

    percent = 100 is a random even split, percent = 0 is sorted.

    Source: Karimireddy et al. 2020 (SCAFFOLD); 95 is the FAFED paper's "low" heterogeneity.
    """

    percent: float = setting(95.0, "s, percentage of the samples that is dealt at random", least=0, most=100)

    def split(self, labels, num_clients, draw):
        order = draw.permutation(len(labels))
        num_random = math.floor(self.percent * len(labels) / 100)
        rest = order[num_random:]
        blocks = np.array_split(rest[np.argsort(labels[rest], kind="stable")], num_clients)
        dealt = np.array_split(order[:num_random], num_clients)
        # Turned round, so that the larger pieces of the one meet the smaller pieces of the other.
        return [np.concatenate(pair) for pair in zip(dealt[::-1], blocks)]


@dataclasses.dataclass(frozen=True)
class Halves(Partition):
    """The first half of the clients shares one half of the classes, the second half the others.

    Inside a half, samples are sorted by class (stable) and dealt in turn, so that its clients hold
    equal shares of its classes; or, as in the code for MNIST, shuffled and cut into even blocks.

    Source: the FAFED paper's "high" heterogeneity (disjoint, 5 of 10 classes).
    """

    first_classes: str = setting(
        "",
        "classes of the first half of the clients, like 0,1,2,5,9, or the paper's for "
        "fashion_mnist, mnist or cifar10; empty: the paper's for the data set, if it is one of them, or the "
        "lower half of the labels",
    )
    deal: str = setting("stride", "how a half is split over its clients", among=("stride", "shuffle"))

    def split(self, labels, num_clients, draw):
        if num_clients % 2:
            raise UserError(f"clients = {num_clients}: expected an even number for partition halves")
        in_first = np.isin(labels, self._first(np.unique(labels)))
        deal = Stride().split if self.deal == "stride" else IID().split
        halves = [np.flatnonzero(in_first), np.flatnonzero(~in_first)]
        return [half[part] for half in halves for part in deal(labels[half], num_clients // 2, draw)]

    def for_data(self, name):
        known = not self.first_classes and name in FIRST_CLASSES
        return dataclasses.replace(self, first_classes=name) if known else self

    def _first(self, classes):
        """The classes of the first half, out of all classes of the data."""
        if not self.first_classes:
            return classes[: len(classes) // 2]
        given = f"partition.first_classes = {self.first_classes}"
        try:
            first = [int(c) for c in FIRST_CLASSES.get(self.first_classes, self.first_classes).split(",")]
        except ValueError:
            names = ", ".join(FIRST_CLASSES)
            raise UserError(f"{given}: expected integers like 0,1,2 or one of {names}") from None
        if not set(first) < set(classes.tolist()):
            raise UserError(f"{given}: expected some but not all of the labels {classes.min()}..{classes.max()}")
        return first


@dataclasses.dataclass(frozen=True)
class Classes(Partition):
    """k classes per client: client i holds classes ik, ik+1, ..., ik+k-1 modulo their number.

    Each class is shuffled and split evenly over the clients that hold it. k = 1 gives client i the
    class i mod 10.

    Source: the Fed-LAMB paper's non-iid setting in its static form (k = 1).
    """

    per_client: int = setting(1, "k, classes that a client holds", least=1)

    def split(self, labels, num_clients, draw):
        classes, k = np.unique(labels), self.per_client
        if k > len(classes):
            raise UserError(f"partition.per_client = {k}: expected at most the {len(classes)} classes of the data")
        if num_clients * k < len(classes):
            raise UserError(
                f"clients = {num_clients} with {k} classes each: {len(classes)} classes need at least "
                f"{-(-len(classes) // k)} clients, otherwise some samples belong to nobody"
            )
        held = [[(client * k + j) % len(classes) for j in range(k)] for client in range(num_clients)]
        parts = [[] for _ in range(num_clients)]
        for number, label in enumerate(classes):
            holders = [client for client in range(num_clients) if number in held[client]]
            samples = draw.permutation(np.flatnonzero(labels == label))
            for client, share in zip(holders, np.array_split(samples, len(holders))):
                parts[client].append(share)
        return [np.concatenate(part) for part in parts]


@dataclasses.dataclass(frozen=True)
class Dirichlet(Partition):
    """Every client draws its own mixture of classes; sizes differ by at most one.

    Client i draws p_i ~ Dir(α 1), then labels from p_i without replacement; the weight of a class
    that is used up becomes 0. Small α: few classes per client. Large α: like a random even split.

    Source: Hsu et al. 2019, arXiv:1909.06335 (not the variant that splits every class by p and so
    makes unequal sizes).
    """

    concentration: float = setting(0.5, "α, how alike the clients' mixtures of classes are", above=0, most=1e6)

    def split(self, labels, num_clients, draw):
        stock = [draw.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
        taken = np.zeros(len(stock), dtype=int)
        sizes = np.array([len(samples) for samples in stock])
        parts = []
        for wanted in even_sizes(len(labels), num_clients):
            mixture = draw.dirichlet(np.full(len(stock), self.concentration))
            counts = self._draw_counts(mixture, wanted, sizes - taken, draw)
            parts.append(np.concatenate([s[t : t + c] for s, t, c in zip(stock, taken, counts)]))
            taken += counts
        return parts

    @staticmethod
    def _draw_counts(mixture, wanted, left, draw):
        """How many samples of each class: `wanted` in all, at most `left` of each.

        What falls on a class that is used up is drawn again: the same distribution as drawing
        label by label.
        """
        counts = np.zeros(len(left), dtype=int)
        while missing := wanted - counts.sum():
            weights = np.where(counts < left, mixture, 0)
            if weights.sum() == 0:  # all classes that the client would have are gone
                weights = (left - counts).astype(float)
            counts = np.minimum(counts + draw.multinomial(missing, weights / weights.sum()), left)
        return counts


@dataclasses.dataclass(frozen=True)
class Uneven(Partition):
    """Disjoint random groups of unequal size.

    Every client gets ⌊n/(2N)⌋ samples; the rest is handed out to the clients in random order in
    amounts uniform on {0, ..., ⌈1.5 n/N⌉} until it is used up.

    Source: the FAFedZO paper; sizes as in the public FedZO code, whose groups may overlap (not here).
    """

    def split(self, labels, num_clients, draw):
        sizes = np.full(num_clients, len(labels) // (2 * num_clients))
        largest = math.ceil(1.5 * len(labels) / num_clients)
        while left := len(labels) - sizes.sum():
            for client in draw.permutation(num_clients):
                amount = min(int(draw.integers(largest, endpoint=True)), left)
                sizes[client] += amount
                left -= amount
        return np.split(draw.permutation(len(labels)), np.cumsum(sizes)[:-1])


@dataclasses.dataclass(frozen=True)
class Column(Partition):
    """By a column of the file: whole groups of equal values (writers, hospitals), or sorted and cut.

    Groups go, the largest first, to the client that holds the fewest samples so far. With `cut`,
    samples are sorted by the column (stable) and cut into even blocks: with by = brightness, the mean
    pixel, an uneven distribution for data of one class.
    """

    by: str = setting("group", "the data set train/<by> of the file: [n] numbers or words; or labels, or brightness")
    cut: bool = setting(False, "sort by the column and cut into even blocks; groups may then be cut through")

    @property
    def column(self):
        """The data set that the split looks at."""
        return self.by

    def split(self, labels, num_clients, draw):
        if self.cut:
            return np.array_split(np.argsort(labels, kind="stable"), num_clients)
        groups, which, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        if len(groups) < num_clients:
            raise UserError(
                f"clients = {num_clients}: expected at most the number of groups in train/{self.by}, {len(groups)}"
            )
        client_of, held = np.zeros(len(groups), dtype=int), np.zeros(num_clients, dtype=int)
        for group in np.argsort(-sizes, kind="stable"):
            client_of[group] = held.argmin()
            held[client_of[group]] += sizes[group]
        return [np.flatnonzero(client_of[which] == client) for client in range(num_clients)]


def even_sizes(num_samples, num_clients):
    """[num_clients] sizes that differ by at most one, the larger ones first."""
    small, num_large = divmod(num_samples, num_clients)
    return [small + 1] * num_large + [small] * (num_clients - num_large)


def write_partition(path, parts, data, unit="rows"):
    """Write who has what: HDF5 with one data set client_<i> per client, and the attributes data and unit.

    Args:
        path: of the file to make. parts: one array per client; data: name of the data set.
        unit: "rows": a part is the [n] row numbers of its samples in the file's training set;
            "words": a part is [2], its first word in the training text and the one behind its last.

    Raises:
        UserError: if it cannot be written.
    """
    try:
        with h5py.File(path, "w") as file:
            file.attrs["data"], file.attrs["unit"] = data, unit
            for client, part in enumerate(parts):
                file[f"client_{client}"] = part
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}") from None
