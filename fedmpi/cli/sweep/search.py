"""Random and TPE search with Optuna: each trial is a run of a sweep, and can be ended early (pruned)."""

import json
import time

from fedmpi.cli.sweep.choice import usual_metric
from fedmpi.cli.sweep.local import start_job
from fedmpi.cli.sweep.plan import Planned, axis, names_of
from fedmpi.config.grammar import spelling
from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.own_files import check_regular, replacing
from fedmpi.ground.text import Log
from fedmpi.runs.folder import outcome, read_run
from fedmpi.runs.record import less_is_better

log = Log(__name__)

TRIALS = "trials.jsonl"  # in the sweep's folder: a line for each trial that was begun, or was pruned
BEGIN = b'{"name": "'  # of each line
SAMPLERS = ("random", "tpe")
LONGEST_NAME = 240  # bytes
FIRST_TRIALS = 5  # complete ones, before any is pruned


def make_space(ranges, grid):
    """Setting -> Optuna distribution.

    Args:
        ranges: texts like "algorithm.step_size=0.001:0.1:log" or "local_steps=1:20".
        grid: texts like "algorithm=fafed,fedavg", of which each trial takes one value.

    Raises:
        UserError: if a text is none of these, or Optuna is not installed.
    """
    optuna = import_optuna()
    space = {key: optuna.distributions.CategoricalDistribution(texts) for key, texts in map(axis, grid)}
    for text in ranges:
        key, _, range_ = text.partition("=")
        low, _, rest = range_.partition(":")
        high, _, scale = rest.partition(":")
        try:
            kind = int if low.lstrip("-").isdigit() and high.lstrip("-").isdigit() else float
            make = optuna.distributions.IntDistribution if kind is int else optuna.distributions.FloatDistribution
            if scale not in ("", "log"):
                raise ValueError(f"scale {scale}")
            if not key:
                raise ValueError("no setting")
            if not abs(float(low)) < 2**53 > abs(float(high)):
                raise ValueError("a value is not finite, or too large")
            distribution = make(kind(low), kind(high), log=scale == "log")
        except (ValueError, OverflowError) as error:
            raise UserError(
                f"--range {text}: expected a setting with its smallest and largest value, like "
                f"algorithm.step_size=0.001:0.1:log or local_steps=1:20 ({error})"
            ) from None
        space[spelling(key)] = distribution
    if not space:
        raise UserError("--search: nothing to vary: give --range algorithm.step_size=0.001:0.1:log")
    return space


