"""Train a model over silos: ``mpirun -np 4 python -m fedmpi.train``; ``--help`` lists the settings.

A program calls `fedmpi.train(...)`, or `main` with the arguments of a command line, on every rank:

>>> import fedmpi
>>> fedmpi.train.main(["--clients", "4", "--rounds", "3", "--name", "example"])  # doctest: +ELLIPSIS
round 1/3: train_loss ...
round 3/3: train_loss ...
  algorithm        fafed
  clients          4 on 1 ranks
...
>>> run = fedmpi.train(algorithm="fedavg", clients=4, rounds=3)  # doctest: +ELLIPSIS
round 1/3: train_loss ...
>>> len(run.metrics), run.model.training, run.folder.name
(3, False, 'fedavg-digits-001')
"""

import dataclasses
import inspect
import sys
import time
import types
from collections.abc import Sequence
from typing import Any

from fedmpi.config.run import Run
from fedmpi.training.signals import remember_signals


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, or print what was asked for (--help, --list, --print_config). Collective.

    Args:
        arguments: the words of the command line; None: those of this process.

    Wrong input ends the process with one line and exit code 2; see `fedmpi.program.ranks.run_program`.
    """
    if arguments is None:
        remember_signals()  # the next import loads torch and begins MPI, which takes seconds
    from fedmpi.program.ranks import run_program

    run_program(_run, sys.argv[1:] if arguments is None else list(arguments))


def _run(arguments, link):
    """The program: train, or print what a flag asked for. Collective on the link."""
    from fedmpi.comm.host import seconds_since_start
    from fedmpi.program.ranks import show
    from fedmpi.training.build import read_config
    from fedmpi.training.loop import train

    config = read_config(arguments, link)
    if isinstance(config, str):
        if link.rank == 0:
            show(config)
        return
    for note in config.notes if link.rank == 0 else ():
        print(f"fedmpi: {note}", file=sys.stderr, flush=True)
    train(config, link, began=time.perf_counter() - seconds_since_start())


def train(**settings: Any) -> Any:
    """Train as on the command line, from a program. Collective on all ranks, or on those of `comm`.

    Args:
        settings: those of the command line by their names (`python -m fedmpi.train --help`), of algorithm, task,
            oracle, model and partition also as a dict like {"name": "fafed", "step_size": 0.01} or as an object:
            an `Algorithm`, a module or a function that makes one, ... And:
            data: also a list with one `torch.utils.data.Dataset` per client, or a function of a client's number
                that makes it; their items are (input, label).
            test_data: beside such data, a Dataset that all ranks have, or None.
            preset, config: as on the command line.
            on_round, on_evaluation: called on every rank after every round, and after every evaluation, with the
                record of the round, a dict of numbers; the run ends if one returns True.
            comm: an mpi4py communicator; default: COMM_WORLD.

    Returns:
        a `fedmpi.training.api.Run`, on every rank: `model`, `metrics`, `final`, `folder`, `settings`, `frame()`.

    Raises:
        UserError: one line, on every rank: what was given, what is allowed.
        Diverged: on every rank, if a loss is not finite.
    """
    from fedmpi.training.api import run

    return run(settings)


def _signature() -> inspect.Signature:
    """Of `train`, for editors: its own arguments, and every setting of a run."""
    own = ("task", "data", "test_data", "model", "partition", "oracle", "preset", "config")
    defaults = {"algorithm": "fafed", **dict.fromkeys((*own, "on_round", "on_evaluation", "comm"))}
    defaults |= {field.name: field.default for field in dataclasses.fields(Run)}
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword, default=default) for name, default in defaults.items()]
    return inspect.Signature([*parameters, inspect.Parameter("settings", inspect.Parameter.VAR_KEYWORD)])


class _CallableModule(types.ModuleType):
    """`fedmpi.train` is this module, for `import fedmpi.train`, and the function `train` in it."""

    def __call__(self, **settings: Any) -> Any:
        return train(**settings)


if __name__ == "__main__":
    main()
else:
    __signature__ = train.__signature__ = _signature()  # type: ignore[attr-defined]
    sys.modules[__name__].__class__ = _CallableModule
