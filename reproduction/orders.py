"""The papers' tables of proved rates, measured: how gradient norms fall while the budget of a theorem's run grows.

A table of rates has nothing to train, but its orders can be measured on a problem whose constants are known: the lines
are those of ``python -m fedmpi bench rates``, with its rule, which is fixed before the runs. One CSV file in
``results/orders`` for each table, from which its page, its figure and its verdicts are made.
"""

import dataclasses
import datetime
import time

import numpy as np

from fedmpi import algorithms
from fedmpi.cli.bench.parts.rates import MOMENTUM, Line, draw, lines, momentum
from fedmpi.cli.bench.rates import Trial, means, slope, verdict
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import replacing
from fedmpi.ground.text import as_markdown, format_seconds
from fedmpi.tasks.saddle_toys import Saddle
from fedmpi.tasks.toys import Slow
from reproduction.claims import CONFIRMED, CONTRADICTED, UNDECIDED, Outcome
from reproduction.csv_files import damaged, read_rows, write_tables
from reproduction.page import last_changed, plain_table, prose
from reproduction.running import code_version

SEEDS = tuple(range(6))
COLUMNS = ("method", "grows", "size", "seed", "all", "half", "proved", "from", "cpu_seconds", "commit", "date")
STATES = {"agrees": CONFIRMED, "not readable": UNDECIDED, "contradicted": CONTRADICTED}
SIGNATURE = b"# Orders: "
LOCAL, STEP = 4, 8.0  # of the baselines: local steps, and step size times the root of all of them
TEXT = """\
{place} of the paper: orders that were proved, and no runs. Here each method runs with its theorem's settings up to
fixed factors on a problem whose constants are known (`python -m fedmpi bench rates`; docs/theory.md describes both),
the budget grows, and the exponent of the mean square gradient norm is compared with the proved one. The theorems bound
the mean over *all rounds*; the verdict rests on that over the *last half* of them, which no theorem bounds, because the
start is a large part of runs that one can make. The intervals are two deviations by leaving out one of {seeds} seeds.

An order is an upper bound. One rule for all rows: the exponent **agrees** if the one over the last half is at most 1/12
above the proved one (half of the distance between -1/2 and -2/3) and one of the two is at most 1/6 below it; it is
**contradicted** if that over the last half is above by more than 1/12 and its interval; otherwise it is **not
readable**. One problem can contradict an order; a method that agrees does so on this problem.
"""
CONTROL = """\
## Control: orders that are wrong

The same rule, on the same problem, has to fail an order that was not proved for a method: it may not say *agrees*.
"""


def baseline(method, R, is_noisy=False):
    """A `Trial` of FedAvg, or of Local SGDA on the problem `saddle`, with step sizes ~ 1/√T, as their proofs have.

    Args:
        is_noisy: FedAvg on the problem of the methods with momentum, on which the noise decides, and with FedAvg-M's
            steps: its γ is ~ 1/√R, and a round of FedAvg moves by as much.
    """
    if is_noisy:
        trial = momentum("fedavg_m", R)
        step = trial.algorithm.server_step_size / trial.local_steps
        return dataclasses.replace(trial, algorithm=algorithms.FedAvg(step_size=step))
    step = STEP / (LOCAL * R) ** 0.5
    if method == "fedavg":
        return Trial(Slow().problem(4), algorithms.FedAvg(step_size=step), R, LOCAL, 4)
    return Trial(Saddle().problem(4), algorithms.LocalSGDA(step_size=step, dual_step_size=step), R, LOCAL, 4)


def chosen_lines(names):
    """The `Line`s of a table of rates.

    Args:
        names: of methods; R grows as far as in `rates --quick`, N as in `rates` for FAFED and STEM. A baseline runs on
            the problem of the others.

    Raises:
        UserError: if a method has none.
    """
    known = lines(quick=True)
    known += [one for one in lines(quick=False) if one.method in ("fafed", "stem") and one.grows == "N"]
    is_noisy = not {*MOMENTUM}.isdisjoint(names)
    for method in ("fedavg", "local_sgda"):
        sizes, source = (64, 256, 1024, 4096), "FedAvg-M's γ ~ 1/√R" if is_noisy else "step size ~ 1/√T"
        known.append(Line(method, "R", sizes, lambda R, method=method: baseline(method, R, is_noisy), -0.5, source))
    for name in names:
        if name not in [one.method for one in known]:
            raise UserError(f"orders: {name}: expected some of {', '.join(dict.fromkeys(o.method for o in known))}")
    return [one for one in known if one.method in names]


def file_of(folder, experiment):
    """The CSV file of a table of rates; its page and figure have the same name."""
    return folder / "orders" / f"{experiment.name}.csv"


def measure(folder, experiment):
    """Run all lines of a table, and write its CSV file; returns its path.

    Raises:
        UserError: if it cannot be written, or the table names an unknown method.
    """
    path, rows = file_of(folder, experiment), []
    for line in chosen_lines(experiment.orders):
        for size in line.sizes:
            began = time.process_time()
            found = means(dataclasses.replace(line.trial(size), seeds=SEEDS).run())
            spent = round(time.process_time() - began, 2)
            print(f"{line.method}: {line.grows} = {size} ({spent:.1f} s)", flush=True)
            known = {"method": line.method, "grows": line.grows, "size": size, "proved": f"{line.proved:.7g}"}
            known |= {"from": line.source, "commit": code_version(), "date": datetime.date.today().isoformat()}
            for number, seed in enumerate(SEEDS):
                values = {name: f"{one[0, number]:.7g}" for name, one in found.items()}
                rows.append(known | values | {"seed": seed, "cpu_seconds": "" if number else spent})
    write_tables((path, COLUMNS, rows))
    return path


