"""One training run: rounds, evaluations, records, checkpoints, the result. Rank 0 records, prints and saves."""

import contextlib
import dataclasses
import functools
import pathlib
import re
import time
from collections.abc import Callable

import torch

from fedmpi.comm.agreement import agree, allgather_lines, share
from fedmpi.comm.job.replicas import check_replicas, check_result
from fedmpi.comm.job.signals import StopSignals, stopping_signal
from fedmpi.config.resume import AUTO
from fedmpi.ground.errors import AgreedUserError, Diverged, Stopped, UserError
from fedmpi.ground.files.run_files import RECORDS, SERVER_STATE, find_checkpoints, is_complete
from fedmpi.ground.registry import command_name
from fedmpi.ground.text import Log
from fedmpi.runs.checkpoints.files import Damaged, checkpoint_folder, read_manifest
from fedmpi.runs.checkpoints.writer import Checkpoints
from fedmpi.runs.folder import read_records
from fedmpi.runs.lock import RunLock
from fedmpi.runs.record import AMOUNTS, CLIENTS_KEY
from fedmpi.runs.recorder import Recorder, check_run_folder, make_run_folder
from fedmpi.runs.trackers.base import make_trackers
from fedmpi.training import cross_site
from fedmpi.training.build import Job, prepare
from fedmpi.training.data_account import account_for_data
from fedmpi.training.early_stopping import Callbacks, EarlyStopping
from fedmpi.training.evaluation import Evaluation
from fedmpi.training.own_results import OwnResults
from fedmpi.training.records import Records
from fedmpi.training.result import (
    ResultRule,
    closing_table,
    complete_run,
    save,
    save_clients,
    save_selected,
    trained_module,
)

