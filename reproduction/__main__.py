"""Repeat the papers' tables and figures: ``python -m reproduction fafed_theorem1``; ``--list`` shows all."""

import argparse
import os
import pathlib
import re
import shlex
import signal
import sys

from fedmpi.comm.job.parser import Parser, count
from fedmpi.comm.job.single import run_single
from fedmpi.ground.errors import Stopped, UserError
from fedmpi.ground.files.own_files import check_replaceable
from fedmpi.ground.text import format_seconds, table
from reproduction import orders
from reproduction.csv_files import signature as csv_signature
from reproduction.experiment import ENDINGS, HERE, SCALES, find_experiments
from reproduction.page import signature as page_signature
from reproduction.results import (
    FIRST_COLUMNS,
    RUN_COLUMNS,
    grid_path,
    left_to_make,
    other_seeds,
    paths,
    read_results,
    write_results,
)
from reproduction.running import ON_GPU, How, emit_slurm, facts, make, plan_runs
from reproduction.summary import PAGES, cost, state, write_summary
from reproduction.tuning import COLUMNS as GRID_COLUMNS

DESCRIPTION = """\
Repeat tables and figures of the papers: run every method with every seed, and write a page that shows the measured
numbers beside those of the paper.

    python -m reproduction --list
    python -m reproduction fafed_theorem1
    python -m reproduction all --data-dir data

WHAT is the name of a table or figure, a paper (fafed, lamb, mom, zo, auc), or all. The same command continues where
it was interrupted: it keeps runs that have ended, unless their settings have changed."""


def main(arguments=None):
    """Entry point; `arguments` default to those of the process."""
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):  # the first is SLURM's warning of the time limit
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores the last
            signal.signal(number, _stop)
    run_single(_run, sys.argv[1:] if arguments is None else arguments)


def _stop(number, _):
    signal.signal(number, signal.SIG_IGN)  # until the runs have stopped
    raise Stopped(f"stopped by {signal.Signals(number).name}; to continue: the same command")


def make_parser():
    """The parser of the program's options."""
    parser = Parser(prog="python -m reproduction", description=DESCRIPTION)
    add = parser.add_argument
    add("what", nargs="*", metavar="WHAT", help="table, figure or paper to repeat, or all; see --list")
    add("--list", action="store_true", help="list every table and figure with its data, methods, cost and state")
    add(
        "--scale",
        choices=SCALES,
        default="small",
        help="small (default): a reduced version; full: as in the paper; mlp: as full, but the attack is on an MLP",
    )
    add(
        "--seeds",
        type=_seeds,
        metavar="N,N",
        help="seeds of every method; default: those of the file, or 0,1,2",
    )
    words = "keep what --results has, if it was made with the settings of these runs, and make only the rest"
    add("--add", action="store_true", help=words)
    add("--tune", action="store_true", help="search the best settings of every method on held-out training data")
    add("--pages", action="store_true", help="start no runs; only write the pages again, from the CSV files")
    words = "make short runs again, compare them with --results, and say PASS or FAIL (exit code 1); needs no data"
    add("--check", action="store_true", help=words)
    words = "compare the results of a rerun, in FOLDER, with those in --results: is each value within the 95 %% range?"
    add("--compare", type=pathlib.Path, metavar="FOLDER", help=words)
    add("--ranks", type=count, default=1, metavar="N", help="ranks of each run; default: 1")
    add("--at-a-time", type=count, metavar="N", help="how many runs to start at the same time; default: cores / ranks")
    add("--threads", type=count, default=1, metavar="N", help="CPU threads of each rank; default: 1")
    add("--launch", metavar="WORDS", help='command that starts the ranks, like "mpirun --oversubscribe -np {ranks}"')
    words = "how the runs compile their gradients, as in fedmpi.train; cuda_graph suits small models on a GPU"
    add("--compile", choices=("off", "default", "reduce-overhead", "cuda_graph"), help=words)
    add("--data-dir", metavar="FOLDER", help="folder of data files; default: the variable FEDMPI_DATA")
    words = "folder in which the run folders are created; default: reproduce"
    add("--out", type=pathlib.Path, default=pathlib.Path("reproduce"), metavar="FOLDER", help=words)
    words = "folder in which CSV files, pages and figures are written; default: results, beside the program"
    add("--results", type=pathlib.Path, default=HERE / "results", metavar="FOLDER", help=words)
    add(
        "--emit-slurm",
        type=pathlib.Path,
        metavar="FILE",
        help="write a job script (an array with one task per run) and start nothing",
    )
    return parser


def _seeds(text):
    if not all(word.isdecimal() for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"expected whole numbers with commas, like 0,1,2, not '{text}'")
    return list(dict.fromkeys(map(int, text.split(","))))


