"""What every task answers to the client's oracle and to the training loop."""

import dataclasses
import inspect
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from fedmpi.comm.link import Link
from fedmpi.data.sampler import EpochSampler
from fedmpi.ground.errors import UserError, one_line
from fedmpi.ground.machine.devices import fits, memory_of
from fedmpi.ground.settings import check


@dataclasses.dataclass(frozen=True)
class RankContext:
    """Where in the federation this rank stands.

    Attributes:
        num_clients: N. clients: the numbers of this rank's clients.
        rank, num_ranks: of the link. seed: of the run.
        data_dir: folder of the data files, or None.
        device, dtype: of inputs and rows.
        is_personal: whether each client is evaluated with a model of its own (`RunSettings.private`).
        holdout: share of every client's training data that is evaluated and not trained on.
        participation: share of the clients that take part in a round.
        weighting: of the clients in every average, "uniform" or "samples".
        num_local: ranks of this node, which may share the device.
        least, scores: see `DataSettings`.
    """

    num_clients: int
    clients: range
    rank: int
    num_ranks: int
    seed: int
    data_dir: str | None
    device: torch.device
    dtype: torch.dtype
    holdout: float = 0.0
    is_personal: bool = False
    participation: float = 1.0
    num_local: int = 1
    weighting: str = "uniform"
    least: int = 1
    scores: str = "auto"

    def scores_of(self, are_common: bool) -> str:
        """How metrics of the order of scores are computed: "bins" or "samples", which all ranks may have in common."""
        return ("samples" if are_common else "bins") if self.scores == "auto" else self.scores

    def device_of_data(self, nbytes: int) -> torch.device:
        """The device on which a data set of so many bytes is to lie: the host, if it would fill a GPU's memory."""
        has_room = self.device.type == "cpu" or fits(nbytes, memory_of(self.device), self.num_local)
        return self.device if has_room else torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class BaseTask:
    """Base of all tasks: the fields are its settings; `load` returns the task with its data.

    Attributes:
        has_model: whether the user chooses the model. has_partition: whether there are data to split;
            None: if there is a model.
        partition, oracle: names of those that are used unless the user names others; None: the default ones.
        can_hold_out: whether it can hold out a part of the training data (`RankContext.holdout`).
        can_redeal: whether it can deal its training data anew in every round (`Partition.redeal`).
    """

    has_model = True
    has_partition: ClassVar[bool | None] = None
    partition = None
    oracle = None
    can_hold_out = False
    can_redeal = False

    def __post_init__(self) -> None:
        check(self, "task.")

    def common_files(self, context: RankContext) -> dict[str, list[pathlib.Path]]:
        """Setting as text, like "task.data = silo.h5" -> paths of the files that all ranks have in common.

        They are compared by digests before `load` opens them: nothing of a file that differs leaves its rank.

        Raises:
            UserError: if one is missing.
        """
        return {}

    def crosses(self, is_personal: bool, scores: str = "auto") -> set[str]:
        """Which kinds of messages (`fedmpi.comm.crosses.KINDS`) it may send, besides those of every run.

        `is_personal`, `scores`: see `RankContext`.
        """
        return set()

    def load(self, context: RankContext, partition: Any) -> Any:
        """Read what this rank's clients train on.

        Args:
            context: a `RankContext`. partition: a `fedmpi.data.partitions.base.Partition`, or None.

        Returns:
            the loaded task: an object with the methods of `LoadedTask`.

        Raises:
            UserError: if the data are missing, damaged or have another layout.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Support:
    """The test cases of one client, from which a metric of it is computed; they stay on the client's rank.

    Attributes:
        number: of the cases. value: function of [m] numbers of cases -> the metric of these, or nan.
        right: [number] of bool, if the metric is their mean; or None.
    """

    number: int
    value: Callable[[Any], float]
    right: Any = None


class Metrics(dict[str, float]):
    """What an evaluation measured: name -> float, and of each client.

    Attributes:
        clients: name -> [N] values, client by client; nan if a client has nothing to measure it on.
        tables: name -> {"classes": their names, "values": a vector or matrix as nested lists}.
        cases: of clients with tests of their own {"classes": their names, "values": [N][classes] numbers of test
            cases}; {} if there are no classes.
        supports: name -> [a `Support` of each of this rank's clients], of the metrics for which the task has them.
    """

    def __init__(self, values: Any, clients: Any = (), tables: Any = (), cases: Any = (), supports: Any = ()) -> None:
        super().__init__(values)
        self.clients, self.tables, self.cases, self.supports = *map(dict, (clients, tables, cases)), dict(supports)


UNEQUAL = 1.01  # largest number of samples / smallest: above it, means over clients and over samples both count


def averages(name: str, values: Any, numbers: Any, weighting: str) -> dict[str, float]:
    """A mean over clients under its name and, where the clients' numbers of samples differ, the other mean beside it.

    Args:
        values: [N] of each client. numbers: [N] of its samples; a client with none does not count.
        weighting: of the clients in training: "uniform": the mean over clients is `name`, that over samples
            `name`_samples; "samples": the mean over samples is `name`, that over clients `name`_clients.

    Returns:
        name -> number; {} if no client has samples.
    """
    values, numbers = np.asarray(values), np.asarray(numbers)
    values, numbers = values[numbers > 0], numbers[numbers > 0]
    if not len(values):
        return {}
    over_clients = math.fsum(values) / len(values)
    over_samples = math.fsum(values * numbers) / math.fsum(numbers)
    chosen, other = (over_clients, over_samples) if weighting == "uniform" else (over_samples, over_clients)
    beside = {f"{name}_{'samples' if weighting == 'uniform' else 'clients'}": other}
    return {name: chosen} | (beside if numbers.max() > UNEQUAL * numbers.min() else {})


def of_clients(
    link: Link, values: dict[str, Any], numbers: Any, weighting: str
) -> tuple[dict[str, float], dict[str, Any]]:
    """(the `averages`, name -> [N] values of all clients) of what a rank measured of its own. Collective on the link.

    `values`: name -> one per client of this rank; `numbers`: of their samples; `weighting`: see `averages`.
    """
    if link.add_hidden is not None:
        return _averages_of_sums(link.add_hidden, values, np.asarray(numbers), weighting), {}
    # A rank without any test data has measured nothing.
    columns: list[Any] = [of_metric if len(of_metric) else [math.nan] * len(numbers) for of_metric in values.values()]
    table = np.column_stack([numbers, *columns])
    numbers, *columns = link.allgatherv(table.ravel(), "evaluation").reshape(-1, table.shape[1]).T
    clients = dict(zip(values, columns)) if numbers.any() else {}
    means = [averages(name, column, numbers, weighting) for name, column in clients.items()]
    return {name: value for of_metric in means for name, value in of_metric.items()}, clients


def sums_of_ranks(link: Link, own: Any) -> Any:
    """[n] sums over all ranks of what each has measured; hidden where the aggregation hides it. Collective."""
    if link.add_hidden is not None:
        return np.array(link.add_hidden([[float(number)] for number in own]))
    return link.allgather(own, "evaluation").sum(0)


def _averages_of_sums(
    add: Callable[[list[list[float]]], list[float]], values: dict[str, Any], numbers: Any, weighting: str
) -> dict[str, float]:
    """The `averages` of all clients, of which only sums are known: always both means."""
    measured = numbers > 0
    terms = [numbers[measured].tolist(), [1.0] * int(measured.sum())]
    for of_metric in values.values():
        column = np.asarray(of_metric if len(of_metric) else [0.0] * len(numbers), np.float64)[measured]
        terms += [column.tolist(), (column * numbers[measured]).tolist()]
    num_samples, num_clients, *sums = add(terms)
    found: dict[str, float] = {}
    for name, plain, weighted in zip(values, sums[::2], sums[1::2]) if num_clients else ():
        over_clients, over_samples = plain / num_clients, weighted / num_samples
        chosen, other = (over_clients, over_samples) if weighting == "uniform" else (over_samples, over_clients)
        found |= {name: chosen, f"{name}_{'samples' if weighting == 'uniform' else 'clients'}": other}
    return found


class LoadedTask:
    """A task with this rank's data in memory.

    Attributes:
        shape, num_classes: of the inputs and labels, for models; default_model: a model's name.
        is_personal: whether `evaluate` calls `visit(client)` before it evaluates on a client's data, which gives the
            module that client's own layers.
        client_names: one per client of the federation, or None; from `synchronise` on.
        goal: (metric, sign) by which one result is better than another; sign 1 if more is better.
        ascent_scale: factor of the ascent block's gradient (`fedmpi.oracles`).
        random_batches: whether `batch` draws from torch's generator (augmentation), which is then seeded before it.
        user_batches: whether `batch` calls the user's code, which may draw from any generator; all are then seeded.
        random_loss: whether `loss` itself draws from torch's generator, besides what the module draws; it is then
            seeded before every `loss`.
        draws_outside_torch: whether a loss also draws from numpy's or Python's generator; those are then seeded, too.
        is_on_host: whether data of this rank stay in the host's memory though it computes on a GPU.
        reading: how the data are read, as text for the user, or "".
        dealer: the `fedmpi.data.dealing.Dealer` of samples that are dealt anew in every round, or None.
        measured: how the metrics are averaged, as text for the closing table, or "".
        has_own_tests: whether clients have test sets of their own; else a client's own model has an equal part of one.
        carries: whether a sample leaves something to the client's next one (a recurrent state); `batch` then takes a
            third argument, the client's own dict for it: names -> numbers and (nested tuples of) tensors.
    """

    shape: tuple[int, ...] | None
    num_classes: int | None
    is_personal = False
    client_names: list[str] | None = None
    default_model: str | None = None
    goal = ("train_loss", -1)
    ascent_scale = 1.0
    reading = ""
    measured = ""
    dealer: Any = None
    has_own_tests = False
    carries = False
    random_batches = True
    user_batches = False
    random_loss = True
    draws_outside_torch = False
    is_on_host = False

    def build_model(self, model_class: Any, model_settings: dict[str, Any]) -> nn.Module:
        """The module to train, on the CPU in float32; called under the run's model seed.

        Raises:
            UserError: with the model's own message, if it does not accept its settings.
        """
        try:
            module = model_class(**self.model_arguments(model_class, model_settings))
        except Exception as error:  # noqa: BLE001  a user's class can raise anything
            kind = "" if isinstance(error, TypeError | ValueError | RuntimeError) else f"{type(error).__name__}: "
            raise UserError(f"model {model_class.__name__}: {kind}{one_line(error)}") from error
        if not isinstance(module, torch.nn.Module):
            raise UserError(f"model {model_class.__name__}: made a {type(module).__name__}: expected a torch.nn.Module")
        return module

    def model_arguments(self, model_class: Any, model_settings: dict[str, Any]) -> dict[str, Any]:
        """Name -> value of the arguments that a model is built with: those that the data give, and its settings."""
        offered = {"shape": self.shape, "num_classes": self.num_classes}
        taken: dict[str, Any] = dict(inspect.signature(model_class).parameters)
        if not inspect.isclass(model_class) and any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            taken["num_classes"] = None  # torchvision's functions hand it on to their class
        return {**{k: v for k, v in offered.items() if k in taken and v is not None}, **model_settings}

    def constructor(self, model_class: Any, model_settings: dict[str, Any]) -> dict[str, Any] | None:
        """How to build the module again: {"class": a dotted path, "arguments": name -> value}, which JSON can hold.

        An argument may be such a dict itself. None if it cannot be said.
        """
        return constructor_of(model_class, **self.model_arguments(model_class, model_settings))

    def describe_inputs(self) -> dict[str, Any]:
        """What a program must know to use the trained module, as name -> value which JSON can hold."""
        return {}

    def why_not_finite(self) -> str:
        """The sample of this rank that makes a loss infinite or not a number, as a line, or "". Not collective."""
        return ""

    def begin_round(self, round_index: int) -> None:
        """Before every round, from 0; the training loop calls it."""

    def visit(self, client: int) -> None:
        """Before an evaluation on data of one of this rank's clients; the training loop replaces it if it needs to."""

    def try_out(self, module: nn.Module, client: int) -> None:
        """Check that the module accepts the task's data, by one loss on one sample.

        Raises:
            UserError: with the module's own message, if it does not.
        """
        sample = torch.zeros(1, dtype=torch.int64, device=next(module.parameters()).device)
        module.eval()
        try:
            with torch.no_grad():
                self.loss(module, self.batch(client, sample))
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001  a user's module can raise anything
            inputs = f"inputs of shape {list(self.shape or ())} with {self.num_classes} classes"
            raise UserError(f"model {type(module).__name__} does not work on {inputs}: {one_line(error)}") from error

    def ascent(self, flat: Any) -> slice | None:
        """The slice of the flat vector in which a min-max problem ascends; None: a minimisation."""
        return None

    def synchronise(self, link: Link) -> None:
        """Exchange what the ranks need to know before a model can be built. Collective on the link.

        Raises:
            UserError: on every rank or on none.
        """

    def data_files(self) -> list[pathlib.Path]:
        """Paths of the data files that this rank accounts for, each file on one rank only."""
        return []

    def write_split(self, folder: pathlib.Path) -> None:
        """Write into the run folder which client has which samples; on rank 0 only."""

    def sampler(self, client: int, batch_size: int, first_batch_size: int, seed: int, device: torch.device) -> Any:
        """Which samples are in the draws of one of this rank's clients; see `EpochSampler`."""
        return EpochSampler(self.num_samples(client), batch_size, first_batch_size, seed, client, device)

    def num_samples(self, client: int) -> int:
        """Number of training samples of one of this rank's clients."""
        raise NotImplementedError

    def batch(self, client: int, indices: torch.Tensor) -> Any:
        """The minibatch of a client's samples at int64 `indices`, on the device, ready for `loss`."""
        raise NotImplementedError

    def loss(self, module: nn.Module, batch: Any) -> torch.Tensor:
        """Mean loss of `module` over the samples of a batch: a 0-d tensor."""
        raise NotImplementedError

    def try_metrics(self, module: nn.Module, link: Link) -> None:
        """Check before the first round that the task's metrics are numbers, on a few samples. Collective on the link.

        Raises:
            AgreedUserError: on every rank, with the name of the metric that fails.
        """

    def evaluate(self, module: nn.Module, link: Link) -> Metrics:
        """`Metrics` of `module` over all ranks' data: name -> float. Collective on the link.

        "train_loss" is the objective that is trained: the mean of f_i over the clients, weighted as they are in
        training, see `averages`. "test_loss" and the task's own metrics come from the test set, those that begin with
        "holdout_" from held-out training data. Called without gradients and in evaluation mode.
        """
        raise NotImplementedError

    def subset(self, num_samples: int, tests: bool = True) -> Any:
        """The task as it is evaluated during a run: on a fixed random part of its data, drawn by the run's seed.

        Args:
            num_samples: about so many training samples of all clients, and as many test samples.
            tests: whether there are fewer test and held-out samples, too.

        Returns:
            an object with the method `evaluate`; the task itself, if it has no more samples than that.
        """
        return self

    def write_result(self, module: nn.Module, folder: pathlib.Path) -> None:
        """Write into the run folder what the task itself shows of the resulting module; on rank 0 only."""


def constructor_of(cls: Any, **arguments: Any) -> dict[str, Any] | None:
    """See `LoadedTask.constructor`; None for a function without a path, and if an argument is not for JSON."""
    name = getattr(cls, "__qualname__", "<")
    try:
        json.dumps(arguments)
    except TypeError:
        return None
    return None if "<" in name else {"class": f"{cls.__module__}.{name}", "arguments": arguments}
