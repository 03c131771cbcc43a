"""Segmentation: the class of each pixel of an image."""

import dataclasses
import json
import math

import h5py
import numpy as np
import torch
from torch.nn import functional

from fedmpi.data.common_words import check_equal_words
from fedmpi.data.partitions.base import write_partition
from fedmpi.data.samples import input_shape
from fedmpi.data.source import HDF5Source, find_file, pool_normalisation
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.hdf5 import files_of, readable
from fedmpi.ground.files.run_files import PARTITION
from fedmpi.ground.settings import setting
from fedmpi.ground.streams import generator
from fedmpi.tasks.custom import LoadedOwnTask, Task
from fedmpi.tasks.files import common_files, has_own_files, own_file, own_files_setting


def _accuracy(counts):
    return int(counts.diagonal().sum()) / int(counts.sum())


def _dice(counts):
    """`counts`: [classes, classes] numbers of pixels by their class (row) and the answer (column)."""
    of_class, answered, right = counts.sum(1).tolist(), counts.sum(0).tolist(), counts.diagonal().tolist()
    found = [2 * right[k] / (answered[k] + of_class[k]) for k in range(1, len(counts)) if of_class[k]]
    return sum(found) / len(found) if found else math.nan


@dataclasses.dataclass(frozen=True)
class Segmentation(Task):
    """Train a network that gives each pixel scores of classes, [n, classes, height, width], with cross entropy.

    The data are those of `data prepare --masks`; clients get random shares of one file, or have a file each. Metrics:
    accuracy (share of right pixels) and dice, the mean of the Dice coefficients of all classes but the first that some
    test pixel has (nan if none has any).
    """

    data: str = setting(
        "", "data set with masks: a name, a path ending in .h5, or one file per client; --data is short"
    )

    own_files: bool = own_files_setting()

    goal = ("dice", 1)
    outputs = "scores"
    metrics = {"accuracy": _accuracy, "dice": _dice}
    takes = {"accuracy": "counts", "dice": "counts"}

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

    def predict(self, model, batch):
        return model(batch[0]).argmax(1), batch[1]

    def crosses(self, is_personal, scores="auto"):
        of_files = {"test counts", "blind words"} if has_own_files(self) else set()
        return super().crosses(is_personal, scores) | {"scales"} | of_files

    def common_files(self, context):
        return common_files(self, context)

    def load(self, context, partition):
        return LoadedSegmentation(self, context)


class Pixels(torch.utils.data.Dataset):
    """(input [channels, ...], mask [...]) of each sample; `normalisation`, once it is set, is a pair (mean, std)."""

    normalisation = ((0.0,), (1.0,))

    def __init__(self, source, split, rows):
        self._images = source.read(split, rows)
        with readable(source.path) as file:
            masks = file.get(f"{split}/masks")
            if not isinstance(masks, h5py.Dataset) or masks.shape[:1] != source.labels[split].shape:
                raise UserError(f"{source.path}: lacks {split}/masks, one per image: see data prepare --masks")
            self._masks = masks[:][rows]

    def __len__(self):
        return len(self._masks)

    def __getitem__(self, index):
        image, (mean, std) = self._images[index], self.normalisation
        values = image / np.float32(255 if image.dtype == np.uint8 else 1)
        values = (values - np.float32(mean)) / np.float32(std)
        values = values[None] if values.ndim == 2 else np.moveaxis(values, -1, 0)
        return torch.from_numpy(np.ascontiguousarray(values)), torch.from_numpy(self._masks[index].astype(np.int64))


class LoadedSegmentation(LoadedOwnTask):
    """See `LoadedOwnTask`. Args: task: a `Segmentation`. context: a `RankContext`."""

    def __init__(self, task, context):
        is_shared = not has_own_files(task)
        of = (lambda _: find_file(task.data, context.data_dir)) if is_shared else (lambda k: own_file(task, context, k))
        opened = {}  # path -> source
        self._sources = [opened.setdefault(of(k), HDF5Source(of(k), tested=is_shared)) for k in context.clients]
        self._sets, self._rows_of = [], None
        if is_shared:
            order = generator(context.seed, "partition").permutation(len(self._sources[0].labels["train"]))
            self._rows_of = [np.sort(order[client :: context.num_clients]) for client in range(context.num_clients)]
        own_sources = opened.values() if not is_shared or context.rank == 0 else ()
        self._files = [file for source in own_sources for file in files_of(source.path)]

        def pixels(client, num_clients, split):
            source = self._sources[context.clients.index(client)]
            rows = np.arange(len(source.labels[split]))
            if not len(rows):
                return None
            if is_shared and split == "train":
                rows = self._rows_of[client]
            self._sets.append(Pixels(source, split, rows))
            return self._sets[-1]

        first = context.clients[0]
        tests = {"test_of": lambda k, n: pixels(k, n, "test")}
        tests = {"test": lambda: pixels(first, 1, "test")} if is_shared else tests
        members = {"train": lambda k, n: pixels(k, n, "train"), **tests, "num_classes": self._sources[0].num_classes}
        super().__init__(type(task).of("Segmentation", **members)(**vars(task)), context)
        self.data = task.data

    def data_files(self):
        return self._files

    def write_split(self, folder):
        if self._rows_of is not None:
            write_partition(folder / PARTITION, self._rows_of, self.data)

    def synchronise(self, link):
        super().synchronise(link)
        if self.has_own_tests:
            check_equal_words(link, [_class_names(source) for source in self._sources], self.data)
        mean, std = pool_normalisation(link, self.data, self._sources)
        for pixels in self._sets:
            pixels.normalisation = (mean, std)

    def describe_inputs(self):
        source, (mean, std) = self._sources[0], self._sets[0].normalisation
        per_value = 255 if source.dtype == np.uint8 else 1
        classes = [*map(str, source.attributes.get("class_names", range(source.num_classes)))]
        facts = {"shape": list(input_shape(source.shape)), "divide_by": per_value, "mean": list(mean), "std": list(std)}
        return {"input": facts, "outputs": "pixels", "class_names": classes}


def _class_names(source):
    """What of a client's file must be equal in the files of all clients, see `check_equal_words`."""
    names = source.attributes.get("class_names")
    return {} if names is None else {"class names": json.dumps([*map(str, names)])}
