"""The imbalanced binary version of a classification data set."""

import numpy as np

from fedmpi.data.source import Source
from fedmpi.ground.errors import UserError
from fedmpi.ground.streams import generator


class ImbalancedBinary(Source):
    """A data set whose lower half of classes is negative (0) and partly removed, the upper half positive (1).

    Of every negative class, a random ⌊(1 - removed_share) n_c⌋ of the n_c training samples remain; the test
    set is unchanged. The column "labels", by which partitions split, contains the original classes, so that
    ``stride`` deals them as in the paper.

    Args:
        source: any `Source`; its number of classes is the attribute `num_original_classes`.
        removed_share: of each negative class, in [0, 1).
        seed: of the run; the stream (seed, "imbalance") decides which samples remain.

    Raises:
        UserError: if no training sample remains.

    Source: "On the Convergence of Federated Deep AUC Maximization", section on data: 0.8 is removed.
    """

    def __init__(self, source, removed_share, seed):
        self._source, classes = source, source.labels["train"]
        first_positive = source.num_classes // 2
        rng = generator(seed, "imbalance")
        remaining = [np.flatnonzero(classes >= first_positive)]
        for negative in range(first_positive):
            samples = np.flatnonzero(classes == negative)
            num_remaining = int((1 - removed_share) * len(samples) + 1e-9)
            remaining.append(rng.permutation(samples)[:num_remaining])
        if not sum(map(len, remaining)):
            raise UserError(
                f"{source.name}: no training sample remains after removing a share of {removed_share} of every class "
                f"below {first_positive}: use a smaller share or a data set with samples of the other classes"
            )
        self.num_original_classes = source.num_classes
        # split -> [n] samples of the source that are in this version, sorted
        self._samples = {"train": np.sort(np.concatenate(remaining)), "test": np.arange(len(source.labels["test"]))}
        self._classes = classes[self._samples["train"]]
        labels = {split: (source.labels[split][samples] >= first_positive).astype(np.int64)
                  for split, samples in self._samples.items()}  # fmt: skip
        super().__init__(source.name, labels, source.shape, 2, source.mean, source.std, source.dtype,
                         source.classes_declared, source.rows_at_once)  # fmt: skip
        self.path, self.attributes = source.path, source.attributes

    def read(self, split, indices):
        return self._source.read(split, self._samples[split][indices])

    def file_rows(self, indices):
        return self._source.file_rows(self._samples["train"][indices])

    def column(self, name, split="train"):
        if name == "labels":
            return self._classes if split == "train" else self._source.labels[split]
        return self._source.column(name, split)[self._samples[split]]
