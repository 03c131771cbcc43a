"""Classification of images or feature vectors with cross entropy."""

import dataclasses

import numpy as np
import torch
from torch.nn import functional

from fedmpi.data.source import open_source
from fedmpi.settings import setting
from fedmpi.tasks.base import LoadedTask, Task

EVALUATION_BATCH = 1000  # samples; larger ones gain nothing and cost memory


@dataclasses.dataclass(frozen=True)
class Classification(Task):
    """Train a classifier on a labelled data set that is split over the clients."""

    data: str = setting("digits", "data set: digits (embedded), a name in --data-dir, or a path ending in .h5")

    def load(self, place, partition):
        source = open_source(self.data, place.data_dir)
        parts = partition(source.labels["train"], place.num_clients, place.seed)
        num_test = len(source.labels["test"])
        edges = [num_test * rank // place.num_ranks for rank in (place.rank, place.rank + 1)]
        return LoadedClassification(
            source,
            {client: Samples.read(source, "train", parts[client], place) for client in place.clients},
            Samples.read(source, "test", np.arange(*edges), place),
            place.num_clients,
        )


class Samples:
    """Rows of a data set in memory as they are in the file (uint8 images stay bytes).

    Args:
        rows: [n, ...] tensor; images are [n, height, width] or [n, height, width, channels].
        labels: [n] int64 tensor.
        scale, shift: 0-d or [channels]; an input is row * scale + shift.
    """

    def __init__(self, rows, labels, scale, shift):
        self._rows, self._labels, self._scale, self._shift = rows, labels, scale, shift
        self.num = len(labels)

    @classmethod
    def read(cls, source, split, indices, place):
        """The samples of a source at sorted `indices`, on the place's device."""
        rows = torch.from_numpy(source.read(split, indices))
        per_value = 255.0 if rows.dtype == torch.uint8 else 1.0
        mean, std = (torch.tensor(values, dtype=place.dtype).squeeze() for values in (source.mean, source.std))
        labels = torch.from_numpy(source.labels[split][indices])
        moved = [t.to(place.device) for t in (rows, labels, 1 / (per_value * std), -mean / std)]
        return cls(*moved)

    def at(self, indices):
        """(inputs, labels) at int64 `indices`: gathered as bytes, then scaled; images channels first."""
        inputs = self._rows.index_select(0, indices).to(self._scale.dtype).mul_(self._scale).add_(self._shift)
        if inputs.dim() == 3:
            inputs = inputs.unsqueeze(1)
        elif inputs.dim() == 4:
            inputs = inputs.permute(0, 3, 1, 2)  # in memory channels last, as convolutions like it
        return inputs, self._labels.index_select(0, indices)

    def all(self):
        """(inputs, labels) of all samples, in batches."""
        for start in range(0, self.num, EVALUATION_BATCH):
            indices = torch.arange(start, min(start + EVALUATION_BATCH, self.num), device=self._labels.device)
            yield self.at(indices)


class LoadedClassification(LoadedTask):
    """See `LoadedTask`. Metrics: train_loss, test_loss, accuracy."""

    goal = ("accuracy", 1)

    def __init__(self, source, train, test, num_clients):
        self._train, self._test, self._num_clients = train, test, num_clients
        self.num_classes = source.num_classes
        channels_first = (1, *source.shape) if len(source.shape) == 2 else (source.shape[-1], *source.shape[:-1])
        self.shape = channels_first if len(source.shape) > 1 else source.shape
        self.default_model = {"mnist": "mnist_cnn", "fashion_mnist": "fashion_cnn"}.get(source.name, "mlp")

    def num_samples(self, client):
        return self._train[client].num

    def batch(self, client, indices):
        return self._train[client].at(indices)

    def loss(self, module, batch):
        inputs, labels = batch
        return functional.cross_entropy(module(inputs), labels)

    def evaluate(self, module, link):
        objective = sum(_sums(module, samples)[0] / samples.num for samples in self._train.values())
        test_loss, correct = _sums(module, self._test)
        total = link.gather(np.array([objective, test_loss, correct, self._test.num])).sum(0)
        return {
            "train_loss": total[0] / self._num_clients,
            "test_loss": total[1] / total[3],
            "accuracy": total[2] / total[3],
        }


def _sums(module, samples):
    """(sum of losses, number of correct answers) over all samples."""
    loss, correct = 0.0, 0
    for inputs, labels in samples.all():
        scores = module(inputs)
        loss += functional.cross_entropy(scores, labels, reduction="sum").item()
        correct += (scores.argmax(1) == labels).sum().item()
    return loss, correct
