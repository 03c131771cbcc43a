"""When a run ends before its last round: a metric is reached, none improves, or a program's callback says so."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from fedmpi.comm.agreement import agree
from fedmpi.ground.errors import UserError
from fedmpi.runs.loop.part import OwnPart, Part
from fedmpi.runs.record import HELD_OUT
from fedmpi.training.settings import read_condition

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
        parts: of a program's own, see `fedmpi.Part`.
    """

    on_round: Callable | None = None
    on_evaluation: Callable | None = None
    parts: Sequence[Part] = ()


def _is_true(value):
    """Whether a callback's value is True, also numpy's or torch's; other values, like a loss, have no meaning."""
    return str(getattr(value, "dtype", type(value).__name__)) in ("bool", "torch.bool") and bool(value)


def selection_goal(goal, metrics):
    """(metric, sign) by which results are selected: the task's goal, on held-out data if `metrics` names any."""
    held_out = f"{HELD_OUT}{goal[0]}"
    return (held_out, goal[1]) if held_out in metrics else goal


def check_goal(goal, metrics, given):
    """Check that `Metrics`, or a dict, have the task's goal as a number; `given`: the setting that chooses by it.

    Raises:
        UserError: one line: the metric, what is measured, what to do.
    """
    clients, tables = (getattr(metrics, part, {}) for part in ("clients", "tables"))
    name, _ = selection_goal(goal, {**metrics, **tables})
    numbers = [each for each, value in metrics.items() if not math.isnan(value)]
    if name in metrics and (not math.isnan(metrics[name]) or not all(map(math.isnan, clients.get(name, ())))):
        return
    problem, advice = "is not measured", ""
    if name in metrics:
        problem, advice = "is nan", ", check the data that it is measured on (are they of one class?)"
    elif name in tables:
        problem, advice = "is a vector or a matrix, not a number", ', average it over the classes (average = "macro")'
    raise UserError(
        f"{given}: the task's goal {name} {problem}; measured are the numbers {', '.join(numbers)}: "
        f"set the task's goal to one of these{advice}, or leave this setting out"
    )


def goal_of_client(goal, metrics, client):
    """(metric, sign, value) by which a client's own models are compared: the training loss if it has no other data.

    `goal`: see `LoadedTask`.
    """
    values = {name: each[client] for name, each in metrics.clients.items() if not math.isnan(each[client])}
    metric, sign = selection_goal(goal, values)
    metric, sign = (metric, sign) if metric in values else ("train_loss", -1)
    return metric, sign, sign * values.get(metric, math.nan)


@dataclasses.dataclass
class _Watch:
    """What ends the run, or one client's part of it.

    Attributes:
        best: the best value of the metric so far, larger is better. num_worse: evaluations since then.
        round: the one at which it ended, or 0.
    """

    best: float = -math.inf
    num_worse: int = 0
    round: int = 0


class EarlyStopping(OwnPart):
    """Decides after every round whether the run ends there. Collective: all ranks agree.

    Args:
        evaluation: an `EvaluationSettings`. goal: see `LoadedTask`. link: a `Link`. callbacks: `Callbacks`.
        num_clients: of clients that train alone, each of which ends by its own metrics, and the run with the last; 0:
            the clients train together.

    Attributes:
        reason: text, why the run ended early, or "".
    """

    def __init__(self, evaluation, goal, link, callbacks, num_clients=0):
        self._condition = None if evaluation.stop is None else read_condition(evaluation.stop)
        self._patience, self._goal, self._link, self._callbacks = evaluation.patience, goal, link, callbacks
        self._watches = {"": _Watch()} if not num_clients else {f"/{client}": _Watch() for client in range(num_clients)}
        self._may_end = bool(self._condition or self._patience or callbacks.on_round or callbacks.on_evaluation)
        self.reason = ""

    @property
    def ended(self):
        """Number of each client that has ended by itself -> the round."""
        return {int(name[1:]): watch.round for name, watch in self._watches.items() if name and watch.round}

    @property
    def has_ended(self):
        """Whether metrics have ended the run, or all clients' parts of it: also if it goes on from a checkpoint."""
        return all(watch.round for watch in self._watches.values())

    def go_on(self):
        """Look at metrics anew, of a run that has ended and is asked for more rounds."""
        for watch in self._watches.values():
            watch.round = watch.num_worse = 0

    def after_round(self, now):
        """Let the round be the last one if the run ends there."""
        if self._may_end and self.after(now.record, now.metrics):
            now.is_last = True

    def after(self, record, metrics):
        """Whether the run ends after a round, of which these are the record and the `Metrics` ({}: not evaluated).

        Raises:
            AgreedUserError: on every rank, if the condition names a metric that is not measured.
        """
        record, is_evaluated = {**record, **metrics}, bool(metrics)
        if is_evaluated and (self._condition or self._patience):
            agree(self._link, lambda: self._look(record, metrics))
        for name in ("on_evaluation", "on_round"):
            callback = getattr(self._callbacks, name)
            if callback is None or (name == "on_evaluation" and not is_evaluated):
                continue
            if self._link.first_rank_where(_is_true(callback(dict(record)))) is not None:
                self.reason = self.reason or f"by {name}"
        return bool(self.reason)

    def state(self):
        """Name -> number, for a checkpoint."""
        return {
            f"ending/{key}{name}": value for name, watch in self._watches.items() for key, value in vars(watch).items()
        }

    def restore(self, state):
        """Take what `state` gave."""
        for name, watch in self._watches.items():
            for key, value in vars(watch).items():
                setattr(watch, key, type(value)(state[f"ending/{key}{name}"]))

    def _look(self, record, metrics):
        """Compare the metrics of an evaluation; not collective."""
        reasons = []
        for name, watch in self._watches.items():
            if watch.round:
                continue
            if name:
                metric, _, value = goal_of_client(self._goal, metrics, int(name[1:]))
                of_client = {key: each[int(name[1:])] for key, each in metrics.clients.items()}
                reason = self._reason(watch, {**record, **of_client}, metric, value)
            else:
                metric, sign = selection_goal(self._goal, record)
                reason = self._reason(watch, record, metric, sign * record.get(metric, math.nan))
            watch.round = record["round"] if reason else 0
            reasons.append(reason)
        if self.has_ended:
            rounds = ", ".join(str(watch.round) for watch in self._watches.values())
            self.reason = reasons[0] if "" in self._watches else f"each client by its own metrics, after round {rounds}"

    def _reason(self, watch, record, metric, value):
        """Why what a `_Watch` is of ends, by a record and the value of the metric that patience is about; or ""."""
        if self._condition is not None:
            name, comparison, bound = self._condition
            if name not in record:
                known = ", ".join(record)
                raise UserError(f"stop: there is no metric {name}; the record of a round contains {known}")
            if _COMPARISONS[comparison](record[name], bound):
                return f"{name} {comparison} {bound:g}"
        if self._patience is not None:
            watch.best, watch.num_worse = (value, 0) if value > watch.best else (watch.best, watch.num_worse + 1)
            if watch.num_worse >= self._patience:
                how = "was not a finite number" if watch.best == -math.inf else "has not improved"
                return f"{metric} {how} in {self._patience} evaluations"
        return ""
