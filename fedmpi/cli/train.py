"""Train a model over silos: ``mpirun -np 4 python -m fedmpi.train``; ``--help`` lists the settings.

The module `fedmpi.train` is the function `train`, which has the function `main` as an attribute.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast

from fedmpi.comm.job.signals import remember_signals
from fedmpi.comm.settings import FaultSettings, MachineSettings
from fedmpi.data.settings import DataSettings
from fedmpi.ground.text import Log
from fedmpi.runs.settings import FolderSettings
from fedmpi.training.settings import EvaluationSettings, LayerSettings, RoundSettings, StudySettings

log = Log("fedmpi.train")

if TYPE_CHECKING:
    import torch

    from fedmpi.algorithms.base import Algorithm
    from fedmpi.runs.loop.part import Part
    from fedmpi.training.api import Run

Choice = str | Mapping[str, Any]
Place = str | PathLike[str]
Callback = Callable[[dict[str, float]], object]
P = ParamSpec("P")
R = TypeVar("R", covariant=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(  # a dataclass has the fields of the last one first
    FaultSettings,
    MachineSettings,
    FolderSettings,
    StudySettings,
    EvaluationSettings,
    LayerSettings,
    DataSettings,
    RoundSettings,
):
    """The keyword arguments of `train`, for editors and type checkers: those below, and every setting of a run."""

    algorithm: Choice | Algorithm | type[Algorithm] = "fafed"
    task: Choice | Any = None
    data: Place | Sequence[Any] | Callable[[int], Any] | None = None
    test_data: Any = None
    cache: bool = False
    model: Choice | torch.nn.Module | Callable[..., torch.nn.Module] | None = None
    partition: Choice | Any = None
    oracle: Choice | Any = None
    aggregation: Choice | Any = None
    codec: Choice | Any = None
    stages: str | Sequence[Any] | Mapping[str, Any] | None = None
    preset: str | None = None
    config: Place | None = None
    on_round: Callback | None = None
    on_evaluation: Callback | None = None
    parts: Sequence[Part] = ()
    verbose: bool = False
    comm: Any = None
    # Paths are texts in a run's settings, and may also be pathlib's here.
    data_dir: Place | None = None  # type: ignore[assignment]
    out: Place = "runs"  # type: ignore[assignment]
    resume: Place | None = None  # type: ignore[assignment]
    init: Place | None = None  # type: ignore[assignment]
    checkpoint_clients: Place | None = None  # type: ignore[assignment]


class _Train(Protocol[P, R]):
    main: Callable[[Sequence[str] | None], None]

    def __call__(self, *args: P.args, **settings: P.kwargs) -> R: ...


def _takes(arguments: Callable[P, Any]) -> Callable[[Callable[..., R]], _Train[P, R]]:
    """Give a function the signature of `arguments`."""

    def decorate(function: Callable[..., R]) -> _Train[P, R]:
        parameters = list(inspect.signature(arguments).parameters.values())
        function.__signature__ = inspect.Signature(parameters, return_annotation="Run")  # type: ignore[attr-defined]
        return cast("_Train[P, R]", function)

    return decorate


@_takes(Arguments)
def train(**settings: Any) -> Run:
    """Train as on the command line, from a program. Collective on all ranks, or on those of `comm`.

    >>> import fedmpi
    >>> run = fedmpi.train(algorithm="fedavg", clients=4, rounds=3)
    >>> len(run.metrics), run.model.training, run.folder.name
    (3, False, 'fedavg-digits-001')
    >>> fedmpi.train.main(["--clients", "4", "--rounds", "3", "--name", "example"])  # doctest: +ELLIPSIS
    round 1/3: train_loss ...
    round 3/3: train_loss ...
      algorithm        fafed
      clients          4 on 1 rank
    ...

    Args:
        algorithm: how the silos learn together: a name, a dict like {"name": "fafed", "step_size": 0.01}, or an
            `Algorithm`.
        task: what is learned: a name, a dict, or an object like a `Task` of your own; beside Datasets as data,
            "classification" (the default), "regression" or "multilabel".
        data: the name or the path of a data file; or a list with one `torch.utils.data.Dataset` per client, or a
            function of a client's number that makes it; their items are (input, label), or (input, target).
        test_data: beside Datasets, a Dataset that all ranks have, or None.
        cache: whether such Datasets are read once and kept in memory; their items must then be always the same.
        model: a name, a dict, a `torch.nn.Module` (a copy is trained), or a function that makes one.
        partition: how the samples of one file are divided among the clients: a name, a dict or an object.
        oracle: how gradients are computed: a name, a dict or an object; None: as the algorithm needs them.
        aggregation: how the clients' rows become one: a name, a dict or an object; None: their mean.
        codec: how the rows are made smaller before they are sent: a name, a dict or an object; None: not at all.
        stages: what becomes of each client's rows before: names, or objects.
        preset: name of a paper's experiment, whose settings are the defaults; the other arguments override it.
        config: path of a settings file; the other arguments override it.
        on_round: function that is called on every rank after every round, with its record, a dict of numbers; the run
            ends if it returns True.
        on_evaluation: the same, after every evaluation.
        parts: list of `fedmpi.Part`s, which see every round and may add to its record.
        verbose: whether rank 0 prints the progress and the result, as the command does.
        comm: an mpi4py communicator; default: COMM_WORLD.
        settings: every setting of a run by its name, like rounds=50; `python -m fedmpi.train --help` lists them.

    Returns:
        a `fedmpi.training.api.Run`, on every rank: `model`, `metrics`, `final`, `folder`, `settings`, `frame()`.

    Raises:
        UserError: one line, on every rank: what was given, what is allowed.
        Diverged: on every rank, if a loss is not finite.
    """
    from fedmpi.training.api import run

    return run(settings)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, or print what was asked for (--help, --list, --print_config). Collective.

    Args:
        arguments: the words of the command line; None: those of this process.

    Wrong input ends the process with one line and exit code 2; see `fedmpi.comm.job.ranks.run_program`.
    """
    is_ours = False  # whether this process is a program of ours, and not a user's that calls `main`
    if arguments is None:
        remember_signals()  # the next import but one loads torch, and then MPI begins, which takes seconds
        from fedmpi.comm.job.program import is_own_program, say_starting

        say_starting(sys.argv[1:])
        if is_ours := is_own_program() and gc.isenabled():
            gc.disable()  # loading torch makes no garbage; searching for some took a tenth of the time
    from fedmpi.comm.job.ranks import run_program

    if is_ours:
        gc.freeze()  # what has been loaded is never searched
        gc.enable()
    run_program(_run, sys.argv[1:] if arguments is None else list(arguments))


def _run(arguments: list[str], link: Any) -> None:
    """The program: train, or print what a flag asked for. Collective on the link."""
    from fedmpi.comm.job.ranks import show
    from fedmpi.ground.machine.processes import seconds_since_start
    from fedmpi.training.build import read_config
    from fedmpi.training.loop import train

    config = read_config(arguments, link)
    if isinstance(config, str):
        show(link, config)
        return
    for note in config.notes if link.rank == 0 else ():
        log.warning(note)
    if config.studies.baselines:
        from fedmpi.training.baselines import train
    train(config, link, began=time.perf_counter() - seconds_since_start())


vars(train).update(main=main, train=train)
