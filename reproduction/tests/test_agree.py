"""Whether a rerun agrees with the committed results."""

import csv
import shutil

import pytest
from helpers import ROOT

from fedmpi.cli.comparison import Spread
from fedmpi.ground.errors import UserError
from reproduction.agree import _is_near, compare, report
from reproduction.experiment import find_experiments
from reproduction.tests.tiny import reproduce

RESULTS = ROOT / "reproduction" / "results"
NAME = "fafed_theorem1"
(ONE,) = find_experiments([NAME])


def changed(tmp_path, method, change, one=ONE, metric="distance", scale="small", rounds=lambda number: True):
    """The committed results with other values of a metric of a method, at some rounds."""
    for ending in (".csv", "-runs.csv"):
        path = tmp_path / scale / f"{one.name}{ending}"
        path.parent.mkdir(exist_ok=True)
        shutil.copy(RESULTS / scale / path.name, path)
    path = tmp_path / scale / f"{one.name}.csv"
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["method"] == method and rounds(int(row["round"])):
            row[metric] = change(float(row[metric]))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "differs"),
    [(lambda value: value, []), (lambda value: value * (1 + 1e-6), []), (lambda value: 2 * value, ["value", "claim"])],
)
def test_a_rerun_agrees_up_to_rounding(tmp_path, change, differs):
    rows = compare([ONE], RESULTS, changed(tmp_path, "FAFED", change))
    found = {"claim" if "claim" in what else "value" for _, what, *_, agrees in rows if not agrees}
    assert found == set(differs)
    text, all_agree = report(rows)
    assert all_agree == (not differs)
    assert text.splitlines()[-1].startswith("FAIL: " if differs else f"PASS: {len(rows)} values and outcomes agree")
    assert ("DIFFERS" in text) == bool(differs)


@pytest.mark.parametrize("seeds", ["0", "01"])
def test_a_rerun_of_fewer_seeds_is_compared_with_these(tmp_path, seeds):
    """All its numbers are the committed ones; the outcomes of other seeds may be others."""
    (one,) = find_experiments(["mom_figures5_6_10_of_100"])
    its = changed(tmp_path, "FedAvg", lambda value: value, one, "accuracy", "full")
    for ending in (".csv", "-runs.csv"):
        path = tmp_path / "full" / f"{one.name}{ending}"
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(row for row in rows if row["seed"] in seeds)
    assert len(compare([one], RESULTS, its)) > 10
    assert report(compare([one], RESULTS, its))[1]


def test_every_metric_of_the_table_and_the_claims_is_compared(tmp_path):
    (one,) = find_experiments(["fafed_table2_low"])
    its = changed(tmp_path, "FedAvg", lambda value: value + 1, one, "train_loss")
    rows = compare([one], RESULTS, its)
    assert [what for _, what, *_, agrees in rows if not agrees and "claim" not in what] == [
        "low, FedAvg: training loss"
    ]
    assert {what.partition(": ")[2] for _, what, *_ in rows} > {"test accuracy", "training loss"}


def test_values_are_means_over_the_last_tenth_of_the_rounds(tmp_path):
    (one,) = find_experiments(["fafed_table2_low"])
    where = {
        "last": lambda number: number > 290,
        "tenth": lambda number: 270 < number < 290,
        "before": range(265).__contains__,
    }
    found = {}
    for name, rounds in where.items():
        its = changed(tmp_path, "FedAvg", lambda value: value + 0.3, one, "accuracy", "full", rounds)
        rows = compare([one], RESULTS, its)
        (found[name],) = [here != there for _, what, here, there, _ in rows if what == "low, FedAvg: test accuracy"]
    assert found == {"last": True, "tenth": True, "before": False}


def test_what_was_not_measured_or_diverged_differs(tmp_path):
    (one,) = find_experiments(["fafed_table2_low"])
    its = changed(tmp_path, "FedAvg", lambda value: "", one, "train_loss")
    (row,) = [row for row in compare([one], RESULTS, its) if row[1] == "low, FedAvg: training loss"]
    assert row[3] == "not measured" and not row[4]


def test_of_a_long_table_only_what_differs_is_shown():
    rows = [("x", f"value {number}", 1, 1, number != 7) for number in range(101)]
    text, _ = report(rows)
    assert "value 7 " in text and "value 8 " not in text and text.endswith("FAIL: 1 of 101 do not agree")
    assert "value 8 " in report(rows[:100])[0]
    assert report([row[:4] + (True,) for row in rows])[0] == "PASS: 101 values and outcomes agree"


def test_other_seeds_agree_within_the_spread():
    """The mean of three further seeds is within 4.303 √(1/3 + 1/3) = 3.513 deviations, with a probability of 95 %."""
    here = Spread((1.0, 2.0, 3.0))
    near = [_is_near(here, Spread((mean - 1, mean, mean + 1)), is_again=False) for mean in (-1.6, -1.5, 5.5, 5.6)]
    assert near == [False, True, True, False]
    assert not _is_near(here, Spread((1.1, 2.1, 3.1)), is_again=True)


def test_results_without_a_common_experiment_are_refused(tmp_path):
    with pytest.raises(UserError, match="has no results that .* has, too"):
        compare([ONE], RESULTS, tmp_path)


@pytest.mark.rarely
def test_the_program_says_fail_with_exit_code_1(tmp_path):
    its = changed(tmp_path, "FAFED", lambda value: 2 * value)
    done = reproduce(NAME, "--compare", str(its))
    assert done.returncode == 1 and "FAIL: " in done.stdout and "DIFFERS" in done.stdout
