"""When a run ends before its last round: a metric is reached, none improves, or a program's callback says so."""

import dataclasses
import math
from collections.abc import Callable

from fedmpi.comm.agreement import agree
from fedmpi.config.run import read_condition
from fedmpi.errors import UserError
from fedmpi.runs.record import HELD_OUT

_COMPARISONS = {
    ">=": lambda value, bound: value >= bound,
    "<=": lambda value, bound: value <= bound,
    ">": lambda value, bound: value > bound,
    "<": lambda value, bound: value < bound,
}


@dataclasses.dataclass(frozen=True)
class Callbacks:
    """The functions of a user's program that a run calls; a function returns True to end the run after this round.

    Attributes:
        on_round: called on every rank after every round with its record, a dict of numbers.
        on_evaluation: the same, after the rounds in which the model is evaluated; the record contains the metrics.
    """

    on_round: Callable | None = None
    on_evaluation: Callable | None = None


def _is_true(value):
    """Whether a callback's value is True, also numpy's or torch's; other values, like a loss, have no meaning."""
    return str(getattr(value, "dtype", type(value).__name__)) in ("bool", "torch.bool") and bool(value)


def selection_goal(goal, metrics):
    """(metric, sign) by which results are selected: the task's goal, on held-out data if there are any.

    Args:
        goal: of the task, see `LoadedTask`. metrics: names of what is measured.
    """
    held_out = f"{HELD_OUT}{goal[0]}"
    return (held_out, goal[1]) if held_out in metrics else goal


class EarlyStopping:
    """Decides after every round whether the run ends there. Collective: all ranks agree.

    Args:
        run: a `RunSettings`, for `stop` and `patience`. goal: see `LoadedTask`. link: a `Link`. callbacks: `Callbacks`.

    Attributes:
        best: the best value of the metric so far, larger is better. num_worse: evaluations since then.
        reason: text, why the run ended early, or "".
    """

    def __init__(self, run, goal, link, callbacks):
        self._condition = None if run.stop is None else read_condition(run.stop)
        self._patience, self._goal, self._link, self._callbacks = run.patience, goal, link, callbacks
        self.best, self.num_worse, self.reason = -math.inf, 0, ""

    def after(self, record, is_evaluated):
        """Whether the run ends after a round.

        Args:
            record: of the round, with the metrics if the model `is_evaluated`.

        Raises:
            AgreedUserError: on every rank, if the condition names a metric that is not measured.
        """
        if is_evaluated and (self._condition or self._patience):
            agree(self._link, lambda: self._look(record))
        for name in ("on_evaluation", "on_round"):
            callback = getattr(self._callbacks, name)
            if callback is None or (name == "on_evaluation" and not is_evaluated):
                continue
            if self._link.first_rank_where(_is_true(callback(dict(record)))) is not None:
                self.reason = self.reason or f"by {name}"
        return bool(self.reason)

    def state(self):
        """Name -> number, for a checkpoint; the names are those of earlier versions."""
        return {"ending/best": self.best, "ending/num_worse": self.num_worse}

    def restore(self, state):
        """Take what `state` gave; earlier versions' checkpoints lack it."""
        self.best = float(state.get("ending/best", -math.inf))
        self.num_worse = int(state.get("ending/num_worse", 0))

    def _look(self, record):
        """Compare the metrics of an evaluation; not collective."""
        if self._condition is not None:
            metric, comparison, bound = self._condition
            if metric not in record:
                raise UserError(
                    f"stop: there is no metric {metric}; the record of a round contains {', '.join(record)}"
                )
            if _COMPARISONS[comparison](record[metric], bound):
                self.reason = f"{metric} {comparison} {bound:g}"
        if self._patience is not None:
            metric, sign = selection_goal(self._goal, record)
            better = sign * record[metric] > self.best
            self.best, self.num_worse = (sign * record[metric], 0) if better else (self.best, self.num_worse + 1)
            if self.num_worse >= self._patience:
                self.reason = self.reason or f"{metric} has not improved in {self._patience} evaluations"
