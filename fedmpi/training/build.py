"""From settings to a job that is ready for its first step. All functions are collective unless they say otherwise."""

import dataclasses
import functools
import math

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fedmpi.comm.agreement import agree, check_equal, share
from fedmpi.comm.faults.mitigation import why_unavailable
from fedmpi.comm.job.code import LossOf, check_same_code
from fedmpi.comm.job.equality import check_same_model, check_software
from fedmpi.comm.job.opening import check_alone
from fedmpi.comm.job.program import doing
from fedmpi.comm.link import Link
from fedmpi.comm.start.launch import check_launch
from fedmpi.config.build import resolve, same_on_all_ranks
from fedmpi.config.layers import read_layers
from fedmpi.config.resume import AUTO, read_resumed
from fedmpi.data.same_files import check_same_files
from fedmpi.data.sampler import LastBatch
from fedmpi.federation.participation import Plan, draw_participants, spread
from fedmpi.federation.rounds import Federation
from fedmpi.federation.variables import Variables
from fedmpi.ground.errors import UserError
from fedmpi.ground.machine.cores import BY_LOAD, VARIABLES, choose_threads
from fedmpi.ground.machine.devices import bind_to_near_cores, pick_device, set_arithmetic, warn_if_shared
from fedmpi.ground.machine.memory import keep_freed_memory
from fedmpi.ground.registry import command_name
from fedmpi.ground.text import Log
from fedmpi.oracles.base import LocalObjective
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.runs.initial import initial_files, read_initial
from fedmpi.tasks.base import UNEQUAL, LoadedTask, RankContext
from fedmpi.tasks.files import EXPECTED, check_common_files
from fedmpi.training.config import Config
from fedmpi.training.hidden import check_hidden
from fedmpi.training.layers import private_parts
from fedmpi.training.model import build_model, model_class, try_goal, try_loss, try_metrics

log = Log(__name__)

# With unequal numbers of local steps, the rounds of these end where the weighted mean loss is least all the same.
KEEP_OBJECTIVE = ("ce_lsgd", "feddyn", "fednova", "mb_storm", "scaffnew", "scaffold", "scaffold_m", "scaffold_m_vr")


@dataclasses.dataclass
class Job:
    """One rank's part of a run: what the `STEPS` of `prepare` have made so far, for its first local step in the end.

    Attributes:
        config: the `Config`. link: the `Link`. context: the `RankContext`.
        task: the `LoadedTask`. flat: the model as a `FlatModule`. federation: the `Federation`.
        plan: its `Plan`. num_rounds: of the run. num_batches: minibatches in one pass over all clients' data.
        samplers: client -> its sampler, of the clients of this rank.
        threads_by: what has decided the number of threads, see `choose_threads`.
        threads: this number, if it has become a setting of the run; else None.
        learns: whether the model is trained; otherwise it is measured only.
    """

    config: Config
    link: Link
    context: RankContext = None
    task: LoadedTask = None
    flat: FlatModule = None
    federation: Federation = None
    plan: Plan = None
    num_rounds: int = 0
    num_batches: int = 0
    samplers: dict = dataclasses.field(default_factory=dict)
    threads_by: str = ""
    threads: int | None = None
    learns: bool = True

    @property
    def settings(self):
        """What the run folder records: all settings, with the number of clients also if it is that of the ranks.

        Also the threads if other processes may decide them: a rerun or a resumed run would choose others, for other
        bits.
        """
        return self.config.resolved | {"clients": self.context.num_clients, "threads": self.threads}