def _run(arguments):
    options = make_parser().parse_args(arguments)
    _check_together(options)
    if options.list:
        print(listing(options.what or ["all"], options.results, options.data_dir))
        return
    if options.check or options.compare:
        _agree(options, arguments)
        return
    if not options.what and not options.pages:
        raise UserError("expected the name of a table or figure (see --list), a paper, or all")
    experiments = find_experiments(options.what or ["all"])
    is_named = len(experiments) == 1
    if options.pages:
        _pages(experiments, options)
        return
    if options.data_dir and not pathlib.Path(options.data_dir).is_dir():
        raise UserError(f"--data-dir {options.data_dir}: no such folder")
    if options.emit_slurm and not is_named:
        raise UserError("--emit-slurm: expected one table or figure, because each has a job array of its own")
    reasons = {one.name: _reason_to_skip(one, options) for one in experiments}
    if is_named and (reason := reasons[experiments[0].name]):
        raise UserError(f"{experiments[0].name}: {reason}")
    if all(reasons.values()):
        raise UserError(f"nothing can be run: {next(iter(reasons))}: {next(iter(reasons.values()))}; see --list")
    _check_results(options.results, experiments, options.scale)
    how = _how(options, arguments)
    failed = []
    for one in experiments:
        reason = reasons[one.name]
        if reason:
            print(f"{one.name}: left out: {reason}", flush=True)
            continue
        try:
            _reproduce(one, options, how)
        except KeyboardInterrupt:
            print("to continue: the same command", file=sys.stderr)
            raise
        except UserError as error:
            if is_named:
                raise
            failed.append(f"{one.name}: {error}")
            print(failed[-1], file=sys.stderr, flush=True)
    if not options.emit_slurm:
        print(write_summary(options.results))
    if failed:
        raise UserError(f"{len(failed)} of {len(experiments)} failed; the first is {failed[0]}")


def _agree(options, arguments):
    """Print what agrees with the committed results, and end with exit code 1 if something does not."""
    from reproduction import agree

    def reproduce(one, folder):
        changed = {"results": folder, "out": folder / "runs", "scale": "small", "seeds": [0, 1, 2]}
        its = argparse.Namespace(**vars(options) | changed)
        _reproduce(one, its, _how(its, arguments))

    if options.check:
        its = facts()
        print(
            f"here: commit {its['commit']}, {its['processor']}, torch {its['torch']}, Python {its['python']}",
            flush=True,
        )
        rows = agree.check(options.results, reproduce)
    else:
        rows = agree.compare(find_experiments(options.what or ["all"]), options.results, options.compare)
    text, all_agree = agree.report(rows)
    print(text)
    if not all_agree:
        sys.exit(1)


def _reproduce(one, options, how):
    """Tune, or plan a job array, or make the runs and the page of an experiment."""
    if one.orders:
        print(orders.measure(options.results, one), flush=True)
        print(_write(orders.write_page, options.results, one), flush=True)
        return
    if options.tune:
        from reproduction.tuning import tune

        tune(one, options.scale, options.seeds, options.results, how, options.add)
        return
    scale = options.scale
    points, folder = one.points(scale), how.out / one.name / scale
    planning = plan_runs(one.first_run(scale), points, options.seeds or one.seeds or [0, 1, 2], folder, how)
    if options.add:
        num_planned = len(planning.plan.runs)
        planning = left_to_make(options.results, one, scale, planning)
        num_kept = num_planned - len(planning.plan.runs)
        print(f"{num_kept} of {num_planned} runs are kept as they are in {options.results}", flush=True)
    if options.emit_slurm:
        if not planning.plan.runs:
            raise UserError(f"--emit-slurm: --results {options.results} has all these runs: nothing is left to be run")
        emit_slurm(planning, how, options.emit_slurm)
        return
    if not options.add and (others := other_seeds(options.results, one, scale, planning)):
        print(
            f"{paths(options.results, one, scale)[1]} also has seeds {', '.join(others)}: its page will not show them, "
            "and the old files are kept as *.old; with --add the page shows all"
        )
    make(planning, how)
    lost = write_results(options.results, one, scale, planning, options.add)
    print(_write_page(options.results, one, scale), flush=True)
    if lost:
        write_summary(options.results)
        raise UserError(
            f"{lost[0]} did not end ({len(lost)} of {len(planning.plan.runs)} runs): the page has the others; "
            f"{planning.plan.out}/*.log say why, and the same command makes them again"
        )


def _check_together(options):
    """Raise UserError if an option is given that the others leave without a meaning."""
    given = [
        name for name in ("list", "check", "compare", "pages", "tune", "emit_slurm", "add") if getattr(options, name)
    ]
    allowed = given in (["emit_slurm", "add"], ["tune", "add"])
    if len(given) > 1 and not allowed:
        one, other = (f"--{name.replace('_', '-')}" for name in given[:2])
        raise UserError(f"{other}: has no meaning together with {one}: give one of them")


def _check_results(folder, experiments, scale):
    """Raise UserError if the folder of the results cannot be made or written, or has files of the user's own."""
    for name, signature in PAGES.items():
        check_replaceable(folder / name, signature)
    for one in experiments:
        check_replaceable(orders.file_of(folder, one), csv_signature(orders.COLUMNS))
        files = list(zip(paths(folder, one, scale), (RUN_COLUMNS, RUN_COLUMNS, FIRST_COLUMNS)))
        for path, columns in [*files, (grid_path(folder, one.name, scale), GRID_COLUMNS)]:
            check_replaceable(path, csv_signature(columns))
        check_replaceable(files[0][0].with_suffix(".md"), page_signature(scale))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--results {folder}: cannot be written: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--results {folder}: this user may not write there")


