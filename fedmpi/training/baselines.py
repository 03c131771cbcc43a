"""A run and, beside it, the runs that it is compared with (`--baselines`). Collective on the link."""

import dataclasses
import itertools
import math

import torch

from fedmpi.aggregation.sending import Sending
from fedmpi.comm.agreement import agree, share
from fedmpi.comm.traffic import Traffic
from fedmpi.config.resume import AUTO
from fedmpi.ground.errors import Diverged, UserError
from fedmpi.ground.files.run_files import has_checkpoint, is_complete
from fedmpi.ground.text import Log, say
from fedmpi.runs import baselines
from fedmpi.runs.record import HELD_OUT, METRICS, is_beside
from fedmpi.training import intervals, loop
from fedmpi.training.early_stopping import Callbacks, selection_goal

log = Log(__name__)

FOLDER = "baselines"  # in the run folder: the folders of the further runs


def train(config, link, callbacks=Callbacks(), began=None):  # noqa: B008  it is frozen
    """(the `Trained` of `fedmpi.training.loop.train`, its file of the baselines that the settings ask for or {})."""
    outcome = loop.train(config, link, callbacks, began)
    return outcome, _compare(outcome) if config.studies.baselines else {}


def _compare(outcome):
    """Make the further runs that are missing, print the table on rank 0, and return the file's content."""
    job, given, supports = outcome.job, outcome.job.config.algorithm.step_size, {}
    # What was compared with the run before it went on does not count.
    content = share(job.link, lambda: baselines.read(outcome.folder) if outcome.was_complete else {})
    if not content:
        agree(job.link, lambda: _check(outcome))
        metric = _metric(outcome)
        content = {"metric": metric, "tests": _tests(job.task, metric)[0], "names": job.task.client_names or []}
        content |= {"notes": [], "rows": [], "runs": {}}
        supports[_key("federated", given)] = _add(outcome, content, _key("federated", given), outcome)
    config, best = job.config, {}
    sizes = config.studies.baselines_step_sizes or (given / 3, given, 3 * given)
    sizes = sorted({given, *sizes}) if config.data.holdout else [given]
    for method in ("federated", *config.studies.methods):
        for size in sizes:
            if _key(method, size) not in content["runs"]:
                settings = _settings(method, job, best and best["federated"]["folder"])
                supports[_key(method, size)] = _make(outcome, content, size, _key(method, size), settings)
        made = [content["runs"][_key(method, size)] for size in sizes]
        best[method] = min(made, key=lambda trial: math.inf if math.isnan(trial["held_out"]) else trial["held_out"])
    _find_intervals(
        job, content, {method: _key(method, trial["step_size"]) for method, trial in best.items()}, supports
    )
    rows = [{"method": method, **trial} for method, trial in best.items()]
    for row in rows:
        row["bytes"] = 0 if row["method"] in ("local", "tuned") else row.get("bytes")  # nothing leaves a silo
        for cost in ("samples", "bytes", "seconds") if row["method"] == "tuned" and "clients" in row else ():
            row[cost] += rows[0][cost]
    content |= {"pending": False, "rows": rows, "notes": _notes(job, content, sizes)}
    _write(outcome, content)
    if job.link.rank == 0:
        say(baselines.in_words(content))
    return content


def _find_intervals(job, content, keys, supports):
    """Add to the content how sure its means are; what an earlier part of the comparison has found stays. Collective.

    Args:
        keys: method -> the key of its run in the table. supports: key of a run -> what `_add` returned.
    """
    link, seed = job.link, job.config.data.seed
    if link.survives:  # without `alltoallv`, which goes on with all ranks only
        return
    for key in keys.values():
        content["runs"][key] |= intervals.of_mean(link, seed, supports.get(key))
    both = [keys["federated"], keys.get("local")]
    if content.get("gain", {}).get("of") != both:
        found = intervals.of_difference(link, seed, *map(supports.get, both))
        content["gain"] = {**found, "of": both} if found else {}


def _check(outcome):
    if outcome.was_complete:
        raise UserError(f"baselines: the run in {outcome.folder} was made without them: begin a new one (--name)")
    if _metric(outcome) is None:
        raise UserError("baselines: no silo has test or held-out data, on which models could be compared")


def _metric(outcome):
    """The metric that the table shows: the task's goal on the silos' own tests, else the nearest that there is."""
    goal, clients = outcome.job.task.goal[0], outcome.metrics.clients
    goals = [] if goal == "train_loss" else [goal]
    names = [*goals, "test_loss", *(f"{HELD_OUT}{name}" for name in goals), f"{HELD_OUT}loss"]
    return next((name for name in names if any(value == value for value in clients.get(name, ()))), None)


def _tests(task, metric):
    """(what a silo's model is measured on, what that means)."""
    if metric.startswith(HELD_OUT):
        name, meaning = "held-out data", "what each silo held out of its training data"
    elif task.has_own_tests:
        name, meaning = "own tests", "each silo's own test data"
    else:
        name, meaning = "part of the common tests", "an equal part for each silo of a test set that all have in common"
    return name, f"{meaning}; the mean counts each silo once"


