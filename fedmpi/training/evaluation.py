"""How an averaged model is evaluated: on what."""

import math

import torch

from fedmpi.ground.errors import Diverged
from fedmpi.ground.text import format_count
from fedmpi.tasks.base import Metrics

# The gradients must pass over the training data so often that one more pass, the last evaluation, costs little.
PASSES = 5


class Evaluation:
    """Evaluates the models of one run. Collective on the job's link.

    Args:
        job: the `Job`, without its federation if a model is only measured.
        own_results: its `OwnResults`, or None if clients have no layers of their own.

    Attributes:
        is_partial: whether models are evaluated on a part of the data before the run's end; equal on all ranks.
    """

    def __init__(self, job, own_results=None):
        config = job.config
        self._job, self._own_results = job, own_results
        # To find the best of several results, each is measured on all the data.
        is_partial = config.evaluation.evaluate == "subset" and config.evaluation.result != "best"
        self._part = job.task.subset(config.evaluation.evaluate_samples) if is_partial else job.task
        self._all_tests = job.task.subset(config.evaluation.evaluate_samples, tests=False) if is_partial else job.task
        self.is_partial = job.link.first_rank_where(self._part is not job.task) is not None  # of any rank's clients

    def describe(self):
        """What models are evaluated on, as text for the closing table."""
        if not self.is_partial:
            return "all training and test data"
        number = format_count(self._job.config.evaluation.evaluate_samples)
        last = "all" if self._task_at_end() is self._job.task else "all test samples"
        return f"{number} training and test samples, drawn once; at the end {last}"

    def _task_at_end(self):
        """On all test data; on all training data, too, if the gradients of the run passed over them `PASSES` times."""
        job = self._job
        is_long = not self.is_partial or job.federation.num_gradients >= PASSES * job.num_batches
        return job.task if is_long else self._all_tests

    @torch.no_grad()
    def __call__(self, x, buffers, number, whole=False, settled=()):
        """Metrics of an averaged model. Collective.

        Args:
            x: [dim]; buffers: [num_buffers]. number: of rounds after which it was. whole: whether at the end.
            settled: numbers of clients of whose own models the results count.

        Returns:
            `Metrics`.

        Raises:
            Diverged: on every rank, if its training loss is not finite; with ``--faulty leave_out``, if no client's is.
            UserError: if training has changed which parameters and buffers the module has.
        """
        job = self._job
        job.flat.check()
        job.flat.point_at(x, buffers.clone())  # a copy: a module may write to its buffers even in evaluation mode
        if job.federation:  # the model that is saved has the integer buffers of this rank's first client
            job.flat.point_counters_at([counter.clone() for counter in job.federation.clients[0].counters])
        job.flat.module.eval()
        task, federation = self._task_at_end() if whole else self._part, job.federation
        if federation and federation.private:
            clients = federation.clients
            own = {client.index: self._own_results.of(client, client.index in settled) for client in clients}
            task.visit = lambda client: job.flat.point_at(*own[client])
        metrics = task.evaluate(job.flat.module, job.link)
        loss = metrics["train_loss"]
        if not math.isfinite(loss) and not self._may_go_on(metrics):
            raise Diverged(f"after round {number}: the loss of the averaged model is {loss}; try a smaller step_size")
        clients = {name: by_client(job, values) for name, values in getattr(metrics, "clients", {}).items()}
        cases = dict(getattr(metrics, "cases", {}))
        if cases:
            lost, rest = job.link.lost_clients(), iter(cases["values"])
            none = [0] * len(cases["classes"])
            cases["values"] = [none if k in lost else next(rest, none) for k in range(job.context.num_clients)]
        tables, supports = (getattr(metrics, name, {}) for name in ("tables", "supports"))
        return Metrics({name: float(value) for name, value in metrics.items()}, clients, tables, cases, supports)

    def _may_go_on(self, metrics):
        """Whether faulty clients are left out, and the loss is finite on the data of another one."""
        of_clients = getattr(metrics, "clients", {}).get("train_loss", ())
        return self._job.config.faults.faulty == "leave_out" and any(map(math.isfinite, of_clients))


def by_client(job, values):
    """Numbers of all clients, nan for those that are lost, of an array without these."""
    lost, rest = job.link.lost_clients(), iter(values)
    return [math.nan if client in lost else float(next(rest, math.nan)) for client in range(job.context.num_clients)]
