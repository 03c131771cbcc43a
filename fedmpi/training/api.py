"""Training from a Python program: `fedmpi.train(...)`, on all ranks of a job or alone in a notebook."""

import contextlib
import copy
import dataclasses
import inspect
import os
import pathlib
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from fedmpi.aggregation.sending import chosen
from fedmpi.comm.agreement import agree
from fedmpi.comm.job.equality import check_same_model
from fedmpi.comm.job.opening import TIMEOUT, close_link, open_link
from fedmpi.comm.job.ranks import end_at_once
from fedmpi.comm.link import Link
from fedmpi.config.build import CHOICES, STAGES
from fedmpi.config.grammar import Assignments, Flags, Given, flatten
from fedmpi.ground.errors import AgreedUserError, Diverged, Stopped, UserError
from fedmpi.ground.generators import generators_kept
from fedmpi.ground.machine.cores import run_on, usable_cores
from fedmpi.ground.machine.devices import WORKSPACE, arithmetic_kept
from fedmpi.ground.machine.memory import return_freed_memory
from fedmpi.ground.text import Log, progress_shown
from fedmpi.oracles.flat_module import give_own_memory
from fedmpi.runs.baselines import Comparison
from fedmpi.runs.loop.part import check_parts
from fedmpi.runs.model_files import load_values, read_state
from fedmpi.runs.record import CLIENTS_KEY
from fedmpi.tasks.datasets import KINDS, task_of
from fedmpi.training import baselines
from fedmpi.training.build import read_config
from fedmpi.training.early_stopping import Callbacks

log = Log(__name__)

OF_THE_COMMAND = ("help", "list", "print_config", "traceback")  # options that have no meaning in a program
FILES = ("preset", "config")
Functions = dict[str, Callable[[dict[str, float]], object] | None]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run leaves, the same on every rank.

    Attributes:
        models: of a run with private layers: number of a client -> its own model, as `model` is otherwise; each is read
            from the run folder when it is asked for. Without private layers, it is empty.
        metrics: the records of the rounds, dicts of numbers; see `fedmpi.runs.record`. Times are those of rank 0.
            After an evaluation, "clients" is a dict: metric -> list with each client's value.
        final: name -> value of the metrics of the resulting model, measured on all data.
        folder: path of the run folder.
        settings: nested dict, as in settings.yaml.
        baselines: of a run with baselines, a `fedmpi.runs.baselines.Comparison`; otherwise None.
        cross_site: of a run with private layers and cross_site: name of a metric -> matrix, whose row i has the metric
            of client i's model on the data of each client; nan where there are none. {} if the run was complete before.
    """

    _model: torch.nn.Module
    metrics: list[dict[str, Any]]
    final: dict[str, float]
    folder: pathlib.Path
    settings: dict[str, Any]
    models: Mapping[int, torch.nn.Module] = dataclasses.field(default_factory=dict)
    baselines: Comparison | None = None
    cross_site: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)

    @property
    def model(self) -> torch.nn.Module:
        """The resulting `torch.nn.Module`, in evaluation mode, with memory of its own.

        Raises:
            UserError: if each client has a model of its own.
        """
        if self.models:
            raise UserError("Run.model: each client has a model of its own (private): choose one, like run.models[0]")
        return self._model

    def frame(self) -> Any:
        """The records as a `pandas.DataFrame` with a row per round; client k's values are columns like "accuracy/k".

        Raises:
            UserError: if pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise UserError("Run.frame needs pandas: pip install 'fedmpi[pandas]'") from None
        rows = [{**record, **_columns(record.get(CLIENTS_KEY, {}))} for record in self.metrics]
        return pandas.DataFrame(rows).drop(columns=CLIENTS_KEY, errors="ignore")


def _columns(clients: Mapping[str, list[float]]) -> dict[str, float]:
    """Names like "accuracy/0" -> values, of metric -> each client's value."""
    return {f"{name}/{client}": value for name, values in clients.items() for client, value in enumerate(values)}