def _notes(job, content, sizes):
    chosen = f"the best of {', '.join(f'{size:.4g}' for size in sizes)} on held-out data, for each method"
    if len(sizes) == 1:
        chosen = "given, because nothing is held out to choose it by (--holdout)"
    costs = "samples of all silos, bytes of one, and time of the run with that step size; tuned includes federated"
    crossed = [("all silos' tests", "each silo's model on the tests of every silo, on average")]
    crossed = crossed if job.config.studies.cross_site else []
    return [_tests(job.task, content["metric"]), *crossed, ("step size", chosen), ("costs", costs)]


def _settings(method, job, federated):
    """Settings of a method's run that differ from the run's; `federated`: folder of the best federated one."""
    config, plan = job.config, job.federation.plan
    if method == "pooled":
        steps = [plan.steps_of(client, 0) for client in range(plan.num_clients)]
        rounds = round(job.num_rounds * sum(steps) / len(steps))
        every = config.evaluation.eval_every and round(config.evaluation.eval_every * rounds / job.num_rounds)
        words = {"private": None, "local_steps": 1, "local_epochs": None, "epochs": None, "rounds": rounds}
        return {**words, "weighting": "samples", "participation": 1.0, "eval_every": every}
    settings = {} if method == "federated" else {"private": "*"}
    return settings | ({"init": federated, "init_except": None} if method == "tuned" else {})


def _derived(outcome, size, key, settings):
    """The `Config` of a further run."""
    config, folder = outcome.job.config, outcome.folder / FOLDER
    numbered = itertools.chain([key], (f"{key}-{number}" for number in itertools.count(2)))
    # The folder of a run that ended before it was compared is not used again.
    name = share(outcome.job.link, lambda: next(name for name in numbered if not is_complete(folder / name)))
    common = {"out": str(folder), "name": name, "checkpoint_clients": None, "baselines_step_sizes": None}
    common["threads"] = torch.get_num_threads()  # the run's: another number might round differently
    common["baselines"] = "local"  # so that each silo's own tests are measured
    resume = share(outcome.job.link, lambda: str(folder / name) if has_checkpoint(folder / name) else AUTO)
    algorithm = dataclasses.replace(config.algorithm, step_size=size)
    own = {**settings, **common, "resume": resume}
    resolved = {**config.resolved, **own, "resume": None, "baselines": None}
    resolved["algorithm"] = {**resolved["algorithm"], "step_size": size}
    sending = config.sending
    if settings:  # nothing is sent: neither noise nor compression
        sending, none = Sending(), {"aggregation": {"name": "mean"}, "stages": {"name": None}, "codec": None}
        resolved |= none
    return config.replaced(own, algorithm=algorithm, sending=sending, resolved=resolved)


def _make(outcome, content, size, key, settings):
    """Make a further run; see `_add`, None if it diverges."""
    link = outcome.job.link
    config = _derived(outcome, size, key, settings)
    if link.rank == 0:
        say(f"baseline {key}:")
    link.traffic.restore(dataclasses.asdict(Traffic()))
    link.crossed.clear()
    try:
        return _add(outcome, content, key, loop.train(config, link))
    except Diverged as error:
        log.warning(f"{error}")
        content["runs"][key] = {"step_size": size, "held_out": math.nan, "diverged": str(error)}
        return None


def _add(outcome, content, key, made):
    """Remember what a run measured: the `Trained` `made` of those that the run `outcome` is compared with.

    Returns:
        client -> `Support` of the metric of each client of this rank, or None if the task has none.
    """
    metric, last = content["metric"], made.records[-1]
    further = {name: of for name, of in made.metrics.clients.items() if _is_asked(name)}
    held_out, sign = f"{HELD_OUT}loss", -1
    if held_out not in made.metrics:
        held_out, sign = selection_goal(made.job.task.goal, made.metrics)
    clients = [float(value) for value in made.metrics.clients[metric]]
    mean, worst = baselines.mean_and_worst(clients, metric)
    supports = getattr(made.metrics, "supports", {}).get(metric)
    supports = None if supports is None else dict(zip(made.job.context.clients, supports))
    content["runs"][key] = {
        "folder": str(made.folder),
        "step_size": made.job.config.algorithm.step_size,
        "clients": clients,
        "mean": mean,
        "worst": worst,
        "further": {name: baselines.mean_and_worst(of, name)[0] for name, of in further.items()},
        "held_out": -sign * made.metrics.get(held_out, math.nan),
        "samples": made.samples,
        **{name: last[name] for name in ("bytes", "seconds")},
        **made.cross_site.get(metric, {"all_tests": mean} if made.job.config.studies.cross_site else {}),
    }
    _write(outcome, content)
    return supports


def _is_asked(metric):
    """Whether it is a further metric on tests: of --task.metrics, or of a task of the user's own."""
    return metric not in METRICS and not is_beside(metric) and not metric.startswith(HELD_OUT)


def _write(outcome, content):
    link = outcome.job.link
    agree(link, lambda: link.rank == 0 and baselines.write(outcome.folder, content))


def _key(method, size):
    return f"{method}-{size:g}"
