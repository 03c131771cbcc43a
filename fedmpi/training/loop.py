"""One training run: rounds, evaluations, records, checkpoints, the result. Rank 0 records, prints and saves."""

import dataclasses
import functools
import math
import pathlib
import re
import time
from collections.abc import Callable

import torch

from fedmpi.comm.agreement import agree, allgather_lines, share
from fedmpi.comm.job.program import doing
from fedmpi.comm.job.replicas import check_replicas
from fedmpi.comm.job.signals import StopSignals
from fedmpi.config.resume import AUTO
from fedmpi.federation.turns import go_on, is_within
from fedmpi.ground.errors import AgreedUserError, Diverged, Stopped
from fedmpi.ground.files.run_files import RECORDS, find_checkpoints, is_complete
from fedmpi.ground.registry import command_name
from fedmpi.ground.text import Log, say
from fedmpi.runs.checkpoints.files import Damaged, checkpoint_folder, read_manifest
from fedmpi.runs.checkpoints.writer import Checkpoints
from fedmpi.runs.folder import read_records
from fedmpi.runs.lock import RunLock
from fedmpi.runs.loop.check import with_checks
from fedmpi.runs.loop.crossed import Crossing
from fedmpi.runs.loop.loop import Loop
from fedmpi.runs.loop.part import Now
from fedmpi.runs.loop.records import Records
from fedmpi.runs.loop.run import Run
from fedmpi.runs.loop.saving import Saving, Stopping
from fedmpi.runs.loop.within import WithinRound
from fedmpi.runs.record import AMOUNTS, CLIENTS_KEY
from fedmpi.runs.recorder import Recorder, check_run_folder, make_run_folder
from fedmpi.runs.trackers.base import make_trackers
from fedmpi.training import cross_site
from fedmpi.training.build import Job, prepare
from fedmpi.training.data_account import account_for_data
from fedmpi.training.early_stopping import Callbacks, EarlyStopping
from fedmpi.training.evaluation import Evaluation
from fedmpi.training.own_results import OwnResults
from fedmpi.training.parts import Completing, Dealing, Ending, Evaluating, EvaluatingAtEnd, Replicas, Result
from fedmpi.training.result import ResultRule, save_selected, trained_module

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
        job = _prepared(config, link, signals)
        recorder, folder, identity = _open(job)
        try:
            training = _assemble(job, recorder, folder, identity, callbacks, signals)
            if _begin(job, recorder, training, began):
                return _outcome(job, folder, was_complete=True)
            loop, federation, now = training.loop, job.federation, training.last_round()
            while not now.is_last:
                loop.before_round()
                now = loop.after_round(federation.run_round(loop.request))
                link.enter(f"the checkpoint after round {now.round}")
                loop.after_parts(now)
            loop.end(now)
            outcome, samples = _outcome(job, folder, now.metrics), _num_samples(job, training.early)
            return dataclasses.replace(outcome, samples=samples, cross_site=training.result.crossed)
        except Diverged as met:
            raise _diverged(job, training, met) from None
        finally:
            if recorder is not None:
                recorder.close()


def _prepared(config, link, signals):
    """The `Job`; from now on, signals wait for the end of a round."""
    agree(link, lambda: link.rank == 0 and check_run_folder(config.folder))
    job = prepare(config, link)
    # On all ranks before there is a run folder: whoever has seen it may send a signal.
    agree(link, signals.begin_rounds)
    if config.folder.resume in (None, AUTO):
        _survive(job)
    return job


def _survive(job):
    """From now on, go on without ranks that are lost, if the settings say so. Collective."""
    if job.config.faults.on_loss == "continue":
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
    config = job.config
    if job.link.rank != 0:
        return None
    if config.folder.resume not in (None, AUTO):
        trackers = make_trackers(config.folder.track)
        return Recorder(RunLock(pathlib.Path(config.folder.resume)), job.num_rounds, trackers)
    prefix = command_name(type(config.algorithm))
    data = getattr(config.task, "data", command_name(type(config.task)))
    stem = str(data).rsplit("/", 1)[-1].removesuffix(".h5")
    stem = re.sub(r"[-_.]*{.*}", "", stem) or "silos"  # silo_{client}: silo
    trackers = make_trackers(config.folder.track)  # first: an error leaves no folder behind
    begins_anew = config.folder.resume == AUTO or bool(job.link.lost)
    return Recorder(
        make_run_folder(config.folder.out, config.folder.name, f"{prefix}-{stem}", begins_anew),
        job.num_rounds,
        trackers,
    )


