"""The task of torch's Datasets, one per client, which a Python program gives as objects."""

import dataclasses
import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from fedmpi.data.holdout import hold_out
from fedmpi.data.samples import Samples
from fedmpi.data.source import SPLITS, check_labels
from fedmpi.ground.errors import UserError
from fedmpi.ground.generators import seed_all
from fedmpi.ground.settings import setting
from fedmpi.ground.streams import derive
from fedmpi.ground.text import short
from fedmpi.tasks.classification import LoadedClassification
from fedmpi.tasks.custom import Task, checked, fetch_item
from fedmpi.tasks.same_tests import check_same_tests

IN_MEMORY = (TensorDataset, np.ndarray, torch.Tensor, list, tuple)  # whose items never change
LOSSES = {"squared": functional.mse_loss, "absolute": functional.l1_loss, "huber": functional.huber_loss}
SK, READING = "sklearn.metrics.", ("workers", "prefetch", "measured_samples")
KINDS = {"classification": (), "regression": (*READING, "criterion"), "multilabel": READING}  # of targets -> settings
MEMBERS = {
    "classification": {"can_hold_out": True},
    "regression": {
        "outputs": "values",
        "allowed": "a finite number, or a vector of them",
        "metrics": {"r2": f"{SK}r2_score", "mean_absolute_error": f"{SK}mean_absolute_error"},
    },
    "multilabel": {
        "outputs": "scores",
        "allowed": "a vector of zeros and ones",
        "metrics": {"f1": (f"{SK}f1_score", {"average": "macro"}), "exact_matches": f"{SK}accuracy_score"},
    },
}


def task_of(task, data, test_data, cache):
    """The `Datasets` that `fedmpi.train` is given. `task`: one of `KINDS`, a dict of it and its settings, or None.

    Raises:
        UserError: if there is no such kind, or it has no such setting, or not this value.
    """
    settings = {**task} if isinstance(task, Mapping) else {"name": task}
    kind = settings.pop("name", None) or "classification"
    if kind not in [*KINDS]:
        kinds = ", ".join(map(repr, KINDS))
        raise UserError(f"task, beside data = [one Dataset per client]: expected {kinds}, or none for classification")
    if cache and kind != "classification":
        raise UserError(f"cache: task {kind} reads each item when it is needed: leave it out, or give TensorDatasets")
    for name in settings:
        if name not in KINDS[kind]:
            known = ", ".join(KINDS[kind]) or "none, beside data = [one Dataset per client]"
            raise UserError(f"task {kind} has no setting {name}: expected {known}")
    return Datasets(**settings, kind=kind, train_sets=data, test_set=test_data, cache=cache)


