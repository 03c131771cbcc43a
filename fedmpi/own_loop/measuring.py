"""What a user's own loop measures of its averaged model."""

import hashlib
import json
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fedmpi.comm.agreement import agree
from fedmpi.federation.losses import PAUSED
from fedmpi.ground.errors import UserError
from fedmpi.ground.text import short
from fedmpi.own_loop.recording import Recording
from fedmpi.runs.loop.part import Now, OwnPart
from fedmpi.runs.loop.run import Run
from fedmpi.tasks.base import Metrics


class Measuring(OwnPart):
    """Calls a user's function `Recording.evaluate` every so many rounds.

    Args:
        loop: an `OwnLoop`. recording: its `Recording`.
    """

    def __init__(self, loop: Any, recording: Recording) -> None:
        self._loop, self._recording = loop, recording

    def begin(self, run: Run) -> None:
        self._clock = run.clock

    def after_round(self, now: Now) -> None:
        if self._recording.evaluate is not None and now.round % self._recording.eval_every == 0:
            with self._clock.evaluation():
                now.metrics = self._measured(self._recording.evaluate)

    def _measured(self, evaluate: Callable[[], Mapping[str, float]]) -> Metrics:
        """The means of what all ranks have measured, and each rank's values; nan is left out of the mean."""
        values = agree(self._loop._link, lambda: _as_numbers(_called(evaluate)))
        weights = self._loop.federation.plan.weights or [1.0] * self._loop.size
        self._check_names(list(values))
        if self._loop.federation.aggregation.hides:
            return Metrics(self._hidden_means(values, self._loop._own_weight()))
        columns = dict(zip(values, self._loop._ask([*values.values()]).T.tolist())) if values else {}
        means = {}
        for name, column in columns.items():
            pairs = [(weight, value) for weight, value in zip(weights, column) if not math.isnan(value)]
            total = sum(weight for weight, _ in pairs)
            means[name] = sum(weight * value for weight, value in pairs) / total if total else math.nan
        return Metrics(means, columns)

    def _check_names(self, names: list[str]) -> None:
        """Check that all ranks have measured the same. The names stay on their rank: they may be those of its classes.

        Raises:
            AgreedUserError: on every rank.
        """
        digest = int.from_bytes(hashlib.blake2b(json.dumps(names).encode(), digest_size=6).digest(), "little")
        first = self._loop._link.allgather([float(digest)], "settings")[0, 0]

        def check() -> None:
            if digest != first:
                has = short(", ".join(names), 300) or "nothing"
                raise UserError(f"evaluate measures {has} here, and something else on rank 0: expected the same names")

        agree(self._loop._link, check)

    def _hidden_means(self, values: Mapping[str, float], weight: float) -> dict[str, float]:
        """The same means, where no rank sees what others have measured; `weight`: of this rank."""
        counts = [0.0 if math.isnan(value) else weight for value in values.values()]
        products = [count * value if count else 0.0 for count, value in zip(counts, values.values())]
        self._loop._announce(PAUSED)
        sums = self._loop._hidden_sums([*counts, *products])
        pairs = zip(sums[: len(counts)], sums[len(counts) :])
        return {name: product / count if count else math.nan for name, (count, product) in zip(values, pairs)}


def _called(evaluate: Callable[[], Any]) -> Any:
    """What a user's function returns; its error as a `UserError`, so that the other ranks end, too."""
    try:
        return evaluate()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"evaluate: {type(error).__name__}: {short(error)}") from error


def _as_numbers(values: Any) -> dict[str, float]:
    """What a user's `evaluate` returned, as name -> number.

    Raises:
        UserError: if it is something else: the name and what it is.
    """
    expected = "expected a number: one name for each, like recall_0, recall_1"
    if not isinstance(values, Mapping):
        raise UserError(f"evaluate returned a {type(values).__name__}: expected a dict: name -> number")
    found = {}
    for name, value in values.items():
        number = value.item() if getattr(value, "size", None) == 1 or getattr(value, "shape", None) == () else value
        number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else number
        if not isinstance(number, numbers.Real):
            shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
            raise UserError(f"evaluate: {short(name, 50)} is a {type(value).__name__}{shape}: {expected}")
        found[str(name)] = float(number)
    return found
