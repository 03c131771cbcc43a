"""One training run: rounds, evaluations, records, checkpoints, the result. Rank 0 records, prints and saves."""

import dataclasses
import functools
import math
import pathlib
import re
import time

import torch

from fedmpi.comm.agreement import agree, share
from fedmpi.config.resume import AUTO
from fedmpi.errors import AgreedUserError, Diverged, Stopped
from fedmpi.registry import command_name
from fedmpi.runs.checkpoint import find_checkpoints
from fedmpi.runs.recorder import Recorder, clear_run_folder, make_run_folder
from fedmpi.tasks.base import Metrics
from fedmpi.training.build import prepare
from fedmpi.training.checkpoints import Checkpoints
from fedmpi.training.records import Records
from fedmpi.training.replicas import check_replicas
from fedmpi.training.result import ResultRule, closing_table, save, save_clients, save_kept
from fedmpi.training.stopping import StopSignals, stopping_signal


def train(config, link):
    """Train as the settings say, from the beginning or from a checkpoint. Collective on the link.

    Args:
        config: a `Config`. link: a `Link`.

    Returns:
        the run folder on rank 0, None elsewhere.

    Raises:
        AgreedUserError: on every rank (see `agree`), before any training or if the result
            cannot be written.
        Diverged: on every rank, if a loss is not finite.
        Stopped: on every rank, if one was sent a signal and a checkpoint is written.
    """
    with StopSignals() as signals:
        job = prepare(config, link)
        recorder = agree(link, lambda: _make_recorder(job))
        try:
            folder = pathlib.Path(share(link, lambda: str(recorder.folder)))
            checkpoints = Checkpoints(job, folder, recorder)
            link.way_on = lambda: f"; --resume {folder} goes on after round {checkpoints.done}" * bool(checkpoints.done)
            job.federation.request = lambda: signals.bits | checkpoints.request()
            return _run(job, recorder, checkpoints)
        finally:
            if recorder is not None:
                recorder.close()


def _make_recorder(job):
    """The recorder on rank 0, None elsewhere; not collective."""
    run, config = job.config.run, job.config
    if job.link.rank != 0:
        return None
    if run.resume not in (None, AUTO):
        return Recorder(pathlib.Path(run.resume), job.num_rounds)
    prefix = command_name(type(config.algorithm))
    data = getattr(config.task, "data", command_name(type(config.task)))
    stem = str(data).rsplit("/", 1)[-1].removesuffix(".h5")
    stem = re.sub(r"[-_.]*{.*}", "", stem) or "silos"  # silo_{client}: silo
    if run.resume == AUTO:
        clear_run_folder(pathlib.Path(run.out) / run.name)
    return Recorder(make_run_folder(run.out, run.name, f"{prefix}-{stem}"), job.num_rounds)


@dataclasses.dataclass
class _Progress:
    """What the loop itself goes on with: the clocks, and the metrics of the last evaluation."""

    began: float
    evaluation_seconds: float = 0.0
    metrics: dict = dataclasses.field(default_factory=dict)

    @property
    def seconds(self):
        """Wall time since the beginning of the run, without the time between a stop and its resumption."""
        return time.perf_counter() - self.began

    def state(self):
        """Name -> number."""
        clocks = {"seconds": self.seconds, "evaluation_seconds": self.evaluation_seconds}
        return clocks | {f"metrics/{name}": value for name, value in self.metrics.items()}

    def restore(self, state):
        """Take what `state` gave."""
        self.began = time.perf_counter() - state["seconds"]
        self.evaluation_seconds = state["evaluation_seconds"]
        self.metrics = {name[len("metrics/") :]: state[name] for name in state if name.startswith("metrics/")}


def _run(job, recorder, checkpoints):
    """Start or resume, rounds, evaluations, result."""
    run, link = job.config.run, job.link
    progress = _Progress(time.perf_counter())
    rule = ResultRule(run.result, job.num_rounds, run.seed, job.task.goal)
    position = 0
    if run.resume not in (None, AUTO):
        folder, is_finished, rounds = share(link, lambda: _look(job, recorder))
        state, manifest = checkpoints.restore() if rounds or not is_finished else ({}, None)
        if is_finished:
            if recorder:
                print(
                    f"{folder}: the run is complete after {job.num_rounds} rounds; --rounds asks for more", flush=True
                )
            return folder if recorder else None
        position = manifest["records"]
        progress.restore(state)
        agree(link, lambda: rule.check(job.federation))
        if recorder:
            print(f"{folder}: going on after round {manifest['round']}", flush=True)
    agree(link, lambda: recorder and recorder.begin(job.config.resolved, position))
    if recorder:
        job.task.write_split(recorder.folder)
    records = Records(job, checkpoints.folder, recorder)
    try:
        _run_rounds(job, records, checkpoints, progress, rule)
        return _finish(job, records, checkpoints, progress, rule)
    except Diverged as error:
        checkpoints.finish()
        recorder = records.recorder()
        if recorder is None:
            raise
        recorder.diverged(str(error))
        notes = [f"{save_kept(job, recorder)} is the best model so far"] if job.federation.selected else []
        notes += [f"the last checkpoint is that of round {checkpoints.done}"] if checkpoints.done else []
        raise Diverged("; ".join([str(error), *notes])) from None