log = Log(__name__)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run leaves, the same on every rank.

    Attributes:
        folder: path of the run folder. records: of the rounds, as in metrics.jsonl; times are those of rank 0.
        metrics: of the resulting model, on all data.
        make_model: function without arguments, before the link is closed: the resulting module, in evaluation mode.
        job: the `Job`. samples: in all minibatches of all clients. was_complete: whether the run was complete before.
        cross_site: see `fedmpi.training.cross_site.measure`.
    """

    folder: pathlib.Path
    records: list
    metrics: dict
    make_model: Callable[[], torch.nn.Module]
    job: Job
    samples: float = 0.0
    was_complete: bool = False
    cross_site: dict = dataclasses.field(default_factory=dict)


def train(config, link, callbacks=Callbacks(), began=None):  # noqa: B008  it is frozen
    """Train as the settings say, from the beginning or from a checkpoint. Collective on the link.

    Args:
        config: a `Config`. link: a `Link`. callbacks: what is called after rounds, see `Callbacks`.
        began: when the program began, on the clock of `time.perf_counter`; None: now.

    Returns:
        the `Trained`.

    Raises:
        AgreedUserError: on every rank (see `agree`), before any training or if the result
            cannot be written.
        Diverged: on every rank, if a loss is not finite.
        Stopped: on every rank, if one was sent a signal and a checkpoint is written.
    """
    began = time.perf_counter() if began is None else began
    with StopSignals() as signals:
        agree(link, lambda: link.rank == 0 and check_run_folder(config.run))
        job = prepare(config, link)
        # On all ranks before there is a run folder: whoever has seen it may send a signal.
        agree(link, signals.begin_rounds)
        if config.run.resume in (None, AUTO):
            _survive(job)
        recorder, folder, identity = _open(job)
        try:
            records = Records(job, folder, recorder)
            check = (lambda: check_replicas(job.federation)) if config.run.check_replicas else (lambda: None)
            checkpoints = Checkpoints(job, folder, identity, records.recorder, check)
            link.can_be_resumed(
                lambda: f"; --resume {folder} continues after round {checkpoints.done}" if checkpoints.done else ""
            )
            return _run(job, recorder, records, checkpoints, callbacks, began, signals)
        finally:
            if recorder is not None:
                recorder.close()


def _survive(job):
    """From now on, go on without ranks that are lost, if the settings say so. Collective."""
    if job.config.run.on_loss == "continue":
        job.link.survive()


def _open(job):
    """(the recorder on rank 0, None elsewhere; path of the run folder; the run's identity). Collective."""
    recorder, folder, identity = None, "", ""
    while not folder:  # again, if rank 0 is lost before the others know its folder
        recorder = agree(job.link, lambda: recorder or _make_recorder(job))  # noqa: B023
        folder, identity = share(
            job.link,
            lambda: [str(recorder.folder), recorder.identity] if recorder else ["", ""],  # noqa: B023
        )
    return recorder, pathlib.Path(folder), identity


def _make_recorder(job):
    """The recorder on rank 0, None elsewhere; not collective."""
    run, config = job.config.run, job.config
    if job.link.rank != 0:
        return None
    if run.resume not in (None, AUTO):
        trackers = make_trackers(run.track)
        return Recorder(RunLock(pathlib.Path(run.resume)), job.num_rounds, trackers)
    prefix = command_name(type(config.algorithm))
    data = getattr(config.task, "data", command_name(type(config.task)))
    stem = str(data).rsplit("/", 1)[-1].removesuffix(".h5")
    stem = re.sub(r"[-_.]*{.*}", "", stem) or "silos"  # silo_{client}: silo
    trackers = make_trackers(run.track)  # first: an error leaves no folder behind
    begins_anew = run.resume == AUTO or bool(job.link.lost)
    return Recorder(make_run_folder(run.out, run.name, f"{prefix}-{stem}", begins_anew), job.num_rounds, trackers)


class _Progress:
    """The loop's own state, which a checkpoint contains: the clocks, the last metrics, and what may end it early.

    Attributes:
        early_stopping: the `EarlyStopping`. metrics: of the last evaluation. start_seconds: of the program before its
            first round.
    """

    def __init__(self, early_stopping):
        self.early_stopping = early_stopping
        self._began, self.evaluation_seconds = time.perf_counter(), 0.0
        self.metrics, self.start_seconds = {}, 0.0

    @property
    def seconds(self):
        """Wall time since the beginning of the run, without the time between a stop and its resumption."""
        return time.perf_counter() - self._began

    @contextlib.contextmanager
    def evaluating(self):
        """A context whose time counts as evaluation."""
        before = time.perf_counter()
        yield
        self.evaluation_seconds += time.perf_counter() - before

    def state(self):
        """Name -> number, for a checkpoint."""
        clocks = {"seconds": self.seconds, "evaluation_seconds": self.evaluation_seconds}
        metrics = {f"metrics/{name}": value for name, value in self.metrics.items()}
        return clocks | self.early_stopping.state() | metrics

    def restore(self, state):
        """Take what `state` gave; raises `UserError` if it is something else."""
        names = ("seconds", "evaluation_seconds", *self.early_stopping.state())
        if missing := [name for name in names if not isinstance(state.get(name), int | float)]:
            raise UserError(f"the checkpoint's {SERVER_STATE}: has no {missing[0]}: expected what fedmpi wrote")
        self._began = time.perf_counter() - state["seconds"]
        self.evaluation_seconds = state["evaluation_seconds"]
        self.early_stopping.restore(state)
        self.metrics = {name[len("metrics/") :]: state[name] for name in state if name.startswith("metrics/")}


def _run(job, recorder, records, checkpoints, callbacks, began, signals):
    """The whole run, from its start or a checkpoint to its `Trained`. Collective."""
    run, link = job.config.run, job.link
    own = OwnResults(job.federation, run, job.task.goal)
    num_alone = job.context.num_clients if job.federation.private.is_everything else 0
    progress = _Progress(EarlyStopping(run, job.task.goal, link, callbacks, num_alone))
    rule = ResultRule(run.result, job.num_rounds, run.seed, job.task.goal, own)
    position = 0
    if run.resume not in (None, AUTO):
        position, complete_in = _resume(job, recorder, checkpoints, progress, rule)
        if complete_in is not None:
            return _outcome(job, checkpoints.folder, complete_in)
    agree(link, lambda: recorder and recorder.begin(job.settings, position, job.federation.round_index))
    _survive(job)  # a resumed run only now: another rank 0 would append to records that go beyond the checkpoint
    account_for_data(job, records.recorder())
    _warn_of_choice(job)
    if recorder and job.task.reading:
        print(f"data: {job.task.reading}", flush=True)
    if recorder:
        recorder.write(job.task.write_split)
    evaluation = Evaluation(job, own)
    progress.start_seconds = time.perf_counter() - began
    try:
        _run_rounds(job, records, checkpoints, progress, rule, evaluation, signals)
        return _finish(job, records, checkpoints, progress, rule, evaluation)
    except Diverged as met:
        samples = allgather_lines(link, filter(None, [job.task.why_not_finite()]))
        error = Diverged("; ".join([str(met), *samples[:1]]))
        checkpoints.finish()
        recorder = records.recorder()
        if recorder is None:
            raise error from None
        recorder.diverged(str(error))
        notes = [f"{save_selected(job, recorder)} is the best model so far"] if job.federation.selected else []
        notes += [f"the last checkpoint is that of round {checkpoints.done}"] if checkpoints.done else []
        raise Diverged("; ".join([str(error), *notes])) from None


def _resume(job, recorder, checkpoints, progress, rule):
    """(where a restored run's records end in metrics.jsonl, its folder if it is complete or None). Collective."""
    folder, is_finished, rounds = share(job.link, lambda: _find_run(job, recorder))
    state, manifest = checkpoints.restore() if rounds or not is_finished else ({}, None)
    if is_finished:
        if recorder:
            number = recorder.last_round()
            print(f"{folder}: the run is complete after {number} rounds; a larger --rounds continues it", flush=True)
        return 0, folder
    agree(job.link, lambda: progress.restore(state))
    if progress.early_stopping.has_ended and manifest.get("rounds") != job.num_rounds:
        progress.early_stopping.go_on()
    agree(job.link, lambda: rule.check(job.federation))
    if recorder:
        print(f"{folder}: continuing after round {manifest['round']}", flush=True)
    return manifest["records"], None


def _find_run(job, recorder):
    """[folder of the resumed run, whether the run is complete, rounds of its checkpoints]; not collective."""
    folder, rounds = recorder.folder, find_checkpoints(recorder.folder)
    is_finished = is_complete(folder) and (
        recorder.last_round() == job.num_rounds or (rounds and _planned_rounds(folder, rounds[0]) == job.num_rounds)
    )
    return [str(folder), bool(is_finished), rounds]


def _planned_rounds(folder, number):
    """How many rounds were asked for when the checkpoint after `number` was written: the run may have ended early."""
    try:
        return read_manifest(checkpoint_folder(folder, number)).get("rounds")
    except Damaged:
        return None


def _warn_of_choice(job):
    """Print a warning on rank 0 if the run will choose its result on the test set, on which it is then measured."""
    run, task = job.config.run, job.config.task
    if job.link.rank == 0 and run.cross_site:
        log.warning(cross_site.SENT)
    chooses = run.result == "best" or run.patience is not None
    if job.link.rank == 0 and chooses and task.can_hold_out and not run.holdout:
        choice = "the best model is chosen" if run.result == "best" else "the run ends early"
        hint = "so the test results will be too optimistic; --holdout 0.1 uses held-out training data instead"
        log.warning(f"{choice} by {job.task.goal[0]} on the test set, {hint}")


def _run_rounds(job, records, checkpoints, progress, rule, evaluation, signals):
    """The start, unless the run was resumed, and all rounds that are left."""
    federation, run, link = job.federation, job.config.run, job.link
    every = run.eval_every or max(1, job.num_rounds // (10 if evaluation.is_partial else 20))
    if federation.round_index == 0:
        federation.start()
    is_last = federation.round_index >= job.num_rounds or progress.early_stopping.has_ended
    while not is_last:
        job.task.begin_round(federation.round_index)
        loss = federation.run_round(lambda: signals.bits | checkpoints.request())
        number, evaluated = federation.round_index, {}
        if run.check_replicas and number % run.check_replicas == 0:
            check_replicas(federation)
        is_last = number == job.num_rounds
        if number % every == 0 or is_last:
            evaluated = _evaluate(job, progress, evaluation, whole=is_last)
        rule.consider(federation, evaluated, progress.early_stopping.ended)
        record = _record(job, loss, progress)
        if progress.early_stopping.after(record, evaluated) and not is_last:
            is_last = True
            evaluated = _evaluate(job, progress, evaluation, whole=True)
            record = _record(job, loss, progress)
        records.round(record, evaluated)
        link.enter(f"the checkpoint after round {number}")
        checkpoints.after_round(progress.state)
        signal = stopping_signal(federation.requests)
        if signal and not is_last:
            _stop(job, records.recorder(), checkpoints, progress, signal)


def _evaluate(job, progress, evaluation, whole):
    """Metrics of the current averaged model, which `progress` remembers. Collective."""
    federation = job.federation
    job.link.enter(f"the evaluation after round {federation.round_index}")
    with progress.evaluating():
        x, buffers, ended = federation.server.x, federation.store.buffers, progress.early_stopping.ended
        metrics = evaluation(x, buffers, federation.round_index, whole, ended)
    progress.metrics = metrics
    return metrics


def _record(job, loss, progress):
    """The amounts and the loss of the last round, see `fedmpi.runs.record`."""
    federation = job.federation
    return {
        "round": federation.round_index,
        "iteration": federation.server.iteration,
        "loss": loss,
        "seconds": progress.seconds,
        "local_seconds": federation.seconds["local"],
        "communication_seconds": federation.seconds["communication"],
        "evaluation_seconds": progress.evaluation_seconds,
        "bytes": job.link.traffic.nbytes,
        "gradients": federation.num_gradients,
        **federation.facts(),
    }


def _stop(job, recorder, checkpoints, progress, signal):
    """Write a checkpoint and raise `Stopped`."""
    number = job.federation.round_index
    is_written = checkpoints.write_now(progress.state)
    where = f"--resume {recorder.folder}" if recorder else ""
    if not is_written:
        last = (
            f"the last checkpoint is that of round {checkpoints.done}" if checkpoints.done else "there is no checkpoint"
        )
        raise AgreedUserError(f"stopped after round {number} by {signal}; {last}", recorder is not None)
    raise Stopped(f"stopped after round {number} by {signal}; to continue: {where}")


def _finish(job, records, checkpoints, progress, rule, evaluation):
    """Save the result, print the closing table, and write the last checkpoint."""
    federation, metrics = job.federation, progress.metrics
    if job.config.run.check_replicas:
        check_replicas(federation)
    selected = federation.selected
    job.link.enter("the end")
    if selected is not None and selected.round != federation.round_index:
        metrics = evaluation(selected.x, selected.buffers, selected.round, whole=True)
    own = rule.own_results
    if own.are_kept:
        everyone = range(job.context.num_clients)
        metrics = evaluation(federation.server.x, federation.store.buffers, federation.round_index, True, everyone)
    crossed = cross_site.measure(job, own) if job.config.run.cross_site and federation.private else {}
    problem = None
    try:
        agree(job.link, lambda: save_clients(job, checkpoints.folder, own))
    except AgreedUserError as error:  # the model is saved all the same
        problem = error
    _on_rank_0(job.link, lambda: save(job, records.recorder()))
    try:
        agree(job.link, lambda: rule.check_selected(selected))
    except AgreedUserError as error:
        problem = problem or error
    if problem is not None:
        raise problem
    if records.recorder() is not None and (crossed or metrics is not progress.metrics):
        records.recorder().result(metrics, cross_site.tables(job, crossed))
    checkpoints.write_now(progress.state)
    job.link.barrier()  # all ranks have come to the end: only now does the run look complete
    _on_rank_0(job.link, lambda: complete_run(records.recorder()))
    check_result(federation)
    recorder = records.recorder()
    if recorder is not None:
        recorder.close()
        facts = {"data": job.task.reading} if job.task.reading else {}
        facts |= {"evaluated on": evaluation.describe()}
        facts |= {"start-up": f"{progress.start_seconds:.2f} s before the first round"}
        facts |= {"ended early": progress.early_stopping.reason} if progress.early_stopping.reason else {}
        result = f"{rule.describe(selected)}, in {recorder.folder}"
        print(closing_table(job, recorder.last, metrics, result, facts), flush=True)
    samples = _num_samples(job, progress.early_stopping)
    return dataclasses.replace(_outcome(job, checkpoints.folder, metrics=metrics), samples=samples, cross_site=crossed)


def _num_samples(job, early_stopping):
    """Samples in the minibatches of all clients; those of a client that ended by itself, until then. Collective."""
    total = 0.0
    for client in job.federation.clients:
        of_pass = job.task.num_samples(client.index) / job.samplers[client.index].batches_per_pass
        ended = early_stopping.ended.get(client.index, job.federation.round_index)
        total += client.num_draws * of_pass * ended / job.federation.round_index
    return float(job.link.allgather([total]).sum())


def _on_rank_0(link, action):
    """`agree` on an action of rank 0; again on the next rank if that one is lost. Collective."""
    done_by = None
    while done_by != link.members:
        done_by = link.members
        agree(link, action)


def _outcome(job, folder, complete_in=None, metrics=None):
    """The `Trained`. Collective.

    `complete_in`: the run folder, if the run was complete before. `metrics`: of the result; None: the last record's.
    """
    records = None
    while records is None:  # again, if the rank that read them is lost
        records = share(job.link, lambda: read_records(folder / RECORDS, keeps_clients=True)[0])
    if metrics is None:
        metrics = {name: value for name, value in records[-1].items() if name not in {*AMOUNTS, "loss", CLIENTS_KEY}}
    make = functools.partial(trained_module, job, complete_in and pathlib.Path(complete_in))
    return Trained(folder, records, metrics, make, job, was_complete=complete_in is not None)
