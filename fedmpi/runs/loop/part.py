"""What a part of a run is, and the round that parts see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import misspelt

if TYPE_CHECKING:
    from fedmpi.runs.loop.run import Run


class Now:
    """A round that has ended, as the parts of a run see it, in the order in which they are listed.

    Attributes:
        round: its number, from 1. loss: its mean training loss, nan if unknown.
        metrics: `fedmpi.tasks.Metrics` of the averaged model, {} if it was not evaluated after this round.
        is_last: whether no other round follows. A part may set it to True, also on one rank alone: the run then ends
            here, with an evaluation. A recorded loop of the user's own ends by itself.
        was_planned: whether this is the last round of those that were asked for.
        recorded: the metrics in the record of this round. facts: name -> number, what parts add to this record.
        tables: at the end, name -> table that is recorded beside the result's metrics.
    """

    def __init__(self, run: Run, loss: float) -> None:
        self._run, self.loss = run, loss
        self.round = run.federation.round_index
        self.is_last = self.was_planned = self.round == run.num_rounds
        self.metrics: Mapping[str, float] = {}
        self.recorded: Mapping[str, float] = {}
        self.facts: dict[str, float] = {}
        self.tables: dict[str, Any] = {}

    @property
    def record(self) -> dict[str, Any]:
        """The record of the round as it would be now: its amounts, loss and times, and the facts so far."""
        return {**self._run.record(self.loss), **self.facts}


class Part:
    """One feature of a run; each method does nothing unless a part has its own.

    All methods are called on all ranks, which make the same calls of MPI in them. Of a part that only `writes`, all are
    called on the rank alone that has the run's folder.

    >>> import fedmpi
    >>> class Slowest(fedmpi.Part):
    ...     def after_round(self, now):
    ...         now.facts["loss_per_round"] = now.loss / now.round
    >>> run = fedmpi.train(algorithm="fedavg", clients=2, rounds=2, parts=[Slowest()])
    >>> "loss_per_round" in run.metrics[-1]
    True
    """

    writes = False

    @property
    def prefix(self) -> str:
        """How the names of its state begin in a checkpoint."""
        return f"parts/{type(self).__name__}/"

    def begin(self, run: Run) -> None:
        """Before the first round of this process, after `restore` if the run goes on from a checkpoint."""

    def before_round(self, number: int) -> None:
        """Before a round; `number` of rounds have ended so far."""

    def request(self) -> int:
        """This rank's bits of `Federation.requests`; not collective.

        Asked for whenever the ranks exchange their losses: `fedmpi.runs.checkpoints.writer.DUE` asks for a checkpoint.
        """
        return 0

    def after_round(self, now: Now) -> None:
        """After a round."""

    def after_parts(self, now: Now) -> None:
        """After a round and the `after_round` of all parts: what saves the state, or ends the process."""

    def end(self, now: Now) -> None:
        """After the last round."""

    def state(self) -> dict[str, Any]:
        """Name -> number or tensor: what it needs to go on from a checkpoint, the same on all ranks; not collective.

        Called once after `begin`, and then on the rank that writes a checkpoint, also within a round. Lists of numbers
        pass, too.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave, before `begin`; not collective.

        Raises:
            UserError: if the run cannot go on with it.
        """


class OwnPart(Part):
    """A part of fedmpi's own, whose state has plain names."""

    prefix = ""


def has_own(part: Part, method: str) -> bool:
    """Whether a part has a method of its own, which does something."""
    return getattr(getattr(part, method), "__func__", None) is not getattr(Part, method)


def check_parts(parts: object) -> None:
    """Check an argument `parts`.

    Raises:
        UserError: if it is no list of `Part`s, two of them would have the same names in a checkpoint, or one has a
            method that would never be called, or a state that would be lost.
    """
    if not isinstance(parts, list | tuple) or not all(isinstance(part, Part) for part in parts):
        kind = type(parts).__name__
        if isinstance(parts, list | tuple):
            kind += " with a " + next(type(part).__name__ for part in parts if not isinstance(part, Part))
        raise UserError(f"parts is a {kind}: expected a list of fedmpi.Part objects")
    names = [part.prefix for part in parts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"parts: two are of the class {twice.split('/')[1]}: expected one, or a subclass for each")
    for part in parts:
        if wrong := misspelt(part, Part):
            raise UserError(f"part {type(part).__name__}: {wrong}")
        if has_own(part, "state") and not has_own(part, "restore"):
            raise UserError(f"part {type(part).__name__}: it has state, but not restore: expected both, or none")
