"""Whether other results agree with the committed ones: ``--compare FOLDER``, and ``--check`` in two minutes."""

import dataclasses
import math
import pathlib
import tempfile

import numpy as np

from fedmpi.cli.bench.rates import means
from fedmpi.cli.comparison import Spread
from fedmpi.ground.errors import UserError
from fedmpi.ground.text import table
from fedmpi.runs.record import title
from reproduction import digits, manifest, orders
from reproduction.claims import late, num_diverged, outcomes, quantile
from reproduction.experiment import SCALES, find_experiments
from reproduction.results import read_results
from reproduction.strength import graded

CHECKED = ("fafed_theorem1", "auc_figure1")  # run in seconds, without data files
ORDERS = "mom_tables1_2"
SHORT = 256  # rounds of the orders that are measured again
NOT_MEASURED = "not measured"
LONG = 100  # rows: of a longer table only those that differ are printed
ROUNDING = 1e-7  # the same in float64
EXACT = 1e-4  # how far values of the same seeds may be apart, as a share: rounding on another processor


def compare(experiments, committed, other, is_again=False):
    """Rows of a table: where, what, the committed value, the other one, whether they agree.

    Values are means over the last tenth of the rounds, as in the verdicts, of each metric that the experiment's table,
    figure or claims show; of the committed ones those with the rerun's seeds alone, if they have all of these.

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
                both[0] = both[0].of_seeds_in(both[1])
                found = [*_values(one, *both, is_again), *_states(one, scale, *both)]
                rows += [(f"{one.name}, {scale}", *row) for row in found]
        if one.orders:
            rows += [(one.name, *row) for row in _orders(one, committed, other)]
    if not rows:
        raise UserError(f"--compare {other}: has no results that {committed} has, too: give the --results of a rerun")
    return rows


def _values(experiment, committed, other, is_again):
    metrics = [*experiment.metrics, experiment.printed.get("metric")]
    metrics += [claim.get("metric") for claim in experiment.claims]
    metrics = list(filter(None, dict.fromkeys(metrics)))
    for panel, methods in committed.panels.items():
        for method in methods:
            its = other.method(panel, method.label)
            if its is None:
                continue
            what, both = f"{panel}, {method.label}", (method, its)
            all_diverged = [num_diverged(some) == len(some.runs) for some in both]
            if any(all_diverged):
                yield what, *(f"{num_diverged(some)} of {len(some.runs)} diverged" for some in both), all(all_diverged)
                continue
            for metric in metrics:
                here, there = (_late(some, metric) for some in both)
                if here or there:
                    agrees = bool(here and there) and _is_near(here, there, is_again)
                    yield f"{what}: {title(metric)}", str(here or NOT_MEASURED), str(there or NOT_MEASURED), agrees


def _late(method, metric):
    """`Spread` over the complete runs of the means that verdicts compare, or None if there are none."""
    values = [late(run, metric) for run in method.runs if run.is_complete]
    values = tuple(one for one in values if one is not None and math.isfinite(one))
    return Spread(values) if values else None


def _is_near(here, there, is_again):
    """Whether a mean lies in the 95 % range of another one, of which `here` is the sample."""
    if is_again or here.deviation is None:
        return math.isclose(here.mean, there.mean, rel_tol=EXACT, abs_tol=1e-9)
    n, m = len(here.values), len(there.values)
    half = quantile(n - 1) * here.deviation * math.sqrt(1 / n + 1 / m)
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
    """Rows as of `compare`: the manifest, and runs made again with the same seeds: two problems, short runs of the
    orders, and every method on the digits.

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
    rows += [row for paper, methods in digits.METHODS.items() for row in on_digits(results, paper, methods)]
    return of_manifest(results) + rows


def of_manifest(results):
    """Rows as of `compare`, of the files that are not as the manifest says; one row if all are."""
    files = manifest.differences(results)
    found = [("manifest", name, listed[:12] or "none", there[:12] or "none", False) for name, listed, there in files]
    number = len(manifest.entries(results))
    return found or [("manifest", "files of numbers with their hashes", str(number), str(number), True)]


def on_digits(results, paper, methods):
    """Rows as of `compare`, of some methods of a paper on the embedded digits."""
    return [
        (f"digits, {paper}", *pair, bool(np.isclose(float(pair[1]), float(pair[2]), rtol=ROUNDING, atol=1e-9)))
        for method in methods
        for pair in digits.pairs(results, paper, method)
    ]


def report(rows):
    """The rows as text, disagreements marked, and a last line with PASS or FAIL; and whether all agree.

    Of more than `LONG` rows only those that differ are shown.
    """
    bad = sum(not agrees for *_, agrees in rows)
    shown = [[*map(str, row[:4]), "" if row[4] else "DIFFERS"] for row in rows if len(rows) <= LONG or not row[4]]
    last = f"PASS: {len(rows)} values and outcomes agree" if not bad else f"FAIL: {bad} of {len(rows)} do not agree"
    text = table([["where", "what", "committed", "here", ""], *shown], indent="") + "\n" if shown else ""
    return f"{text}{last}", not bad
