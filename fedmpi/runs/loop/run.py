"""A run as the parts of its loop see it."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from fedmpi.comm.link import Link
from fedmpi.federation.rounds import Federation
from fedmpi.oracles.flat_module import FlatModule
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