@dataclasses.dataclass(frozen=True)
class Measured:
    """One slope of a table: a `Line` without its trial, values name -> [sizes, seeds], two `Slope`s, the verdict."""

    line: object
    values: dict
    of_all: object
    of_half: object
    says: str


def read(folder, experiment):
    """The `Measured` of a table, and the rows of its file; ([], []) if it was not run.

    Raises:
        UserError: if the file is damaged.
    """
    path = file_of(folder, experiment)
    rows, found = read_rows(path, COLUMNS), []
    for key in dict.fromkeys((row["method"], row["grows"]) for row in rows):
        its = [row for row in rows if (row["method"], row["grows"]) == key]
        sizes = tuple(dict.fromkeys(row["size"] for row in its))
        last = rows.index(its[-1]) + 1
        if len(its) % len(sizes) or len(sizes) < 2:
            raise damaged(path, last, "not all sizes have as many seeds")
        try:
            both = [np.array([float(row[name]) for row in its]).reshape(len(sizes), -1) for name in ("all", "half")]
            line = Line(*key, tuple(map(int, sizes)), None, float(its[0]["proved"]), its[0]["from"])
        except ValueError as error:
            raise damaged(path, last, str(error)) from None
        values = dict(zip(("all", "half"), both))
        slopes = [slope(line.sizes, values[name]) for name in ("all", "half")]
        found.append(Measured(line, values, *slopes, verdict(line.proved, *slopes)))
    return found, rows


def outcomes(folder, experiment):
    """An `Outcome` for each slope of the methods that the claim `orders` is about; [] if nothing was measured."""
    measured, rows = read(folder, experiment)
    seeds = len({row["seed"] for row in rows})
    for one in (one for one in measured if one.line.method not in experiment.beside):
        words = f"{one.line.method}: exponent against {one.line.grows} {one.of_half} (last half), {one.of_all} (all "
        words += f"rounds), proved {one.line.proved:.2f}: {one.says}"
        yield Outcome("orders", f"{one.line.method} against {one.line.grows}", STATES[one.says], words, seeds)


def controls(folder, experiment):
    """The `Measured` of the table's controls: slopes of a method, and what the rule says of an order it does not have.

    Those over R alone: the orders that the tables have.
    """
    return [
        dataclasses.replace(
            one,
            line=dataclasses.replace(one.line, proved=experiment.controls[one.line.method]),
            says=verdict(experiment.controls[one.line.method], one.of_all, one.of_half),
        )
        for one in read(folder, experiment)[0]
        if one.line.method in experiment.controls and one.line.grows == "R"
    ]


def write_page(folder, experiment):
    """Write the page and the figure of a table from its CSV file; returns the page's path.

    Raises:
        UserError: if matplotlib is missing.
        OSError: if a file cannot be written.
    """
    measured, _ = read(folder, experiment)
    path = file_of(folder, experiment).with_suffix(".md")
    draw({one.line: np.sqrt(one.values["half"].mean(1)) for one in measured}, path.with_suffix(".svg"))
    with replacing(path, SIGNATURE) as part:
        part.write_text(page(folder, experiment), encoding="utf-8")
    return path


def page(folder, experiment):
    """The text of the page."""
    measured, rows = read(folder, experiment)
    table = [
        [
            f"`{one.line.method}`",
            one.line.grows,
            ", ".join(map(str, one.line.sizes)),
            one.line.source,
            f"{one.line.proved:.2f}",
            str(one.of_all),
            str(one.of_half),
            f"**{one.says}**",
        ]
        for one in measured
    ]
    header = ["method", "grows", "sizes", "from", "proved", "all rounds (bounded)", "last half (judged)", "verdict"]
    seeds, name = len({row["seed"] for row in rows}), file_of(folder, experiment).name
    spent = format_seconds(sum(float(row["cpu_seconds"] or 0) for row in rows))
    commits, dates = (", ".join(dict.fromkeys(row[name] for row in rows)) for name in ("commit", "date"))
    made = f"`python -m reproduction {experiment.name}`, {spent} of CPU time, commit {commits}, "
    made += f"{dates}. Every number is from [{name}]({name})."
    made += " A commit with + had changes that were not committed." if any("+" in row["commit"] for row in rows) else ""
    changed = last_changed(experiment, [row["date"] for row in rows])
    figure = f"![Gradient norms against rounds, with the proved orders as lines]({name.removesuffix('csv')}svg)"
    wrong = [
        [f"`{one.line.method}`", f"{one.line.proved:.2f}", str(one.of_all), str(one.of_half), f"**{one.says}**"]
        for one in controls(folder, experiment)
    ]
    head = ["method", "wrong order", *header[-3:]]
    control = [CONTROL, plain_table(head, wrong)] if wrong else []
    lacking = [f"Not measured here: {prose(experiment.unmeasured)}", ""] if experiment.unmeasured else []
    return (
        "\n".join(
            [
                f"{SIGNATURE.decode()}{as_markdown(experiment.title)}",
                "",
                TEXT.format(place=as_markdown(experiment.place), seeds=seeds),
                plain_table(header, table),
                figure,
                "",
                "Points are root mean squares over the last half, lines the proved orders.",
                "",
                *control,
                *lacking,
                "## How it was made",
                "",
                made,
                *(["", f"Last changed (UTC): {changed}."] if changed else []),
            ]
        )
        + "\n"
    )
