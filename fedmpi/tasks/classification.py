"""Classification of images or feature vectors with cross entropy."""

import contextlib
import copy
import dataclasses
import json
import pathlib
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn import functional

from fedmpi.comm.agreement import agree, allgather_lines
from fedmpi.data.common_words import check_equal_words
from fedmpi.data.holdout import hold_out
from fedmpi.data.partitions.base import write_partition
from fedmpi.data.samples import Augmentation, Samples, Transform, check_normalisation, input_shape
from fedmpi.data.shared_file import ClientRows
from fedmpi.data.source import (
    COLUMNS,
    SILO_NAME,
    HDF5Source,
    as_strings,
    check_labels,
    digits_file,
    names_silos,
    open_source,
    pool_normalisation,
    silo_name,
)
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.hdf5 import files_of
from fedmpi.ground.files.run_files import CLIENTS, PARTITION
from fedmpi.ground.registry import command_name
from fedmpi.ground.settings import setting
from fedmpi.ground.streams import generator
from fedmpi.ground.text import Log, short
from fedmpi.tasks.base import BaseTask, LoadedTask, Metrics, Support, of_clients, sums_of_ranks
from fedmpi.tasks.dealt import Dealt
from fedmpi.tasks.files import common_files, has_own_files, own_file, own_files_setting
from fedmpi.tasks.metrics import ANSWERS, by_name, last_layer, or_nan
from fedmpi.tasks.metrics import NAMES as METRIC_NAMES
from fedmpi.tasks.pooling import Facts, Measuring

log = Log(__name__)

RARE = 100  # times as many samples of another class: then a network may ignore a class
NAMES = ("class_names", "feature_names")  # attributes of a data set that are kept beside the model
DEFAULT_MODELS = {
    "mnist": "mnist_cnn",
    "fashion_mnist": "fashion_cnn",
    "cifar10": "cifar_cnn",
    "tiny_imagenet": "resnet18",
}


@dataclasses.dataclass(frozen=True)
class Classification(BaseTask):
    """Train a classifier on a labelled data set that is split over the clients."""

    can_hold_out = True
    can_redeal = True
    outputs = "scores"

    data: str = setting(
        "digits",
        "data set: digits (needs no file), the name of a file in --data-dir, a path ending in .h5, or one file per "
        "client like silo_{client}.h5; short form: --data",
    )
    mean: tuple[float, ...] | None = setting(
        None, "mean of each channel, subtracted from the inputs (pixels / 255), like [0.5]; default: the data set's"
    )
    std: tuple[float, ...] | None = setting(
        None, "deviation of each channel, by which inputs are divided then, like [0.5]; default: the data set's"
    )
    crop_padding: int = setting(0, "pad training images by this many black pixels and crop at random", least=0)
    flip: bool = setting(False, "mirror training images left to right at random")
    transform: str | None = setting(
        None,
        "dotted path of a function that changes one training input, [channels, height, width] with pixels from 0 to 1, "
        "or [features]; applied before mean and std, like mymodule.augment = torchvision.transforms.v2.Compose([...])",
    )

    class_weights: str = setting(
        "equal",
        "weight of a class in every loss: 1 (equal); balanced is scikit-learn's n / (classes * samples of the class), "
        "counted over the training samples of all clients together, without those held out",
        among=("equal", "balanced"),
    )
    metrics: str | None = setting(
        None, f"further metrics of the test set by scikit-learn, separated by commas, of {', '.join(METRIC_NAMES)}"
    )

    own_files: bool = own_files_setting()

    def common_files(self, context):
        if self.data == "digits" and not self.own_files:
            return {"task.data = digits": [digits_file()]}
        return common_files(self, context)

    def crosses(self, is_personal, scores="auto"):
        found = {"file facts", "class counts", *(["metric sums"] if self.metrics else [])}
        by_samples = scores == "samples" or (scores == "auto" and not has_own_files(self))
        found |= {"outputs"} if self.metrics and (by_samples or any("." in name for name in self.metrics)) else set()
        if has_own_files(self):
            return found | {"labels", "scales", "names", "test counts", "blind words"}
        return found | {"samples", *(["test counts"] if is_personal else [])}

    def load(self, context, partition):
        if partition.redeal:
            return _DealtClassification(self, context, partition, *self.open(context, partition))
        return LoadedClassification(self, context, *self.open(context, partition))

    def open(self, context, partition):
        """The data of `LoadedClassification`: sources, parts, rows, tests, names."""
        return (_open_silos if has_own_files(self) else _open_shared)(self, context, partition)

    def version(self, source, seed):
        """The part of a data set that the task trains on, a `Source`: all of it. `seed` is the run's."""
        return source


