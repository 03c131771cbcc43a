"""What a stage is: it changes what one client sends, after its turn and before the aggregation."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from fedmpi.aggregation.layout import Layout, Moment
from fedmpi.comm.link import Link
from fedmpi.ground.errors import UserError
from fedmpi.ground.part import Part
from fedmpi.ground.settings import check
from fedmpi.ground.text import Log

log = Log(__name__)


class NotFinite(Exception):
    """A stage that `looks` has found a value that is not finite."""


WATCHED = 10  # exchanges in which it is found out whether a stage makes squares 0
NOTABLE = 0.01  # of the values


@dataclasses.dataclass(frozen=True)
class Sent:
    """What a client is about to send.

    Attributes:
        client: its number. weight: in the average, which is applied later. moment: the `Moment`.
        rows: name -> [dim] of the rows that this exchange averages; to be changed in place. If it
            averages the model's float buffers, too, these are one more row, "float buffers", of their own length, with
            0 for those that no client has changed.
        start: name -> [dim] copies of the same rows as the round began with them, 0 for differences: a client's move is
            what it sends, minus it. None unless the stage `needs_start`.
        kinds: name -> what the row is, see `fedmpi.algorithms.base`. Squares that are below 0 afterwards become 0.
        kept: name in `kept_rows` -> {name of a row -> [dim]}: what the stage keeps for this client from round to round;
            zeros at first, and part of checkpoints.
    """

    client: int
    weight: float
    moment: Moment
    rows: dict[str, torch.Tensor]
    start: dict[str, torch.Tensor] | None
    kept: dict[str, dict[str, torch.Tensor]]
    kinds: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class Stage(Part):
    """Base of the stages that a client's rows pass before the aggregation; its settings are its fields.

    Rows are checked to be finite before the first stage and after each one. Rounding to whole numbers, with the error
    fed back:

    >>> import dataclasses, fedmpi
    >>> from fedmpi.aggregation.stages import Stage
    >>> @dataclasses.dataclass(kw_only=True)
    ... class Whole(Stage):
    ...     kept_rows = ("error",)
    ...
    ...     def apply(self, sent):
    ...         for name, row in sent.rows.items():
    ...             error = sent.kept["error"][name]
    ...             row += error
    ...             error.copy_(row)
    ...             row.round_()
    ...             error -= row
    >>> fedavg = fedmpi.algorithms.FedAvg(step_size=0.5)
    >>> def gradient(client, x, sample):
    ...     return x - client
    >>> trace = fedmpi.simulate(fedavg, gradient, x0=[9.0], rounds=1, sending=fedmpi.Sending(stages=[Whole()]))
    >>> trace[-1]["rows"]["x"].tolist()  # the mean of 2, 3 and 4, which are 2.25, 3 and 3.75 rounded
    [[3.0], [3.0], [3.0]]

    Attributes:
        needs_start: whether `apply` reads the rows that the round began with.
        writes_start: whether it may change them: if not, they need not be a copy. This and the next two count if the
            class itself says them: one that derives from it may do otherwise.
        keeps_finite: whether finite rows stay finite: if so, nobody looks at them after it.
        looks: whether, on a CPU, it raises NotFinite, and has changed nothing, if a value is not finite: if so, and if
            it is the first stage, nobody looks before it.
        link, layout: after `open`.
    """

    needs_start: ClassVar[bool] = False
    writes_start: ClassVar[bool] = True
    keeps_finite: ClassVar[bool] = False
    looks: ClassVar[bool] = False
    may_warn = False  # of squares that it makes 0; on rank 0, once
    called = "the stage"  # in messages

    def __post_init__(self) -> None:
        check(self, "stages.")

    def open(self, link: Link, layout: Layout) -> None:
        """Called once, before the first exchange. Collective on the link."""
        self.link, self.layout = link, layout

    @abc.abstractmethod
    def apply(self, sent: Sent) -> None:
        """Change the rows of a client in place. Not collective.

        Called once in every exchange for every client that takes part, in the exchange of the start too.
        """


def apply_stage(
    stage: Stage,
    client: int,
    weight: float,
    moment: Moment,
    kinds: dict[str, str],
    rows: dict[str, torch.Tensor],
    start_rows: Callable[..., dict[str, Any]],
) -> None:
    """Let the rows that a client sends pass a stage.

    Args:
        kinds: name -> kind of the exchanged rows; those that are not there are points.
        rows: name -> what the client sends.
        start_rows: function that returns the rows with which the round began, with ``is_copy`` to be overwritten.
    """
    of = {row: kinds.get(row, "point") for row in rows}
    if not rows:
        return
    kept = stage.kept_of[client] if stage.kept_rows else {}
    start = None
    if stage.needs_start:
        may_write = vars(type(stage)).get("writes_start", True)  # a class that derives from one that does not may
        began = start_rows(is_copy=may_write)
        start = {row: torch.zeros_like(began[row]) if of[row] == "difference" else began[row] for row in rows}
    squares = {row: values for row, values in rows.items() if of[row] == "square"}
    before = _num_positive(squares) if stage.may_warn and moment.serial < WATCHED else {}
    given = dict(rows)
    stage.apply(Sent(client, weight, moment, rows, start, kept, {row: of[row] for row in rows}))
    for row, values in given.items():
        if rows.get(row) is not values or rows.keys() != given.keys():
            raise UserError(
                f"{stage.called} has put another tensor in the place of sent.rows[{row!r}]: expected that it changes "
                "the values of the one that is there, like sent.rows[name].copy_(...) or sent.rows[name] *= ..."
            )
    for values in squares.values():
        values.clamp_(min=0)
    if before:
        stage.may_warn = not _warn_of_zeros(stage.called, before, _num_positive(squares))


def _num_positive(rows: dict[str, torch.Tensor]) -> dict[str, int]:
    return {row: int((values > 0).sum()) for row, values in rows.items()}


def _warn_of_zeros(name: str, before: dict[str, int], after: dict[str, int]) -> bool:
    """Whether a stage has made so many squares 0, or negative, that steps can be far too long: a line says so."""
    for row, number in before.items():
        if number - after[row] > NOTABLE * number:
            log.warning(
                f"{name} makes {number - after[row]:,} of {number:,} positive values of row {row}, means of "
                "squares, 0 or less (they are sent as 0): steps divided by their roots can be far too long; expected "
                "less noise, or a stage that leaves them above 0"
            )
            return True
    return False
