"""What the record of a round contains: every field with its title, its unit, and which values are better.

A record is one line of metrics.jsonl: a dict of numbers. Amounts are counted from the beginning of
the run; metrics are measured after the round, "loss" in every round and the others when the model is evaluated.
JSON has neither nan nor infinities: nan is written as null, and an infinity as the largest number of its sign.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a record.

    Attributes:
        name: its key in the record. title: what figures and headings call it.
        label: what tables call it; default: the name without underscores.
        unit: for an amount, the kind of quantity that `fedmpi.ground.text.format_quantity` writes; None for a metric.
        less_is_better: for a metric, whether a smaller value is better.
    """

    name: str
    title: str
    label: str = ""
    unit: str | None = None
    less_is_better: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.name.replace("_", " "))


def _table(*fields: Field) -> dict[str, Field]:
    return {field.name: field for field in fields}


AMOUNTS = _table(
    Field("round", "communication rounds", "rounds", unit="rounds"),
    Field("iteration", "local steps of a client", "local steps", unit="rounds"),
    Field("bytes", "bytes sent per client", "sent per client", unit="bytes"),
    Field("gradients", "gradient evaluations of all clients", unit="gradients"),
    Field("seconds", "wall time", "time", unit="seconds"),
    Field("local_seconds", "time of local steps", "local steps", unit="seconds"),
    Field("communication_seconds", "time of communication", "communication", unit="seconds"),
    Field("evaluation_seconds", "time of evaluation", "evaluation", unit="seconds"),
)
AXES = ("round", "bytes", "gradients", "seconds")  # the amounts that a metric is drawn against
METRICS = _table(
    Field("loss", "loss in local steps", less_is_better=True),
    Field("train_loss", "training loss", less_is_better=True),
    Field("test_loss", "test loss", less_is_better=True),
    Field("accuracy", "test accuracy"),
    Field("perplexity", "test perplexity", less_is_better=True),
    Field("auc", "test ROC-AUC"),
    Field("holdout_loss", "loss on held-out training data", less_is_better=True),
    Field("holdout_accuracy", "accuracy on held-out training data"),
    Field("holdout_perplexity", "perplexity on held-out training data", less_is_better=True),
    Field("holdout_auc", "ROC-AUC on held-out training data"),
    Field("attack_loss", "attack loss", less_is_better=True),
    Field("attack_accuracy", "attack accuracy"),
    Field("distortion", "distortion", less_is_better=True),
    Field("distance", "distance to the solution", less_is_better=True),
    Field("gap", "gap", less_is_better=True),
    Field("gradient_norm", "norm of the gradient", less_is_better=True),
)
CLIENTS_KEY = "clients"  # in a record: metric -> a list with each client's value, nan if it has none
TABLES_KEY = "tables"  # in a record: metric -> {"classes": names, "values": a vector or matrix as nested lists}
# In the first evaluated record, and when it changes: {"classes": names, "values": [N][classes] numbers of test cases}.
CASES_KEY = "cases"
FORMAT_KEY, FORMAT = "format", "2"  # in a record with metrics, for readers of several versions
LEVEL = 5e-5  # metrics that differ by less are printed as the same
HELD_OUT = "holdout_"  # how the names of metrics on held-out training data begin
# In names of other metrics.
LESS_IS_BETTER = ("loss", "perplexity", "distance", "distortion", "error", "gap", "norm", "brier", "calibration")


def to_line(record: object) -> bytes:
    """A record as a line of metrics.jsonl, in bytes."""
    return json.dumps(_mapped(record, _as_json), allow_nan=False).encode() + b"\n"


def from_line(line: str | bytes) -> Any:
    """What `to_line` was given, with nan for null.

    Raises:
        ValueError, RecursionError: if it is not JSON.
    """
    return _mapped(json.loads(line), lambda value: math.nan if value is None else value)


def _as_json(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else math.copysign(sys.float_info.max, value)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value of JSON with `change` of all that is no dict or list."""
    if isinstance(value, dict):
        return {name: _mapped(inner, change) for name, inner in value.items()}
    return [_mapped(inner, change) for inner in value] if isinstance(value, list) else change(value)


def field(name: str) -> Field:
    """The `Field` of that name; one of a user's task is described by its name alone."""
    known = AMOUNTS.get(name) or METRICS.get(name)
    less_is_better = any(word in name for word in LESS_IS_BETTER)
    return known or Field(name, name.replace("_", " "), less_is_better=less_is_better)


def title(name: str) -> str:
    """What figures and headings call a field."""
    return field(name).title


def label(name: str) -> str:
    """What tables call a field."""
    return field(name).label


def is_beside(metric: str) -> bool:
    """Whether it is the other average, over samples or clients, of the metric whose name it begins with."""
    return metric.endswith(("_samples", "_clients"))


def less_is_better(metric: str) -> bool:
    """Whether a smaller value of a metric is better."""
    return field(metric).less_is_better
