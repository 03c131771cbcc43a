"""Choose settings: ``python -m fedmpi.sweep --grid algorithm.step_size=0.001,0.01 --grid seed=0,1,2 --rounds 50``."""

import argparse
import os
import pathlib
import sys

import yaml

from fedmpi.errors import UserError
from fedmpi.program.parser import Parser
from fedmpi.program.single import run_single
from fedmpi.runs.folder import is_run, read_run
from fedmpi.sweep.choice import (
    HOLDOUT,
    best_of_each_algorithm,
    candidate_table,
    check_metric,
    ended_runs,
    may_choose,
    rank,
    usual_metric,
    write_best,
    write_candidates,
)
from fedmpi.sweep.local import outcome, run_all
from fedmpi.sweep.plan import make_plan
from fedmpi.sweep.slurm import job_array

TEMPLATE = pathlib.Path("slurm") / "train.sbatch"
DESCRIPTION = """\
Train with every combination of some settings, and choose the best by held-out training data.

    python -m fedmpi.sweep --grid algorithm.step_size=0.001,0.003,0.01 --grid seed=0,1,2 --rounds 50

Options that are not named below are settings of every run, as of fedmpi.train. The same command
again goes on where it was: runs that ended are skipped, those that broke are made again. A plan is
a YAML file like

    settings: {rounds: 50, clients: 4}
    grid: {algorithm.step_size: [0.001, 0.01], seed: [0, 1, 2]}
    list:                 # each of these with each point of the grid
      - {algorithm: fafed}
      - {algorithm: {name: fedavg, step_size: 0.01}, batch_size: 10}"""


def main(arguments=None):
    """Entry point; `arguments` default to those of the process."""
    run_single(_run, sys.argv[1:] if arguments is None else arguments)


def _parser():
    parser = Parser(prog="python -m fedmpi.sweep", description=DESCRIPTION)
    parser.add_argument(
        "--grid", action="append", default=[], metavar="SETTING=VALUE,VALUE", help="values to try; can be given again"
    )
    parser.add_argument("--plan", type=pathlib.Path, metavar="FILE", help="the same from a YAML file")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("sweep"), help="folder of the runs: sweep")
    parser.add_argument(
        "--ranks", type=_count, metavar="N", help="ranks of each run: 1; in a job array: the template's"
    )
    parser.add_argument("--at-a-time", type=_count, metavar="N", help="runs at once: 1; in a job array: no limit")
    parser.add_argument(
        "--launch", metavar="WORDS", help='how ranks are started, like "mpirun --oversubscribe -np {ranks}"'
    )
    parser.add_argument("--metric", help="what to choose by: a holdout_ metric, the accuracy if there is one")
    parser.add_argument("--emit-slurm", type=pathlib.Path, metavar="FILE", help="write a job array instead of running")
    parser.add_argument("--template", type=pathlib.Path, metavar="FILE", help=f"of the job array: {TEMPLATE}")
    parser.add_argument("--table", action="store_true", help="only show what the runs so far came to")
    return parser


