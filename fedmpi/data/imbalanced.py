"""The imbalanced binary version of a classification data set."""

import numpy as np

from fedmpi.data.source import Source
from fedmpi.errors import UserError
from fedmpi.streams import generator


class ImbalancedBinary(Source):
    """A data set whose lower half of classes is negative (0) and partly removed, the upper half positive (1).

    Of every negative class a random ⌊(1 - removed_share) n_c⌋ of the training samples stay; the test
    set is untouched. The column "labels", by which partitions split, holds the original classes, so
    ``stride`` deals them as in the paper.

    Args:
        source: any `Source`; it has `num_original_classes`. removed_share: of each negative class, in [0, 1).
        seed: of the run; what stays is the stream (seed, "imbalance").

    Source: "On the Convergence of Federated Deep AUC Maximization", section on data: 0.8 is removed.
    """

    def __init__(self, source, removed_share, seed):
        self._source, classes = source, source.labels["train"]
        first_positive = source.num_classes // 2
        draw = generator(seed, "imbalance")
        kept = [np.flatnonzero(classes >= first_positive)]
        for negative in range(first_positive):
            samples = np.flatnonzero(classes == negative)
            number = int((1 - removed_share) * len(samples) + 1e-9)
            kept.append(draw.permutation(samples)[:number])
        if not sum(map(len, kept)):
            raise UserError(
                f"{source.name}: no training sample stays where {removed_share} of every class "
                f"below {first_positive} is removed"
            )
        self.num_original_classes = source.num_classes
        self._kept = {"train": np.sort(np.concatenate(kept)), "test": np.arange(len(source.labels["test"]))}
        self._classes = classes[self._kept["train"]]
        super().__init__(
            name=source.name,
            labels={
                split: (source.labels[split][kept] >= first_positive).astype(np.int64)
                for split, kept in self._kept.items()
            },
            shape=source.shape,
            num_classes=2,
            mean=source.mean,
            std=source.std,
            dtype=source.dtype,
            classes_declared=source.classes_declared,
            rows_at_once=source.rows_at_once,
        )

    def read(self, split, indices):
        return self._source.read(split, self._kept[split][indices])

    def file_rows(self, indices):
        return self._source.file_rows(self._kept["train"][indices])

    def column(self, name):
        return self._classes if name == "labels" else self._source.column(name)[self._kept["train"]]
