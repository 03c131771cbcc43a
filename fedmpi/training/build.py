"""One training run: from settings to a trained model in a run folder."""

import functools
import math
import re
import time

import numpy as np
import torch

from fedmpi.algorithms.fused import fuse
from fedmpi.comm.agreement import agree
from fedmpi.comm.host import keep_freed_memory, pick_device, share_of_cores
from fedmpi.comm.mpi import check_launch
from fedmpi.errors import Diverged
from fedmpi.federation.participation import draw_participants, spread
from fedmpi.federation.rounds import Federation
from fedmpi.models import find_model
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.registry import command_name
from fedmpi.runs.model_files import save_model
from fedmpi.runs.recorder import Recorder
from fedmpi.streams import derive, generator
from fedmpi.tasks.base import RankContext
from fedmpi.text import format_bytes, table
from fedmpi.training.result import Iterate, OutputRule


def train(config, link):
    """Train as the settings say; rank 0 records, prints and saves. Collective on the link.

    Args:
        config: a `Config`. link: an `MPILink`.

    Returns:
        the run folder on rank 0, None elsewhere.

    Raises:
        AgreedUserError: on every rank alike (see `agree`), before any training or if the result
            cannot be written.
        Diverged: on every rank alike, if a loss is not finite.
    """
    training = prepare(config, link)
    recorder = agree(link, training.make_recorder)
    try:
        return training.run(recorder)
    except Diverged as error:
        if recorder is not None:
            recorder.diverged(str(error))
        raise
    finally:
        if recorder is not None:
            recorder.close()


def prepare(config, link):
    """Everything of a run up to its first step. Collective on the link.

    Returns:
        an object with the run's `context`, `task`, `flat` (a `FlatModule`) and `federation`.

    Raises:
        AgreedUserError: on every rank alike (see `agree`).
    """
    agree(link, lambda: check_launch(link, config.run.ranks))
    if config.run.tune_malloc:
        keep_freed_memory()
    torch.set_num_threads(config.run.threads or share_of_cores(link))
    link.transport = config.run.transport
    training = agree(link, lambda: _Training(config, link))
    agree(link, lambda: training.task.synchronise(link))
    agree(link, training.build)
    agree(link, training.assemble)
    return training


