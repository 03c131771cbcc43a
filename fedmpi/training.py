"""One training run: from settings to a trained model in a run folder."""

import dataclasses
import functools
import math
import re
import time

import numpy as np
import torch

from fedmpi.checkpoint import save_model
from fedmpi.comm.host import keep_freed_memory, pick_device, share_of_cores
from fedmpi.comm.mpi import check_launch
from fedmpi.errors import AgreedUserError, Diverged, UserError
from fedmpi.federation import Federation, draw_participants, spread
from fedmpi.fused import fuse
from fedmpi.models import find_model
from fedmpi.recorder import Recorder, readable_bytes, table
from fedmpi.registry import command_name
from fedmpi.streams import derive, generator
from fedmpi.tasks.base import Place
from fedmpi.vectors import FlatModule


def together(link, action):
    """Do something that may meet a user's error on some ranks only, and let all ranks agree on it.

    Collective on the link; if `action` itself is, it must fail on all ranks alike.

    Raises:
        AgreedUserError: on every rank if on any; with text only on the lowest rank that met one.
    """
    result, error = None, None
    try:
        result = action()
    except UserError as met:
        error = met
    failing = np.flatnonzero(link.gather([float(error is not None)])[:, 0])
    if not len(failing):
        return result
    where = f"on rank {failing[0]}: " if failing[0] > 0 else ""
    raise AgreedUserError(f"{where}{error}" if failing[0] == link.rank else "") from error