def read_config(arguments, link, objects=None, below=()):
    """The `Config` that a command line asks for, on all ranks, or a text to print instead of running.

    `arguments` lack the program's name; `objects`: see `fedmpi.config.build.resolve`.
    `below`: assignments that all others override.

    Raises:
        AgreedUserError: on every rank (see `agree`).
    """
    check_software(link)
    doing("read settings")
    layers = agree(link, lambda: read_layers(arguments), tells=True)
    if below:
        layers = dataclasses.replace(
            layers, layers=[[*below], *layers.layers], files=["the run's settings", *layers.files]
        )
    resumed = share(link, lambda: read_resumed(layers.assignments))  # only rank 0 needs to reach the run folder
    config = agree(link, lambda: resolve(layers, resumed, Config, objects), tells=True)
    check_equal(
        link,
        same_on_all_ranks(config),
        "expected the same on all ranks, but for --threads, --device, --data_dir and paths with {client}",
    )
    return config


def prepare(config, link, learns=True):
    """A `Job` that is ready for its first local step; or, if the model is only measured, without a federation.

    Raises:
        AgreedUserError: on every rank (see `agree`).
    """
    job = Job(config, link, learns=learns)
    for step in STEPS if learns else STEPS[: STEPS.index(make_federation)]:
        doing(step.__name__.replace("_", " "))
        step(job)
    return job


def take_machine(job):
    """The ranks as they were started; threads, arithmetic, and how sums are made."""
    config, link = job.config, job.link
    agree(link, lambda: check_launch(link, config.machine.ranks), tells=True)
    agree(link, check_alone, tells=True)
    keep_freed_memory()
    job.threads_by, job.threads = _take_threads(config.machine, link)
    set_arithmetic(config.machine.tf32, config.machine.deterministic)
    link.transport = config.machine.transport
    if config.faults.on_loss == "continue":
        agree(link, lambda: _check_survival(config), tells=True)
        link.transport = "allreduce"  # the others' shared memory would be waited for


def take_place(job):
    """Which clients this rank has, and its device; from now on, the ranks notice who is missing."""
    config, link = job.config, job.link
    job.context = agree(link, lambda: rank_context(config, link))
    agree(link, lambda: check_hidden(config, link.size, job.context.num_clients))
    warn_if_shared(link, job.context.device)
    bind_to_near_cores(job.context.device, link)
    link.watch(config.machine.timeout, spread(job.context.num_clients, link.size))


def load_task(job):
    """The data of this rank's clients."""
    config, link, context = job.config, job.link, job.context
    check_common_files(link, config.task, context)
    job.task = agree(link, lambda: config.task.load(context, config.partition))
    agree(link, lambda: job.task.synchronise(link))


def make_model(job):
    """The model, with equal values and equal code on all ranks."""
    config, link = job.config, job.link
    job.flat = flat = agree(link, lambda: build_model(config, job.context, job.task))
    has_frozen = not all(parameter.requires_grad for parameter in flat.module.parameters())
    layers, resumes = config.layers, config.folder.resume not in (None, AUTO)
    if layers.init and (has_frozen or not resumes):  # no checkpoint has the layers that are not trained
        if link.size > 1:
            files = agree(link, lambda: initial_files(layers.init))
            check_same_files(link, f"init = {layers.init}", files, EXPECTED)
        agree(link, lambda: flat.load(read_initial(layers.init, flat, layers.init_except, layers.init_strict)))
    check_same_model(
        link,
        flat.module,
        "may not depend on the rank, the machine or the time (torch's, numpy's and Python's generators are seeded)",
    )
    check_same_code(link, _code_of(config, flat, job.task), config.machine.may_differ)


def plan_rounds(job):
    """Minibatches, local steps and rounds."""
    link, config, context = job.link, job.config, job.context
    has_norm = any(isinstance(part, _BatchNorm) for part in job.flat.module.modules())
    last = LastBatch(config.data.last_batch, least=2 if has_norm else 1)

    def samplers():
        return {client: _sampler(config.data, job.task, context, client, last) for client in context.clients}

    job.samplers = agree(link, samplers)
    job.plan, job.num_rounds, job.num_batches = agree(
        link, lambda: _plan(config, link, context, job.task, job.samplers)
    )


