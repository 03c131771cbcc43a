"""fedmpi: cross-silo federated learning over MPI.

``dir(fedmpi)`` lists what a program may use. Everything is imported at its first use, so that
``import fedmpi`` alone loads neither torch nor MPI.
"""

import importlib
import os
import pathlib
import sys
from typing import TYPE_CHECKING, Any

from fedmpi.ground.version import __version__

if TYPE_CHECKING:
    from fedmpi import algorithms
    from fedmpi.aggregation.sending import Sending
    from fedmpi.algorithms.base import Algorithm, Exchange
    from fedmpi.cli.report import figure
    from fedmpi.federation.rounds import Federation
    from fedmpi.federation.simulate import simulate
    from fedmpi.ground.errors import UserError
    from fedmpi.ground.settings import setting
    from fedmpi.own_loop.average import average
    from fedmpi.own_loop.join import join
    from fedmpi.own_loop.recording import Recording
    from fedmpi.runs.folder import RunFolder
    from fedmpi.runs.loop.part import Part
    from fedmpi.tasks.custom import Task
    from fedmpi.train import train

__all__ = [
    "Algorithm",
    "Exchange",
    "Federation",
    "Part",
    "Recording",
    "Sending",
    "Task",
    "UserError",
    "__version__",
    "algorithms",
    "average",
    "figure",
    "join",
    "load",
    "load_run",
    "setting",
    "simulate",
    "train",
]
_DEFINED_IN = {
    "Algorithm": "fedmpi.algorithms.base",
    "Exchange": "fedmpi.algorithms.base",
    "Federation": "fedmpi.federation.rounds",
    "Part": "fedmpi.runs.loop.part",
    "Recording": "fedmpi.own_loop.recording",
    "Sending": "fedmpi.aggregation.sending",
    "Task": "fedmpi.tasks.custom",
    "UserError": "fedmpi.ground.errors",
    "average": "fedmpi.own_loop.average",
    "figure": "fedmpi.cli.report",
    "join": "fedmpi.own_loop.join",
    "setting": "fedmpi.ground.settings",
    "simulate": "fedmpi.federation.simulate",
}
_MODULES = ("algorithms", "train")

if sys.path[0] in ("", os.getcwd()) and any(
    option == "-m" and word.partition(".")[0] == "fedmpi" for option, word in zip(sys.orig_argv, sys.orig_argv[1:])
):
    sys.path.append(sys.path.pop(0))  # a program's modules are found before the user's random.py or queue.py here
if any(word.startswith("from multiprocessing.") for word in sys.orig_argv):  # a worker of spawn or forkserver
    importlib.import_module("fedmpi.comm.start.process").leave_job()


def load_run(folder: str | os.PathLike[str]) -> "RunFolder":
    """The settings and the records of a run folder, also while the run is still going on.

    Args:
        folder: path of the run folder.

    Raises:
        UserError: one line: what is wrong with the folder.

    >>> import fedmpi
    >>> run = fedmpi.load_run("runs/example")
    >>> run.is_complete, run.settings["algorithm"], len(run.records)
    (True, 'fafed', 3)
    >>> 0 < run.final("accuracy") <= 1
    True
    """
    from fedmpi.runs.folder import read_run

    run: RunFolder = read_run(_path(folder))
    return run


def load(folder: str | os.PathLike[str], model: Any = None, client: int | None = None, *, strict: bool = True) -> Any:
    """The trained module of a run folder, a `torch.nn.Module` in evaluation mode on the CPU.

    Its attribute `fedmpi` is the content of model.json: the model's class, the shape and the normalisation of its
    inputs, and the names of the classes if the data have them.

    Args:
        folder: path of the run folder.
        model: a module of the right shape, or a function that makes one, if the folder does not say how to build it.
        client: of a run with personal layers, the number of the client whose own model is wanted; without it the
            averaged model, whose personal layers have their initial values.
        strict: whether the model must be built as the one that was trained: of the same parts with the same settings.
            False: names and shapes of the tensors suffice.

    Raises:
        UserError: one line: what is missing or does not fit.

    >>> import fedmpi, torch
    >>> model = fedmpi.load("runs/example")
    >>> model.fedmpi["input"]["shape"], model(torch.zeros(2, 1, 8, 8)).shape
    ([1, 8, 8], torch.Size([2, 10]))
    """
    from fedmpi.runs.model_files import load_model

    return load_model(_path(folder), model, client, strict=strict)


def _path(folder: Any) -> pathlib.Path:
    try:
        return pathlib.Path(folder)
    except TypeError:
        from fedmpi.ground.errors import UserError
        from fedmpi.ground.text import short

        raise UserError(f"folder = {short(folder)}: expected the path of a run folder") from None


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"fedmpi.{name}")
    if name not in _DEFINED_IN:
        raise AttributeError(f"module 'fedmpi' has no attribute '{name}'")
    return getattr(importlib.import_module(_DEFINED_IN[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
