"""The base of all partitions, and the file that records how a run split its data."""

import dataclasses
import io

import h5py
import numpy as np

from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.own_files import replacing
from fedmpi.ground.settings import check, setting
from fedmpi.ground.streams import generator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partition:
    """Base of all partitions.

    A partition is called as `partition(labels, num_clients, seed)`. `labels` [n] are the labels of the
    training set in file order, or another column that the partition names in `column`. The result is one
    sorted int64 array of sample indices per client. It draws random numbers from the stream (seed, "partition")
    only. `deal` does the same for one round of a run that redistributes its samples.

    Raises:
        UserError: if the data cannot be split this way, or a client gets fewer than `min_samples` samples.
    """

    min_samples: int = setting(1, "the run does not start if a client has fewer samples than this", least=1)
    redeal: bool = setting(
        False,
        "in every round, distribute all training samples again among the clients that take part in it (only task "
        "classification with one data file for all clients)",
    )

    column = "labels"  # the data set train/<column> of the file that decides the split
    by_class = False  # whether it gives clients different classes, so that data of a single class cannot be split by it

    def __post_init__(self):
        check(self, "partition.")

    def __call__(self, labels, num_clients, seed):
        return self._parts(self.split, np.asarray(labels), num_clients, generator(seed, "partition"))

    def deal(self, labels, clients, seed, round_index):
        """client -> sorted int64 sample indices: the samples, dealt to the clients of a round.

        It draws from the stream (seed, "deal", round) only. Which client gets which part is random.

        Args:
            labels: [n] values of the column. clients: numbers of the round's participants.
            seed: of the run. round_index: from 0.

        Raises:
            UserError: as when the partition is called.
        """
        rng = generator(seed, "deal", round_index)
        parts = self._parts(self.split_round, np.asarray(labels), len(clients), rng)
        return {client: parts[position] for client, position in zip(clients, rng.permutation(len(clients)))}

    def split_round(self, labels, num_clients, rng):
        """As `split`, for one round of many: which samples are favoured or left out may be drawn anew in each."""
        return self.split(labels, num_clients, rng)

    def _parts(self, split, labels, num_clients, rng):
        """One sorted int64 array of sample indices per client, of those that `split` gives."""
        if num_clients > len(labels):
            raise UserError(f"clients = {num_clients}: expected at most one per training sample, {len(labels)}")
        parts = [np.sort(np.asarray(part, dtype=np.int64)) for part in split(labels, num_clients, rng)]
        for client, part in enumerate(parts):
            if len(part) < self.min_samples:
                raise UserError(
                    f"partition gives client {client} of {num_clients} only {len(part)} samples: expected at least "
                    f"{self.min_samples}; use fewer clients, another seed or another partition"
                )
        return parts

    def split_source(self, source, num_clients, seed):
        """One sorted int64 array per client: the training set of a `fedmpi.data.source.Source`, split by `column`.

        If the data have groups, they are dealt as samples are, each by its most frequent value.
        """
        values, groups = source.column(self.column), source.groups()
        partition = self.for_data_set(source.name)
        if groups is None:
            return partition(values, num_clients, seed)
        parts = partition(most_frequent(values, groups), num_clients, seed)
        return [np.flatnonzero(np.isin(groups, part)) for part in parts]

    def split_test_set(self, source, parts):
        """One sorted int64 array per client: the rows of the test set that are like the client's training rows.

        Of every value of the column that decides the split, a client gets the share of the test rows that it has of
        the training rows; every client gets at least one row.

        Args:
            source: see `split_source`. parts: what it returned.

        Raises:
            UserError: if the test set lacks the column, or has no row for a client.
        """
        return _follow(parts, source.column(self.column), source.column(self.column, "test"), self.column)

    def names(self, source, parts):
        """One name per client, by what its samples have in common; None if this partition gives clients no names."""
        return None

    def for_data_set(self, name):
        """This partition with the settings that its paper uses for data set `name`; unchanged if there are none."""
        return self

    def split(self, labels, num_clients, rng):
        """One array of sample indices per client, in any order; every partition implements it.

        Args:
            labels: [n] values of the column. num_clients: N, at most n. rng: a `numpy.random.Generator`.
        """
        raise NotImplementedError


def most_frequent(values, groups):
    """[m] the most frequent value of each group, of values [n] and the samples' groups [n], numbers from 0 to m - 1."""
    known, codes = np.unique(values, return_inverse=True)
    counts = np.zeros((groups.max() + 1, len(known)), int)
    np.add.at(counts, (groups, codes), 1)
    return known[counts.argmax(1)]


def _follow(parts, values, test_values, column):
    """See `Partition.split_test_set`; `values` and `test_values` are those of the column in the two sets.

    The test rows of each value are dealt one by one, each to the client to which most is owed by then. A client that
    got no row takes one of its values from the client that has most.
    """
    known, codes = np.unique(values, return_inverse=True)
    counts = np.stack([np.bincount(codes[part], minlength=len(known)) for part in parts])  # [clients, values]
    test_codes = _nearest(known, test_values)
    owners = np.full(len(test_values), -1)  # client of each test row
    owed = np.zeros(len(parts))  # its share of the test rows so far, minus the rows that it has
    for code in np.unique(test_codes[test_codes >= 0]):
        rows, holders = np.flatnonzero(test_codes == code), np.flatnonzero(counts[:, code])
        if not len(holders):
            continue  # of a value that belongs to no client
        owed[holders] += len(rows) * counts[holders, code] / counts[holders, code].sum()
        for row in rows:
            owners[row] = holders[owed[holders].argmax()]
            owed[owners[row]] -= 1
    for client in np.flatnonzero(np.bincount(owners[owners >= 0], minlength=len(parts)) == 0):
        like = np.flatnonzero((test_codes >= 0) & (counts[client, test_codes] > 0))
        sizes = np.bincount(owners[owners >= 0], minlength=len(parts))
        if not len(like) or sizes[owners[like]].max() < 2:
            raise UserError(
                f"client {client} gets no test row: the test set has too few rows with this client's values of "
                f"{column}: use fewer clients, another partition or a larger test set"
            )
        owners[like[sizes[owners[like]].argmax()]] = client
    return [np.flatnonzero(owners == client) for client in range(len(parts))]


def _nearest(known, values):
    """[n] position in the sorted array `known` of each value: of the nearest number; of the same word, or -1."""
    right = np.searchsorted(known, values).clip(0, len(known) - 1)
    if known.dtype.kind in "SUO":
        return np.where(known[right] == values, right, -1)
    left = (right - 1).clip(0)
    is_left_nearer = np.abs(known[left] - values.astype(float)) < np.abs(known[right] - values.astype(float))
    return np.where(is_left_nearer, left, right)


def write_partition(path, parts, data, unit="rows"):
    """Write an HDF5 file that records which client has which part of a data set.

    The file has one data set client_<i> per client, and the attributes `data` and `unit`.

    Args:
        path: of the new file. parts: one integer array per client. data: name of the data set.
        unit: "rows": a part is [n], the row numbers of its samples in the file's training set.
            "words": a part is [2], the number of its first word in the training text and the number
            of the word after its last one.

    Raises:
        UserError: if the file cannot be written.
    """
    content = io.BytesIO()  # in memory first: the HDF5 library crashes if the disk fills up while it writes
    with h5py.File(content, "w") as file:
        file.attrs["data"], file.attrs["unit"] = data, unit
        for client, part in enumerate(parts):
            file[f"client_{client}"] = part
    with attempt("write", path), replacing(path) as part:
        part.write_bytes(content.getbuffer())