@dataclasses.dataclass(frozen=True)
class Datasets(Task):
    """Learn from one `torch.utils.data.Dataset` per client, whose items are (input, target).

    Of classes, bytes are divided by 255, as those of files. Datasets whose items are in memory (see `IN_MEMORY`) are
    read once and held there as float32. Another Dataset may transform its items at random: it is read once for its
    labels and then in every pass. Of other targets, items are read as those of every `Task`.

    Args:
        kind: what the targets are, one of `KINDS`: classes, whole numbers from 0; for "regression" numbers or vectors;
            for "multilabel" vectors of zeros and ones. The model has an output per class or number, or a logit per
            label.
        train_sets: a sequence with one Dataset per client (those of other ranks' clients may be None), or a function
            of a client's number that makes it. test_set: a Dataset that all ranks have, or None.
        cache: whether all of them are held in memory.
    """

    name = "datasets"
    is_base = True  # not in the list of tasks
    model = "mlp"

    kind: str = setting("classification", "what the targets are", among=KINDS, role="problem")
    criterion: str = setting("squared", "the loss: mean difference, huber with delta = 1", among=LOSSES, role="problem")
    train_sets: Any = None
    test_set: Any = None
    cache: bool = False

    def __post_init__(self):
        super().__post_init__()
        for name, value in MEMBERS[self.kind].items():
            object.__setattr__(self, name, value)

    def train(self, client, num_clients):
        return self.train_sets(client) if callable(self.train_sets) else self.train_sets[client]

    def test(self):
        return self.test_set

    def crosses(self, is_personal, scores="auto"):
        if self.kind != "classification":
            return super().crosses(is_personal, scores)
        return {"file facts", "class counts", "labels", *(["test counts"] if is_personal else [])}

    def load(self, context, partition):
        number = context.num_clients
        if not callable(self.train_sets) and len(self.train_sets) != number:
            raise UserError(f"data: {len(self.train_sets)} Datasets for {number} clients: expected one for each")
        sets = {f"data of client {client}": self.train(client, number) for client in context.clients}
        if self.kind == "classification":
            return self._load_classes(context, sets)
        sets["test_data"] = self.test_set
        targets = [self._first_target(*pair) for pair in sets.items() if pair[1] is not None]
        if len({target.shape for target in targets}) > 1:
            shapes = [list(target.shape) for target in targets]
            raise UserError(f"data: targets of the shapes {shapes}: expected one shape")
        object.__setattr__(self, "num_classes", targets[0].numel())  # the outputs of models that are chosen by name
        return super().load(context, partition)

    def predict(self, model, batch):
        """(outputs, targets), of one shape.

        Raises:
            UserError: if the model has more or fewer outputs than there are targets.
        """
        inputs, targets = batch
        outputs = model(inputs)
        if outputs.numel() != targets.numel():
            given, expected = list(outputs.shape), list(targets.shape)
            raise UserError(f"task {self.kind}: the model's outputs are {given}: expected {expected}, as the targets")
        return outputs.reshape(targets.shape), targets.to(outputs.dtype)

    def loss(self, model, batch):
        are_labels = self.kind == "multilabel"
        measure = functional.binary_cross_entropy_with_logits if are_labels else LOSSES[self.criterion]
        return measure(*self.predict(model, batch))

    def _first_target(self, name, dataset):
        """The target of a Dataset's first item as a tensor."""
        try:
            inputs, target = dataset[0]
            target = torch.as_tensor(target)
            is_right = bool(target.isfinite().all()) and target.dim() <= 1 and not target.is_complex()
            is_label = target.dim() == 1 and bool(((target == 0) | (target == 1)).all())
        except Exception as error:  # noqa: BLE001  the user's Dataset can raise anything
            raise UserError(f"{name}, item 0: expected (input, target): {short(error)}") from None
        if not (is_label if self.kind == "multilabel" else is_right):
            raise UserError(f"{name}, item 0 has the target {short(target.tolist(), 80)}: expected {self.allowed}")
        if isinstance(inputs, torch.Tensor) and inputs.dtype == torch.uint8:
            raise UserError(f"{name}: the inputs are bytes (uint8): expected them divided by 255")
        return target

    def _load_classes(self, context, sets):
        """See `load`. sets: name of each of this rank's clients, for messages -> its Dataset."""
        train = dict(zip(context.clients, (self._items(dataset, name) for name, dataset in sets.items())))
        num_tests = 0 if self.test_set is None else len(checked(self.test_set, "test_data"))
        num_parts, own_parts = context.num_ranks, [context.rank]
        if context.is_personal:  # a part per client, which its own model is tested on
            num_parts, own_parts = context.num_clients, context.clients
        tests = [np.arange(num_tests * part // num_parts, num_tests * (part + 1) // num_parts) for part in own_parts]
        everything = np.concatenate(tests)
        test = self._items(self.test_set, "test_data", everything) if len(everything) else None
        loaded = LoadedDatasets(context, train, test, num_tests, tests)
        loaded.common_test = self.test_set
        return loaded

    def _items(self, dataset, name, indices=None):
        """(inputs, labels [n], whether inputs are bytes, number of declared classes) of the items at `indices` or all.

        The inputs are `_Items`, if they change.
        """
        indices = np.arange(len(checked(dataset, name))) if indices is None else indices
        keeps = self.cache or _is_in_memory(dataset)
        inputs, labels, are_bytes = _read(dataset, name, indices, keeps=keeps)
        return (
            (inputs if keeps else _Items(dataset, name, indices, inputs.shape[1:])),
            labels,
            are_bytes,
            _declared(dataset),
        )


@dataclasses.dataclass(frozen=True)
class _Items:
    """Inputs that are read from a Dataset at every use: the items at `indices`, each of some shape."""

    dataset: Any
    name: str
    indices: np.ndarray
    shape_of_item: tuple

    @property
    def shape(self):
        return (len(self.indices), *self.shape_of_item)

    def __getitem__(self, chosen):
        return dataclasses.replace(self, indices=self.indices[chosen])


class LoadedDatasets(LoadedClassification):
    """See `LoadedClassification`.

    Args:
        context: a `RankContext`. train: client -> (inputs, labels, whether they are bytes, number of declared classes).
            test: the same of this rank's share of the test set, or None.
        num_tests: number of test samples. test_rows: which of them this rank has, in parts.
    """

    default_model = "mlp"
    weighs_classes = "the loss of a task of your own (fedmpi.Task) can weigh classes"
    common_test = None  # the Dataset of which each rank has a share
    _attributes = {}

    def __init__(self, context, train, test, num_tests, test_rows):
        self._context, self._augmentation, self._transform = context, None, None
        self._files = []
        self._bytes, declared = zip(*(dataset[2:] for dataset in [*train.values(), *([test] if test else [])]))
        train, test = {client: dataset[:2] for client, dataset in train.items()}, test and test[:2]
        first = next(iter(train.values()))[0]
        self.shape = tuple(first.shape[1:])
        tests = [test] if test else []
        pairs = [*train.values(), *tests]
        odd = next((inputs for inputs, _ in pairs if tuple(inputs.shape[1:]) != self.shape), None)
        if odd is not None:
            raise UserError(f"data: inputs are {list(self.shape)} and {list(odd.shape[1:])}: expected one shape")
        self.num_classes = max(*declared, *(1 + int(labels.max()) for _, labels in pairs))
        labels = [
            np.concatenate([np.empty(0, int), *(labels for _, labels in part)]) for part in (train.values(), tests)
        ]
        self._sources = [SimpleNamespace(labels=dict(zip(SPLITS, labels)), classes_declared=any(declared), path="data")]
        samples = functools.partial(_samples, context)
        self._is_read_anew = any(isinstance(inputs, _Items) for inputs, _ in pairs)
        self.random_batches = self.user_batches = self._is_read_anew
        own = {client: hold_out(len(pair[1]), context.holdout, context.seed, client) for client, pair in train.items()}
        self._train = {client: samples(*train[client], training) for client, (training, _) in own.items()}
        self._labels = {client: part.labels.cpu().numpy() for client, part in self._train.items()}
        self._held = [samples(*train[client], held) for client, (_, held) in own.items()]
        starts = np.cumsum([0, *map(len, test_rows)])
        places = [np.arange(start, start + len(rows)) for start, rows in zip(starts, test_rows)]
        self._tests = [samples(*test, part) for part in places] if test else []
        self._test_parts = [(0, 1, num_tests, rows) for rows in test_rows]
        self._count()

    def synchronise(self, link):
        check_same_tests(link, self.common_test)
        if len(np.unique(link.allgatherv(np.array(self._bytes, float), "file facts"))) > 1:
            raise UserError(
                "data: the inputs of some clients are bytes (uint8), those of others not: expected one type"
            )
        self.num_classes = int(link.allgather([self.num_classes], "file facts").max())
        check_labels(link, "data", self._sources, self.num_classes)
        self._warn_of_rare_classes(link)
        self._labels = None

    def write_split(self, folder):
        """Nothing to write: the program that made the Datasets knows."""

    def describe_inputs(self):
        return {
            "input": {"shape": list(self.shape), "divide_by": 255 if self._bytes[0] else 1, "mean": [0.0], "std": [1.0]}
        }

    @property
    def reading(self):
        return "read in every pass; cache=True would keep them in memory" if self._is_read_anew else "kept in memory"


def _samples(context, inputs, labels, chosen=slice(None)):
    """The `Samples` at `chosen` of inputs [n, ...] and `labels` [n], on the context's device unless they are read."""
    scale = torch.ones((), dtype=context.dtype, device=context.device)
    inputs, labels = inputs[chosen], labels[chosen]
    if isinstance(inputs, _Items):
        return _ReadSamples(inputs, labels, scale, torch.zeros_like(scale))
    device = context.device_of_data(inputs.numel() * context.dtype.itemsize + labels.nbytes)
    return _TensorSamples(inputs.to(device, context.dtype), labels.to(device), scale, torch.zeros_like(scale))


class _TensorSamples(Samples):
    """Inputs that are ready for the module."""

    def at(self, indices, augmentation=None, transform=None):
        return self._gather(self._rows, indices), self._gather(self.labels, indices)


class _ReadSamples(Samples):
    """Samples that are read anew at every use; each draws from generators with a seed of its own."""

    def at(self, indices, augmentation=None, transform=None):
        # The oracle has seeded the generator by the client and the draw: the item's number completes the key.
        items, draw = self._rows[indices.numpy()], torch.initial_seed()
        inputs, labels, _ = _read(items.dataset, items.name, items.indices, draw)
        torch.default_generator.manual_seed(draw)
        return inputs.to(self._scale), labels.to(self._scale.device)

    def take(self, indices):
        return type(self)(self._rows[indices], self.labels[indices], self._scale, self._shift)

    def all(self):
        torch.default_generator.manual_seed(derive(0, "evaluation", self._rows.name))  # the same in every evaluation
        yield from super().all()


def _is_in_memory(dataset):
    if type(dataset) is ConcatDataset:
        return all(map(_is_in_memory, dataset.datasets))
    return _is_in_memory(dataset.dataset) if type(dataset) is Subset else type(dataset) in IN_MEMORY


def _declared(dataset):
    """Number of classes that a Dataset declares by its attribute `classes`, as those of torchvision do; or 0."""
    inner = dataset.dataset if type(dataset) is Subset else dataset
    classes = getattr(inner, "classes", None)
    return len(classes) if isinstance(classes, list | tuple) else 0


def _read(dataset, name, indices, draw=None, keeps=True):
    """(inputs [n, ...] float32, labels [n] int64, whether inputs are bytes) of the items of a Dataset at `indices`.

    Bytes are divided by 255.

    Args:
        draw: number from which the generators are seeded, item by item; None: they are not.
        keeps: whether all inputs are returned; otherwise only the first one is.
    """
    inputs, labels, kinds = [], [], set()
    for index in indices.tolist():
        if draw is not None:
            seed_all(derive(draw, index), torch.device("cpu"))
        item = fetch_item(dataset, index, name)
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UserError(f"{name}, item {index} is a {type(item).__name__}: expected (input, label)")
        try:
            given = item[0]
            if isinstance(given, np.ndarray) and not given.dtype.isnative:
                given = given.astype(given.dtype.newbyteorder("="))
            given = torch.as_tensor(given, device="cpu").to_dense()
            kinds.add(given.dtype == torch.uint8)
            if len(kinds) > 1:
                raise UserError(
                    f"{name}: some inputs are bytes (uint8), others not: item {index} is {given.dtype}, unlike those "
                    "before: expected one type"
                )
            inputs.append(given.float() / 255 if given.dtype == torch.uint8 else given.float())
            label = torch.as_tensor(item[1])
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise UserError(f"{name}, item {index}: expected numbers as (input, label): {short(error)}") from None
        if label.numel() != 1 or label.is_floating_point() or label.item() < 0:
            raise UserError(f"{name}, item {index} has the label {item[1]}: expected a class, a whole number from 0")
        if not inputs[-1].isfinite().all():
            raise UserError(f"{name}, item {index} has an input that is not finite: expected finite numbers")
        labels.append(int(label))
        if inputs[-1].shape != inputs[0].shape:
            odd, first = list(inputs[-1].shape), list(inputs[0].shape)
            raise UserError(
                f"{name}, item {index} has an input of shape {odd}, item {int(indices[0])} one of {first}: expected "
                "inputs of one shape"
            )
        if not keeps and len(inputs) > 1:
            inputs.pop()
    return torch.stack(inputs), torch.tensor(labels), True in kinds
