"""Tasks that users write, `fedmpi.Task`: a Dataset per client, a loss and metrics."""

import dataclasses
import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, default_collate

from fedmpi.comm.agreement import agree
from fedmpi.comm.link import SoloLink
from fedmpi.errors import AgreedUserError, UserError
from fedmpi.oracles.base import seed_all
from fedmpi.settings import setting
from fedmpi.streams import FIRST, WHOLE, derive, generator
from fedmpi.tasks.base import BaseTask, LoadedTask, Metrics, constructor_of, of_clients
from fedmpi.tasks.metrics import PADDING, Answers, Metric, or_nan
from fedmpi.tasks.same_tests import check_same_tests
from fedmpi.text import Log, short

log = Log(__name__)

FEW = 20  # samples of each part on which metrics are tried
SHAKES = 6  # times that noise is added to a model to find out whether its outputs are probabilities
MOST_AXES = 8  # of a batch of predictions
EVALUATION_BATCH = 100  # samples; fewer than in `fedmpi.data.samples`, because a user's samples may be large


@dataclasses.dataclass(frozen=True)
class Task(BaseTask):
    """Base of users' tasks: subclasses say what a client's data are, what the loss is, and what is measured.

    >>> import fedmpi, torch
    >>> class Line(fedmpi.Task):
    ...     def train(self, client, num_clients):
    ...         x = torch.linspace(-1, 1, 20)[client::num_clients, None]
    ...         return torch.utils.data.TensorDataset(x, 3 * x)
    ...     def loss(self, model, batch):
    ...         return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    >>> Line().workers
    0

    In a file mytask.py, it is chosen by ``--task mytask.Line --model mymodels.Net``. Its further settings, if any,
    are the fields of a dataclass, made by `fedmpi.setting`.

    Attributes:
        metrics: name -> function(outputs, targets) -> number, vector or matrix, on the whole test set (or without one,
            on the training sets of all clients), and of each client on its own test data: a function, or the dotted
            path of one of torchmetrics' or scikit-learn's, or a pair of it and its keyword arguments. Functions of
            scikit-learn get (targets, what they compare with these: classes, scores, probabilities or values).
        class_names: names of the classes, for vectors and matrices; None: their numbers.
        model: the default model: a class, or its dotted path. num_classes: given to models that take it, or None.
        goal: (metric, sign) by which one result is better than another; sign 1 if more is better.
    """

    workers: int = setting(
        0, "processes per client that load samples; 0: the rank loads them itself", least=0, role="speed"
    )
    prefetch: int = setting(2, "minibatches that each worker loads in advance", least=1, role="speed")
    measured_samples: int = setting(
        2000, "samples of each client, drawn once, on which train_loss is measured; 0: all", least=0
    )

    is_base = True  # not in the list of tasks
    has_partition = False
    metrics: ClassVar[Mapping[str, Any]] = {}
    model: ClassVar[object] = None
    num_classes: ClassVar[int | None] = None
    class_names: ClassVar[Sequence[str] | None] = None
    goal: ClassVar[tuple[str, int]] = ("train_loss", -1)

    @classmethod
    def of(cls, name: str, **members: Any) -> "type[Task]":
        """A subclass from functions, for notebooks and scripts: ``fedmpi.Task.of("Line", train=..., loss=...)``.

        Args:
            name: of the subclass. members: its attributes; its functions take no `self`.
        """
        module = sys._getframe(1).f_globals.get("__name__", "__main__")
        members = {key: staticmethod(value) if inspect.isfunction(value) else value for key, value in members.items()}
        return type(name, (cls,), {"__module__": module, **members})

    def train(self, client: int, num_clients: int) -> Any:
        """The training data of a client: a `torch.utils.data.Dataset` with a length and items by number."""
        raise UserError(f"{type(self).__name__} does not define train(client, num_clients)")

    def test(self) -> Any:
        """The test data, the same on every rank, or None. Every rank evaluates a part of them."""
        return None

    def test_of(self, client: int, num_clients: int) -> Any:
        """The test data of one client, for its own results, or None. Without `test`, those of all are the test data."""
        return None

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        """Mean loss of a batch: a 0-d tensor; or a pair (sum, weight) whose quotient is the mean.

        With class weights, or of samples that count differently, only the pair gives the mean over a whole data set.
        """
        raise UserError(f"{type(self).__name__} does not define loss(model, batch)")

    def predict(self, model: Any, batch: Any) -> tuple[Any, Any]:
        """(outputs, targets) of a batch, that the metrics compare: tensors, or lists with a tensor per sample."""
        inputs, targets = batch
        return model(inputs), targets

    def collate(self, samples: list[Any]) -> Any:
        """A batch from a list of samples, stacked; overwrite it for samples of different length.

        It may pad them, targets with -100 (or nan, if they are numbers), which metrics ignore, or return lists.
        """
        try:
            return default_collate(samples)
        except RuntimeError as error:
            why = f"samples have different shapes ({short(error)}): define collate(samples), which pads or lists them"
            raise UserError(f"{type(self).__name__}: {why}") from None

    @property
    def default_model(self) -> Any:
        """`model`; of a class its dotted path, if it has one."""
        known = constructor_of(self.model) if inspect.isclass(self.model) else None
        return known["class"] if known else self.model

    def load(self, context, partition):
        return LoadedOwnTask(self, context)


