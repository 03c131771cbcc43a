"""Tasks that users write, `fedmpi.Task`: a Dataset per client, a loss and metrics."""

import collections
import dataclasses
import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from fedmpi.comm.agreement import agree
from fedmpi.comm.solo import SoloLink
from fedmpi.ground.errors import AgreedUserError, UserError
from fedmpi.ground.generators import seed_all
from fedmpi.ground.settings import setting
from fedmpi.ground.streams import FIRST, WHOLE, derive, generator
from fedmpi.ground.text import Log, short
from fedmpi.tasks.base import BaseTask, LoadedTask, Metrics, Support, constructor_of, of_clients, sums_of_ranks
from fedmpi.tasks.metrics import OUTPUTS, PADDING, Answers, Metric, or_nan
from fedmpi.tasks.pooling import MOST_AXES, Facts, Measuring, gathered
from fedmpi.tasks.same_tests import check_same_tests

log = Log(__name__)

FEW = 20  # samples of each part on which metrics are tried
_NUMBERS = (bool, int, float, complex)  # types of Python
MOST_DRAWN = 1000  # minibatches of a round among which a sample that is not finite is sought
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
        takes: name of a metric that is a function of your own -> what it takes of all silos' samples: "counts", a
            matrix [classes, classes] of numbers of samples by target and answer; "pairs", answers (classes, if there
            are some) and targets in no order; "mean", (outputs, targets) of one silo after the other, as the mean
            over samples suffices; or, by default, "scores", (outputs, targets) of all.
        outputs: what the outputs in `predict` are: "scores" (logits: softmax, or the sigmoid of a single one, makes
            probabilities of them), "probabilities" or "values"; None: not said, which is an error where it matters.
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
    takes: ClassVar[Mapping[str, str]] = {}
    outputs: ClassVar[str | None] = None
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
        _check_types(samples)
        try:
            return default_collate(samples)
        except RuntimeError as error:
            why = f"samples have different shapes ({short(error)}): define collate(samples), which pads or lists them"
            raise UserError(why) from None

    @property
    def default_model(self) -> Any:
        """`model`; of a class its dotted path, if it has one."""
        known = constructor_of(self.model) if inspect.isclass(self.model) else None
        return known["class"] if known else self.model

    def crosses(self, is_personal, scores="auto"):
        found = {"outputs", "metric sums"} if self.metrics else set()
        return found | ({"test counts"} if type(self).test_of is not Task.test_of else set())

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
        self._task, self._context, self._name = task, context, type(task).__name__
        if task.outputs not in (None, *OUTPUTS):
            given = f"task {self._name}: outputs = {short(repr(task.outputs), 100)}"
            raise UserError(f"{given}: expected {', '.join(map(repr, OUTPUTS))}, or None")
        self.goal, self.num_classes, self.default_model = task.goal, task.num_classes, task.default_model
        number = context.num_clients
        self._train = {k: checked(task.train(k, number), f"train({k})") for k in context.clients}
        self._test = checked(task.test(), "test()", may_lack=True)
        self._tests_of_clients = [_own_test(task, client, number) for client in context.clients]
        self.has_own_tests = type(task).test_of is not Task.test_of
        self._form = {"kind": task.outputs or "scores"}  # of outputs, see `Answers`
        self._kinds_of_outputs = "classes"  # for `fedmpi predict`
        if unknown := [name for name in task.takes if name not in task.metrics]:
            known = ", ".join(task.metrics) or "none"
            raise UserError(f"task {self._name}: takes names {short(unknown[0], 50)}: expected metrics: {known}")
        self._metrics = {name: Metric(name, metric, task.takes.get(name)) for name, metric in task.metrics.items()}
        is_common = self._test is not None
        self._measuring = Measuring(self._metrics, is_common, context.scores_of(is_common), self._form)
        self._of_metrics = f"; {', '.join(self._metrics)}: of all samples" if self._metrics else ""
        self.measured = self._of_metrics.removeprefix("; ")
        self._drawn = collections.deque(maxlen=MOST_DRAWN)  # (client, indices) of the round's minibatches
        self._bad, self._has_warned = "", False  # a training sample that is not finite, in a line; whether of any
        first = context.clients[0]
        sample = self._move(_fetch(task, self._train[first], [0], f"training data of client {first}"))
        self._first = sample
        inputs = _inputs(sample)
        is_plain = isinstance(inputs, torch.Tensor) and not inputs.is_nested
        self.shape = tuple(inputs.shape[1:]) if is_plain else ()
        self._takes_numbers = is_plain and inputs.is_floating_point()
        self._loaders = {}  # client -> _Loader

    def synchronise(self, link):
        check_same_tests(link, self._test)

    def begin_round(self, round_index):
        self._drawn.clear()

    def sampler(self, client, batch_size, first_batch_size, seed, device):
        numbered = _Numbered(super().sampler(client, batch_size, first_batch_size, seed, "cpu"))
        self._loaders[client] = _Loader(self._task, self._train[client], numbered, seed, client)
        return numbered

    def num_samples(self, client):
        return len(self._train[client])

    def describe_inputs(self):
        kind = self._task.outputs
        if not self._takes_numbers:
            return {}
        names, shape = self._task.class_names, list(self.shape)
        kinds = {"class_names": [*map(str, names)]} if names else {}
        kinds |= {"outputs_are": kind} if kind else {}
        outputs = "values" if kind in ("values", None) else self._kinds_of_outputs
        return {"input": {"shape": shape, "divide_by": 1, "mean": [0.0], "std": [1.0]}, "outputs": outputs, **kinds}

    def batch(self, client, indices):
        self._drawn.append((client, indices))
        loader = self._loaders.get(client)
        if loader is not None and loader.has(indices):
            return self._move(loader.next())
        return self._move(
            _fetch(self._task, self._train[client], indices.tolist(), f"training data of client {client}")
        )

    def loss(self, module, batch):
        try:
            loss = self._task.loss(module, batch)
        except Exception as error:
            if problem := self._odd_shape(batch):
                raise UserError(f"{problem}: {type(error).__name__}: {short(error)}") from error
            raise
        return loss[0] / (loss[1] if loss[1] else 1) if isinstance(loss, tuple) else loss

    def _odd_shape(self, batch):
        """That a minibatch has inputs of another shape than the first sample, of which a loss has failed; or ""."""
        inputs = _inputs(batch)
        is_plain = isinstance(inputs, torch.Tensor) and isinstance(_inputs(self._first), torch.Tensor)
        if not is_plain or inputs.shape[1:] == self.shape or not self._drawn:
            return ""
        client, indices = self._drawn[-1]
        which = f"training data of client {client}, item{'s' * (len(indices) > 1)} {_some_of(indices.tolist())}"
        return f"{which}: inputs are {list(inputs.shape[1:])}, those of the first item {list(self.shape)}"

    def why_not_finite(self):
        for client, indices in self._drawn:
            name = f"training data of client {client}"
            for index in indices.tolist():
                if not _is_finite(fetch_item(self._train[client], index, name)):
                    return f"{name}, item {index}: has a value that is not finite"
        return self._bad

    def evaluate(self, module, link):
        losses = [_mean(self._sums(module, client, self._measured(client))) for client in self._train]
        parts, weighting = self._parts(link), self._context.weighting
        numbers = [len(dataset) for dataset in self._train.values()]
        values, clients = of_clients(link, {"train_loss": losses}, numbers, weighting)
        if self.has_own_tests or (self._test is not None and self._context.is_personal):
            results, weights = self._results_of_clients(module, None if self.has_own_tests else parts)
            means, each = of_clients(link, results, weights, weighting)
            values |= {name: mean for name, mean in means.items() if name.startswith("test_loss")}
            clients |= each
        cases = self._cases(link) if self.has_own_tests and not link.add_hidden else {}
        if self._test is not None:
            sums = [pair for part in parts for pair in self._sums(module, *part)]
            if link.add_hidden is not None:
                sums = [sums_of_ranks(link, np.sum([(0.0, 0.0), *sums], axis=0))]
            else:
                sums = link.allgatherv(np.ravel(sums), "evaluation").reshape(-1, 2)
            values = {name: value for name, value in values.items() if not name.startswith("test_loss")}
            values |= {"test_loss": _mean(sums)} if len(sums) else {}
        if self._metrics and link.first_rank_where(any(len(part) for _, part in parts)) is not None:
            is_measured = self.has_own_tests and self._test is None
            found = self._predictions_of_clients if is_measured else self._predictions(module, parts)
            values |= self._measuring(link, found)
        tables = {name: values.pop(name) for name in list(values) if isinstance(values[name], list)}
        tables = {name: {"classes": self._names_of(table), "values": table} for name, table in tables.items()}
        clients = {name: each for name, each in clients.items() if name not in tables}
        supports = {name: self._supports(name) for name in self._metrics if name in clients}
        return Metrics(values, clients, tables, cases, supports)

    def try_metrics(self, module, link):
        parts = self._parts(link)
        few = [(client, part.few()) for client, part in parts if len(part)]
        has_any = link.first_rank_where(bool(few)) is not None
        if not has_any and link.rank == 0:
            log.warning("the test sets are empty: there is no test loss and no metric")
        for chosen in (few, parts) if self._metrics and has_any else ():
            found = agree(link, lambda chosen=chosen: self._predictions(module, chosen))
            facts = self._agree_on_form(link, found)
            if chosen is few:
                agree(link, lambda facts=facts: self._say(link, facts))
            try:
                agree(link, lambda found=found: self._measuring(link, found))
                return
            except AgreedUserError:  # few samples may be too few: of one class only, for example
                if chosen is parts:
                    raise

    def _say(self, link, facts):
        reason, kind = f"metrics of task {self._name}", "test" if self.has_own_tests else "training"
        self._measuring.say(link, facts, self._context.scores, reason, kind)

    def _agree_on_form(self, link, found):
        """Agree on what all answers have in common, and return their `Facts`. Collective on the link.

        `found`: [(outputs, targets)] of this rank.
        """
        is_last = any(outputs.dim() > 2 and Answers.are_last(outputs, targets) for outputs, targets in found)
        is_low = any(bool(((targets < 0) & (targets != PADDING)).any()) for _, targets in found)
        is_last, is_low = link.allgather([is_last, is_low], "metric sums").any(0).tolist()
        self._form.update(is_last=is_last, low=-int(is_low))
        answers = [Answers(*pair, **self._form) for pair in found if len(pair[1])]
        answers = [own for own in answers if len(own.targets)]
        facts = Facts.agreed(link, answers)
        are_labels = any(own.outputs.dim() == 2 and own.outputs.shape == own.targets.shape for own in answers)
        self._kinds_of_outputs = "classes" if link.first_rank_where(are_labels) is None else "labels"
        agree(link, lambda: [self._check_outputs(own, facts) for own in answers])
        return facts

    def _check_outputs(self, answers, facts):
        """Check that the task says what its model's outputs are, if a metric depends on it.

        `answers`: `Answers` of a part of the samples; `facts`: the `Facts` of all.

        Raises:
            UserError: how to say it.
        """
        for name, metric in self._metrics.items() if self._task.outputs is None else ():
            if metric.depends_on_kind(answers) and (facts.num_classes or facts.is_binary):
                raise UserError(
                    f"metric {name}: depends on what the model's outputs are: say in the task {self._name} outputs = "
                    '"probabilities", or outputs = "scores" (logits)'
                )

    def _parts(self, link):
        """[(client, what is measured of its data)] of this rank: test data; without any, its clients' training data.

        Ranks share a common test set in whole batches: these, and so the loss, do not depend on the number of ranks.
        Clients with models of their own have equal parts of it.
        """
        if self._test is not None and self._context.is_personal:
            number, most = self._context.num_clients, len(self._test)
            edges = {client: (most * client // number, most * (client + 1) // number) for client in self._train}
            return [(client, _Part(self._test, "test data", range(*part))) for client, part in edges.items()]
        if self._test is not None:
            num, most = -(-len(self._test) // EVALUATION_BATCH), len(self._test)
            edges = [min(most, num * rank // link.size * EVALUATION_BATCH) for rank in (link.rank, link.rank + 1)]
            return [(None, _Part(self._test, "test data", range(*edges)))]
        if self.has_own_tests:
            return [pair for pair in zip(self._train, self._tests_of_clients) if pair[1] is not None]
        return [(client, _Part(own, f"training data of client {client}")) for client, own in self._train.items()]

    def _names_of(self, table):
        """Names of the classes of a vector or matrix."""
        names = self._task.class_names
        return [str(k) for k in range(len(table))] if names is None or len(names) != len(table) else [*map(str, names)]

    def _results_of_clients(self, module, parts=None):
        """(name -> a value of each of this rank's clients on its own test data, nan if it has none; their weights).

        parts: [(client, its part of the common test set)]; None: clients have test sets of their own.
        """
        names, rows, weights = ["test_loss", *self._metrics], [], []
        self._cases_here, self._predictions_of_clients = [], []
        for client, own in parts or zip(self._train, self._tests_of_clients):
            sums = [] if own is None else self._sums(module, client, own)
            weights.append(math.fsum(weight for _, weight in sums))
            if not weights[-1]:  # no sample, or none that counts
                rows.append([np.nan] * len(names))
                self._cases_here.append([])
                self._predictions_of_clients.append((torch.empty(0), torch.empty(0)))
                continue
            (found,) = self._predictions(module, [(client, own)])
            self._predictions_of_clients.append(found)
            self._cases_here.append(Answers(*found, **self._form).cases())
            rows.append([_mean(sums), *(or_nan(metric, *found, **self._form) for metric in self._metrics.values())])
        return dict(zip(names, map(list, zip(*rows)))), weights

    def _supports(self, name):
        """A `Support` of a metric for each of this rank's clients."""

        def of(outputs, targets):
            form, metric = dict(self._form), self._metrics[name]
            return Support(len(targets), lambda at: or_nan(metric, outputs[at], targets[at], **form))

        return [of(*found) for found in self._predictions_of_clients]

    def _cases(self, link):
        """{"classes": names, "values": [N][classes] test cases of each client's own}; {} if they are no classes."""
        here = [cases or [] for cases in self._cases_here]
        number = int(link.allgather([max(map(len, here))], "test counts").max())
        padded = [[*cases, *[0] * (number - len(cases))] for cases in here]
        table = link.allgatherv(np.ravel(padded), "test counts").reshape(-1, number or 1).astype(int)
        names = self._names_of(range(number))
        return {"classes": names, "values": table.tolist()} if number else {}

    def _measured(self, client):
        """The samples of a client on which its loss is measured: the same in every evaluation."""
        dataset, name = self._train[client], f"training data of client {client}"
        at_most = self._task.measured_samples or len(dataset)
        if at_most >= len(dataset):
            return _Part(dataset, name)
        drawn = generator(self._context.seed, "measured", client).choice(len(dataset), at_most, replace=False)
        return _Part(dataset, name, np.sort(drawn).tolist())

    def _batches(self, part):
        """The batches of a part, on the device."""
        batches = _PartBatches(self._task, part)
        options = {"num_workers": self._task.workers, "collate_fn": _as_it_is}
        loader = DataLoader(batches, batch_size=None, sampler=range(-(-len(part) // EVALUATION_BATCH)), **options)
        for batch in loader if len(part) else ():
            yield self._move(_unless_failed(batch))

    def _sums(self, module, client, part):
        """[(sum of losses, weight)] of each batch; of a mean loss, the weight is the number of samples."""
        self.visit(client)
        sums, number = [], 0
        for batch in self._batches(part):
            size = min(EVALUATION_BATCH, len(part) - number)
            number, loss = number + size, self._task.loss(module, batch)
            if not isinstance(loss, tuple):
                self.measured = f"losses of batches of {EVALUATION_BATCH}, weighted by samples{self._of_metrics}"
                loss = (size * loss.item(), size)
            sums.append(tuple(map(float, loss)))
            if not self._has_warned and not all(map(math.isfinite, sums[-1])):
                self._find_bad(part, number - size, number)
        return sums

    def _find_bad(self, part, begin, end):
        """Remember and say which sample of a part has a value that is not finite, after a loss that was not."""
        for position in range(begin, end):
            if not _is_finite(part[position]):
                line, self._has_warned = (
                    f"{part.name}, item {part.index(position)}: has a value that is not finite",
                    True,
                )
                self._bad = line if part.name.startswith("training") else ""
                log.warning(f"{line}, and no loss of it is")
                return

    def _predictions(self, module, parts):
        """[(outputs, targets)] of each of this rank's parts, on the CPU. Not collective."""
        found = []
        for client, dataset in parts:
            self.visit(client)
            pairs = [_pair(self._task.predict(module, batch)) for batch in self._batches(dataset)]
            columns = ([tensor for pair in pairs for tensor in _tensors(pair[which])] for which in (0, 1))
            found.append(tuple(gathered(part, SoloLink(), fill) for part, fill in zip(columns, (PADDING, math.nan))))
        return found

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
        return _unless_failed(next(self._iterator))


class _Batches:
    """A Dataset of whole batches: number of a draw -> its batch, seeded as the oracle seeds that draw."""

    def __init__(self, task, dataset, sampler, seed, client):
        self._task, self._dataset, self._sampler = task, dataset, sampler
        self._seed, self._client = seed, client

    def __getitem__(self, number):
        seed_all(derive(self._seed, "augmentation", self._client, number), torch.device("cpu"))
        indices, name = self._sampler(number).tolist(), f"training data of client {self._client}"
        return _or_failed(lambda: _fetch(self._task, self._dataset, indices, name))


class _PartBatches:
    """A Dataset of whole batches of a `_Part` in order."""

    def __init__(self, task, part):
        self._task, self._part = task, part

    def __getitem__(self, number):
        return _or_failed(lambda: self._part.batch(self._task, number))


@dataclasses.dataclass(frozen=True)
class _Failed:
    """Stands for a batch that cannot be read: an error of a worker process would arrive as its traceback."""

    text: str


def _or_failed(read):
    try:
        return read()
    except UserError as error:
        return _Failed(str(error))


def _unless_failed(batch):
    if isinstance(batch, _Failed):
        raise UserError(batch.text)
    return batch


def _as_it_is(batch):
    return batch


class _Part:
    """Some items of a user's Dataset, or all; an error in one names it.

    Args:
        dataset: the user's. name: for messages. indices: of the items; None: all.
    """

    def __init__(self, dataset, name, indices=None):
        self._dataset, self.name = dataset, name
        self._indices = range(len(dataset)) if indices is None else indices

    def __len__(self):
        return len(self._indices)

    def __getitem__(self, position):
        return fetch_item(self._dataset, self.index(position), self.name)

    def index(self, position):
        """Number of the item in the user's Dataset."""
        return int(self._indices[position])

    def batch(self, task, number):
        """The batch that begins after `number` others of the size `EVALUATION_BATCH`."""
        positions = range(number * EVALUATION_BATCH, min(len(self), (number + 1) * EVALUATION_BATCH))
        return _fetch(task, self._dataset, [self.index(position) for position in positions], self.name)

    def few(self):
        """Few of the items, spread over all."""
        chosen = sorted({*np.linspace(0, len(self) - 1, FEW).astype(int).tolist()})
        return _Part(self._dataset, self.name, [self.index(position) for position in chosen])


def fetch_item(dataset, index, name):
    """The item of a user's Dataset at a number; an error names both."""
    try:
        return dataset[index]
    except Exception as error:  # noqa: BLE001  the user's Dataset can raise anything
        raise _unreadable(name, index, error) from error


def _unreadable(name, index, error):
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return UserError(f"{name}, item {index}: cannot be read: {kind}{short(error)}")


def _fetch(task, dataset, indices, name):
    """The batch of the items of a user's Dataset at a list of `indices`; `name` is for messages."""
    items = []
    try:
        for index in indices:
            items.append(dataset[index])  # noqa: PERF401  so that the item that fails is known
    except Exception as error:  # noqa: BLE001
        raise _unreadable(name, indices[len(items)], error) from error
    try:
        return task.collate(items)
    except Exception as error:  # noqa: BLE001
        raise UserError(f"{name}, {_odd_one(indices, items)}: {_of_error(error)}") from error


def _of_error(error):
    return short(error) if isinstance(error, UserError) else f"{type(error).__name__}: {short(error)}"


def _odd_one(indices, items):
    """Which of some items that make no batch is unlike most others, in words."""
    kinds = [_in_words(item) for item in items]
    usual = max(kinds, key=kinds.count)
    odd = next((position for position, kind in enumerate(kinds) if kind != usual), None)
    if odd is None:
        return f"item{'s' * (len(indices) > 1)} {_some_of(indices)}"
    return f"item {indices[odd]} is {kinds[odd]}, item {indices[kinds.index(usual)]} is {usual}"


def _in_words(value):
    """Types and shapes of an item, like "(float32 [8], int)"."""
    if isinstance(value, tuple | list) and len(value) <= MOST_AXES:
        return f"({', '.join(map(_in_words, value))})"
    if isinstance(value, dict) and len(value) <= MOST_AXES:
        return f"{{{', '.join(f'{short(key, 30)}: {_in_words(part)}' for key, part in value.items())}}}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def _some_of(indices, most=5):
    return ", ".join(map(str, indices[:most])) + (", ..." if len(indices) > most else "")


def _check_types(samples):
    """Check that samples have one kind of numbers: bytes among floats, for example, would be other quantities.

    Raises:
        UserError: which kinds there are.
    """
    first = samples[0]
    for place in range(len(first)) if isinstance(first, tuple | list) else ():
        if isinstance(first[place], torch.Tensor):
            dtype = first[place].dtype
            if all(getattr(sample[place], "dtype", None) is dtype for sample in samples):
                continue
        kinds = {_kind(sample[place]) for sample in samples} - {None}
        if len(kinds) > 1:
            raise UserError(
                f"part {place} of the samples are {' and '.join(sorted(kinds))}: expected one kind of numbers"
            )


def _kind(value):
    """The kind of a tensor's, an array's or a Python number; None of what is none of them."""
    if isinstance(value, torch.Tensor):
        is_complex, is_float = value.is_complex(), value.is_floating_point()
    else:
        dtype = value.dtype if hasattr(value, "dtype") else np.dtype(type(value)) if type(value) in _NUMBERS else None
        if getattr(dtype, "kind", "O") not in "biufc":
            return None
        is_complex, is_float = dtype.kind == "c", dtype.kind == "f"
    return "complex numbers" if is_complex else "numbers with a fraction" if is_float else "whole numbers"


def _inputs(batch):
    """The inputs of a batch: its first part."""
    if dataclasses.is_dataclass(batch):
        batch = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    first = next(iter(batch.values())) if isinstance(batch, dict) else batch
    return first[0] if isinstance(first, tuple | list) and first else first


def _is_finite(value):
    """Whether all numbers in an item are finite."""
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, np.ndarray | np.floating):
        return value.dtype.kind != "f" or bool(np.isfinite(value).all())
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, tuple | list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _own_test(task, client, num_clients):
    """The `_Part` of a client's own test data, or None."""
    dataset = checked(task.test_of(client, num_clients), f"test_of({client})", may_lack=True)
    return None if dataset is None else _Part(dataset, f"test data of client {client}")


def checked(dataset, name, may_lack=False):
    """A user's Dataset; `may_lack`: whether it may be None, or empty."""
    if dataset is None and may_lack:
        return None
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UserError(f"{name}: is a {type(dataset).__name__}: expected a Dataset with a length and items by number")
    try:
        length = len(dataset)
    except Exception as error:  # noqa: BLE001  the user's; Python says what is wrong with lengths below 0
        raise UserError(f"{name}: has no length: {short(error)}") from None
    if not length and not may_lack:
        raise UserError(f"{name}: has no items")
    return dataset


def _pair(predicted):
    """What `predict` returned, if it is (outputs, targets)."""
    if not isinstance(predicted, tuple | list) or len(predicted) != 2:
        raise UserError(f"predict returned {_in_words(predicted)}: expected a pair (outputs, targets)")
    return predicted


def _tensors(values):
    """What `predict` returned, as tensors [n, ...]: one, or of a list of tensors one per sample."""
    is_list = isinstance(values, list | tuple) and isinstance(next(iter(values), 0), torch.Tensor)
    return [sample[None] for sample in values] if is_list else [torch.as_tensor(values)]
