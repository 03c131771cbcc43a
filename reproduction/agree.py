"""Whether other results agree with the committed ones: ``--compare FOLDER``, and ``--check`` in five minutes."""

import dataclasses
import math
import pathlib
import tempfile

import numpy as np

from fedmpi.bench.rates import means
from fedmpi.errors import UserError
from fedmpi.runs.record import title
from fedmpi.text import table
from reproduction import orders
from reproduction.claims import T, num_diverged, outcomes, spread
from reproduction.experiment import SCALES, find_experiments
from reproduction.results import read_results
from reproduction.strength import graded

CHECKED = ("fafed_theorem1", "auc_figure1")  # run in seconds, without data files
ORDERS = "mom_tables1_2"
SHORT = 256  # rounds of the orders that are measured again
EXACT = 1e-4  # how far values of the same seeds may be apart, as a share: rounding on another processor


def compare(experiments, committed, other, is_again=False):
    """Rows of a table: where, what, the committed value, the other one, whether they agree.

    Args:
        committed, other: folders of results. is_again: the same seeds, so that values agree up to rounding; else each
            mean lies in the 95 % range in which the committed ones expect it.

    Raises:
        UserError: if they have no experiment in common.
    """
    rows = []
    for one in experiments:
        for scale in SCALES if one.scales else ():
            both = [read_results(folder, one, scale) for folder in (committed, other)]
            if all(both):
                found = [*_values(one, *both, is_again), *_states(one, scale, *both)]
                rows += [(f"{one.name}, {scale}", *row) for row in found]
        if one.orders:
            rows += [(one.name, *row) for row in _orders(one, committed, other)]
    if not rows:
        raise UserError(f"--compare {other}: has no results that {committed} has, too: give the --results of a rerun")
    return rows


def _values(experiment, committed, other, is_again):
    for panel, methods in committed.panels.items():
        for method in methods:
            its = other.method(panel, method.label)
            if its is None:
                continue
            what, here, there = f"{panel}, {method.label}", *(spread(some, experiment.metric) for some in (method, its))
            if here is None or there is None:
                both = [f"{num_diverged(some)} of {len(some.runs)} diverged" for some in (method, its)]
                yield what, *both, (here is None) == (there is None)
                continue
            yield f"{what}: {title(experiment.metric)}", str(here), str(there), _is_near(here, there, is_again)


def _is_near(here, there, is_again):
    """Whether a mean lies in the 95 % range of another one, of which `here` is the sample."""
    if is_again or here.deviation is None:
        return math.isclose(here.mean, there.mean, rel_tol=EXACT, abs_tol=1e-9)
    n, m = len(here.values), len(there.values)
    half = T[min(n - 1, len(T)) - 1] * here.deviation * math.sqrt(1 / n + 1 / m)
    return abs(here.mean - there.mean) <= half + EXACT * abs(here.mean)


def _states(experiment, scale, *both):
    graded_both = [graded(experiment, list(outcomes(experiment, its)), scale, its) for its in both]
    for one, other in zip(*graded_both):
        if other.words.endswith("not run") and not other.seeds:
            continue
        yield f"{one.panel}: claim {one.key}", one.state, other.state, one.state == other.state


def _orders(experiment, committed, other):
    both = [orders.read(folder, experiment)[0] for folder in (committed, other)]
    found = {(one.line.method, one.line.grows): one for one in both[1]}
    for one in both[0]:
        its = found.get((one.line.method, one.line.grows))
        if its:
            yield (
                f"{one.line.method} against {one.line.grows}",
                str(one.of_half),
                str(its.of_half),
                one.says == its.says,
            )


def check(results, reproduce):
    """Rows as of `compare`, of runs made again with the same seeds: two problems, and short runs of the orders.

    Args:
        results: folder of the committed results. reproduce: `reproduce(experiment, folder)` makes the runs.
    """
    again = find_experiments(CHECKED)
    with tempfile.TemporaryDirectory() as folder:
        for one in again:
            reproduce(one, pathlib.Path(folder))
        rows = compare(again, results, pathlib.Path(folder), is_again=True)
    for one in find_experiments([ORDERS]):
        known = {(its.line.method, its.line.grows): its for its in orders.read(results, one)[0]}
        for line in (line for line in orders.chosen_lines(one.orders) if line.grows == "R"):
            for number, size in enumerate(size for size in line.sizes if size <= SHORT):
                found = means(dataclasses.replace(line.trial(size), seeds=orders.SEEDS).run())["half"][0]
                here = known[line.method, "R"].values["half"][number]
                agrees = np.allclose(found, here, rtol=EXACT)
                what = f"{line.method}: mean square gradient norm, R = {size}"
                rows.append((one.name, what, f"{here.mean():.6g}", f"{found.mean():.6g}", bool(agrees)))
    return rows


def report(rows):
    """The rows as text, disagreements marked, and a last line with PASS or FAIL; and whether all agree."""
    bad = sum(not agrees for *_, agrees in rows)
    shown = [[*map(str, row[:4]), "" if row[4] else "DIFFERS"] for row in rows]
    last = f"PASS: {len(rows)} values and outcomes agree" if not bad else f"FAIL: {bad} of {len(rows)} do not agree"
    return f"{table([['where', 'what', 'committed', 'here', ''], *shown], indent='')}\n{last}", not bad
