"""What parts of a run return, or a line about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fedmpi.ground.errors import UserError
from fedmpi.runs.loop.part import Now, OwnPart, Part, has_own
from fedmpi.runs.loop.run import Run


def checked_request(part: Part) -> int:
    """What `request` returns.

    Raises:
        UserError: if it is no whole number.
    """
    bits: object = part.request()
    if not isinstance(bits, int):
        raise UserError(
            f"part {type(part).__name__}: request() returned a {type(bits).__name__}: expected a whole number"
        )
    return bits


def checked_state(part: Part) -> dict[str, Any]:
    """What `state` returns.

    Raises:
        UserError: if it is something else than name -> number, list of numbers or tensor.
    """
    state: object = part.state()
    who = f"part {type(part).__name__}: state()"
    if not isinstance(state, dict):
        raise UserError(f"{who} returned a {type(state).__name__}: expected a dict, name -> number or tensor")
    for name, value in state.items():
        if not isinstance(name, str):
            raise UserError(f"{who} has the name {name!r}, of {type(name).__name__}: expected texts as names")
        entries = value if isinstance(value, list) else [value]
        if not isinstance(value, torch.Tensor) and not all(isinstance(entry, int | float) for entry in entries):
            raise UserError(f"{who}[{name!r}] is a {type(value).__name__}: expected a number or tensor")
    return state


class Given(OwnPart):
    """Checks what a user's part, which stands before it, has put into a record."""

    def __init__(self, part: Part) -> None:
        self._part = part

    def begin(self, run: Run) -> None:
        self._run = run

    def after_round(self, now: Now) -> None:
        """Raises UserError if a fact is no number, or has the name of another number of the record."""
        if not now.facts:
            return
        who, taken = f"part {type(self._part).__name__}: facts", self._run.record(now.loss).keys() | now.metrics.keys()
        for name, value in now.facts.items():
            if not isinstance(value, int | float):
                hint = " (.item())" if hasattr(value, "item") else ""
                raise UserError(f"{who}[{name!r}] is a {type(value).__name__}: expected a number{hint}")
            if name in taken:
                raise UserError(f"{who}[{name!r}]: the record of a round has {name} already: expected another name")


def with_checks(parts: Iterable[Part]) -> list[Part]:
    """A list of users' parts, with a `Given` behind each that sees the rounds."""
    return [each for part in parts for each in ([part, Given(part)] if has_own(part, "after_round") else [part])]