def _count(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, not '{text}'")
    return int(text)


def _run(arguments):
    options, common = _parser().parse_known_args(arguments)
    if options.metric:
        check_metric(options.metric)
    plan = make_plan(options.out.absolute(), options.plan, options.grid, common)
    added = _complete(plan.common, options)
    todo = [run for run in plan.runs if outcome(plan.folder(run)) in ("missing", "broken")]
    if not options.table:
        _check_runs(plan, todo, added)
        _claim_folder(plan)
        print(f"{len(plan.runs)} runs, {len(todo)} of them to be made, in {options.out}", flush=True)
    if options.emit_slurm:
        _emit(options, plan, todo)
        return
    if not options.table:
        ranks = options.ranks or 1
        launcher = ("mpirun -np {ranks}" if ranks > 1 else "") if options.launch is None else options.launch
        show = _Progress(plan, len(todo), options.metric)
        run_all(plan, todo, ranks, options.at_a_time or 1, launcher, show)
    _choose(plan, options)


def _complete(common, options):
    """Give every run the settings that follow from the sweep's own, unless they are given: the names of those."""
    wanted = {}
    if options.metric is None or options.metric.startswith(HOLDOUT):
        wanted["holdout"] = "0.1"
    if (options.at_a_time or 1) > 1 and not options.emit_slurm:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        wanted["threads"] = str(max(1, cores // ((options.ranks or 1) * options.at_a_time)))
    added = {key: word for key, word in wanted.items() if key not in common}
    common.update(added)
    return list(added)


def _check_runs(plan, runs, added):
    """See that all settings are right before any work starts.

    Args:
        plan: a `Plan`. runs: list of `Planned`. added: names of the settings that nobody gave, see `_complete`.

    Raises:
        UserError: if those of a run are not.
    """
    if not runs:
        return
    from fedmpi.config.build import read_command_line  # brings torch, which --table and --help do without

    for run in runs:
        try:
            if isinstance(read_command_line(plan.words(run)), str):
                raise UserError("--list and --print_config are for fedmpi.train")
        except UserError as error:
            ours = "holdout" in added and "holdout" not in run.varied and str(error).startswith("holdout =")
            advice = "; choose without it: --holdout 0 --metric train_loss" if ours else ""
            raise UserError(f"run {run.name}: {error}{advice}") from None


def _claim_folder(plan):
    """Note the common settings in the sweep's folder, and see that they are those of the runs in it.

    Raises:
        UserError: if runs with other settings are there, or it cannot be written.
    """
    note = plan.out / "common.yaml"
    settings = {key: word for key, word in plan.common.items() if key != "threads"}
    try:
        plan.out.mkdir(parents=True, exist_ok=True)
        before = yaml.safe_load(note.read_text(encoding="utf-8")) if note.is_file() else settings
        if before != settings and any(map(is_run, plan.out.iterdir())):
            keys = [key for key in {**before, **settings} if before.get(key) != settings.get(key)]
            changes = ", ".join(f"{key} was {before.get(key, 'not set')}" for key in keys)
            raise UserError(f"{plan.out}: holds runs with other common settings ({changes}); choose another --out")
        note.write_text(yaml.safe_dump(settings), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {plan.out}: cannot be written: {error.strerror}") from None


class _Progress:
    """A line for every run that ends."""

    def __init__(self, plan, number, metric):
        self._plan, self._number, self._metric, self._ended = plan, number, metric, 0

    def __call__(self, run, code, seconds, last):
        self._ended += 1
        folder = self._plan.folder(run)
        how = f"broken, exit code {code}: {last}"
        if outcome(folder) == "complete":
            record = read_run(folder)
            how = _result(record, self._metric)
        elif outcome(folder) == "diverged":
            how = "diverged"
        print(f"[{self._ended}/{self._number}] {run.name}: {how} ({seconds:.1f} s)", flush=True)


def _result(record, metric):
    """What a run came to, in words; it may not have measured the metric."""
    if metric is None and not any(name.startswith(HOLDOUT) for name in record.metrics):
        return "nothing held out"
    metric = metric or usual_metric([record])
    value = record.final(metric)
    return f"no {metric}" if value is None else f"{metric} {value:.4f}"


def _choose(plan, options):
    """Say and write which settings are the best."""
    ended = ended_runs(plan)
    if not ended:
        raise UserError(f"{options.out}: no run has ended with a result; what they printed is in its .log files")
    metric = options.metric or usual_metric(ended.values())
    candidates = rank(plan, metric, ended)
    if candidates[0].spread is None:
        names = dict.fromkeys(name for run in ended.values() for name in run.metrics if may_choose(name))
        raise UserError(f"--metric {metric}: no run measured it; to choose by there are {', '.join(names)}")
    print(candidate_table(candidates, metric).text())
    try:
        write_candidates(options.out / "sweep.csv", candidates, metric)
        files = {"best.yaml": candidates[0]}
        by_algorithm = best_of_each_algorithm(candidates)
        if len(by_algorithm) > 1:
            files |= {f"best-{name}.yaml": candidate for name, candidate in by_algorithm.items()}
        for name, candidate in files.items():
            write_best(options.out / name, candidate, metric)
    except OSError as error:
        raise UserError(f"{options.out}: cannot be written: {error.strerror}") from None
    print(f"best: {candidates[0].label}")
    print(f"to train with it on all data: python -m fedmpi.train --config {options.out / 'best.yaml'}")


def _emit(options, plan, todo):
    """Write a job array for the runs that are to be made."""
    if not todo:
        raise UserError("every run has ended: nothing to submit; --table shows what they came to")
    here = TEMPLATE if TEMPLATE.is_file() else pathlib.Path(__file__).parents[2] / TEMPLATE
    template = options.template or here
    try:
        text = job_array(template.read_text(encoding="utf-8"), plan, todo, options.ranks, options.at_a_time)
        options.emit_slurm.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror} (--template names a job script)") from None
    print(f"submit: sbatch {options.emit_slurm}; afterwards the same command with --table shows the best")


if __name__ == "__main__":
    main()
