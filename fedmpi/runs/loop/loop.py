"""The loop of a run: its parts, called in their order."""

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fedmpi.comm.agreement import agree
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.run_files import SERVER_STATE
from fedmpi.runs.loop.check import checked_request, checked_state
from fedmpi.runs.loop.part import Now, Part, has_own
from fedmpi.runs.loop.run import Run


class Loop:
    """The parts of a run, called in their order.

    Args:
        run: the `Run`. parts: list of `Part`s.
    """

    def __init__(self, run: Run, parts: Sequence[Part]) -> None:
        self._run, self.parts = run, parts
        # Only what parts have of their own is called in a round.
        self._of = {name: [part for part in parts if has_own(part, name)] for name in vars(Part)}

    def begin(self) -> None:
        """Before the first round of this process."""
        self._call("begin", self._run)
        if any(part.prefix for part in self._of["state"]):  # what a user's part has wrong is said now
            agree(self._run.link, self.state)

    def before_round(self) -> None:
        """Before a round."""
        self._call("before_round", self._run.federation.round_index)

    def request(self) -> int:
        """This rank's bits of `Federation.requests`. Not collective."""
        return functools.reduce(operator.or_, map(checked_request, self._here("request")), 0)

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
        """Name -> number or tensor, for a checkpoint. Not collective.

        Raises:
            UserError: if a part returns something else.
        """
        return self._state_of(self._here("state"))

    def _state_of(self, parts: Iterable[Part]) -> dict[str, Any]:
        found: dict[str, Any] = self._run.clock.state()
        for part in parts:
            found |= {f"{part.prefix}{name}": value for name, value in checked_state(part).items()}
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave. Not collective.

        Raises:
            UserError: if it is something else.
        """
        for name in self._state_of(part for part in self._of["state"] if not part.prefix):
            if not isinstance(state.get(name), int | float):
                raise UserError(f"the checkpoint's {SERVER_STATE}: has no {name}: expected what fedmpi wrote")
        self._run.clock.restore(state)
        for part in self._here("restore"):
            own = {name.removeprefix(part.prefix): state[name] for name in state if name.startswith(part.prefix)}
            try:
                if own:  # else the part is new
                    part.restore(own)
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                problem = f"{type(error).__name__}: {error}"
                raise UserError(f"part {type(part).__name__}: cannot go on from its state: {problem}") from None

    def _call(self, method: str, argument: object) -> None:
        for part in self._here(method):
            getattr(part, method)(argument)

    def _here(self, method: str) -> Iterator[Part]:
        """The parts with this method of their own; those that only write, on the rank that records."""
        return (part for part in self._of[method] if not part.writes or self._run.recorder() is not None)
