"""The result of a run: which iterate it is, its files, and the closing table. Not collective."""

import math
import os
import pathlib
import shutil
import tempfile

import torch

from fedmpi.comm.ranks import describe_clients
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.run_files import BEST_SO_FAR, CLIENT_MODEL
from fedmpi.ground.registry import command_name
from fedmpi.ground.streams import generator
from fedmpi.ground.text import Log, format_bytes, short, spread_in_words, table
from fedmpi.oracles.architecture import as_json, unwrapped
from fedmpi.runs.model_files import complete, load_values, read_state, save_client_model, save_hdf5, save_model
from fedmpi.runs.record import is_beside, less_is_better
from fedmpi.training.early_stopping import selection_goal
from fedmpi.training.model import describe_model, model_class

log = Log(__name__)

MOST_MISSING = 5  # classes of a client, and clients, in the line about classes without test cases
MOST_CELLS = 12  # of a row of a matrix, in the closing table


class ResultRule:
    """Which averaged model is the result: the last, the best at an evaluation, or that of a round drawn beforehand.

    The selected one is in `federation.selected`; None there stands for the last. "best" compares metrics of held-out
    data if there are any.

    Args:
        rule: "last", "best" or "uniform". num_rounds: of the run. seed: of the run.
        goal: (metric, sign) by which "best" compares; sign 1 if more is better.
        own_results: `OwnResults`, which decides instead if clients have models of their own.
    """

    def __init__(self, rule, num_rounds, seed, goal, own_results=None):
        self.own_results = own_results
        self._rule, (self._metric, self._sign), self._is_warned = rule, goal, False
        self._drawn = int(generator(seed, "output").integers(1, num_rounds + 1))

    def consider(self, federation, metrics, ended=()):
        """Select the model after a round if it is better so far; `metrics` are {} if it was not evaluated.

        ended: clients whose own results are settled.
        """
        if self.own_results and self.own_results.are_kept:
            self.own_results.consider(metrics, ended)
        elif self._rule == "uniform" and federation.round_index == self._drawn:
            federation.select()
        elif self._rule == "best":
            self._metric, _ = selection_goal((self._metric, self._sign), metrics)
            value = self._sign * metrics.get(self._metric, math.nan)
            if metrics and math.isnan(value) and not self._is_warned and federation.link.rank == 0:
                log.warning(f"{self._metric} is nan after round {federation.round_index}: no such model is the best")
            self._is_warned |= bool(metrics) and math.isnan(value)
            if value > (-math.inf if federation.selected is None else federation.selected.value):
                federation.select(value)

    def check(self, federation):
        """Check that the round drawn for "uniform" is still to come or was selected.

        If a resumed run has more rounds than before, another one is drawn, which may have passed already.

        Raises:
            UserError: if it is lost.
        """
        if self._rule != "uniform":
            return
        if self._drawn > federation.round_index:
            federation.selected = None  # of a round that was drawn among fewer
        elif federation.selected is None or federation.selected.round != self._drawn:
            raise UserError(
                f"result = uniform: for this number of rounds the result is round {self._drawn}, which has passed "
                "and was not saved; begin a new run, or resume with the former number of rounds"
            )

    def check_selected(self, selected):
        """Check that there is a best model, if one was asked for; `selected` is `federation.selected`.

        Raises:
            UserError: if the metric was a finite number at no evaluation.
        """
        if self._rule == "best" and selected is None and not (self.own_results and self.own_results.are_kept):
            raise UserError(
                f"result = best: {self._metric} was not a finite number at any evaluation: the model that is saved is "
                "the last; check the data that it is measured on, or choose another goal in the task"
            )

    def describe(self, selected):
        """Which iterate is the result, as text for the closing table; `selected` is `federation.selected`."""
        if self.own_results and self.own_results.are_kept:
            return self.own_results.describe()
        if selected is None:
            return "last iterate"
        how = "best by " + self._metric if self._rule == "best" else "drawn uniformly"
        return f"iterate of round {selected.round} ({how})"