def try_model(job):
    """One pass with a minibatch, and the metrics, before anything is written."""
    config, link, task, flat = job.config, job.link, job.task, job.flat
    if config.task.has_model:
        note = agree(link, lambda: try_loss(config, flat, task, job.samplers, job.learns))
        if note and link.rank == 0:
            log.warning(note)
        try_metrics(flat, task, link)
    try_goal(config, flat, task, link)


def make_federation(job):
    """The clients with their oracles, and the server."""
    config, link, task, flat = job.config, job.link, job.task, job.flat
    oracles = agree(link, lambda: _oracles(config, task, flat, job.samplers))
    private = agree(link, lambda: private_parts(config, task, flat))
    parameters = (flat.buffer_parts, flat.names, flat.shapes)
    variables = Variables(flat.x, flat.buffers, flat.segments, task.ascent(flat), *private, *parameters)
    parts = (job.plan, variables, config.sending)
    job.federation = agree(link, lambda: Federation(config.algorithm, link, oracles, *parts))


STEPS = (take_machine, take_place, load_task, make_model, plan_rounds, try_model, make_federation)


def _code_of(config, flat, task):
    """What the user's code can be behind, for `check_same_code`; not collective."""
    objects = {"algorithm": config.algorithm, "oracle": config.oracle, "partition": config.partition}
    objects |= {
        **config.sending.as_objects(),
        "task": LossOf(config.task),
        "loaded task": LossOf(type(task), ("loss", "evaluate", "ascent")),
    }
    return {**objects, "what makes the model": model_class(config, task), "model": flat.module}


