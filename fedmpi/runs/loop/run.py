"""A run as the parts of its loop see it, and the loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import pathlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from fedmpi.comm.link import Link
from fedmpi.federation.rounds import Federation
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.run_files import SERVER_STATE
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.runs.loop.part import Now, Part
from fedmpi.runs.recorder import Recorder


class Clock:
    """The times of a run, without those between a stop and its resumption.

    Attributes:
        evaluating: seconds spent in evaluations.
    """

    def __init__(self) -> None:
        self._began, self.evaluating = time.perf_counter(), 0.0

    @property
    def seconds(self) -> float:
        """Wall time since the beginning of the run."""
        return time.perf_counter() - self._began

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """A context whose time counts as evaluation."""
        before = time.perf_counter()
        yield
        self.evaluating += time.perf_counter() - before

    def state(self) -> dict[str, float]:
        return {"seconds": self.seconds, "evaluation_seconds": self.evaluating}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._began, self.evaluating = time.perf_counter() - state["seconds"], state["evaluation_seconds"]


@dataclasses.dataclass
class Run:
    """One rank's part of a run: what its parts may use.

    Attributes:
        link, federation, flat: the `Link`, the `Federation`, and the model as a `FlatModule`.
        clients: numbers of this rank's clients. num_clients: of all.
        num_rounds: of the run. settings: of the run, as settings.yaml has them: name -> value or nested dict.
        folder: path of the run folder. identity: of the run, see `Recorder`.
        recorder: function without arguments: the `Recorder` on the rank that records now, None elsewhere.
        record: function of a round's loss: the amounts and the loss of the last round, see `fedmpi.runs.record`.
        state, restore: what a checkpoint contains of the federation, and what lets it go on from there.
        may_change: names of settings that may have other values when the run is resumed.
        clock: the `Clock`.
    """

    link: Link
    federation: Federation
    flat: FlatModule
    clients: Sequence[int]
    num_clients: int
    num_rounds: int
    settings: dict[str, Any]
    folder: pathlib.Path
    identity: str
    recorder: Callable[[], Recorder | None]
    record: Callable[[float], dict[str, float]]
    state: Callable[[], dict[str, Any]]
    restore: Callable[[Mapping[str, Any]], object]
    may_change: Collection[str] = ()
    clock: Clock = dataclasses.field(default_factory=Clock)


class Loop:
    """The parts of a run, called in their order.

    Args:
        run: the `Run`. parts: list of `Part`s.
    """

    def __init__(self, run: Run, parts: Sequence[Part]) -> None:
        self._run, self.parts = run, parts
        # Only what parts have of their own is called in a round.
        self._of = {name: [part for part in parts if _has_own(part, name)] for name in vars(Part)}

    def begin(self) -> None:
        """Before the first round of this process."""
        self._call("begin", self._run)

    def before_round(self) -> None:
        """Before a round."""
        self._call("before_round", self._run.federation.round_index)

    def request(self) -> int:
        """This rank's bits of `Federation.requests`. Not collective."""
        return functools.reduce(operator.or_, (part.request() for part in self._of["request"]), 0)

    def after_round(self, loss: float) -> Now:
        """After a round; `after_parts` follows."""
        now = Now(self._run, loss)
        self._call("after_round", now)
        return now

    def after_parts(self, now: Now) -> None:
        """What saves the state after a round, or ends the process."""
        self._call("after_parts", now)

    def end(self, now: Now) -> None:
        """After the last round."""
        self._call("end", now)

    def state(self) -> dict[str, Any]:
        """Name -> number or tensor, for a checkpoint. Not collective."""
        found: dict[str, Any] = self._run.clock.state()
        for part in self.parts:
            found |= {f"{part.prefix}{name}": value for name, value in part.state().items()}
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave. Not collective.

        Raises:
            UserError: if it is something else.
        """
        for name in self.state():
            if not isinstance(state.get(name), int | float) and not name.startswith("parts/"):
                raise UserError(f"the checkpoint's {SERVER_STATE}: has no {name}: expected what fedmpi wrote")
        self._run.clock.restore(state)
        for part in self.parts:
            own = {name.removeprefix(part.prefix): state[name] for name in state if name.startswith(part.prefix)}
            try:
                if own:  # else the part is new
                    part.restore(own)
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                problem = f"{type(error).__name__}: {error}"
                raise UserError(f"part {type(part).__name__}: cannot go on from its state: {problem}") from None

    def _call(self, method: str, argument: object) -> None:
        """Call a method of all parts; those that only write, on the rank that records."""
        for part in self._of[method]:
            if not part.writes or self._run.recorder() is not None:
                getattr(part, method)(argument)


def _has_own(part: Part, method: str) -> bool:
    return getattr(type(part), method) is not getattr(Part, method)