def save(job, recorder):
    """Write the resulting model, which `complete_run` gives its name; on rank 0 only (`recorder` is None elsewhere).

    Raises:
        UserError: if a file cannot be written.
    """
    if recorder is None:
        return
    federation, flat, selected = job.federation, job.flat, job.federation.selected
    if selected is None:
        x, buffers = federation.server.x, federation.store.buffers
        rows = {**federation.store.averaged_rows(), **federation.store.server_rows()}
    else:
        x, buffers, rows = selected.x, selected.buffers, {"x": selected.x}  # the other rows belong to the last iterate
    flat.point_counters_at(federation.clients[0].counters)
    values, description = flat.named_values(x, buffers), describe_model(job.config, job.task)
    description |= {"architecture": as_json(flat.architecture, flat.module)}
    try:
        job.task.write_result(flat.module, recorder.folder)
    except OSError as error:
        log.warning(f"{error.filename}: cannot be written: {error.strerror}")
    try:
        save_model(recorder.folder, values, rows, description)
    except UserError as error:
        raise UserError(f"{error}; {_save_elsewhere(recorder.folder.name, values, rows, description)}") from error


def complete_run(recorder):
    """Give the resulting model its name in the run folder, by which the run is complete; on rank 0 only.

    Raises:
        UserError: if that is impossible.
    """
    if recorder is not None:
        complete(recorder.folder)


def save_clients(job, folder, own_results):
    """Write the own model of each of this rank's clients, if they have layers of their own; on every rank.

    Raises:
        UserError: if a file cannot be written.
    """
    federation, flat = job.federation, job.flat
    for client in federation.clients if federation.private else ():
        flat.point_counters_at(client.counters)
        values = flat.named_values(*own_results.of(client))
        save_client_model(folder / CLIENT_MODEL.format(client=client.index), values)


def _save_elsewhere(name, values, rows, description):
    """Write the model files where there is room: a new folder in the current folder, that of temporary files, or home.

    Returns text that says where they are. For the arguments see `save_model`; `name` is that of the run folder.
    """
    for find in (os.getcwd, tempfile.gettempdir, lambda: os.path.expanduser("~")):
        folder = None
        try:
            place = find()  # fails if the current folder was removed
            folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{name}-result-", dir=place))
            save_model(folder, values, rows, description)
            complete(folder)
            return f"the model is in {folder}"
        except (OSError, UserError):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
    return "no other folder has room for the model: it is lost"


def trained_module(job, folder=None):
    """The resulting model as a module of its own, in evaluation mode; not collective.

    `folder`: the run folder, of a run that was complete before and whose rows are not in memory.
    """
    federation, config = job.federation, job.config
    selected = federation.selected
    x, buffers = (federation.server.x, federation.store.buffers) if selected is None else (selected.x, selected.buffers)
    values = job.flat.named_values(x, buffers) if folder is None else read_state(folder)
    with torch.random.fork_rng():
        module = unwrapped(job.task.build_model(model_class(config, job.task), config.model_settings))
    module = module.to(job.context.device, job.context.dtype)
    load_values(module, values)
    return module.eval()


def save_selected(job, recorder):
    """Write the model selected so far, of a run that diverged; rank 0 only. Returns the path of its file.

    Raises:
        UserError: if it cannot be written.
    """
    selected, path = job.federation.selected, recorder.folder / BEST_SO_FAR
    job.flat.point_counters_at(job.federation.clients[0].counters)
    save_hdf5(path, job.flat.named_values(selected.x, selected.buffers), {"x": selected.x})
    return path


def _lost(job):
    """The row of the table about ranks that were lost, if there were any."""
    lost = [
        f"rank {rank} ({describe_clients(job.link.clients[rank])}) in {job.link.lost_in[rank]}"
        for rank in job.link.lost
    ]
    return [("lost", ", ".join(lost))] if lost else []


