"""What would show single silos' numbers in a run whose aggregation hides them (`Aggregation.hides`)."""

from typing import Any

from fedmpi.aggregation.masked import Masked
from fedmpi.federation.participation import draw_participants
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import command_name
from fedmpi.tasks.custom import Task
from fedmpi.tasks.files import has_own_files


def check_hidden(config: Any, num_ranks: int, num_clients: int) -> None:
    """Check, by the settings alone, that nothing undoes what the aggregation hides; not collective.

    Raises:
        UserError: with what shows a silo's numbers, and what to do.
    """
    aggregation = config.sending.aggregation
    if not aggregation.hides:
        return
    called = f"--aggregation {command_name(type(aggregation))} hides what single silos have"
    if getattr(aggregation, "hidden_weights", False):
        raise UserError(
            "aggregation.hidden_weights: in this program all ranks know how many samples and minibatches each silo "
            "has: expected no hidden weights, or fedmpi.join or fedmpi.average with weight="
        )
    if config.studies.cross_site:
        raise UserError(f"{called}, and --cross_site sends each silo's model to all: leave one of them out")
    if config.studies.methods:
        raise UserError(f"{called}, and --baselines shows each silo's own results: leave one of them out")
    task, is_private = config.task, config.layers.private is not None
    if task.crosses(is_private, config.data.scores) & {"outputs", "metric sums"} and not _is_common(config, task):
        raise UserError(
            f"{called}, and the metrics of task {command_name(type(task))} need labels, outputs or counts of a silo's "
            "own samples on all ranks: expected metrics of one test set that all ranks have (without files, tests, "
            "held-out samples or --private layers of single silos), or no metrics"
        )
    if isinstance(aggregation, Masked):
        number = min(num_ranks, len(draw_participants(num_clients, config.rounds.participation, 0, 0)))
        if number < aggregation.least_ranks:
            raise UserError(
                f"{called}, and at most {number} ranks have clients that take part in a round: expected at least "
                f"aggregation.least_ranks = {aggregation.least_ranks}: with fewer, one can compute another's rows"
            )


def _is_common(config: Any, task: Any) -> bool:
    """Whether metrics are of a test set that all ranks have."""
    if config.layers.private is not None or config.data.holdout:
        return False
    if hasattr(task, "own_files"):
        return not has_own_files(task)
    has_common = task.test_set is not None if hasattr(task, "test_set") else type(task).test is not Task.test
    return has_common and type(task).test_of is Task.test_of
