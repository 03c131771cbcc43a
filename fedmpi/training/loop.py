"""One training run: rounds, evaluations, records, the result. Rank 0 records, prints and saves."""

import contextlib
import dataclasses
import functools
import pathlib
import re
import sys
import time
from collections.abc import Callable

import torch

from fedmpi.comm.agreement import agree, share
from fedmpi.errors import Diverged
from fedmpi.registry import command_name
from fedmpi.runs.recorder import Recorder
from fedmpi.training.build import prepare
from fedmpi.training.ending import Callbacks, Ending
from fedmpi.training.evaluation import Evaluation
from fedmpi.training.result import ResultRule, closing_table, save, trained_module


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run leaves, the same on every rank.

    Attributes:
        folder: path of the run folder. records: of the rounds, as in metrics.jsonl; times are those of rank 0.
        metrics: of the resulting model, on all data.
        make_model: function without arguments, before the link is closed: the resulting module, in evaluation mode.
    """

    folder: pathlib.Path
    records: list
    metrics: dict
    make_model: Callable[[], torch.nn.Module]


def train(config, link, callbacks=Callbacks()):  # noqa: B008  frozen
    """Train as the settings say. Collective on the link.

    Args:
        config: a `Config`. link: a `Link`. callbacks: what is called after rounds, see `Callbacks`.

    Returns:
        the `Outcome`.

    Raises:
        AgreedUserError: on every rank (see `agree`), before any training or if the result
            cannot be written.
        Diverged: on every rank, if a loss is not finite.
    """
    job = prepare(config, link)
    recorder = agree(link, lambda: _make_recorder(job))
    try:
        return _run(job, recorder, callbacks)
    except Diverged as error:
        if recorder is not None:
            recorder.diverged(str(error))
        raise
    finally:
        if recorder is not None:
            recorder.close()


def _make_recorder(job):
    """The recorder on rank 0, None elsewhere; not collective."""
    if job.link.rank != 0:
        return None
    config = job.config
    prefix = command_name(type(config.algorithm))
    data = getattr(config.task, "data", command_name(type(config.task)))
    stem = str(data).rsplit("/", 1)[-1].removesuffix(".h5")
    stem = re.sub(r"[-_.]*{.*}", "", stem) or "silos"  # silo_{client}: silo
    return Recorder(config.run.out, config.run.name, f"{prefix}-{stem}", config.resolved, job.num_rounds)


def _run(job, recorder, callbacks):
    """Start, rounds, evaluations, result."""
    _warn_of_choice(job)
    run, federation, evaluation = job.config.run, job.federation, Evaluation(job)
    every = run.eval_every or max(1, job.num_rounds // 20)
    rule = ResultRule(run.result, job.num_rounds, run.seed, job.task.goal)
    ending = Ending(run, job.task.goal, job.link, callbacks)
    clock, records = _Clock(), []
    if recorder:
        job.task.write_split(recorder.folder)
        recorder.begin()
    federation.start()
    for number in range(1, job.num_rounds + 1):
        loss, metrics = federation.run_round(), {}
        is_last = number == job.num_rounds
        if number % every == 0 or is_last:
            with clock.evaluating():
                metrics = evaluation(federation.server.x, federation.store.buffers, number, whole=is_last)
        rule.consider(federation, metrics)
        record = _record(job, loss, clock)
        if ending.after({**record, **metrics}, is_evaluated=bool(metrics)) and not is_last:
            is_last = True
            with clock.evaluating():
                metrics = evaluation(federation.server.x, federation.store.buffers, number, whole=True)
            record = _record(job, loss, clock)
        if recorder:
            recorder.round(record, metrics)
        records.append({**record, **metrics})
        if is_last:
            break
    selected = federation.selected
    if selected is not None and selected.round != number:
        metrics = evaluation(selected.x, selected.buffers, selected.round, whole=True)
    agree(job.link, lambda: save(job, recorder))
    if recorder is not None:
        recorder.close()
        result = f"{rule.describe(selected)}, in {recorder.folder}"
        facts = {"evaluated on": evaluation.describe(), **({"ended early": ending.reason} if ending.reason else {})}
        print(closing_table(job, record, metrics, result, facts), flush=True)
    folder, records = share(job.link, lambda: [str(recorder.folder), records])
    return Outcome(pathlib.Path(folder), records, metrics, functools.partial(trained_module, job))


def _warn_of_choice(job):
    """Say it if the run will choose on the test set what is then measured there; rank 0 prints."""
    run, task = job.config.run, job.config.task
    chooses = run.result == "best" or run.patience is not None
    if job.link.rank == 0 and chooses and task.can_hold_out and not run.holdout:
        what = "the best result is selected" if run.result == "best" else "the end of the run is decided"
        hint = "so that it is better there than on new data; --holdout 0.1 decides on held-out training data"
        print(f"fedmpi: {what} by {job.task.goal[0]} on the test set, {hint}", file=sys.stderr, flush=True)


class _Clock:
    """The time since the beginning of the rounds, and how much of it evaluation took."""

    def __init__(self):
        self._began, self.evaluation_seconds = time.perf_counter(), 0.0

    @property
    def seconds(self):
        return time.perf_counter() - self._began

    @contextlib.contextmanager
    def evaluating(self):
        """A context whose time counts as evaluation."""
        before = time.perf_counter()
        yield
        self.evaluation_seconds += time.perf_counter() - before


def _record(job, loss, clock):
    """The amounts and the loss of the last round, see `fedmpi.runs.record`."""
    federation = job.federation
    return {
        "round": federation.round_index,
        "iteration": federation.server.iteration,
        "loss": loss,
        "seconds": clock.seconds,
        "local_seconds": federation.seconds["local"],
        "communication_seconds": federation.seconds["communication"],
        "evaluation_seconds": clock.evaluation_seconds,
        "bytes": job.link.traffic.nbytes,
        "gradients": federation.num_gradients,
    }
