"""Figures and tables of runs: ``python -m fedmpi report runs/fafed-digits-001 runs/fedavg-digits-001``."""

import argparse
import itertools
import pathlib
import re
import sys

from tqdm import tqdm

from fedmpi.cli.comparison import problems
from fedmpi.cli.report.curves import Target, metrics_of, shown_metrics
from fedmpi.cli.report.further import further_parts
from fedmpi.cli.report.style import Look, add_options, look_of
from fedmpi.cli.report.tables import (
    cases_table,
    client_table,
    final_table,
    run_table,
    silo_table,
    target_table,
    write_curves,
    write_finals,
)
from fedmpi.comm.job.parser import Parser
from fedmpi.comm.job.single import run_single
from fedmpi.ground.errors import UserError, cannot
from fedmpi.ground.files.own_files import check_folder, check_regular, check_replaceable, make_folder, replacing
from fedmpi.ground.text import Log, as_markdown
from fedmpi.runs.folder import find_runs, is_run, run_folders

log = Log("fedmpi.cli.report")

DESCRIPTION = """\
Plot loss and metrics of runs against communication rounds, bytes, gradient evaluations and wall time.

Writes one self-contained HTML page and, into a folder of the same name, the curves and final values
as CSV, the tables in Markdown and, with --format, each figure. Runs that differ only in their seed
are drawn as one line with a band; of runs that differ in nothing, one counts."""

SIGNATURE = b'<meta name="generator" content="fedmpi report">'  # of the page, near its begin
LONGEST_PREFIX = 48  # most characters of a problem's label, and of a heading, in the names of figures


def main(arguments=None):
    """Entry point; `arguments` default to those of the process."""
    run_single(_run, sys.argv[1:] if arguments is None else arguments)


def _run(arguments):
    options = make_parser().parse_args(arguments)
    targets, look = [Target.parse(text) for text in options.target], look_of(options)
    if options.watch is None or options.out:
        options.out = options.out or pathlib.Path("report.html")
        _check_out(options.out)
    if options.watch is not None:
        from fedmpi.cli.report.live import watch

        watch(options.runs, options.watch, lambda refresh: options.out and _page(options, targets, look, refresh))
        return
    runs, complaints = find_runs(options.runs)
    if not runs:
        raise UserError("; ".join(complaints))
    _check_metrics(runs, "--target", [target.metric for target in targets])
    scaled = look.style.scale if options.scale else ()
    _check_metrics(runs, "--metric", [*look.metrics, *scaled])
    for line in complaints:
        log.warning(f"left out: {line}")
    comparison = [problem.renamed(look.labels) for problem in problems(runs)]
    write(options.out, comparison, complaints, targets, look)
    print(*(f"{heading}\n{table.text()}\n" for heading, table in _tables(comparison, targets)), sep="\n")
    print(f"{options.out}; figures and tables in {_folder(options.out)}")


def make_parser():
    """The parser of the program's options."""
    parser = Parser(prog="fedmpi report", description=DESCRIPTION)
    text = "run folders, or folders that contain run folders"
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN", help=text)
    parser.add_argument("--out", type=pathlib.Path, help="the page to write; default: report.html")
    text = "also show what each method needed to reach this value, like accuracy=0.85; may be repeated"
    parser.add_argument("--target", action="append", default=[], metavar="METRIC=VALUE", help=text)
    add_options(parser)
    text = "follow running jobs until they end; read their folders every SECONDS (default: 2); with --out, also update "
    parser.add_argument("--watch", nargs="?", type=_seconds, const=2.0, metavar="SECONDS", help=f"{text}the page")
    return parser


def _seconds(text):
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: expected seconds from 0.1 to 3600")
    return value


def _check_out(out):
    """Check that the page and the folder beside it are free, or that a report made them."""
    if not out.name:
        raise UserError(f"--out {out}: expected the name of a page, like report.html")
    check_regular(out)
    check_replaceable(out, SIGNATURE)
    check_folder(_folder(out), "report")