def _how(options, arguments):
    """The `How` of the options; `arguments` are recorded without folders of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    at_a_time = options.at_a_time or max(1, cores // (options.ranks * options.threads))
    places = ("--data-dir", "--out", "--results")
    pairs = zip(arguments, ["", *arguments])  # each word with the one before it
    shown = [word for word, before in pairs if not word.startswith(places) and before not in places]
    shown = [pathlib.Path(word).name if word.endswith(ENDINGS) else word for word in shown]
    command = shlex.join(["python", "-m", "reproduction", *shown])
    return How(
        options.ranks,
        at_a_time,
        options.threads,
        options.launch,
        options.compile,
        options.data_dir,
        options.out,
        command,
    )


def _reason_to_skip(one, options):
    """Why an experiment is not run with these options, or ""."""
    if one.orders:
        has_no = "no grids" if options.tune else "no runs for a job array" if options.emit_slurm else ""
        return f"a table of proved orders has {has_no}" if has_no else ""
    if not one.scales:
        return one.not_run
    if options.tune and not one.tuning(options.scale):
        return f"its file has no grids for --scale {options.scale}"
    if options.scale not in one.scales:
        return f"not run at scale {options.scale}: {one.not_run or 'its scales are ' + ', '.join(one.scales)}"
    missing = _missing(one, options.data_dir)
    files = ", ".join(f"{name}.h5" for name in missing)
    folder = _data_folder(options.data_dir)
    return (
        f"data not here: no {files} in folder {folder} (--data-dir; docs/data.md says how to get them)"
        if missing
        else ""
    )


def _data_folder(data_dir):
    return pathlib.Path(data_dir or os.environ.get("FEDMPI_DATA") or ".")


def _missing(one, data_dir):
    """Names of an experiment's data files that are not in the folder."""
    return [name for name in one.data if not (_data_folder(data_dir) / f"{name}.h5").is_file()]


def _pages(experiments, options):
    """Write the pages of all experiments that have results, and the summary."""
    found = [(one, scale) for one in experiments for scale in SCALES if read_results(options.results, one, scale)]
    tables = [one for one in experiments if one.orders and orders.file_of(options.results, one).is_file()]
    if not found and not tables:
        raise UserError(
            f"--results {options.results}: no results of {', '.join(options.what) or 'any experiment'} there"
        )
    for one, scale in found:
        print(_write_page(options.results, one, scale))
    for one in tables:
        print(_write(orders.write_page, options.results, one))
    print(write_summary(options.results))


def _write_page(results, one, scale):
    from reproduction.page import write_page  # needs matplotlib

    return _write(write_page, results, one, scale)


def _write(write, results, one, *scale):
    try:
        return write(results, one, *scale)
    except OSError as error:
        raise UserError(f"{error.filename or results / one.name}: cannot be written") from None


TIMES = """\
Times are those of one seed at full scale, on one CPU core and on one GPU. "about" is estimated: a hundredth of the CPU
time. In the five experiments that ran on an NVIDIA H200, several runs at once, it was a hundredth or less; networks
larger than theirs were not run on a GPU."""
CPU_TIMES = 100  # the smallest of the measured ratios of CPU time to GPU time


def listing(names, results, data_dir):
    """The text of --list for some names; see `find_experiments`."""
    rows = [["name", "CPU time", "GPU time", "state", "data", "what (methods)"]]
    for one in find_experiments(names):
        gpu = _gpu_time(results, one) if one.scales else "–"
        kinds = dict.fromkeys(name.split(", ")[0] for name in one.methods)  # "FedZO" of "FedZO, E = 3"
        methods = f" ({', '.join(kinds or one.orders)})" if kinds or one.orders else ""
        found = state(results, one, ", ".join(_missing(one, data_dir)))
        what = f"{one.place}: {one.title}{methods}"
        rows.append([one.name, cost(one), gpu, found, ", ".join(one.data) or "–", what])
    return f"{TIMES}\n{table(rows, indent='')}"


def _gpu_time(folder, one):
    """How long the runs of one seed at full scale took on a GPU, or "about" how long they would."""
    results = read_results(folder, one, "full")
    runs = [row for row in results.runs if row["processor"].startswith(ON_GPU)] if results else []
    if not runs:
        return f"about {format_seconds(3600 * one.cpu_hours / CPU_TIMES)}" if one.cpu_hours else "–"
    at_a_time = max([1, *(int(found) for row in runs for found in re.findall(r"--at-a-time (\d+)", row["made_by"]))])
    seconds = sum(float(row["wall_seconds"]) for row in runs) / len({row["seed"] for row in runs}) / at_a_time
    return f"{format_seconds(seconds)}, {at_a_time} runs at once"


if __name__ == "__main__":
    main()