def _look(job, recorder):
    """[run folder, whether the run has ended there, rounds of its checkpoints]; not collective."""
    folder = recorder.folder
    return [str(folder), recorder.is_finished(job.num_rounds), find_checkpoints(folder)]


def _run_rounds(job, records, checkpoints, progress, rule):
    """The start, unless the run was resumed, and all rounds that are left."""
    federation, run, link = job.federation, job.config.run, job.link
    if run.on_loss == "continue":
        link.survive()
    every = run.eval_every or max(1, job.num_rounds // 20)
    if federation.round_index == 0:
        federation.start()
    while federation.round_index < job.num_rounds:
        loss = federation.run_round()
        number, evaluated = federation.round_index, {}
        if run.check_replicas and number % run.check_replicas == 0:
            check_replicas(federation)
        if number % every == 0 or number == job.num_rounds:
            before, link.phase = time.perf_counter(), f"the evaluation after round {number}"
            evaluated = progress.metrics = evaluate(job, federation.server.x, federation.store.buffers, number)
            progress.evaluation_seconds += time.perf_counter() - before
        rule.consider(federation, evaluated)
        if records.recorder() or link.survives:
            record = {
                "round": number,
                "iteration": federation.server.iteration,
                "loss": loss,
                "seconds": progress.seconds,
                "local_seconds": federation.seconds["local"],
                "communication_seconds": federation.seconds["communication"],
                "evaluation_seconds": progress.evaluation_seconds,
                "bytes": job.link.traffic.nbytes,
                "gradients": federation.num_gradients,
            }
            records.round(record, evaluated)
        link.phase = f"the checkpoint after round {number}"
        checkpoints.after_round(progress.state)
        signal = stopping_signal(federation.requests)
        if signal and number < job.num_rounds:
            _stop(job, records.recorder(), checkpoints, progress, signal)


def _stop(job, recorder, checkpoints, progress, signal):
    """Write a checkpoint and raise `Stopped`."""
    number = job.federation.round_index
    is_written = checkpoints.write_now(progress.state)
    where = f"--resume {recorder.folder}" if recorder else ""
    if not is_written:
        last = f"the last checkpoint is of round {checkpoints.done}" if checkpoints.done else "there is no checkpoint"
        raise AgreedUserError(f"stopped after round {number} by {signal}; {last}" if recorder else "")
    raise Stopped(f"stopped after round {number} by {signal}; to go on: {where}")


def _finish(job, records, checkpoints, progress, rule):
    """Save the result, print the closing table, and write the last checkpoint."""
    kept, metrics = job.federation.selected, progress.metrics
    if kept is not None:
        metrics = evaluate(job, kept.x, kept.buffers, kept.round)
    saved_by = None
    while saved_by != job.link.members:  # again, if the rank that saved is lost
        saved_by = job.link.members
        agree(job.link, functools.partial(save, job, records.recorder()))
    agree(job.link, lambda: save_clients(job, checkpoints.folder))
    checkpoints.write_now(progress.state)
    recorder = records.recorder()
    if recorder is None:
        return None
    recorder.close()
    result = f"{rule.describe(kept)}, in {recorder.folder}"
    print(closing_table(job, recorder.last, metrics, result), flush=True)
    return recorder.folder


@torch.no_grad()
def evaluate(job, x, buffers, number):
    """Metrics of an averaged model. Collective.

    Args:
        x: [dim]; buffers: [num_buffers]. number: of rounds after which it was.

    Returns:
        `Metrics`.

    Raises:
        Diverged: on every rank, if its training loss is not finite.
    """
    module = job.flat.module
    job.flat.point_at(x, buffers.clone())  # whatever the module writes there in evaluation mode stays here
    job.flat.point_counters_at([counter.clone() for counter in job.federation.clients[0].counters])  # those saved
    module.eval()
    if job.federation.private:
        own = {client.index: job.federation.private.model(client, x, buffers) for client in job.federation.clients}
        job.task.visit = lambda client: job.flat.point_at(*own[client])
    metrics = job.task.evaluate(module, job.link)
    if not math.isfinite(metrics["train_loss"]):
        loss = metrics["train_loss"]
        raise Diverged(f"after round {number}: the loss of the averaged model is {loss}; try a smaller step size")
    clients = {name: [float(value) for value in values] for name, values in getattr(metrics, "clients", {}).items()}
    return Metrics({name: float(value) for name, value in metrics.items()}, clients)