def train(config, link):
    """Train as the settings say; rank 0 records, prints and saves. Collective on the link.

    Args:
        config: a `Config`. link: an `MPILink`.

    Returns:
        the run folder on rank 0, None elsewhere.

    Raises:
        AgreedUserError: on every rank alike (see `together`), before any training or if the result
            cannot be written.
        Diverged: on every rank alike, if a loss is not finite.
    """
    training = prepare(config, link)
    recorder = together(link, training.make_recorder)
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
        an object with the run's `place`, `task`, `flat` (a `FlatModule`) and `federation`.

    Raises:
        AgreedUserError: on every rank alike (see `together`).
    """
    together(link, lambda: check_launch(link, config.run.ranks))
    if config.run.tune_malloc:
        keep_freed_memory()
    torch.set_num_threads(config.run.threads or share_of_cores(link))
    link.transport = config.run.transport
    training = together(link, lambda: _Training(config, link))
    together(link, lambda: training.task.meet(link))
    together(link, training.build)
    together(link, training.assemble)
    return training


class _Training:
    """What `train` needs at hand: the loaded task, the model, the federation, the result."""

    def __init__(self, config, link):
        """Load everything that this rank can load alone; not collective."""
        self.config, self.link = config, link
        run = config.run
        num_clients = run.clients or link.size
        self.place = Place(
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
        self.task = config.task.load(self.place, config.partition)

    def build(self):
        """Make the model, and see that it takes the data; not collective."""
        config, run = self.config, self.config.run
        model_class = config.model_class
        if model_class is None and config.task.has_model:
            model_class = find_model(self.task.default_model)
        torch.manual_seed(derive(run.seed, "model"))
        module = self.task.build_model(model_class, config.model_settings).to(self.place.device, self.place.dtype)
        self.flat = FlatModule(module, channels_last=run.channels_last, direct_gradients=run.direct_gradients)
        self.task.try_out(module, self.place.clients[0])
        self.algorithm = fuse(config.algorithm, self.flat.x) if run.fused_update else config.algorithm

    def assemble(self):
        """Join the ranks' clients into a federation. Collective."""
        run, place, link = self.config.run, self.place, self.link
        mine = np.array([self.task.num_samples(client) for client in place.clients], dtype=np.float64)
        num_samples = link.concatenate(mine)
        batches = link.concatenate([self._sampler(client).batches_per_pass for client in place.clients])
        if run.local_epochs is not None:
            steps = np.maximum(1, np.round(run.local_epochs * batches)).astype(int).tolist()
        else:
            steps = [run.local_steps] * place.num_clients
        self.num_rounds = run.rounds
        if run.epochs is not None:
            self.num_rounds = max(1, math.ceil(run.epochs * batches.max() / max(steps)))
        workspace = self.config.oracle.workspace(self.flat.x)
        self.federation = Federation(
            self.algorithm,
            link,
            {client: functools.partial(self._oracle, client, workspace) for client in place.clients},
            place.num_clients,
            self.flat.x,
            self.flat.buffers,
            steps.__getitem__,
            participants=functools.partial(draw_participants, place.num_clients, run.participation, run.seed),
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
        return self.task.sampler(client, run.batch_size, first, run.seed, self.place.device)

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
        kept = _Kept(run.output, chosen, self.task.goal)
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
                evaluated = metrics = self._evaluate(federation.server.x, federation.state.buffers, number)
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
        rows = {**federation.state.averaged_rows(), **federation.state.server_rows()}
        if result is None:
            result = _Iterate(number, federation.server.x, federation.state.buffers)
        else:
            rows = {"x": result.x}  # the others belong to the last iterate
            metrics = self._evaluate(result.x, result.buffers, result.round)
        together(self.link, lambda: self._save(recorder, result, rows))
        if recorder is None:
            return None
        recorder.close()
        print(self._table(record, metrics, which, recorder.folder), flush=True)
        return recorder.folder

    def _save(self, recorder, result, rows):
        """Write the resulting model; on rank 0."""
        if recorder is None:
            return
        self.flat.hold_counters(self.place.clients[0])
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
        place, seconds, gradients = self.place, record["seconds"], record["gradients"]

        def share(part):
            return f"{part:.2f} s ({100 * part / seconds:.0f} %)"

        communications = self.link.traffic.collectives
        return table(
            [
                ("algorithm", command_name(type(self.config.algorithm))),
                ("clients", f"{place.num_clients} on {self.link.size} ranks"),
                ("each rank", f"{torch.get_num_threads()} threads, {place.device}"),
                ("parameters", f"{self.flat.dim:,}"),
                ("rounds", f"{record['round']} ({record['iteration']} local steps, {gradients:,} gradients in all)"),
                *((name.replace("_", " "), self._beside(name, f"{value:.4f}")) for name, value in metrics.items()),
                ("local steps", share(record["local_seconds"])),
                ("communication", f"{share(record['communication_seconds'])}, {self.link.used}"),
                ("evaluation", share(record["evaluation_seconds"])),
                ("in all", f"{seconds:.2f} s"),
                ("sent per client", f"{readable_bytes(record['bytes'])} in {communications} Allreduces"),
                ("result", f"{which}, in {folder}"),
            ]
        )

    def _beside(self, metric, words):
        """A metric's value in words, with what the paper printed where a preset says so."""
        printed = self.config.resolved.get("paper", {}).get("printed", {}).get(metric, {})
        value = printed.get(command_name(type(self.config.algorithm)))
        return words if value is None else f"{words} (in the paper: {value})"


@dataclasses.dataclass(frozen=True)
class _Iterate:
    """An averaged model: the round after which it was, x [dim] and its float buffers."""

    round: int
    x: torch.Tensor
    buffers: torch.Tensor


class _Kept:
    """The iterate that is to be the result, if not the last: the best seen, or that of a round drawn beforehand."""

    def __init__(self, rule, chosen_round, goal):
        self._rule, self._chosen, (self._metric, self._sign) = rule, chosen_round, goal
        self._iterate, self._best = None, -math.inf

    def see(self, number, federation, metrics):
        """Look at the model after round `number`."""
        if self._rule == "uniform":
            wanted = number == self._chosen
        elif self._rule == "best":
            value = self._sign * metrics.get(self._metric, math.nan)
            wanted = value > self._best
            self._best = max(self._best, value) if wanted else self._best
        else:
            wanted = False
        if wanted:
            self._iterate = _Iterate(number, federation.server.x.clone(), federation.state.buffers.clone())

    def result(self):
        """(the `_Iterate`, or None for the last; words that say which)."""
        if self._iterate is None:
            return None, "last iterate"
        how = "best by " + self._metric if self._rule == "best" else "drawn uniformly"
        return self._iterate, f"iterate of round {self._iterate.round} ({how})"
