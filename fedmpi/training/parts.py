"""The parts that only a training run has, besides those of `fedmpi.runs.loop`: evaluation, the result, its end."""

from fedmpi.comm.agreement import agree
from fedmpi.comm.job.replicas import check_replicas, check_result
from fedmpi.ground.errors import AgreedUserError
from fedmpi.ground.text import say
from fedmpi.runs.loop.part import OwnPart
from fedmpi.training import cross_site
from fedmpi.training.result import closing_table, complete_run, save, save_clients


class Dealing(OwnPart):
    """Lets the task begin each round: it may deal its samples anew."""

    def __init__(self, task):
        self._task = task

    def before_round(self, number):
        self._task.begin_round(number)


class Replicas(OwnPart):
    """Checks every so many rounds that what the ranks replicate is equal (`--check_replicas`)."""

    def __init__(self, federation, every):
        self._federation, self._every = federation, every

    def after_round(self, now):
        if self._every and now.round % self._every == 0:
            check_replicas(self._federation)

    def end(self, now):
        if self._every:
            check_replicas(self._federation)


class Ending(OwnPart):
    """Ends the run on all ranks if the parts before it have ended it on some."""

    def begin(self, run):
        self._link = run.link

    def after_round(self, now):
        now.is_last = self._link.first_rank_where(now.is_last) is not None


class Evaluating(OwnPart):
    """Evaluates the averaged model every so many rounds, and after the last one on all data.

    Args:
        job: the `Job`. evaluation: an `Evaluation`. clock: of the `Run`. early: the `EarlyStopping`.
    """

    def __init__(self, job, evaluation, clock, early):
        self._job, self._evaluation, self._clock, self._early = job, evaluation, clock, early
        self._every = job.config.evaluation.eval_every or max(
            1, job.num_rounds // (10 if evaluation.is_partial else 20)
        )

    def after_round(self, now):
        if now.round % self._every == 0 or now.is_last:
            now.metrics = self.evaluate(now.is_last)

    def evaluate(self, whole):
        """Metrics of the current averaged model, on all data if `whole`. Collective."""
        job, federation = self._job, self._job.federation
        job.link.enter(f"the evaluation after round {federation.round_index}")
        with self._clock.evaluation():
            x, buffers = federation.server.x, federation.store.buffers
            return self._evaluation(x, buffers, federation.round_index, whole, self._early.ended)


class EvaluatingAtEnd(OwnPart):
    """Evaluates on all data after a round that another part has made the last; remembers the last evaluation.

    Args:
        evaluating: the `Evaluating`.

    Attributes:
        metrics: of the last evaluation.
    """

    def __init__(self, evaluating):
        self._evaluating, self.metrics = evaluating, {}

    def after_round(self, now):
        if now.is_last and not now.was_planned:
            now.metrics = self._evaluating.evaluate(True)
        self.metrics = now.metrics or self.metrics

    def state(self):
        return {f"metrics/{name}": value for name, value in self.metrics.items()}

    def restore(self, state):
        self.metrics = {name[len("metrics/") :]: state[name] for name in state if name.startswith("metrics/")}


class Result(OwnPart):
    """Chooses which averaged model is the result; at the end measures it, and writes it.

    Args:
        job: the `Job`. rule: a `ResultRule`. evaluation: an `Evaluation`. early: the `EarlyStopping`.

    Attributes:
        crossed: see `fedmpi.training.cross_site.measure`; {} unless it is asked for.
    """

    def __init__(self, job, rule, evaluation, early):
        self._job, self._rule, self._evaluation, self._early = job, rule, evaluation, early
        self.crossed = {}

    def begin(self, run):
        self._run = run

    def after_round(self, now):
        self._rule.consider(self._job.federation, now.metrics, self._early.ended)

    def restore(self, state):
        self._rule.check(self._job.federation)

    def end(self, now):
        job, run, own = self._job, self._run, self._rule.own_results
        federation, selected = job.federation, job.federation.selected
        job.link.enter("the end")
        if selected is not None and selected.round != federation.round_index:
            now.metrics = self._evaluation(selected.x, selected.buffers, selected.round, whole=True)
        if own.are_kept:
            x, buffers, everyone = federation.server.x, federation.store.buffers, range(job.context.num_clients)
            now.metrics = self._evaluation(x, buffers, federation.round_index, True, everyone)
        if job.config.studies.cross_site and federation.private:
            self.crossed = cross_site.measure(job, own)
            now.tables = cross_site.tables(job, self.crossed)
        problem = None
        try:
            agree(job.link, lambda: save_clients(job, run.folder, own))
        except AgreedUserError as error:  # the model is saved all the same
            problem = error
        on_recording_rank(job.link, lambda: save(job, run.recorder()))
        try:
            agree(job.link, lambda: self._rule.check_selected(selected))
        except AgreedUserError as error:
            problem = problem or error
        if problem is not None:
            raise problem


class Completing(OwnPart):
    """Gives the model its name, by which the run is complete, when all ranks have come to the end; prints the table.

    Args:
        job: the `Job`. describe: function of the last `Now`: (which iterate the result is, name -> text of further
            lines of the table).
    """

    def __init__(self, job, describe):
        self._job, self._describe = job, describe

    def begin(self, run):
        self._run = run

    def end(self, now):
        job, run = self._job, self._run
        job.link.barrier()  # all ranks have come to the end: only now does the run look complete
        on_recording_rank(job.link, lambda: complete_run(run.recorder()))
        check_result(job.federation)
        recorder = run.recorder()
        if recorder is not None:
            recorder.close()
            result, facts = self._describe(now)
            table = closing_table(job, recorder.last, now.metrics, f"{result}, in {recorder.folder}", facts)
            say(table)


def on_recording_rank(link, action):
    """`agree` on an action of rank 0; again on the next rank if that one is lost. Collective."""
    done_by = None
    while done_by != link.members:
        done_by = link.members
        agree(link, action)