@dataclasses.dataclass
class _Training:
    """What a training run consists of, besides its `Job`: the `Run`, its `Loop`, and the parts that others ask."""

    run: Run
    loop: Loop
    records: Records
    checkpoints: Checkpoints
    early: EarlyStopping
    at_end: EvaluatingAtEnd
    result: Result
    start_seconds: float = 0.0  # of the program before its first round
    interrupted: dict | None = None  # the state within a round, in which an earlier process has stopped

    def restore(self, state):
        """See `Run.restore`."""
        self.run.federation.restore(state)
        self.interrupted = state if is_within(state) else None

    def last_round(self):
        """A `Now` of the last round before this process, or of one that an earlier process has begun."""
        if self.interrupted is not None:
            self.loop.before_round()
            now = self.loop.after_round(go_on(self.run.federation, self.interrupted, self.loop.request))
            self.interrupted = None
            self.loop.after_parts(now)
            return now
        now = Now(self.run, math.nan)
        now.metrics = now.recorded = self.at_end.metrics  # of a run that was killed after its last round
        now.is_last = self.run.federation.round_index >= self.run.num_rounds or self.early.has_ended
        return now


def _assemble(job, recorder, folder, identity, callbacks, signals):
    """The `_Training`. Collective."""
    config, federation, task = job.config, job.federation, job.task

    def make_recorder(lock):
        return Recorder(lock, job.num_rounds, make_trackers(config.folder.track))

    records = Records(job.link, folder, recorder, make_recorder, job.settings)
    run = Run(
        link=job.link,
        federation=federation,
        flat=job.flat,
        clients=job.context.clients,
        num_clients=job.context.num_clients,
        num_rounds=job.num_rounds,
        settings={**job.config.resolved, "clients": job.context.num_clients},
        folder=folder,
        identity=identity,
        recorder=records.recorder,
        record=lambda loss: _record(job, run, loss),
        state=federation.state,
        restore=lambda state: training.restore(state),
        may_change=config.may_change,
    )
    own = OwnResults(federation, config.evaluation, task.goal)
    num_alone = job.context.num_clients if federation.private.is_everything else 0
    early = EarlyStopping(config.evaluation, task.goal, job.link, callbacks, num_alone)
    rule = ResultRule(config.evaluation.result, job.num_rounds, config.data.seed, task.goal, own)
    evaluation = Evaluation(job, own)
    evaluating = Evaluating(job, evaluation, run.clock, early)
    at_end, result = EvaluatingAtEnd(evaluating), Result(job, rule, evaluation, early)
    check = (lambda: check_replicas(federation)) if config.faults.check_replicas else (lambda: None)
    checkpoints = Checkpoints(run, config.folder, lambda: loop.state(), check)

    minutes = config.folder.checkpoint_minutes
    within = WithinRound(signals, checkpoints.within, minutes, lambda signal: _stop_within(run, signal))

    def describe(now):
        facts = {"data": task.reading} if task.reading else {}
        facts |= {"evaluated on": evaluation.describe()}
        facts |= {"start-up": f"{training.start_seconds:.2f} s before the first round"}
        facts |= {"ended early": early.reason} if early.reason else {}
        return rule.describe(federation.selected), facts

    loop = Loop(
        run,
        [
            Crossing(),
            Dealing(task),
            Replicas(federation, config.faults.check_replicas),
            evaluating,
            result,
            early,
            *with_checks(callbacks.parts),
            *([Ending()] if callbacks.parts else []),
            at_end,
            records,
            Saving(checkpoints),
            within,
            Stopping(signals, lambda signal: _stop(run, checkpoints, signal)),
            Completing(job, describe),
        ],
    )
    training = _Training(run, loop, records, checkpoints, early, at_end, result)
    return training


def _begin(job, recorder, training, began):
    """Everything between the preparation and the first round; whether the run was complete before. Collective."""
    link, folder, checkpoints = job.link, training.run.folder, training.checkpoints
    link.can_be_resumed(
        lambda: f"; --resume {folder} continues after round {checkpoints.done}" if checkpoints.done else ""
    )
    position = 0
    if job.config.folder.resume not in (None, AUTO):
        position, was_complete = _resume(job, recorder, training)
        if was_complete:
            return True
    agree(link, lambda: recorder and recorder.begin(job.settings, position, job.federation.round_index))
    _survive(job)  # a resumed run only now: another rank 0 would append to records that go beyond the checkpoint
    account_for_data(job, training.records.recorder())
    _warn_of_choice(job)
    if recorder and job.task.reading:
        say(f"data: {job.task.reading}")
    if recorder:
        recorder.write(job.task.write_split)
    training.loop.begin()
    doing(None)
    training.start_seconds = time.perf_counter() - began
    if job.federation.round_index == 0 and training.interrupted is None:
        job.federation.start()
    return False