class _Training:
    """What `train` needs at hand: the loaded task, the model, the federation, the result."""

    def __init__(self, config, link):
        """Load everything that this rank can load alone; not collective."""
        self.config, self.link = config, link
        run = config.run
        num_clients = run.clients or link.size
        self.context = RankContext(
            num_clients=num_clients,
            clients=spread(num_clients, link.size)[link.rank],
            rank=link.rank,
            num_ranks=link.size,
            seed=run.seed,
            data_dir=run.data_dir,
            device=pick_device(run.device, link.local_rank),
            dtype=getattr(torch, run.dtype),
            holdout=run.holdout,
        )
        self.task = config.task.load(self.context, config.partition)

    def build(self):
        """Make the model, and see that it takes the data; not collective."""
        config, run = self.config, self.config.run
        model_class = config.model_class
        if model_class is None and config.task.has_model:
            model_class = find_model(self.task.default_model)
        torch.manual_seed(derive(run.seed, "model"))
        module = self.task.build_model(model_class, config.model_settings).to(self.context.device, self.context.dtype)
        self.flat = FlatModule(module, channels_last=run.channels_last, direct_gradients=run.direct_gradients)
        self.task.try_out(module, self.context.clients[0])
        self.algorithm = fuse(config.algorithm, self.flat.x) if run.fused_update else config.algorithm

    def assemble(self):
        """Join the ranks' clients into a federation. Collective."""
        run, context, link = self.config.run, self.context, self.link
        mine = np.array([self.task.num_samples(client) for client in context.clients], dtype=np.float64)
        num_samples = link.allgatherv(mine)
        batches = link.allgatherv([self._sampler(client).batches_per_pass for client in context.clients])
        if run.local_epochs is not None:
            steps = np.maximum(1, np.round(run.local_epochs * batches)).astype(int).tolist()
        else:
            steps = [run.local_steps] * context.num_clients
        self.num_rounds = run.rounds
        if run.epochs is not None:
            self.num_rounds = max(1, math.ceil(run.epochs * batches.max() / max(steps)))
        workspace = self.config.oracle.workspace(self.flat.x)
        self.federation = Federation(
            self.algorithm,
            link,
            {client: functools.partial(self._oracle, client, workspace) for client in context.clients},
            context.num_clients,
            self.flat.x,
            self.flat.buffers,
            steps.__getitem__,
            participants=functools.partial(draw_participants, context.num_clients, run.participation, run.seed),
            weights=num_samples.tolist() if run.weighting == "samples" else None,
            seed=run.seed,
            segments=self.flat.segments,
            ascent=self.task.ascent(self.flat),
        )

    def _oracle(self, client, workspace, state):
        run = self.config.run
        return self.config.oracle.make(
            self.flat,
            self.task,
            client,
            self._sampler(client),
            run.seed,
            workspace,
            state.work_buffers,
            clip_norm=run.clip_norm,
            weight_decay=run.weight_decay,
            ascent=self.task.ascent(self.flat),
            ascent_scale=self.task.ascent_scale,
        )

    def _sampler(self, client):
        run = self.config.run
        first = run.first_batch_size or run.batch_size
        return self.task.sampler(client, run.batch_size, first, run.seed, self.context.device)

    def make_recorder(self):
        """The recorder on rank 0, None elsewhere."""
        if self.link.rank != 0:
            return None
        prefix = command_name(type(self.config.algorithm))
        data = getattr(self.config.task, "data", command_name(type(self.config.task)))
        stem = str(data).rsplit("/", 1)[-1].removesuffix(".h5")
        stem = re.sub(r"[-_.]*{.*}", "", stem) or "silos"  # silo_{client}: silo
        return Recorder(
            self.config.run.out, self.config.run.name, f"{prefix}-{stem}", self.config.resolved, self.num_rounds
        )

    def run(self, recorder):
        """Start, rounds, evaluations, result."""
        run, federation = self.config.run, self.federation
        every = run.eval_every or max(1, self.num_rounds // 20)
        chosen = int(generator(run.seed, "output").integers(1, self.num_rounds + 1))
        kept = OutputRule(run.result, chosen, self.task.goal)
        evaluation_seconds, began = 0.0, time.perf_counter()
        metrics = {}
        if recorder:
            self.task.write_split(recorder.folder)
            recorder.begin()
        federation.start()
        for number in range(1, self.num_rounds + 1):
            loss = federation.run_round()
            evaluated = {}
            if number % every == 0 or number == self.num_rounds:
                before = time.perf_counter()
                evaluated = metrics = self._evaluate(federation.server.x, federation.store.buffers, number)
                evaluation_seconds += time.perf_counter() - before
            kept.see(number, federation, evaluated)
            if recorder:
                record = {
                    "round": number,
                    "iteration": federation.server.iteration,
                    "loss": loss,
                    "seconds": time.perf_counter() - began,
                    "local_seconds": federation.seconds["local"],
                    "communication_seconds": federation.seconds["communication"],
                    "evaluation_seconds": evaluation_seconds,
                    "bytes": self.link.traffic.nbytes,
                    "gradients": federation.num_gradients,
                }
                recorder.round(record, evaluated)
        result, which = kept.result()
        rows = {**federation.store.averaged_rows(), **federation.store.server_rows()}
        if result is None:
            result = Iterate(number, federation.server.x, federation.store.buffers)
        else:
            rows = {"x": result.x}  # the others belong to the last iterate
            metrics = self._evaluate(result.x, result.buffers, result.round)
        agree(self.link, lambda: self._save(recorder, result, rows))
        if recorder is None:
            return None
        recorder.close()
        print(self._table(record, metrics, which, recorder.folder), flush=True)
        return recorder.folder

    def _save(self, recorder, result, rows):
        """Write the resulting model; on rank 0."""
        if recorder is None:
            return
        self.flat.hold_counters(self.context.clients[0])
        save_model(recorder.folder, self.flat.named_values(result.x, result.buffers), rows)
        self.task.write_result(self.flat.module, recorder.folder)

    @torch.no_grad()
    def _evaluate(self, x, buffers, number):
        """Metrics of the averaged model after round `number`. Collective."""
        self.flat.point_at(x, buffers)
        self.flat.module.eval()
        metrics = self.task.evaluate(self.flat.module, self.link)
        if not math.isfinite(metrics["train_loss"]):
            loss = metrics["train_loss"]
            raise Diverged(f"after round {number}: the loss of the averaged model is {loss}; try a smaller step size")
        return {name: float(value) for name, value in metrics.items()}

    def _table(self, record, metrics, which, folder):
        context, seconds, gradients = self.context, record["seconds"], record["gradients"]

        def share(part):
            return f"{part:.2f} s ({100 * part / seconds:.0f} %)"

        communications = self.link.traffic.collectives
        return table(
            [
                ("algorithm", command_name(type(self.config.algorithm))),
                ("clients", f"{context.num_clients} on {self.link.size} ranks"),
                ("each rank", f"{torch.get_num_threads()} threads, {context.device}"),
                ("parameters", f"{self.flat.dim:,}"),
                ("rounds", f"{record['round']} ({record['iteration']} local steps, {gradients:,} gradients in all)"),
                *((name.replace("_", " "), self._beside(name, f"{value:.4f}")) for name, value in metrics.items()),
                ("local steps", share(record["local_seconds"])),
                ("communication", f"{share(record['communication_seconds'])}, {self.link.used}"),
                ("evaluation", share(record["evaluation_seconds"])),
                ("in all", f"{seconds:.2f} s"),
                ("sent per client", f"{format_bytes(record['bytes'])} in {communications} Allreduces"),
                ("result", f"{which}, in {folder}"),
            ]
        )

    def _beside(self, metric, words):
        """A metric's value in words, with what the paper printed where a preset says so."""
        printed = self.config.resolved.get("paper", {}).get("printed", {}).get(metric, {})
        value = printed.get(command_name(type(self.config.algorithm)))
        return words if value is None else f"{words} (in the paper: {value})"