def _check_metrics(runs, option, metrics):
    """Check that some run measured each of the metrics that an option names."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    for metric in metrics:
        if metric not in names:
            raise UserError(f"{option} {metric}: no run measured it: expected one of {', '.join(names)}")


def _page(options, targets, look, refresh):
    """Write the page of jobs that may still be running, as soon as one has recorded a round."""
    runs, complaints = find_runs(options.runs)
    if runs:
        comparison = [problem.renamed(look.labels) for problem in problems(runs)]
        write(options.out, comparison, complaints, targets, look, refresh)


def write(out, comparison, complaints, targets, look=None, refresh=None):
    """Write the page and, unless browsers reload it, the files beside it.

    Args:
        out: path of the page. comparison: list of `Problem`.
        complaints: lines that say what was left out. targets: list of `Target`. look: a `Look`.
        refresh: seconds after which a browser reloads the page, or None.

    Raises:
        UserError: if something cannot be written, or matplotlib is missing.
    """
    from fedmpi.cli.report.figures import as_svg, color
    from fedmpi.cli.report.page import page, section

    look = look or Look()
    figures = [_figures(problem, targets, look) for problem in comparison]
    further = [list(further_parts(problem, look.style)) for problem in comparison]
    sections = []
    for problem, drawn, parts in zip(comparison, figures, further):
        colors = [color(number) for number in range(len(problem.methods))]
        costs = [(target.in_words(problem.title), target_table(problem, target)) for target in targets]
        svgs = {
            axis: [(metric, as_svg(figure)) for (its_axis, metric), figure in drawn.items() if its_axis == axis]
            for axis in look.axes
        }
        more = [(heading, tables, as_svg(figure)) for heading, tables, figure in parts]
        text = section(problem, colors, final_table(problem), costs, run_table(problem), svgs, more)
        sections.append((problem.label, text))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out, SIGNATURE) as part:  # so that a browser never loads half a page
            part.write_text(page(sections, complaints, refresh), encoding="utf-8")
        if refresh is None:
            if not check_folder(_folder(out), "report"):
                make_folder(_folder(out), "report")
            _write_figures(_folder(out), comparison, figures, further, look)
            _write_tables(_folder(out), comparison, targets)
    except OSError as error:
        raise cannot("write", error.filename or out, error) from None


def _figures(problem, targets, look):
    """(axis, metric) -> figure, of every metric that was measured."""
    from fedmpi.cli.report.figures import draw

    figures = {}
    metrics = [name for name in metrics_of(problem.methods) if name in look.metrics] or shown_metrics(problem.methods)
    for axis, metric in tqdm([*itertools.product(look.axes, metrics)], "figures", leave=False, disable=None):
        target = next((target for target in targets if target.metric == metric), None)
        figures[axis, metric] = draw(problem.methods, axis, metric, target, look.style, problem.titles.get(metric))
    return {key: figure for key, figure in figures.items() if figure is not None}


def _write_figures(folder, comparison, figures, further, look):
    """Every figure in a file of its own, in each of the formats."""
    from fedmpi.cli.report.figures import save

    for prefix, drawn, parts in zip(_prefixes(comparison), figures, further):
        named = {f"{_plain(metric)}-{axis}": figure for (axis, metric), figure in drawn.items()}
        for heading, _, figure in parts:
            named[_free(_plain(_plain(heading.lower())[:LONGEST_PREFIX]), named)] = figure
        for (name, figure), ending in itertools.product(named.items(), look.formats):
            save(figure, folder / f"{prefix}{name}.{ending}", look.style)


def _write_tables(folder, comparison, targets):
    """Curves and final values as CSV, tables in Markdown."""
    write_curves(folder / "curves.csv", comparison)
    write_finals(folder / "finals.csv", comparison)
    parts = [f"## {as_markdown(heading)}\n\n{table.markdown()}" for heading, table in _tables(comparison, targets)]
    with replacing(folder / "tables.md", b"\n\n| method |") as part:
        part.write_text("\n".join(parts), encoding="utf-8")


def _folder(out):
    """The folder for figures and tables: it has the page's name, unless a folder of that name contains runs."""
    folder = out.with_suffix("")
    contains_runs = any(is_run(inner) for inner in run_folders(folder))
    return folder if out.suffix and not contains_runs else folder.with_name(f"{folder.name}-files")


def _prefixes(comparison):
    """What the file names of each problem's figures begin with: its label, shortened, and numbered if two are equal."""
    if len(comparison) == 1:
        return [""]
    prefixes = []
    for problem in comparison:
        prefixes.append(_free(_plain(_plain(problem.label)[:LONGEST_PREFIX]), prefixes))
    return [f"{prefix}-" for prefix in prefixes]


def _free(name, taken):
    """A name, numbered if it is taken."""
    tries = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(name for name in tries if name not in taken)


def _plain(label):
    """A label as part of a file name."""
    return re.sub(r"[^\w.+-]+", "-", label).strip("-")


def _tables(comparison, targets):
    """(heading, table) of all problems."""
    for problem in comparison:
        yield problem.label, final_table(problem)
        if (clients := silo_table(problem)) is not None:
            yield f"{problem.label}, clients", clients
        if (each := client_table(problem)) is not None:
            yield f"{problem.label}, client by client", each
        if (cases := cases_table(problem)) is not None:
            yield f"{problem.label}, test cases", cases
        for target in targets:
            yield f"{problem.label}, until {target.in_words(problem.title)}", target_table(problem, target)


if __name__ == "__main__":
    main()