class LoadedOwnTask(LoadedTask):
    """See `LoadedTask`. Metrics: train_loss; test_loss if there is a test set; the task's own.

    Args:
        task: a `Task` of this module. context: a `RankContext`.
    """

    user_batches = True
    is_personal = True

    def __init__(self, task, context):
        self._task, self._context = task, context
        self.goal, self.num_classes, self.default_model = task.goal, task.num_classes, task.default_model
        self._train = {client: _checked(task.train(client, context.num_clients), client) for client in context.clients}
        self._test = task.test()
        self._tests_of_clients = [task.test_of(client, context.num_clients) for client in context.clients]
        self.has_own_tests = type(task).test_of is not Task.test_of
        self._form = {}  # of outputs, see `Answers`
        self._metrics = {name: Metric(name, metric) for name, metric in task.metrics.items()}
        self._of_metrics = f"; {', '.join(self._metrics)}: of all samples" if self._metrics else ""
        self.measured = self._of_metrics.removeprefix("; ")
        sample = self._move(task.collate([self._train[context.clients[0]][0]]))
        if dataclasses.is_dataclass(sample):
            sample = [getattr(sample, field.name) for field in dataclasses.fields(sample)]
        first = next(iter(sample.values())) if isinstance(sample, dict) else sample
        first = first[0] if isinstance(first, tuple | list) else first
        is_plain = isinstance(first, torch.Tensor) and not first.is_nested
        self.shape = tuple(first.shape[1:]) if is_plain else ()
        self._takes_numbers = is_plain and first.is_floating_point()
        self._loaders = {}  # client -> _Loader

    def synchronise(self, link):
        check_same_tests(link, self._test)

    def sampler(self, client, batch_size, first_batch_size, seed, device):
        numbered = _Numbered(super().sampler(client, batch_size, first_batch_size, seed, "cpu"))
        self._loaders[client] = _Loader(self._task, self._train[client], numbered, seed, client)
        return numbered

    def num_samples(self, client):
        return len(self._train[client])

    def describe_inputs(self):
        if not self._takes_numbers:
            return {}
        names, shape = self._task.class_names, list(self.shape)
        kinds = {"class_names": [*map(str, names)]} if names else {}
        outputs = "classes" if names or (self._task.num_classes or 0) > 1 else "values"
        return {"input": {"shape": shape, "divide_by": 1, "mean": [0.0], "std": [1.0]}, "outputs": outputs, **kinds}

    def batch(self, client, indices):
        loader = self._loaders.get(client)
        if loader is not None and loader.has(indices):
            return self._move(loader.next())
        return self._move(_fetch(self._task, self._train[client], indices))

    def loss(self, module, batch):
        loss = self._task.loss(module, batch)
        return loss[0] / (loss[1] if loss[1] else 1) if isinstance(loss, tuple) else loss

    def evaluate(self, module, link):
        losses = [_mean(self._sums(module, client, self._measured(client, own))) for client, own in self._train.items()]
        parts, weighting = self._parts(link), self._context.weighting
        numbers = [len(dataset) for dataset in self._train.values()]
        values, clients = of_clients(link, {"train_loss": losses}, numbers, weighting)
        if self.has_own_tests or (self._test is not None and self._context.is_personal):
            results, weights = self._results_of_clients(module, None if self.has_own_tests else parts)
            means, each = of_clients(link, results, weights, weighting)
            values |= {name: mean for name, mean in means.items() if name.startswith("test_loss")}
            clients |= each
        if self._test is not None:
            sums = [pair for part in parts for pair in self._sums(module, *part)]
            sums = link.allgatherv(np.ravel(sums)).reshape(-1, 2)
            values = {name: value for name, value in values.items() if not name.startswith("test_loss")}
            values |= {"test_loss": _mean(sums)} if len(sums) else {}
        if self._metrics and link.first_rank_where(any(len(part) for _, part in parts)) is not None:
            values |= self._measure_all(*self._predictions(module, parts, link))
        tables = {name: values.pop(name) for name in list(values) if isinstance(values[name], list)}
        tables = {name: {"classes": self._names_of(table), "values": table} for name, table in tables.items()}
        return Metrics(values, {name: each for name, each in clients.items() if name not in tables}, tables)

    def try_metrics(self, module, link):
        parts = self._parts(link)
        few = [(client, _some(part)) for client, part in parts if len(part)]
        has_any = link.first_rank_where(bool(few)) is not None
        if not has_any and link.rank == 0:
            log.warning("the test sets are empty: there is no test loss and no metric")
        for chosen in (few, parts) if self._metrics and has_any else ():
            found = self._predictions(module, chosen, link)
            self._form = {"is_share": self._are_shares(module, chosen, link, found)}
            self._form["is_last"] = found[0].dim() > 2 and Answers.are_last(*found)
            try:
                agree(link, lambda found=found: self._measure_all(*found))
                return
            except AgreedUserError:  # few samples may be too few: of one class only, for example
                if chosen is parts:
                    raise

    def _parts(self, link):
        """[(client, what is measured of its data)] of this rank: test data; without any, its clients' training data.

        Ranks share a common test set in whole batches: these, and so the loss, do not depend on the number of ranks.
        Clients with models of their own have equal parts of it.
        """
        if self._test is not None and self._context.is_personal:
            number, most = self._context.num_clients, len(self._test)
            edges = {client: (most * client // number, most * (client + 1) // number) for client in self._train}
            return [(client, Subset(self._test, range(*part))) for client, part in edges.items()]
        if self._test is not None:
            num, most = -(-len(self._test) // EVALUATION_BATCH), len(self._test)
            edges = [min(most, num * rank // link.size * EVALUATION_BATCH) for rank in (link.rank, link.rank + 1)]
            return [(None, Subset(self._test, range(*edges)))]
        if self.has_own_tests:
            return [pair for pair in zip(self._train, self._tests_of_clients) if pair[1] is not None]
        return list(self._train.items())

    def _measure_all(self, outputs, targets):
        """Name -> value of each metric."""
        return {name: metric(outputs, targets, **self._form) for name, metric in self._metrics.items()}

    @torch.no_grad()
    def _are_shares(self, module, parts, link, found):
        """Whether single outputs are probabilities: they stay from 0 to 1 whatever the parameters are. Collective.

        Logits of 0 and 1 look like probabilities, but leave that range where noise is added to the parameters.
        """
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        before = [parameter.clone() for parameter in trained]
        for number in range(SHAKES):
            answers = Answers(*found)
            if not answers.is_binary or ((answers.outputs < 0) | (answers.outputs > 1)).any():
                break
            seed_all(derive(self._context.seed, "shake", number), self._context.device)
            for parameter in trained:
                scale = 2**number * max(0.1, parameter.std(correction=0).item())
                parameter.add_(torch.randn_like(parameter), alpha=scale)
            found = self._predictions(module, parts, link)
        for parameter, values in zip(trained, before):
            parameter.copy_(values)
        answers = Answers(*found)
        return answers.is_binary and not ((answers.outputs < 0) | (answers.outputs > 1)).any()

    def _names_of(self, table):
        """Names of the classes of a vector or matrix."""
        names = self._task.class_names
        return [str(k) for k in range(len(table))] if names is None or len(names) != len(table) else [*map(str, names)]

    def _results_of_clients(self, module, parts=None):
        """(name -> a value of each of this rank's clients on its own test data, nan if it has none; their weights).

        parts: [(client, its part of the common test set)]; None: clients have test sets of their own.
        """
        names, rows, weights = ["test_loss", *self._metrics], [], []
        for client, own in parts or zip(self._train, self._tests_of_clients):
            sums = [] if own is None else self._sums(module, client, own)
            weights.append(math.fsum(weight for _, weight in sums))
            if not weights[-1]:  # no sample, or none that counts
                rows.append([np.nan] * len(names))
                continue
            found = self._predictions(module, [(client, own)], SoloLink())
            rows.append([_mean(sums), *(or_nan(metric, *found, **self._form) for metric in self._metrics.values())])
        return dict(zip(names, map(list, zip(*rows)))), weights

    def _measured(self, client, dataset):
        """The samples of a client on which its loss is measured: the same in every evaluation."""
        at_most = self._task.measured_samples or len(dataset)
        if at_most >= len(dataset):
            return dataset
        drawn = generator(self._context.seed, "measured", client).choice(len(dataset), at_most, replace=False)
        return Subset(dataset, np.sort(drawn).tolist())

    def _batches(self, dataset):
        task = self._task
        loader = DataLoader(dataset, EVALUATION_BATCH, collate_fn=task.collate, num_workers=task.workers)
        yield from map(self._move, loader) if len(dataset) else ()

    def _sums(self, module, client, dataset):
        """[(sum of losses, weight)] of each batch; of a mean loss, the weight is the number of samples."""
        self.visit(client)
        sums, number = [], 0
        for batch in self._batches(dataset):
            size = min(EVALUATION_BATCH, len(dataset) - number)
            number, loss = number + size, self._task.loss(module, batch)
            if not isinstance(loss, tuple):
                self.measured = f"losses of batches of {EVALUATION_BATCH}, weighted by samples{self._of_metrics}"
                loss = (size * loss.item(), size)
            sums.append(tuple(map(float, loss)))
        return sums

    def _predictions(self, module, parts, link):
        """(outputs, targets) of all ranks, on the CPU."""
        pairs = []
        for client, dataset in parts:
            self.visit(client)
            pairs += [self._task.predict(module, batch) for batch in self._batches(dataset)]
        outputs, targets = ([tensor for pair in pairs for tensor in _tensors(pair[which])] for which in (0, 1))
        return _of_all_ranks(outputs, link, PADDING), _of_all_ranks(targets, link, math.nan)

    def _move(self, batch):
        """A batch on the device, its floating-point tensors in the run's dtype."""
        if isinstance(batch, torch.Tensor):
            dtype = self._context.dtype if batch.is_floating_point() else None
            return batch.to(self._context.device, dtype)
        if isinstance(batch, dict):
            return {name: self._move(value) for name, value in batch.items()}
        if isinstance(batch, tuple | list):
            moved = map(self._move, batch)
            return type(batch)(*moved) if hasattr(batch, "_fields") else tuple(moved)  # a NamedTuple stays one
        if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
            values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.init}
            return dataclasses.replace(batch, **self._move(values))
        return batch


def _mean(sums):
    """The mean of [(sum, weight)], the same bits in whatever order they are added."""
    return math.fsum(total for total, _ in sums) / (math.fsum(weight for _, weight in sums) or 1)


class _Numbered:
    """A sampler that remembers the number of the draw that was asked for last."""

    def __init__(self, sampler):
        self.sampler, self.number, self.indices = sampler, None, None

    def __getattr__(self, name):  # all else is the sampler's
        return getattr(self.sampler, name)

    def __call__(self, number):
        self.number, self.indices = number, self.sampler(number)
        return self.indices


class _Loader:
    """A client's minibatches, made ahead of their draw by worker processes.

    The draws are numbered and each is seeded by its number, so that neither the number of workers nor the round
    at which a run was resumed changes a batch.
    """

    def __init__(self, task, dataset, sampler, seed, client):
        self._task, self._dataset, self._sampler = task, dataset, sampler
        self._seed, self._client = seed, client
        self._iterator, self._next = None, None

    def has(self, indices):
        """Whether workers load the batch at `indices`: those that the sampler gave last."""
        number = self._sampler.number
        return self._task.workers > 0 and number not in (None, FIRST, WHOLE) and indices is self._sampler.indices

    def next(self):
        """The batch of the draw that the sampler was asked for last."""
        number, task = self._sampler.number, self._task
        if number != self._next:
            batches = _Batches(task, self._dataset, self._sampler.sampler, self._seed, self._client)
            options = {"num_workers": task.workers, "prefetch_factor": task.prefetch}
            self._iterator = iter(DataLoader(batches, batch_size=None, sampler=range(number, 10**18), **options))
        self._next = number + 1
        return next(self._iterator)


class _Batches:
    """A Dataset of whole batches: number of a draw -> its batch, seeded as the oracle seeds that draw."""

    def __init__(self, task, dataset, sampler, seed, client):
        self._task, self._dataset, self._sampler = task, dataset, sampler
        self._seed, self._client = seed, client

    def __getitem__(self, number):
        seed_all(derive(self._seed, "augmentation", self._client, number), torch.device("cpu"))
        return _fetch(self._task, self._dataset, self._sampler(number))


def _some(dataset):
    """A `Subset` of few items, spread over a Dataset."""
    return Subset(dataset, sorted({*np.linspace(0, len(dataset) - 1, FEW).astype(int)}))


def _fetch(task, dataset, indices):
    return task.collate([dataset[index] for index in indices.tolist()])


def _checked(dataset, client):
    """A client's Dataset."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(f"train({client}): is a {type(dataset).__name__}: expected a Dataset with a length")
    try:
        length = len(dataset)
    except Exception as error:  # noqa: BLE001  the user's; Python says what is wrong with lengths below 0
        raise UserError(f"train({client}): has no length: {short(error)}") from None
    if not length:
        raise UserError(f"train({client}): the client has no sample")
    return dataset


def _tensors(values):
    """What `predict` returned, as tensors [n, ...]: one, or of a list of tensors one per sample."""
    is_list = isinstance(values, list | tuple) and isinstance(next(iter(values), 0), torch.Tensor)
    return [sample[None] for sample in values] if is_list else [torch.as_tensor(values)]


def _of_all_ranks(tensors, link, padding):
    """The tensors of all ranks, one after the other along their first axis, on the CPU. Collective on the link.

    A rank without any learns the shape and type from the others; numbers travel as float64. If further axes differ in
    length, as those of sequences do, the shorter ones are padded: integers with `PADDING`, others with `padding`.
    """
    tensors = [torch.atleast_1d(tensor.detach().cpu()) for tensor in tensors]
    sizes = [[*tensor.shape[1:]] + [0] * (MOST_AXES - tensor.dim()) for tensor in tensors if len(tensor)]
    num_axes = max((tensor.dim() for tensor in tensors), default=1)
    is_integer = any(len(tensor) and not tensor.is_floating_point() for tensor in tensors)
    facts = link.allgather([num_axes, is_integer, *np.max([[0] * (MOST_AXES - 1), *sizes], axis=0)])
    num_axes, is_integer, *longest = facts.max(0).astype(int).tolist()
    longest = longest[: num_axes - 1]
    padding = PADDING if is_integer else padding
    own_values = [_padded(tensor.double(), longest, padding).reshape(-1) for tensor in tensors]
    values = torch.from_numpy(link.allgatherv(torch.cat([torch.empty(0, dtype=torch.float64), *own_values]).numpy()))
    return (values.long() if is_integer else values.float()).reshape(-1, *longest)


def _padded(tensor, longest, padding):
    """A tensor [n, ...] with `padding` behind its values, so that its further axes are as long as `longest`."""
    if list(tensor.shape[1:]) == longest or not len(tensor):
        return tensor
    missing = [(0, most - size) for most, size in zip(longest, tensor.shape[1:])]
    return torch.nn.functional.pad(tensor, sum(reversed(missing), ()), value=padding)