def _take_threads(machine, link):
    """Set torch's threads. Collective. Returns (what has decided them, the number if it is a setting of the run)."""
    by_load, recorded = machine.threads is None and not machine.deterministic, machine.threads
    threads, reason = choose_threads(link, recorded, by_load)
    everyone = link.allgather([threads, reason.startswith(BY_LOAD), reason in VARIABLES], "machinery")
    if everyone[:, 1].any():
        reason = f"{reason or BY_LOAD}; --threads chooses"
    if by_load and not everyone[:, 2].any():  # the same for all ranks: the slowest one decides how fast the others are
        threads = recorded = int(everyone[:, 0].min())
    share = max(1, link.usable_cores // link.local_size)
    if threads > share and link.rank == 0:
        load = f"{link.local_size} rank{'s' * (link.local_size > 1)} with {threads} threads each"
        log.warning(f"{load} share {link.usable_cores} cores: --threads {share} is faster")
    torch.set_num_threads(threads)
    return reason, recorded


def rank_context(config, link):
    """Where in the federation this rank stands; not collective."""
    num_clients = config.data.clients or link.size
    return RankContext(
        num_clients=num_clients,
        clients=spread(num_clients, link.size)[link.rank],
        rank=link.rank,
        num_ranks=link.size,
        seed=config.data.seed,
        data_dir=config.data.data_dir,
        device=pick_device(config.machine.device, link),
        dtype=getattr(torch, config.machine.dtype),
        holdout=config.data.holdout,
        is_personal=config.layers.private is not None or config.studies.baselines is not None,
        participation=config.rounds.participation,
        num_local=link.local_size,
        weighting=config.data.weighting,
        least=config.data.least,
        scores=config.data.scores,
    )


def _sampler(data, task, context, client, last_batch):
    """Which samples the draws of a client of this rank are; not collective."""
    first = data.first_batch_size or data.batch_size
    sampler = task.sampler(client, data.batch_size, first, data.seed, context.device)
    cuts = getattr(sampler, "sampler", sampler)  # which a task may have wrapped
    if hasattr(cuts, "last_batch"):
        cuts.last_batch = last_batch
    elif data.last_batch != "keep":
        raise UserError(
            f"last_batch = {data.last_batch}: minibatches of this task are not cut from passes over samples"
        )
    return sampler


def _check_survival(config):
    """Check that the run can go on without a rank; not collective.

    Raises:
        UserError: if it cannot: why, and what to do.
    """
    reason = why_unavailable()
    if reason is not None:
        raise UserError(f"on_loss = continue: {reason}")
    transport, algorithm = config.machine.transport, config.algorithm
    if transport not in ("auto", "allreduce"):
        raise UserError(f"on_loss = continue: --transport {transport} waits for lost ranks: leave --transport out")
    aggregation = config.sending.aggregation
    if not aggregation.exposes_rows and len(algorithm.exchanges()) > 1:
        raise UserError(
            f"on_loss = continue: algorithm {command_name(type(algorithm))} averages several times in a round, which "
            "is repeated as a whole without a lost client; the difference of two such sums is what aggregation "
            f"{command_name(type(aggregation))} hides: expected on_loss end, or another algorithm"
        )


def _plan(config, link, context, task, samplers):
    """(the `Plan` of the run, its number of rounds, minibatches in a pass over all clients' data)."""
    num_samples = link.allgatherv([task.num_samples(client) for client in context.clients], "sample counts")
    batches = link.allgatherv([samplers[client].batches_per_pass for client in context.clients], "sample counts")
    if config.rounds.local_epochs is not None:
        steps = np.maximum(1, np.round(config.rounds.local_epochs * batches)).astype(int).tolist()
        keeps_objective = command_name(type(config.algorithm)) in KEEP_OBJECTIVE or task.dealer is not None
        if link.rank == 0 and not keeps_objective and max(steps) > UNEQUAL * min(steps):
            log.warning(_about_unequal_steps(config, steps))
    else:
        steps = [config.rounds.local_steps] * context.num_clients
    num_rounds = config.rounds.rounds
    if config.rounds.epochs is not None:
        num_rounds = max(1, math.ceil(config.rounds.epochs * batches.max() / max(steps)))
    num_batches = int(batches.sum())
    if task.dealer is not None:
        num_batches = int(batches[0]) * len(task.dealer.parts(0))
    plan = Plan(
        context.num_clients,
        steps.__getitem__,
        participants=functools.partial(
            draw_participants, context.num_clients, config.rounds.participation, config.data.seed
        ),
        weights=num_samples.tolist() if config.data.weighting == "samples" else None,
        seed=config.data.seed,
        dealt_steps=_dealt_steps(config, task.dealer, next(iter(samplers.values()))),
    )
    return plan, num_rounds, num_batches


def _about_unequal_steps(config, steps):
    """The line about clients that move the average further than others, because they make more local steps."""
    weights = "equal weights" if config.data.weighting == "uniform" else "weights by samples"
    return (
        f"local_epochs = {config.rounds.local_epochs:g}: clients make {min(steps)} to {max(steps)} local steps a "
        f"round, so that where the rounds end is not the minimum of the mean loss with {weights}: who makes more steps "
        "counts more; --algorithm fednova corrects this, --local-steps gives all the same number"
    )


def _dealt_steps(config, dealer, sampler):
    """See `Plan`: --local-epochs passes over what a client receives in a round; None if that is always the same."""
    if dealer is None or config.rounds.local_epochs is None:
        return None

    def steps(round_index, client):
        batches, _ = sampler.last_batch.cut(len(dealer.parts(round_index)[client]), config.data.batch_size)
        return max(1, round(config.rounds.local_epochs * batches))

    return steps


def _oracles(config, task, flat, samplers):
    """Client number -> function(`Client`) -> oracle, for the clients of this rank; not collective."""
    kind = config.oracle
    workspace = kind.workspace(flat)

    def make(client):
        objective = LocalObjective(
            flat,
            task,
            samplers[client.index],
            config.data.seed,
            clip_norm=config.rounds.clip_norm,
            weight_decay=config.rounds.weight_decay,
            ascent=task.ascent(flat),
            ascent_scale=task.ascent_scale,
        )
        oracle = kind.make(client, objective, workspace)
        oracle.kind = kind
        return oracle

    return dict.fromkeys(samplers, make)
