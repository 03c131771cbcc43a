"""What a user's own loop records: `fedmpi.Recording`. What does it is loaded only for a loop that is recorded."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import check, setting
from fedmpi.runs.loop.part import Part, check_parts

TASK = "own_loop"
REQUEST_BITS = 10  # of signals and checkpoints, see `fedmpi.comm.job.signals`; those above are digests


@dataclasses.dataclass(frozen=True)
class Recording:
    """What `fedmpi.join` and `fedmpi.average` record in a run folder, and where they go on after a stop.

    >>> import fedmpi, torch
    >>> model, record = torch.nn.Linear(2, 1), fedmpi.Recording("runs/mine", resume=True)
    >>> fed = fedmpi.join(model, "fedavg", local_steps=5, record=record)
    >>> for _ in range(fed.steps, 20):
    ...     loss = fed.step(lambda: model(torch.eye(2)).square().mean())
    >>> fed.finish()
    >>> len(fedmpi.load_run("runs/mine").records)
    4

    Args:
        folder: path of the run folder, which rank 0 makes.
        resume: continue from the last checkpoint in the folder, if there is one: the loop then begins with the local
            step number `fed.steps`.
        objects: name -> what else changes in the loop and belongs into the checkpoints: schedulers and others with
            `state_dict` and `load_state_dict`, and `torch.Generator`s. The optimizers of `average` and the generators
            of torch, numpy and Python always belong to them.
        evaluate: function without arguments that measures the averaged model on this rank's data: name -> number, the
            same names on all ranks, nan without data. The weighted mean over the ranks and the values of all are
            recorded. eval_every: rounds between two calls.
        checkpoint_every, checkpoint_minutes, checkpoint_keep, track: as for `fedmpi.train`.
        parts: list of `fedmpi.Part`s, which see every round and may add to its record.
        whole_model: of a model with frozen parameters (an adapter's), save also the tensors that have not changed. If
            not, ``fedmpi.load(folder, model)`` takes them from its argument, and checks that they are the same.
        verbose: whether rank 0 prints what is measured, as `fedmpi.train` does.
    """

    folder: str | os.PathLike[str]
    resume: bool = False
    objects: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    evaluate: Callable[[], Mapping[str, float]] | None = None
    eval_every: int = setting(1, "rounds between two evaluations", least=1)
    checkpoint_every: int | None = setting(None, "rounds between checkpoints", least=1)
    checkpoint_minutes: float = setting(10.0, "minutes between checkpoints", least=0)
    checkpoint_keep: int = setting(2, "how many checkpoints are kept", least=1)
    track: str | None = None
    parts: Sequence[Part] = ()
    whole_model: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        check(self)
        check_parts(self.parts)
        for name, candidate in self.objects.items():
            has_state = all(callable(getattr(candidate, verb, None)) for verb in ("state_dict", "load_state_dict"))
            if not isinstance(candidate, torch.Generator) and not has_state:
                hint = ""
                if isinstance(candidate, torch.utils.data.DataLoader):
                    hint = "; it does not know its place in a pass: read it by fed.batches(loader), or take torchdata's"
                    hint += " StatefulDataLoader"
                raise UserError(
                    f"objects: '{name}' is a {type(candidate).__name__}: expected one with state_dict and "
                    f"load_state_dict, or a torch.Generator{hint}"
                )


def chosen_recording(record: Any) -> Recording | None:
    """The argument `record` of `fedmpi.average` as a `Recording`; raises UserError if it is none."""
    if record is None or isinstance(record, Recording):
        return record
    if isinstance(record, str | os.PathLike):
        return Recording(record)
    raise UserError(f"record is a {type(record).__name__}: expected the path of a run folder, or a fedmpi.Recording")