def import_optuna():
    """The package optuna, which logs warnings only.

    Raises:
        UserError: if it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise UserError("--search needs Optuna: pip install 'fedmpi[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Search:
    """A search in the folder of a sweep. The same command goes on with one that was interrupted.

    Args:
        plan: a `Plan` without runs; the trials are added to it. space: see `make_space`.
        sampler: one of `SAMPLERS`. seed: of the sampler. metric: its name, or None for the usual one.
        prunes: whether runs that are worse than the median of the others so far are ended early.
    """

    def __init__(self, plan, space, sampler, seed, metric, prunes):
        optuna = import_optuna()
        self._optuna, self._plan, self._space, self._metric = optuna, plan, space, metric
        self._sampler = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}[sampler]
        self._seed = seed
        pruner = optuna.pruners.MedianPruner(FIRST_TRIALS) if prunes else optuna.pruners.NopPruner()
        self._study = optuna.create_study(direction="maximize", sampler=self._sampler(seed=seed), pruner=pruner)
        self._file = plan.out / TRIALS
        self._unfinished = []  # (`Planned`, parameters) of trials that were begun and have not ended
        self._lines = []  # of the file, as dicts

    def recall(self):
        """How many trials in the sweep's folder have ended; the study gets them. The others are made again first."""
        states = {}
        for line in self._read():
            states[line["name"]] = {**states.get(line["name"], {}), **line}
        for name, line in states.items():
            run = Planned(name, line["varied"])
            self._plan.runs.append(run)
            how = "pruned" if line.get("pruned") else outcome(self._plan.folder(run))
            try:
                trial = self._optuna.trial.create_trial(
                    params=line["parameters"], distributions=self._space, **self._state(run, how)
                )
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(
                    f"{self._file}: trial {name} does not fit --range and --grid: {error}; choose another --out"
                ) from None
            if how in ("missing", "broken"):
                self._unfinished.append((run, line["parameters"]))
            else:
                self._study.add_trial(trial)
        self._study.sampler = self._sampler(seed=self._seed + len(states))  # not the same points once more
        return len(states) - len(self._unfinished)

    def _read(self):
        """The lines of the file as dicts; a last line that is not whole, because a sweep was killed, is ignored."""
        check_regular(self._file, is_changed=True)
        with attempt("read", self._file):
            text = self._file.read_bytes() if self._file.is_file() else b""
        *whole, rest = text.split(b"\n")
        lines = [_as_trial(line) for line in whole]
        if None in lines:
            raise UserError(
                f"{self._file}: line {lines.index(None) + 1} is not a trial: restore it, or choose another --out"
            )
        if rest and (last := _as_trial(rest)) is not None:
            lines.append(last)
        elif rest and not lines and not rest.startswith(BEGIN[: len(rest)]):
            raise UserError(f"{self._file}: fedmpi did not write it: move it, or choose another --out")
        elif rest:
            log.warning(f"{self._file}: the last line is not whole, and is ignored")
        begun = set()
        for number, line in enumerate(lines, 1):
            begun |= {line["name"]} if "parameters" in line else set()
            if line["name"] not in begun:
                raise UserError(
                    f"{self._file}: line {number}: trial {line['name']} was not begun: choose another --out"
                )
        self._lines = lines
        return lines

    def run(self, number, ranks, at_a_time, launcher, ended):
        """Make trials until there are `number`; the other arguments are those of `run_all`."""
        running = []
        try:
            while running or self._unfinished or len(self._plan.runs) < number:
                while len(running) < at_a_time and (self._unfinished or len(self._plan.runs) < number):
                    trial, run = self._next()
                    running.append((trial, start_job(self._plan, run, ranks, launcher), {}))
                for started in list(running):
                    if self._look_after(*started, ended):
                        running.remove(started)
                time.sleep(0.05)
        finally:
            for _, job, _ in running:
                job.end()

    def _next(self):
        """(trial, `Planned`) of a run that did not end, or of a new point."""
        if self._unfinished:
            run, parameters = self._unfinished.pop(0)
            self._study.enqueue_trial(parameters)
            return self._study.ask(self._space), run
        trial = self._study.ask(self._space)
        varied = {key: _text(value) for key, value in trial.params.items()}
        (name,) = names_of([varied])
        number = len(self._plan.runs)
        run = Planned(f"{number:03d},{name}"[:200], varied)
        self._plan.runs.append(run)
        self._write({"name": run.name, "varied": varied, "parameters": trial.params})
        return trial, run

    def _look_after(self, trial, job, seen, ended):
        """Report what a job has measured to the study, end it if it is to be pruned; returns whether it has ended."""
        seconds = time.monotonic() - job.begun
        for round_, value in self._measured(job.run):
            if round_ not in seen:
                seen[round_] = value
                trial.report(value, round_)
        code = job.poll()
        if code is None:
            if not seen or not trial.should_prune():
                return False
            job.end()
            self._write({"name": job.run.name, "varied": job.run.varied, "pruned": True})
            self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
            ended(job.run, "pruned", seconds, "")
            return True
        last = job.last_line()
        if code == 2:
            raise UserError(f"run {job.run.name}: {last.removeprefix('fedmpi: error: ')}")
        how = self._state(job.run, outcome(self._plan.folder(job.run)))
        self._study.tell(trial, how.get("value"), state=how["state"])
        ended(job.run, code, seconds, last)
        return True

    def _state(self, run, how):
        """The state of a trial, and its value if it is complete."""
        states = self._optuna.trial.TrialState
        if how == "pruned":
            return {"state": states.PRUNED}
        record = read_run(self._plan.folder(run)) if how == "complete" else None
        value = record.final(self._name(record)) if record else None
        return {"state": states.FAIL} if value is None else {"state": states.COMPLETE, "value": self._signed(value)}

    def _measured(self, run):
        """[(round, value)] of the metric in the records so far; larger is better."""
        try:
            record = read_run(self._plan.folder(run))
            name = self._name(record)
        except UserError:  # the run has not begun, or nothing is evaluated yet
            return []
        return [(line["round"], self._signed(line[name])) for line in record.records if name in line]

    def _name(self, record):
        self._metric = self._metric or usual_metric([record])
        return self._metric

    def _signed(self, value):
        return -value if less_is_better(self._metric) else value

    def _write(self, line):
        self._lines.append(line)
        text = "".join(f"{json.dumps(entry)}\n" for entry in self._lines)
        with attempt("write", self._file), replacing(self._file, BEGIN) as part:
            part.write_text(text, encoding="utf-8")


def _as_trial(line):
    """A line of the file as a dict; None if it is none, or its name is not that of a folder in the sweep's."""
    try:
        content = json.loads(line)
        name, varied = content["name"], content["varied"]
        is_name = 0 < len(name.encode()) <= LONGEST_NAME and name not in (".", "..") and not {*name} & {"/", "\0"}
        is_whole = isinstance(content["parameters"], dict) if "parameters" in content else content["pruned"] is True
        is_text = all(isinstance(word, str) for word in varied.values())
        return content if is_name and is_whole and is_text else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _text(value):
    return value if isinstance(value, str) else f"{value:.4g}" if isinstance(value, float) else str(value)