def _open_shared(task, context, partition):
    """One source that all ranks read: (client -> source, parts of all clients, their rows, test rows, names)."""
    whole = open_source(task.data, context.data_dir)
    for line in whole.oddities() if context.rank == 0 else ():
        log.warning(line)
    source = task.version(whole, context.seed)
    parts = partition.split_source(source, context.num_clients, context.seed)
    rows = ClientRows(source, parts, context.clients, context.rank, context.num_ranks)
    num_test, tests = len(source.labels["test"]), []
    # The test set is cut into one part per rank, or into one per client if each client has a model of its own.
    num_parts, own_parts = context.num_ranks, [context.rank]
    if context.is_personal:
        num_parts, own_parts = context.num_clients, context.clients
    for part in own_parts:
        tests.append((source, np.arange(num_test * part // num_parts, num_test * (part + 1) // num_parts)))
    names = partition.names(source, parts)
    return dict.fromkeys(context.clients, source), parts, rows, tests, names


def _open_silos(task, context, partition):
    """One file per client, of which a rank opens those of its own clients only."""
    name = command_name(type(partition))
    if name != (task.partition or "even") or partition != type(partition)():  # the user chose one
        raise UserError(
            f"partition {name}: silo files {task.data} are split already and stay with their clients: "
            "leave --partition and its settings out"
        )
    files = {client: HDF5Source(own_file(task, context, client), tested=False) for client in context.clients}
    further = silo_name(task.data, context.num_clients, "task.data") if names_silos(task.data) else None
    if context.rank == 0 and further and pathlib.Path(further).is_file():
        clients = f"{context.num_clients} client{'s' if context.num_clients > 1 else ''}"
        log.warning(f"{further} is not used: the run has {clients} (--clients or mpirun -np)")
    names = [", ".join(as_strings(file.attributes.get(SILO_NAME, ""))) for file in files.values()]
    sources = {client: task.version(file, context.seed) for client, file in files.items()}
    everything = {client: np.arange(len(source.labels["train"])) for client, source in sources.items()}
    rows = {client: source.read("train", everything[client]) for client, source in sources.items()}
    tests = [(source, np.arange(len(source.labels["test"]))) for source in sources.values()]
    return sources, everything, SimpleNamespace(collect=lambda link: rows), tests, names


class LoadedClassification(LoadedTask):
    """See `LoadedTask`. Metrics: train_loss, test_loss, accuracy; with held-out data holdout_loss, holdout_accuracy.

    Args:
        settings: a `Classification`. context: a `RankContext`.
        sources: client -> `Source` of each client of this rank.
        parts: client -> indices: of all clients of the federation if they share a file, else of this rank's.
        rows: `rows.collect(link)` gives client -> [n, ...] array.
        tests: [(source, indices)] of this rank's share of the test set; of silo files one per client.
        names: of this rank's clients if they have files of their own, else of all clients, or None.
    """

    goal = ("accuracy", 1)
    is_personal = True
    random_loss = False
    weighs_classes = "--task.class_weights balanced weighs all classes the same in the loss"  # "": not in this task
    _metrics = _measuring = None  # name -> `Metric`; the `Measuring` of them
    _class_weights = None  # [num_classes] on the device; None: all are 1

    def __init__(self, settings, context, sources, parts, rows, tests, names):
        source = sources[context.clients[0]]
        self._settings, self._context, self._parts, self._rows = settings, context, parts, rows
        self._own = {}  # client -> those of its rows that it trains on, and those that are held out
        for client, own in sources.items():
            groups = own.groups()
            groups = None if groups is None or not context.holdout else groups[parts[client]]
            self._own[client] = hold_out(len(parts[client]), context.holdout, context.seed, client, groups)
        labels = {client: own.labels["train"][parts[client]] for client, own in sources.items()}
        self._labels = {client: labels[client][training] for client, (training, _) in self._own.items()}
        self._held_labels = {client: labels[client][held] for client, (_, held) in self._own.items()}
        self._file_rows = source.file_rows
        own_sources = sources.values() if has_own_files(settings) else [source] if context.rank == 0 else []
        self._files = [file for opened in own_sources if opened.path is not None for file in files_of(opened.path)]
        self.has_own_tests = has_own_files(settings)
        self._sources = sources.values()
        self._normalisation = (settings.mean or source.mean, settings.std or source.std)
        self._dtype, self._attributes = source.dtype, source.attributes
        self._augmentation = None
        if settings.crop_padding or settings.flip:
            self._augmentation = Augmentation(settings.crop_padding, settings.flip)
        self._transform = None if settings.transform is None else Transform(settings.transform)
        self.random_batches = self._augmentation is not None or self._transform is not None
        self.user_batches = self._transform is not None
        self._check(source)
        self._facts = [_facts(own, settings) for own in sources.values()]
        self._words = [_words(own) for own in sources.values()]
        self.num_classes = max(own.num_classes for own in sources.values())
        self.shape = input_shape(source.shape)
        self.default_model = DEFAULT_MODELS.get(source.name, "mlp")
        self._test_rows = [(own.read("test", at), own.labels["test"][at]) for own, at in tests]
        # For each of these test parts: number of its test set (0 if there is only one, else the client), how many test
        # sets there are, how many samples its set has, and which of them the part contains; `subset` draws by it.
        divisor = context.num_clients if self.has_own_tests else 1
        owners = context.clients if self.has_own_tests else [0] * len(tests)
        self._test_parts = [(k, divisor, len(own.labels["test"]), at) for k, (own, at) in zip(owners, tests)]
        self._names = names

    def _check(self, source):
        if self._augmentation and len(source.shape) < 2:
            raise UserError(f"task.crop_padding and task.flip: expected images, and samples are {list(source.shape)}")
        own = self._settings.mean is not None or self._settings.std is not None
        check_normalisation(*self._normalisation, source.shape, "task." if own else f"{source.name}: attribute ")

    def synchronise(self, link):
        _check_equal(link, self._facts, self._settings.data)
        if self.has_own_tests:
            check_equal_words(link, self._words, self._settings.data)
        self.num_classes = int(link.allgather([self.num_classes], "file facts").max())
        if self.has_own_tests:
            check_labels(link, self._settings.data, self._sources, self.num_classes)
            mean, std = pool_normalisation(link, self._settings.data, self._sources)
            self._normalisation = (self._settings.mean or mean, self._settings.std or std)
        if self._settings.metrics:
            self._metrics = by_name(self._settings.metrics, self.num_classes, "task.metrics")
            self.measured = f"{', '.join(self._metrics)}: of all test samples"
            is_common = not self.has_own_tests
            self._measuring = Measuring(self._metrics, is_common, self._context.scores_of(is_common))
            facts = Facts(self.num_classes, 0, False, True)
            self._measuring.say(link, facts, self._context.scores, "task.metrics", "test")
        if self._settings.class_weights == "balanced":
            self._class_weights = self._balanced(link)
            weighted = "losses: means over samples of class weight * loss"
            self.measured = "; ".join(filter(None, [self.measured, weighted]))
        self._warn_of_rare_classes(link)
        rows = self._rows.collect(link)
        self._train, self._held = agree(link, lambda: self._split_rows(rows))
        self._tests = agree(link, lambda: [self._samples(*pair) for pair in self._test_rows])
        self._test_rows = self._rows = self._labels = self._held_labels = self._sources = None
        self._count()
        self._clients = self._describe_clients(link)
        self.client_names = self._clients["names"]
        num_held = sum(samples.num for samples in self._held)
        if self._context.holdout and not link.allgather([num_held], "sample counts").sum():
            raise UserError(f"holdout = {self._context.holdout}: holds out no sample: all clients have too few")

    def _balanced(self, link):
        """[num_classes] weights of the classes, whose mean over all training samples is 1. Collective on the link.

        A class without training samples does not count, as in scikit-learn, and weighs 1.
        """
        counts = self._num_of_classes(link)
        weights = np.where(counts > 0, counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1)), 1)
        return torch.from_numpy(weights).to(self._context.device, self._context.dtype)

    def _num_of_classes(self, link):
        """[num_classes] numbers of training samples of all clients together. Collective on the link."""
        labels = np.concatenate([*self._labels.values()])
        return link.allgather(np.bincount(labels, minlength=self.num_classes).astype(float), "class counts").sum(0)

    def _warn_of_rare_classes(self, link):
        """Say how rare classes can weigh more, if one is `RARE` times as rare as another. Collective on the link."""
        if self._class_weights is not None or not self.weighs_classes:
            return
        counts = self._num_of_classes(link)
        rare, most = int(np.where(counts > 0, counts, np.inf).argmin()), int(counts.argmax())
        if link.rank == 0 and counts[most] >= RARE * counts[rare]:
            names = [short(name, 50) for name in self._class_names()]
            numbers = " and ".join(f"{int(counts[k]):,} of class {names[k]}" for k in (most, rare))
            log.warning(f"there are {numbers} among the training samples: {self.weighs_classes}")

    def _class_names(self):
        names = as_strings(self._attributes.get("class_names", range(self.num_classes)))
        return names if len(names) == self.num_classes else [*map(str, range(self.num_classes))]

    def _count(self):
        """Remember the numbers of samples of this rank's clients, which a `subset` keeps though it has fewer."""
        self._numbers = {
            "train": [samples.num for samples in self._train.values()],
            "test": [len(at) for *_, at in self._test_parts],
            "held out": [samples.num for samples in self._held],
        }

    def _split_rows(self, rows):
        """({client: its training samples}, [its held-out samples]) of client -> rows."""
        own = self._own.items()
        train = {client: self._samples(rows[client][used], self._labels[client]) for client, (used, _) in own}
        return train, [self._samples(rows[client][held], self._held_labels[client]) for client, (_, held) in own]

    def _samples(self, rows, labels):
        return Samples.from_arrays(rows, labels, *self._normalisation, self._context)

    def data_files(self):
        return self._files

    def try_out(self, module, client):
        super().try_out(module, client)
        last = last_layer(module)
        if isinstance(last, ANSWERS) and self._context.rank == 0:
            log.warning(
                f"the model ends with {type(last).__name__}: the loss applies softmax once more, because it takes its "
                "outputs for scores (logits); without that layer, it learns better"
            )

    def num_samples(self, client):
        return self._train[client].num

    def sampler(self, client, batch_size, first_batch_size, seed, device):
        return super().sampler(client, batch_size, first_batch_size, seed, self._samples_of(client).labels.device)

    @property
    def is_on_host(self):
        devices = [self._samples_of(client).labels.device for client in self._context.clients]
        return any(device != self._context.device for device in devices)

    def _samples_of(self, client):
        """The `Samples` that a client's minibatches are made of."""
        return self._train[client]

    def batch(self, client, indices):
        return self._samples_of(client).at(indices, self._augmentation, self._transform)

    def loss(self, module, batch):
        inputs, labels = batch
        if self._class_weights is None:
            return functional.cross_entropy(module(inputs), labels)
        # Divided by the number of samples, not by their weights: these would cancel in a silo with a single class.
        return functional.cross_entropy(module(inputs), labels, self._class_weights, reduction="sum") / len(labels)

    def evaluate(self, module, link):
        losses = [sums[0] / sums[2] for sums, _ in self._sums_of_clients(module, self._train.values())]
        found = [self._sums_of_clients(module, parts) for parts in (self._tests, self._held)]
        (tests, held), rights = ([[part[column] for part in parts] for parts in found] for column in (0, 1))
        parts = [(self._numbers["train"], {"train_loss": losses})]
        if self.has_own_tests or self._context.is_personal:
            parts.append((self._numbers["test"], _per_sample("test_loss", "accuracy", tests)))
        if self._context.holdout:
            parts.append((self._numbers["held out"], _per_sample("holdout_loss", "holdout_accuracy", held)))
        metrics, clients = {}, {}
        for numbers, values in parts:
            means, each = of_clients(link, values, numbers, self._context.weighting)
            metrics, clients = metrics | means, clients | each
        if not self.has_own_tests:  # one test set, whatever part of it a rank or a client tests
            loss, correct, number = sums_of_ranks(link, np.sum([np.zeros(3), *tests], axis=0))
            test = {"test_loss": loss / number, "accuracy": correct / number} if number else {}
            train, held = ({k: v for k, v in metrics.items() if k.startswith(kind)} for kind in ("train", "holdout"))
            metrics = train | test | held
        further = self._measure(module, link) if self._metrics and "test_loss" in metrics else Metrics({})
        supports = {name: [Support(len(right), _share_of(right), right) for right in of_name]
                    for name, of_name in zip(("accuracy", "holdout_accuracy"), rights)}  # fmt: skip
        all_clients = {**clients, **further.clients}
        supports = {name: own for name, own in supports.items() if name in all_clients}
        return Metrics({**metrics, **further}, all_clients, further.tables, self._cases(link), supports)

    def _cases(self, link):
        """See `Metrics.cases`. Collective on the link."""
        if link.add_hidden or not (self.has_own_tests or self._context.is_personal):
            return {}
        counts = [np.bincount(samples.labels.cpu().numpy(), minlength=self.num_classes) for samples in self._tests]
        counts = link.allgatherv(np.ravel(counts), "test counts").reshape(-1, self.num_classes).astype(int)
        return {"classes": self._class_names(), "values": counts.tolist()}

    def _measure(self, module, link):
        """`Metrics` of the settings' further metrics, on the test set. Collective on the link."""
        answers = []
        for client, samples in zip(self._context.clients, self._tests):
            self.visit(client)
            batches = [(module(inputs).double().cpu(), labels.cpu()) for inputs, labels in samples.all()]
            empty = (torch.empty(0, self.num_classes, dtype=torch.float64), torch.empty(0, dtype=torch.int64))
            answers.append([torch.cat(parts) for parts in zip(empty, *batches)])
        found = self._measuring(link, answers)
        tables = {name: value for name, value in found.items() if isinstance(value, list)}
        numbers = {name: value for name, value in found.items() if name not in tables}
        names = as_strings(self._attributes.get("class_names", range(self.num_classes)))
        clients = {}
        for name in numbers if self.has_own_tests or self._context.is_personal else ():
            own = [or_nan(self._metrics[name], *of_client) for of_client in answers]
            clients[name] = link.allgatherv(own, "evaluation")
        tables = {name: {"classes": names, "values": table} for name, table in tables.items()}
        return Metrics(numbers, clients, tables)

    def _sums_of_clients(self, module, parts):
        """`_totals` of each of a rank's parts: one per client, or one for all of them."""
        totals = []
        for client, samples in zip(self._context.clients, parts):
            self.visit(client)
            totals.append(_totals(module, samples, self._class_weights))
        return totals

    def subset(self, num_samples, tests=True):
        part, context = copy.copy(self), self._context
        each = -(-num_samples // context.num_clients)
        part._train = {k: _drawn(samples, each, context.seed, "train", k) for k, samples in self._train.items()}
        if not tests:
            return self if all(part._train[k] is samples for k, samples in self._train.items()) else part
        part._held = [_drawn(samples, each, context.seed, "held out", k) for k, samples in zip(self._train, self._held)]
        part._tests = []
        for samples, (owner, divisor, number, at) in zip(self._tests, self._test_parts):
            chosen = draw(number, -(-num_samples // divisor), context.seed, "test", owner)
            part._tests.append(samples if chosen is None else samples.take(np.flatnonzero(np.isin(at, chosen))))
        drawn, whole = ([*loaded._train.values(), *loaded._held, *loaded._tests] for loaded in (part, self))
        return self if all(taken is every for taken, every in zip(drawn, whole)) else part

    def describe_inputs(self):
        mean, std = map(list, self._normalisation)
        names = {key: as_strings(self._attributes[key]) for key in NAMES if key in self._attributes}
        with contextlib.suppress(KeyError, TypeError, ValueError):  # how the fields of a table become features
            names[COLUMNS] = json.loads(self._attributes[COLUMNS])
        per_value = 255 if self._dtype == np.uint8 else 1
        return {"input": {"shape": list(self.shape), "divide_by": per_value, "mean": mean, "std": std}, **names}

    def write_split(self, folder):
        if not self.has_own_tests:
            parts = map(self._file_rows, self._parts)
            write_partition(folder / PARTITION, parts, self._settings.data)
        (folder / CLIENTS).write_text(json.dumps(self._clients) + "\n", encoding="utf-8")

    def _describe_clients(self, link):
        """{"names": a list of str, or None, "samples": numbers of training samples} of all clients. Collective."""
        names = self._names
        if self.has_own_tests:  # a rank knows those of its own clients
            names = allgather_lines(link, names, "names")
            names = names if any(names) else None
        samples = link.allgatherv([self._train[client].num for client in self._train], "sample counts")
        return {"names": names, "samples": samples.astype(int).tolist()}


class _DealtClassification(Dealt, LoadedClassification):
    """Classification with samples that are dealt again in every round (`Partition.redeal`)."""


def _drawn(samples, number, *key):
    """A random subset of at most `number` of some `Samples`; see `draw`."""
    chosen = draw(samples.num, number, *key)
    return samples if chosen is None else samples.take(chosen)


def draw(num_samples, number, seed, kind, owner):
    """A random subset of 0 ... num_samples - 1: [number] int64, sorted; None if that would be all of them.

    `seed` is that of the run; `kind` and `owner` name the stream, see `fedmpi.ground.streams`.
    """
    if num_samples <= number:
        return None
    return np.sort(generator(seed, "evaluation", kind, owner).permutation(num_samples)[:number])


def _facts(source, settings):
    """What must be equal in the files of all clients, a list of str: of tables, mean and std, too.

    Fields of a table were filled and encoded by what its silo knew; other samples are as they were measured.
    """
    mean, std = settings.mean or source.mean, settings.std or source.std
    return [
        f"{source.dtype} samples {list(source.shape)}",
        f"{source.num_classes} classes" if source.classes_declared else "no attribute num_classes",
        f"mean {list(mean)}, std {list(std)}" if COLUMNS in source.attributes else f"{len(mean)} mean, {len(std)} std",
    ]


def _words(source):
    """What of a client's file must be equal in the files of all clients, and does not leave it: kind -> text."""
    texts = {
        key.replace("_", " "): json.dumps(as_strings(source.attributes[key]))
        for key in NAMES
        if key in source.attributes
    }
    return texts | ({COLUMNS: str(source.attributes[COLUMNS])} if COLUMNS in source.attributes else {})


def _check_equal(link, facts, data):
    """Check that all clients' facts are the same. Collective on the link."""
    of_clients = [json.loads(line) for line in allgather_lines(link, map(json.dumps, facts), "file facts")]
    for client, others in enumerate(of_clients):
        for other, first in zip(others, of_clients[0]):
            if other != first:
                raise UserError(
                    f"{data}: client {client} has {short(other)}; client 0 has {short(first)}: expected the same; "
                    "see data prepare --columns (tables)"
                )


def _per_sample(loss, accuracy, totals):
    """Name -> a value per client, of its [sum of losses, number of correct answers, number of samples]."""
    sums = np.reshape(totals, (-1, 3))
    number = np.where(sums[:, 2] > 0, sums[:, 2], np.nan)
    return {loss: sums[:, 0] / number, accuracy: sums[:, 1] / number}


def _totals(module, samples, weights):
    """([sum of losses, number of correct answers, number of samples], [n] whether each is correct) of `Samples`."""
    loss, right = 0.0, [np.zeros(0, bool)]
    for inputs, labels in samples.all():
        scores = module(inputs)
        loss += functional.cross_entropy(scores, labels, weights, reduction="sum").item()
        right.append((scores.argmax(1) == labels).cpu().numpy())
    right = np.concatenate(right)
    return np.array([loss, right.sum(), samples.num]), right


def _share_of(right):
    return lambda indices: right[indices].mean()
