"""One training run: rounds, evaluations, records, the result. Rank 0 records, prints and saves."""

import math
import re
import time

import torch

from fedmpi.comm.agreement import agree
from fedmpi.errors import Diverged
from fedmpi.registry import command_name
from fedmpi.runs.recorder import Recorder
from fedmpi.training.build import prepare
from fedmpi.training.replicas import check_replicas
from fedmpi.training.result import ResultRule, closing_table, save


def train(config, link):
    """Train as the settings say. Collective on the link.

    Args:
        config: a `Config`. link: a `Link`.

    Returns:
        the run folder on rank 0, None elsewhere.

    Raises:
        AgreedUserError: on every rank (see `agree`), before any training or if the result
            cannot be written.
        Diverged: on every rank, if a loss is not finite.
    """
    job = prepare(config, link)
    recorder = agree(link, lambda: _make_recorder(job))
    try:
        return _run(job, recorder)
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


def _run(job, recorder):
    """Start, rounds, evaluations, result."""
    run, federation = job.config.run, job.federation
    every = run.eval_every or max(1, job.num_rounds // 20)
    rule = ResultRule(run.result, job.num_rounds, run.seed, job.task.goal)
    evaluation_seconds, began = 0.0, time.perf_counter()
    metrics = {}
    if recorder:
        job.task.write_split(recorder.folder)
        recorder.begin()
    federation.start()
    for number in range(1, job.num_rounds + 1):
        loss = federation.run_round()
        if run.check_replicas and number % run.check_replicas == 0:
            check_replicas(federation)
        evaluated = {}
        if number % every == 0 or number == job.num_rounds:
            before, job.link.phase = time.perf_counter(), f"the evaluation after round {number}"
            evaluated = metrics = evaluate(job, federation.server.x, federation.store.buffers, number)
            evaluation_seconds += time.perf_counter() - before
        rule.consider(federation, evaluated)
        if recorder:
            record = {
                "round": number,
                "iteration": federation.server.iteration,
                "loss": loss,
                "seconds": time.perf_counter() - began,
                "local_seconds": federation.seconds["local"],
                "communication_seconds": federation.seconds["communication"],
                "evaluation_seconds": evaluation_seconds,
                "bytes": job.link.traffic.nbytes,
                "gradients": federation.num_gradients,
            }
            recorder.round(record, evaluated)
    kept = federation.selected
    if kept is not None:
        metrics = evaluate(job, kept.x, kept.buffers, kept.round)
    agree(job.link, lambda: save(job, recorder))
    if recorder is None:
        return None
    recorder.close()
    print(closing_table(job, record, metrics, f"{rule.describe(kept)}, in {recorder.folder}"), flush=True)
    return recorder.folder


@torch.no_grad()
def evaluate(job, x, buffers, number):
    """Metrics of an averaged model. Collective.

    Args:
        x: [dim]; buffers: [num_buffers]. number: of rounds after which it was.

    Returns:
        name -> float.

    Raises:
        Diverged: on every rank, if its training loss is not finite.
    """
    module = job.flat.module
    job.flat.point_at(x, buffers)
    module.eval()
    metrics = job.task.evaluate(module, job.link)
    if not math.isfinite(metrics["train_loss"]):
        loss = metrics["train_loss"]
        raise Diverged(f"after round {number}: the loss of the averaged model is {loss}; try a smaller step size")
    return {name: float(value) for name, value in metrics.items()}