def closing_table(job, record, metrics, result, facts):
    """What a run prints at its end.

    Args:
        record: of the last round. metrics: of the resulting model. result: text, which iterate it is and where.
        facts: name -> text of further lines.
    """
    context, link, seconds, num_threads = job.context, job.link, record["seconds"], torch.get_num_threads()
    where = f"{context.device}{', data in host memory' if job.task.is_on_host else ''}"
    where = f" ({job.threads_by}), {where}" if job.threads_by else f", {where}"

    def share(part):
        return f"{part:.2f} s ({100 * part / seconds:.0f} %)"

    return table(
        [
            ("algorithm", command_name(type(job.config.algorithm))),
            ("clients", f"{context.num_clients} on {link.size} rank{'s' * (link.size > 1)}"),
            *_lost(job),
            ("each rank", f"{num_threads} thread{'s' if num_threads > 1 else ''}{where}"),
            ("parameters", f"{job.flat.dim:,}"),
            (
                "rounds",
                f"{record['round']} ({record['iteration']} local steps, {record['gradients']:,} gradients in total)",
            ),
            *metric_lines(job, metrics),
            ("local steps", share(record["local_seconds"])),
            ("communication", f"{share(record['communication_seconds'])}, {link.summed_by}"),
            ("evaluation", share(record["evaluation_seconds"])),
            ("total", f"{seconds:.2f} s"),
            ("sent per client", f"{format_bytes(record['bytes'])} in {link.traffic.collectives} Allreduces"),
            *([("hidden", hides)] if (hides := job.config.sending.aggregation.hides) else []),
            *facts.items(),
            *((name.replace("_", " "), f"{number:.6g}") for name, number in job.federation.facts().items()),
            ("result", result),
        ]
    )


def metric_lines(job, metrics):
    """[(name, text)] of all `Metrics`: numbers, spreads over clients, vectors and matrices, and how means are taken."""
    numbers = [(name.replace("_", " "), _with_paper(job, name, value)) for name, value in metrics.items()]
    lines = [*numbers, *_client_lines(job, metrics), *_table_lines(metrics), *_averages(job, metrics)]
    return [*lines, *_missing_lines(job, metrics)]


def _client_lines(job, metrics):
    """(name, text) of what was measured on data of each client's own, besides the training loss."""
    names = job.task.client_names or ()
    for name, values in getattr(metrics, "clients", {}).items():
        if name != "train_loss" and len(values) > 1:
            text = spread_in_words(values, names, less_is_better(name))
            yield f"{name.replace('_', ' ')} of clients", text


def _missing_lines(job, metrics):
    """(name, text) of clients whose tests lack a class: their values are means over the others."""
    cases = getattr(metrics, "cases", {})
    names, lacking = job.task.client_names or (), []
    for client, counts in enumerate(cases.get("values", ())):
        missing = [short(name, 30) for name, count in zip(cases["classes"], counts) if not count]
        if missing and any(counts):
            who = f"client {client}" + (f", {names[client]}" if names and names[client] else "")
            more = [f"{len(missing) - MOST_MISSING} more"] if len(missing) > MOST_MISSING else []
            lacking.append(f"{who}: {', '.join([*missing[:MOST_MISSING], *more])}")
    more = [f"{len(lacking) - MOST_MISSING} more clients"] if len(lacking) > MOST_MISSING else []
    return [("no test cases", "; ".join([*lacking[:MOST_MISSING], *more]))] if lacking else []


def _averages(job, metrics):
    """The row about how metrics are averaged, if that is not the same for all."""
    of_samples = job.config.data.weighting == "samples"
    chosen, other = ("samples", "clients") if of_samples else ("clients", "samples")
    parts = [f"over {chosen}, as in training; _{other}: over {other}"] if any(map(is_beside, metrics)) else []
    text = "; ".join([*parts, *filter(None, [job.task.measured])])
    return [("averages", text)] if text else []


def _table_lines(metrics):
    """(name, text) of vectors, and of each row of matrices: the name of a class and its number."""
    for name, of_metric in getattr(metrics, "tables", {}).items():
        classes, values = of_metric["classes"], of_metric["values"]
        is_matrix = isinstance(values[0], list)
        for row, of_row in zip(classes, values) if is_matrix else [("", values)]:
            cells = [f"{of_class} {value:.6g}" for of_class, value in zip(classes, of_row)][:MOST_CELLS]
            yield f"{name.replace('_', ' ')} {row}".rstrip(), ", ".join(cells)


def _with_paper(job, metric, value):
    """A metric's value as text, with what the paper printed if a preset says so."""
    printed = job.config.resolved.get("paper", {}).get("printed", {}).get(metric, {})
    in_paper = printed.get(command_name(type(job.config.algorithm)))
    return f"{value:.4f}" if in_paper is None else f"{value:.4f} (in the paper: {in_paper})"