class _ClientModels(Mapping[int, torch.nn.Module]):
    """Number of a client -> its model, which is read when it is asked for; see `Run`."""

    def __init__(self, module: torch.nn.Module, folder: pathlib.Path, num_clients: int) -> None:
        self._module, self._folder, self._num_clients = module, folder, num_clients

    def __getitem__(self, client: int) -> torch.nn.Module:
        if not 0 <= client < self._num_clients:
            raise KeyError(client)
        module = copy.deepcopy(self._module)
        load_values(module, read_state(self._folder, client))
        return module

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._num_clients))

    def __len__(self) -> int:
        return self._num_clients


def run(settings: dict[str, Any]) -> Run:
    """See `fedmpi.train`; `settings` are its keyword arguments. Collective on the ranks of `comm`."""
    settings = dict(settings)
    comm, verbose, parts = settings.pop("comm", None), settings.pop("verbose", False), settings.pop("parts", ())
    functions: Functions = {name: settings.pop(name, None) for name in ("on_round", "on_evaluation")}
    timeout = settings.get("timeout")  # it is checked later; there are waits before
    link = open_link(comm, timeout if isinstance(timeout, int | float) and 0 < timeout < TIMEOUT else TIMEOUT)
    try:
        with _process_restored(), progress_shown(verbose is True):
            agree(link, lambda: check_parts(parts), tells=True)
            given, objects = agree(link, lambda: _read(settings, functions, verbose))
            if isinstance(objects.get("model"), torch.nn.Module):
                objects["model"] = _of_rank_0(link, objects["model"])
            config = read_config(given, link, objects)
            for note in config.notes if link.rank == 0 else ():
                log.warning(note)
            outcome, compared = baselines.train(config, link, Callbacks(**functions, parts=parts))
            model = outcome.make_model()
        has_one = config.layers.private is None
        models = {} if has_one else _ClientModels(model, outcome.folder, sum(map(len, link.clients)))
        table = Comparison.of(compared) if compared else None
        crossed = {metric: found["matrix"] for metric, found in outcome.cross_site.items()}
        facts = (outcome.records, outcome.metrics, outcome.folder, config.resolved)
        return Run(model, *facts, models, table, crossed)
    except (AgreedUserError, Diverged, Stopped):
        raise
    except BaseException as error:
        if link.size > 1:  # the other ranks wait for this one
            end_at_once(link, error, wants_traceback=not isinstance(error, UserError))
        raise
    finally:
        close_link(link)


@contextlib.contextmanager
def _process_restored() -> Iterator[None]:
    """A context that leaves cores, torch's threads, generators and switches, variables, and malloc as they were."""
    cores, threads, sets_workspace = usable_cores(), torch.get_num_threads(), WORKSPACE not in os.environ
    switches = _deterministic()
    with generators_kept(), arithmetic_kept():
        try:
            yield
        finally:
            run_on(cores)
            torch.set_num_threads(threads)
            if switches != _deterministic():  # the call imports torch's compiler, which takes seconds
                torch.use_deterministic_algorithms(switches[0], warn_only=switches[1])
            if sets_workspace:
                os.environ.pop(WORKSPACE, None)
            return_freed_memory()