def _diverged(job, training, met):
    """The error of a run that has diverged, and what is left of it. Collective."""
    samples = allgather_lines(job.link, filter(None, [job.task.why_not_finite()]), "errors")
    error = Diverged("; ".join([str(met), *samples[:1]]))
    training.checkpoints.finish()
    recorder, done = training.records.recorder(), training.checkpoints.done
    if recorder is None:
        return error
    recorder.diverged(str(error))
    notes = [f"{save_selected(job, recorder)} is the best model so far"] if job.federation.selected else []
    notes += [f"the last checkpoint is that of round {done}"] if done else []
    return Diverged("; ".join([str(error), *notes]))


def _resume(job, recorder, training):
    """(where a restored run's records end in metrics.jsonl, whether it is complete). Collective."""
    folder, is_finished, rounds = share(job.link, lambda: _find_run(job, recorder))
    state, manifest = training.checkpoints.restore() if rounds or not is_finished else ({}, None)
    if is_finished:
        if recorder:
            number = recorder.last_round()
            say(f"{folder}: the run is complete after {number} rounds; a larger --rounds continues it")
        return 0, True
    agree(job.link, lambda: training.loop.restore(state))
    if training.early.has_ended and manifest.get("rounds") != job.num_rounds:
        training.early.go_on()
    if recorder:
        say(f"{folder}: continuing after round {manifest['round']}")
    return manifest["records"], False


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
    config, task = job.config, job.config.task
    if job.link.rank == 0 and config.studies.cross_site:
        log.warning(cross_site.SENT)
    chooses = config.evaluation.result == "best" or config.evaluation.patience is not None
    if job.link.rank == 0 and chooses and task.can_hold_out and not config.data.holdout:
        choice = "the best model is chosen" if config.evaluation.result == "best" else "the run ends early"
        hint = "so the test results will be too optimistic; --holdout 0.1 uses held-out training data instead"
        log.warning(f"{choice} by {job.task.goal[0]} on the test set, {hint}")


def _record(job, run, loss):
    """The amounts and the loss of the last round, see `fedmpi.runs.record`."""
    federation = job.federation
    return {
        "round": federation.round_index,
        "iteration": federation.server.iteration,
        "loss": loss,
        "seconds": run.clock.seconds,
        "local_seconds": federation.seconds["local"],
        "communication_seconds": federation.seconds["communication"],
        "evaluation_seconds": run.clock.evaluating,
        "bytes": job.link.traffic.nbytes,
        "gradients": federation.num_gradients,
        **federation.facts(),
    }


def _stop(run, checkpoints, signal):
    """Write a checkpoint and raise `Stopped`."""
    number, recorder = run.federation.round_index, run.recorder()
    is_written = checkpoints.write_now()
    if not is_written:
        done = checkpoints.done
        last = f"the last checkpoint is that of round {done}" if done else "there is no checkpoint"
        raise AgreedUserError(f"stopped after round {number} by {signal}; {last}", recorder is not None)
    raise Stopped(f"stopped after round {number} by {signal}; to continue: --resume {run.folder}")


def _stop_within(run, signal):
    """Raise `Stopped`, of a round whose state is written."""
    raise Stopped(
        f"stopped within round {run.federation.round_index + 1} by {signal}; to continue: --resume {run.folder}"
    )


def _num_samples(job, early_stopping):
    """Samples in the minibatches of all clients; those of a client that ended by itself, until then. Collective."""
    total = 0.0
    for client in job.federation.clients:
        of_pass = job.task.num_samples(client.index) / job.samplers[client.index].batches_per_pass
        ended = early_stopping.ended.get(client.index, job.federation.round_index)
        total += client.num_draws * of_pass * ended / job.federation.round_index
    return float(job.link.allgather([total], "sample counts").sum())


def _outcome(job, folder, metrics=None, was_complete=False):
    """The `Trained`. Collective.

    `metrics`: of the result; None: the last record's. `was_complete`: whether the run was complete before.
    """
    records = None
    while records is None:  # again, if the rank that read them is lost
        records = share(job.link, lambda: read_records(folder / RECORDS, keeps_clients=True)[0])
    if metrics is None:
        metrics = {name: value for name, value in records[-1].items() if name not in {*AMOUNTS, "loss", CLIENTS_KEY}}
    make = functools.partial(trained_module, job, folder if was_complete else None)
    return Trained(folder, records, metrics, make, job, was_complete=was_complete)
