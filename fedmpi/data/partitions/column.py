"""Parts by a column of the data file, like the hospital that a sample comes from."""

import dataclasses

import numpy as np

from fedmpi.data.partitions.base import Partition
from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class Column(Partition):
    """By a column of the file: whole groups of equal values (writers, hospitals), or sorted and cut.

    Groups are assigned, the largest first, to the client that has the fewest samples so far. With `cut`,
    samples are sorted by the column (stable) and cut into even blocks: by = brightness, the mean of a
    sample's pixels, makes heterogeneous clients of images that are all of one class.
    """

    by: str = setting(
        "group", "column train/NAME of the data file, one number or word per sample; or labels, or brightness"
    )
    cut: bool = setting(
        False, "sort by the column and cut into blocks of equal size; samples with one value may then go to two clients"
    )

    @property
    def column(self):
        """The data set train/<column> of the file that decides the split."""
        return self.by

    @property
    def by_class(self):
        """Whether the column contains the classes."""
        return self.by == "labels"

    def names(self, source, parts):
        """The groups of each client: "Bonn", "Aachen, Celle" or "Aachen, Bonn and 3 more"."""
        if self.cut:
            return None
        values = source.column(self.by)
        return [_in_words(np.unique(values[part])) for part in parts]

    def split(self, labels, num_clients, rng):
        if self.cut:
            return np.array_split(np.argsort(labels, kind="stable"), num_clients)
        groups, group_of, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        if len(groups) < num_clients:
            expected = f"expected at most the number of groups in train/{self.by}, {len(groups)}"
            raise UserError(f"clients = {num_clients}: {expected}")
        client_of, num_samples = np.zeros(len(groups), dtype=int), np.zeros(num_clients, dtype=int)
        for group in np.argsort(-sizes, kind="stable"):
            client_of[group] = num_samples.argmin()
            num_samples[client_of[group]] += sizes[group]
        return [np.flatnonzero(client_of[group_of] == client) for client in range(num_clients)]


def _in_words(groups):
    words = [group.decode(errors="replace") if isinstance(group, bytes) else str(group) for group in groups]
    return ", ".join(words) if len(words) <= 3 else f"{words[0]}, {words[1]} and {len(words) - 2} more"
