"""A run and, beside it, the runs that it is compared with (`--baselines`). Collective on the link."""

import dataclasses
import itertools
import math

import torch

from fedmpi.aggregation.sending import Sending
from fedmpi.comm.agreement import agree, share
from fedmpi.comm.link import Traffic
from fedmpi.config.resume import AUTO
from fedmpi.errors import Diverged, UserError
from fedmpi.run_files import find_checkpoints, is_complete
from fedmpi.runs import baselines
from fedmpi.runs.record import HELD_OUT
from fedmpi.text import Log
from fedmpi.training import loop
from fedmpi.training.early_stopping import Callbacks, selection_goal

log = Log(__name__)

FOLDER = "baselines"  # in the run folder: the folders of the further runs


def train(config, link, callbacks=Callbacks(), began=None):  # noqa: B008  it is frozen
    """`fedmpi.training.loop.train`, then the baselines that the settings ask for.

    Returns:
        (the `Trained` of the run, the content of its file of baselines or {}).
    """
    outcome = loop.train(config, link, callbacks, began)
    return outcome, _Baselines(config, link, outcome).make() if config.run.baselines else {}


class _Baselines:
    """The further runs of one run, which are skipped if they were made before.

    Args:
        outcome: the `Trained` of the run.
    """

    def __init__(self, config, link, outcome):
        self._config, self._link, self._folder = config, link, outcome.folder
        self._names = config.run.baselines.replace(" ", "").split(",")
        given = config.algorithm.step_size
        sizes = config.run.baselines_step_sizes or (given / 3, given, 3 * given)
        self._sizes = sorted({given, *sizes}) if config.run.holdout else [given]
        self._job, plan = outcome.job, outcome.job.federation.plan
        steps = [plan.steps_of(client, 0) for client in range(plan.num_clients)]
        self._goal, self._steps = self._job.task.goal, round(self._job.num_rounds * sum(steps) / len(steps))
        # What was compared with the run before it went on counts no more.
        found = share(link, lambda: baselines.read(outcome.folder) if outcome.was_complete else {})
        names = self._job.task.client_names or []
        self._content = {"metric": "", "tests": "", "names": names, "notes": [], "rows": [], "runs": {}, **found}
        self._key = _key("federated", given)
        if self._key not in self._content["runs"]:
            agree(link, lambda: self._check(outcome))
            self._content |= {"metric": self._metric(outcome.metrics.clients)}
            self._content["tests"] = self._tests()[0]
            self._add(self._key, outcome)

    def _check(self, outcome):
        if outcome.was_complete:
            raise UserError(f"baselines: the run in {self._folder} was made without them: begin a new one (--name)")
        if self._metric(outcome.metrics.clients) is None:
            raise UserError("baselines: no silo has test or held-out data, on which models could be compared")

    def _metric(self, clients):
        """The metric that the table shows: the task's goal on the silos' own tests, else the nearest that there is."""
        goal = [] if self._goal[0] == "train_loss" else [self._goal[0]]
        names = [*goal, "test_loss", *(f"{HELD_OUT}{name}" for name in goal), f"{HELD_OUT}loss"]
        return next((name for name in names if any(value == value for value in clients.get(name, ()))), None)

    def make(self):
        """Make what is missing, print the table on rank 0, and return the file's content."""
        best = {}
        for name in ("federated", *self._names):
            best[name] = self._best(name, best.get("federated"))
        rows = [{"method": name, **self._content["runs"][key]} for name, key in best.items()]
        for row in rows:
            row["bytes"] = 0 if row["method"] in ("local", "tuned") else row.get("bytes")  # nothing leaves a silo
            for cost in ("samples", "bytes", "seconds") if row["method"] == "tuned" and "clients" in row else ():
                row[cost] += rows[0][cost]
        self._content |= {"pending": False, "rows": rows, "notes": self._notes()}
        self._write()
        if self._link.rank == 0:
            print(baselines.in_words(self._content), flush=True)
        return self._content

    def _notes(self):
        sizes = ", ".join(f"{size:.4g}" for size in self._sizes)
        chosen = f"the best of {sizes} on held-out data, for each method"
        if len(self._sizes) == 1:
            chosen = "given, because nothing is held out to choose it by (--holdout)"
        costs = "samples of all silos, bytes of one, and time of the run with that step size; tuned includes federated"
        crossed = [("all silos' tests", "each silo's model on the tests of every silo, on average")]
        crossed = crossed if self._config.run.cross_site else []
        return [(self._content["tests"], self._tests()[1]), *crossed, ("step size", chosen), ("costs", costs)]

    def _tests(self):
        """(what a silo's model is measured on, what that means)."""
        if self._content["metric"].startswith(HELD_OUT):
            name, what = "held-out data", "what each silo held out of its training data"
        elif self._job.task.has_own_tests:
            name, what = "own tests", "each silo's own test data"
        else:
            name, what = "part of the common tests", "an equal part for each silo of a test set that all have in common"
        return name, f"{what}; the mean counts each silo once"

    def _best(self, name, federated):
        """The key of a method's run with the best step size; it is made for each if it is not there."""
        keys, runs = [_key(name, size) for size in self._sizes], self._content["runs"]
        for key, size in zip(keys, self._sizes):
            if key not in runs:
                self._make(key, self._derived(size, {"name": key, **self._settings(name, federated)}))
        return min(keys, key=lambda key: math.inf if (value := runs[key]["held_out"]) != value else value)

    def _settings(self, name, federated):
        """Settings of a method's run that differ from the run's; `federated` is the key of the best federated one."""
        run, runs = self._config.run, self._content["runs"]
        if name == "pooled":
            every = run.eval_every and round(run.eval_every * self._steps / runs[self._key]["rounds"])
            words = {"private": None, "local_steps": 1, "local_epochs": None, "epochs": None, "rounds": self._steps}
            return {**words, "weighting": "samples", "participation": 1.0, "eval_every": every}
        settings = {} if name == "federated" else {"private": "*"}
        return settings | ({"init": runs[federated]["folder"], "init_except": None} if name == "tuned" else {})

    def _derived(self, size, settings):
        """The `Config` of a further run."""
        config, folder = self._config, self._folder / FOLDER
        name = share(self._link, lambda: _unused(folder, settings["name"]))
        common = {"out": str(folder), "name": name, "checkpoint_clients": None, "baselines_step_sizes": None}
        common["threads"] = torch.get_num_threads()  # the run's: another number might round differently
        common["baselines"] = "local"  # so that each silo's own tests are measured
        resume = share(self._link, lambda: str(folder / name) if find_checkpoints(folder / name) else AUTO)
        run = dataclasses.replace(config.run, **{**settings, **common, "resume": resume})
        algorithm = dataclasses.replace(config.algorithm, step_size=size)
        resolved = {**config.resolved, **dataclasses.asdict(run), "resume": None, "baselines": None}
        resolved["algorithm"] = {**resolved["algorithm"], "step_size": size}
        sending = config.sending
        if settings.keys() & {"private", "participation"}:  # nothing is sent: neither noise nor compression
            sending = Sending()
            resolved |= {"aggregation": {"name": "mean"}, "stages": {"name": None}}
        return dataclasses.replace(config, run=run, algorithm=algorithm, sending=sending, resolved=resolved)

    def _make(self, key, config):
        if self._link.rank == 0:
            print(f"baseline {key}:", flush=True)
        self._link.traffic.restore(dataclasses.asdict(Traffic()))
        try:
            self._add(key, loop.train(config, self._link))
        except Diverged as error:
            log.warning(f"{error}")
            size = config.algorithm.step_size
            self._content["runs"][key] = {"step_size": size, "held_out": math.nan, "diverged": str(error)}

    def _add(self, key, outcome):
        """Remember what a run measured."""
        metric, last = self._content["metric"], outcome.records[-1]
        held_out, sign = f"{HELD_OUT}loss", -1
        if held_out not in outcome.metrics:
            held_out, sign = selection_goal(self._goal, outcome.metrics)
        clients = [float(value) for value in outcome.metrics.clients[metric]]
        mean, worst = baselines.mean_and_worst(clients, metric)
        self._content["runs"][key] = {
            "folder": str(outcome.folder),
            "step_size": outcome.job.config.algorithm.step_size,
            "clients": clients,
            "mean": mean,
            "worst": worst,
            "held_out": -sign * outcome.metrics.get(held_out, math.nan),
            "rounds": outcome.job.num_rounds,
            "samples": outcome.samples,
            **{name: last[name] for name in ("bytes", "seconds")},
            **outcome.cross_site.get(metric, {"all_tests": mean} if self._config.run.cross_site else {}),
        }
        self._write()

    def _write(self):
        agree(self._link, lambda: self._link.rank == 0 and baselines.write(self._folder, self._content))


def _key(method, size):
    return f"{method}-{size:g}"


def _unused(folder, name):
    """The name of a run folder: that of a run that ended before it was compared is not used again."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not is_complete(folder / name))
