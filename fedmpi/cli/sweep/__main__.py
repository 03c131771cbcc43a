"""Choose settings: ``python -m fedmpi sweep --grid algorithm.step_size=0.001,0.01 --grid seed=0,1 --rounds 50``."""

import math
import pathlib
import sys

import yaml

from fedmpi.cli.sweep.choice import (
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
from fedmpi.cli.sweep.folder import check_run_folders, own_sweep_folder
from fedmpi.cli.sweep.local import run_all
from fedmpi.cli.sweep.plan import Planned, make_plan, plan_of_search
from fedmpi.cli.sweep.search import SAMPLERS, Search, make_space
from fedmpi.cli.sweep.slurm import SIGNATURE, job_array
from fedmpi.comm.job.output import make_output_safe
from fedmpi.comm.job.parser import Parser, count
from fedmpi.comm.job.single import run_single
from fedmpi.config.grammar import read_file
from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.own_files import check_folder, check_regular, check_replaceable, replacing
from fedmpi.ground.machine.cores import cores_of_job
from fedmpi.ground.text import Log, format_ranges, format_seconds
from fedmpi.ground.version import PACKAGE
from fedmpi.runs.folder import is_run, outcome, read_run
from fedmpi.runs.record import HELD_OUT
from fedmpi.training.settings import RunSettings

log = Log("fedmpi.cli.sweep")

NOTE = "# Written by fedmpi sweep: the settings of all its runs.\n"
COMMON, TABLE, BEST = "common.yaml", "sweep.csv", "best.yaml"  # files in a sweep's folder
TEMPLATE = PACKAGE / "slurm" / "sweep.sbatch"
DESCRIPTION = """\
Train with every combination of some settings, and choose the best one by a metric on held-out training data.

    python -m fedmpi sweep --grid algorithm.step_size=0.001,0.003,0.01 --grid seed=0,1,2 --rounds 50

Options that are not listed below are settings of fedmpi.train and apply to every run. The same command
continues an interrupted sweep: it skips runs that have ended and repeats those that failed. A plan is
a YAML or TOML file like

    settings: {rounds: 50, clients: 4}
    grid: {algorithm.step_size: [0.001, 0.01], seed: [0, 1, 2]}
    list:                 # each of these is combined with each point of the grid
      - {algorithm: fafed}
      - {algorithm: {name: fedavg, step_size: 0.01}, batch_size: 10}"""


def main(arguments=None):
    """Entry point; `arguments` default to those of the process."""
    run_single(_run, sys.argv[1:] if arguments is None else arguments)


def make_parser():
    """The parser of the program's options."""
    parser = Parser(prog="fedmpi sweep", description=DESCRIPTION)
    add, file = parser.add_argument, {"type": pathlib.Path, "metavar": "FILE"}
    number, several = {"type": count, "metavar": "N"}, {"action": "append", "default": []}
    text = "values of a setting to try; may be repeated"
    add("--grid", metavar="SETTING=VALUE,VALUE", help=text, **several)
    add("--plan", help="read settings and grid from a YAML or TOML file; the command line overrides it", **file)
    text = "folder in which the run folders are created; default: sweep"
    add("--out", type=pathlib.Path, default=pathlib.Path("sweep"), help=text)
    add("--ranks", help="ranks of each run; default: 1, or in a job array what the job script asks for", **number)
    text = "how many runs to start at the same time; default: 1, or in a job array no limit"
    add("--at-a-time", help=text, **number)
    text = 'command that starts the ranks, like "mpirun --oversubscribe -np {ranks}"'
    add("--launch", metavar="WORDS", help=text)
    text = (
        "metric that decides which settings are best; default: one on held-out data, the loss only if there is no other"
    )
    add("--metric", help=text)
    text = "let a sampler of Optuna draw the settings from --range and --grid, instead of trying all"
    add("--search", choices=SAMPLERS, help=text)
    text = "with --search: smallest and largest value of a setting; may be repeated"
    add("--range", metavar="SETTING=LOW:HIGH[:log]", help=text, **several)
    add("--trials", default=20, help="with --search: number of runs; default: 20", **number)
    text = "with --search: seed of the sampler; default: 0"
    add("--search-seed", type=int, default=0, metavar="N", help=text)
    text = "with --search: end a run early if it is worse than the median of the others"
    add("--prune", action="store_true", help=text)
    add("--emit-slurm", help="write a job script (an array with one task per run) and start nothing", **file)
    add("--template", help="job script on which --emit-slurm is based; default: slurm/sweep.sbatch", **file)
    text = "only print the numbers of the runs that are still to do, for sbatch --array"
    add("--todo", action="store_true", help=text)
    add("--words", type=int, metavar="N", help="only print the arguments of fedmpi.train for run number N")
    add("--table", action="store_true", help="start nothing, only print the results so far")
    return parser


def _run(arguments):
    options, common = make_parser().parse_known_args(arguments)
    make_output_safe()  # a line that cannot be printed does not end the runs
    if options.metric:
        check_metric(options.metric)
    if options.search:
        _search(options, common)
        return
    if options.range or options.prune:
        raise UserError("--range and --prune: expected only with --search random or --search tpe")
    plan = make_plan(options.out.absolute(), options.plan, options.grid, common)
    added = _add_settings(plan.common, options)
    if options.words is not None:
        _print_words(plan, options.words)
        return
    check_folder(plan.out, "sweep")
    check_run_folders(plan)
    if options.emit_slurm:
        check_replaceable(options.emit_slurm, SIGNATURE)
    todo = [run for run in plan.runs if outcome(plan.folder(run)) in ("missing", "broken")]
    if not options.table:
        _check_runs(plan, todo, added)
        _claim_folder(plan)
    if options.todo:
        if not todo:
            raise UserError("every run has ended: nothing to submit; --table shows the results")
        print(format_ranges(_numbers(plan, todo)))
        return
    if not options.table:
        print(f"{len(plan.runs)} runs in {options.out}, {len(todo)} of them still to do", flush=True)
    if options.emit_slurm:
        _emit(options, plan, todo, common)
        return
    if not options.table:
        run_all(plan, todo, *_launch_options(options), _Progress(plan, len(todo), options.metric))
    _choose(plan, options)


def _launch_options(options):
    """(ranks of each run, runs at once, command that starts the ranks) from the options."""
    ranks = options.ranks or 1
    launcher = ("mpirun -np {ranks}" if ranks > 1 else "") if options.launch is None else options.launch
    return ranks, options.at_a_time or 1, launcher


def _search(options, common):
    """Draw settings, one run after the other, and choose the best."""
    if options.emit_slurm or options.words is not None or options.todo:
        raise UserError(
            "--search chooses each run from the results of earlier ones: leave --emit-slurm, --todo and --words out"
        )
    space = make_space(options.range, options.grid)
    plan = plan_of_search(options.out.absolute(), options.plan, list(space), common)
    added = _add_settings(plan.common, options)
    check_folder(plan.out, "sweep")
    search = Search(plan, space, options.search, options.search_seed, options.metric, options.prune)
    known = search.recall()
    check_run_folders(plan)
    if not options.table:
        lowest = {
            key: str(domain.low if hasattr(domain, "low") else domain.choices[0]) for key, domain in space.items()
        }
        _check_runs(plan, [Planned("first", lowest)], added)
        _claim_folder(plan)
        todo = max(0, options.trials - known)
        print(f"{options.trials} trials in {options.out}, {todo} of them still to do", flush=True)
        search.run(options.trials, *_launch_options(options), _Progress(plan, todo, options.metric))
    _choose(plan, options)


def _add_settings(common, options):
    """Add the settings that follow from the sweep's options to those of all runs; those that the user gave stay.

    Returns the names of those that were added.
    """
    wanted = {}
    if options.metric is None or options.metric.startswith(HELD_OUT):
        wanted["holdout"] = "0.1"
    if (options.at_a_time or 1) > 1 and not options.emit_slurm:
        wanted["threads"] = str(max(1, cores_of_job() // ((options.ranks or 1) * options.at_a_time)))
    added = {key: word for key, word in wanted.items() if key not in common}
    common.update(added)
    return list(added)


def _check_runs(plan, runs, added):
    """Check the settings of all `Planned` runs before any work starts; `added`: what `_add_settings` returned."""
    if not runs:
        return
    from fedmpi.training.config import read_command_line  # imports torch, which --table and --help do not need

    notes = {}
    for run in runs:
        try:
            notes |= dict.fromkeys(read_command_line(plan.arguments(run)).notes)
        except UserError as error:
            ours = "holdout" in added and "holdout" not in run.varied and str(error).startswith("holdout =")
            advice = "; to choose by another metric: --holdout 0 --metric train_loss" if ours else ""
            raise UserError(f"run {run.name}: {error}{advice}") from None
    for note in notes:
        log.warning(note)


def _claim_folder(plan):
    """Write the common settings into the sweep's folder, and check that the runs in it have the same.

    Settings of speed and place may differ.
    """
    note = plan.out / COMMON
    settings = _of_all_runs(plan.common)
    if check_regular(note) and not _is_note(note):
        raise UserError(f"{note}: fedmpi did not write it: move it, or choose another --out; nothing changed")
    with attempt("write", f"--out {plan.out}"):
        has_mark = check_folder(plan.out, "sweep")
        before = _of_all_runs(_read_note(note)) if note.is_file() else settings
        if before != settings and (not has_mark or any(map(is_run, plan.out.iterdir()))):
            keys = [key for key in {**before, **settings} if before.get(key) != settings.get(key)]
            changes = ", ".join(f"{key} was {before.get(key, 'not set')}" for key in keys)
            raise UserError(f"{plan.out}: contains runs with other settings ({changes}); choose another --out")
        own_sweep_folder(plan.out)
        if before != settings or not note.is_file():
            with replacing(note, NOTE.encode()) as part:
                part.write_text(NOTE + yaml.safe_dump(settings), encoding="utf-8")


def _read_note(path):
    """The common settings in a sweep's folder."""
    settings = read_file(path)
    if not all(isinstance(word, str) for pair in settings.items() for word in pair):
        raise UserError(f"{path}: expected what a sweep wrote there, a text for each setting; choose another --out")
    return settings


def _is_note(path):
    """Whether a file is what a sweep writes."""
    try:
        check_regular(path)
        return NOTE + yaml.safe_dump(_read_note(path)) == path.read_text(encoding="utf-8")
    except (UserError, OSError, ValueError):
        return False


def _of_all_runs(settings):
    """The settings that the runs of one sweep must share."""
    return {key: text for key, text in settings.items() if RunSettings.role(key) not in ("speed", "place")}


class _Progress:
    """A line for every run that ends."""

    def __init__(self, plan, number, metric):
        self._plan, self._number, self._metric, self._ended = plan, number, metric, 0

    def __call__(self, run, code, seconds, last, cpu_seconds=None):
        self._ended += 1
        folder = self._plan.folder(run)
        how = "pruned" if code == "pruned" else f"failed, exit code {code}: {last}"
        if outcome(folder) == "complete":
            record = read_run(folder)
            how = _result(record, self._metric)
        elif outcome(folder) == "diverged":
            how = "diverged"
        print(f"[{self._ended}/{self._number}] {run.name}: {how} ({format_seconds(seconds)})", flush=True)


def _result(record, metric):
    """A complete run's value of the metric, as text; it may not have measured it."""
    if metric is None and not any(name.startswith(HELD_OUT) for name in record.metrics):
        return "no held-out data"
    metric = metric or usual_metric([record])
    value = record.final(metric)
    return f"{metric} was not measured" if value is None else f"{metric} {value:.4f}"


def _choose(plan, options):
    """Print and write which settings are the best."""
    ended = ended_runs(plan)
    if not ended:
        raise UserError(f"{options.out}: no run is complete; the .log files there contain what the runs printed")
    metric = options.metric or usual_metric(ended.values())
    candidates = rank(plan, metric, ended)
    if candidates[0].spread is None:
        names = dict.fromkeys(name for run in ended.values() for name in run.metrics if may_choose(name))
        raise UserError(f"--metric {metric}: no run measured it: expected one of {', '.join(names)}")
    if not math.isfinite(candidates[0].spread.mean):
        raise UserError(
            f"--metric {metric}: it is not a finite number in any configuration: check the data that it is "
            "measured on, or choose with another --metric"
        )
    print(candidate_table(candidates, metric).text())
    with attempt("write", options.out):
        write_candidates(plan.out / TABLE, candidates, metric)
        files = {BEST: candidates[0]}
        by_algorithm = best_of_each_algorithm(candidates)
        if len(by_algorithm) > 1:
            files |= {f"best-{name}.yaml": candidate for name, candidate in by_algorithm.items()}
        for name, candidate in files.items():
            write_best(plan.out / name, candidate, metric)
    print(f"best: {candidates[0].label}")
    print(f"to train with it on all data: python -m fedmpi.train --config {options.out / BEST}")


def _numbers(plan, runs):
    """The numbers of some runs of a plan."""
    return [number for number, run in enumerate(plan.runs) if run in runs]


def _print_words(plan, number):
    """Print the arguments of a run, one a line; nothing if the run has ended."""
    if not 0 <= number < len(plan.runs):
        raise UserError(f"--words {number}: expected the number of a run, 0 to {len(plan.runs) - 1}")
    run = plan.runs[number]
    if outcome(plan.folder(run)) in ("missing", "broken"):
        print(*plan.arguments(run), sep="\n")


def _emit(options, plan, todo, common):
    """Write a job array for the runs that have not ended; `common` are the user's arguments for all runs."""
    if not todo:
        raise UserError("every run has ended: nothing to submit; --table shows the results")
    words = [f"--out={plan.out}", *(f"--grid={axis}" for axis in options.grid)]
    words += [f"--plan={options.plan.absolute()}"] if options.plan else []
    words += [f"--metric={options.metric}"] if options.metric else []
    template = options.template or TEMPLATE
    try:
        text = template.read_text(encoding="utf-8")
        text = job_array(text, [*words, *common], _numbers(plan, todo), options.ranks, options.at_a_time)
        with replacing(options.emit_slurm, SIGNATURE) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror} (--template names a job script)") from None
    except ValueError:
        raise UserError(f"--template {template}: contains something else than text") from None
    print(f"submit: sbatch {options.emit_slurm}; afterwards the same command with --table shows the best")


if __name__ == "__main__":
    main()