def _deterministic() -> tuple[bool, bool]:
    """(whether torch uses deterministic algorithms only, whether it only warns of others)."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _of_rank_0(link: Link, module: torch.nn.Module) -> torch.nn.Module:
    """A copy of a module with the parameters and buffers that it has on rank 0. Collective on the link.

    Raises:
        AgreedUserError: on every rank, if it has other ones on another rank.
    """
    copied = copy.deepcopy(module)
    give_own_memory(copied)
    tensors = [value for value in copied.state_dict().values() if isinstance(value, torch.Tensor)]
    check_same_model(link, copied, "must be the same on all ranks, but for its values", lambda tensor: False)
    tensors = [value for value in tensors if not is_lazy(value) and value.numel()]  # the others have no values
    for value in tensors:
        array = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
        link.broadcast(array, "model")
        value.copy_(torch.from_numpy(array).view(value.dtype).view(value.shape))
    return copied


def _read(
    settings: dict[str, Any], functions: Functions, verbose: object = False
) -> tuple[tuple[Assignments, Flags], dict[str, Any]]:
    """(what `parse_command_line` makes of a command line, group -> object), from keyword arguments.

    A setting that is None is null, a group that is None is left out.

    Raises:
        UserError: one line, if an argument has a type that is not allowed.
    """
    for name, function in functions.items():
        if not callable(function) and function is not None:
            raise UserError(f"{name} is a {type(function).__name__}: expected a function of a round's record")
    if not isinstance(verbose, bool):
        raise UserError(f"verbose is a {type(verbose).__name__}: expected True or False")
    if any(settings.get(name) is not None for name in OF_THE_COMMAND):
        raise UserError(f"{', '.join(OF_THE_COMMAND)} are options of python -m fedmpi.train: leave them out")
    objects: dict[str, Any] = {}
    values: dict[str, Any] = {}
    data, test_data, cache = settings.pop("data", None), settings.pop("test_data", None), settings.pop("cache", False)
    if data is None or isinstance(data, str | os.PathLike):
        if test_data is not None or cache:
            name = "cache" if test_data is None else "test_data"
            raise UserError(f"{name}: expected only beside data = [one Dataset per client]")
        values |= {} if data is None else {"data": data}
        task = settings.get("task")
        task = task.get("name") if isinstance(task, Mapping) else task
        if task in [*KINDS][1:]:
            raise UserError(f"task {task}: expected data = [one Dataset per client] beside it")
    elif not callable(data) and (isinstance(data, Mapping) or not hasattr(data, "__getitem__")):
        raise UserError(f"data is a {type(data).__name__}: expected a name, a path, or one Dataset per client")
    else:
        objects["task"] = task_of(settings.pop("task", None), data, test_data, bool(cache))
        if isinstance(data, typing.Sized):
            settings["clients"] = len(data) if settings.get("clients") is None else settings["clients"]
        if settings.pop("partition", None) is not None:
            raise UserError("data = [one Dataset per client]: these need no partition: leave partition out")
    for name, value in settings.items():
        if name == STAGES and isinstance(value, list | tuple) and not all(isinstance(stage, str) for stage in value):
            objects[name] = list(chosen("mean", value).stages)
        elif name in CHOICES and value is not None and not isinstance(value, str | Mapping):
            objects[name] = _object(name, value)
        elif value is not None or name not in (*CHOICES, STAGES, *FILES, *OF_THE_COMMAND):
            values[name] = dict(value) if isinstance(value, Mapping) else value
    flat = {key: plain(key, value) for key, value in flatten(values).items()}
    flags: Flags = {name: Given(flat[name]) for name in FILES if name in flat}
    return ([(key, Given(value)) for key, value in flat.items() if key not in flags], flags), objects


def _object(group: str, value: Any) -> Any:
    """A setting that is given as an object: an instance, or of models also a function that makes one."""
    base = CHOICES[group].base
    if isinstance(value, base) or (group == "model" and callable(value)):
        return value
    if inspect.isclass(value) and issubclass(value, base):
        return value()
    kinds = f"a name, a dict like {{'name': ...}}, or a {base.__name__}"
    kinds += " or a function that makes one" if group == "model" else ""
    raise UserError(f"{group} is a {type(value).__name__}: expected {kinds}")


def plain(key: str, value: Any) -> Any:
    """A value as settings can hold it: numpy's and torch's numbers as Python's, and what is in lists and dicts.

    Raises:
        UserError: one line that names the setting `key`, if it is of another type.
    """
    if value is None or isinstance(value, bool | os.PathLike):
        return value
    if isinstance(value, np.ndarray | np.generic | torch.Tensor) and not value.ndim:
        value = value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else _number_of_numpy(value)
    for kind in (str, bool, int, float):
        if isinstance(value, kind):
            return str.__str__(value) if kind is str else kind(value)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(plain(key, inner) for inner in value)
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {str(name): plain(key, inner) for name, inner in value.items()}
    of = f"{type(value).__name__} of shape {list(value.shape)}" if hasattr(value, "shape") else type(value).__name__
    expected = "a number, a text, true or false, None, or a list, a tuple or a dict with texts as keys of them"
    raise UserError(f"{key} is a {of}: expected {expected}")


def _number_of_numpy(value: Any) -> Any:
    """A number of numpy as Python's; another value as it is."""
    for of_numpy, kind in ((np.bool_, bool), (np.integer, int), (np.floating, float)):
        if isinstance(value, of_numpy):
            return kind(value)
    return value
