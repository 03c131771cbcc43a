"""What a page says about how its results were made: when the rules were fixed, and whether its numbers repeat."""

import dataclasses

import pytest
from helpers import ROOT

from fedmpi.ground.errors import UserError
from reproduction import orders
from reproduction.csv_files import read_rows
from reproduction.experiment import find_experiments, read_experiment
from reproduction.page import last_changed, page
from reproduction.results import grid_path, read_results

RESULTS = ROOT / "reproduction" / "results"
EXPERIMENTS = {one.name: one for one in find_experiments(["all"])}


@pytest.mark.parametrize(
    ("fixed", "first", "says"),
    [
        ("2026-11-27", "2026-11-28T05:36:50+00:00", ""),
        ("2026-11-28", "2026-11-28T05:36:50+00:00", " (on the day of the first run)"),
        ("2026-11-29", "2026-11-28T05:36:50+00:00", " (after the first run)"),
        ("2026-11-28 05:35", "2026-11-28T05:36:50+00:00", ""),
        ("2026-11-28 05:36", "2026-11-28T05:36:50+00:00", " (after the first run)"),
        ("2026-11-28 05:36:49", "2026-11-28T05:36:50+00:00", ""),
        ("2026-11-28 08:54", "2026-11-28T05:36:50+00:00", " (after the first run)"),
        ("2026-11-28 05:00", "2026-11-28T06:30:00+02:00", " (after the first run)"),  # at 04:30 in UTC
        ("2026-11-28 05:00", "2026-11-28", " (on the day of the first run)"),
        ("2026-11-27 23:59", "2026-11-28", ""),
    ],
)
def test_a_change_is_compared_with_the_first_run(fixed, first, says):
    one = dataclasses.replace(EXPERIMENTS["fafed_theorem1"], fixed={"claims": fixed})
    assert last_changed(one, ["2026-12-01T00:00:00+00:00", first]) == f"claims {fixed}{says}"
    assert last_changed(one, []) == f"claims {fixed}"


def test_every_experiment_says_when_it_was_fixed():
    run = {name: one for name, one in EXPERIMENTS.items() if one.scales or one.orders}
    assert set(EXPERIMENTS) - set(run) == {"fafed_tables3_5"}
    for name, one in run.items():
        expected = {"claims", "lengths", *(["rule"] if one.orders else []), *(["grids"] if one.tune else [])}
        assert expected <= set(one.fixed), name


def test_grids_are_fixed_after_the_last_run_of_theirs():
    for name, one in EXPERIMENTS.items():
        for path in (grid_path(RESULTS, name, scale) for scale in ("small", "full")):
            dates = [row["date"][:16].replace("T", " ") for row in read_rows(path)]
            assert max(dates, default="") <= one.fixed.get("grids", ""), name


@pytest.mark.parametrize("name", ["lamb_figure3_mlp_falling_in_steps", "lamb_figure3_mlp_falling_3_epochs"])
def test_a_choice_after_the_answer_is_said(name):
    one = EXPERIMENTS[name]
    text = page(RESULTS, one, "full", read_results(RESULTS, one, "full"), {})
    (row,) = [line for line in text.splitlines() if line.startswith("| last changed")]
    assert row.count("(after the first run)") == 1 and f"grids {one.fixed['grids']} (after the first run)" in row


def test_a_table_of_rates_says_when_it_was_fixed():
    one = EXPERIMENTS["mom_tables1_2"]
    text = orders.page(RESULTS, one)
    assert f"Last changed (UTC): claims {one.fixed['claims']} (after the first run), lengths" in text
    assert "Last changed" not in orders.page(RESULTS, dataclasses.replace(one, fixed={}))


def test_days_and_times_are_checked(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("title: a\npaper: mom\nplace: b\nfixed: {claims: today}\n")
    with pytest.raises(UserError, match="fixed.claims: expected a day or a time in UTC, in quotes"):
        read_experiment(path)


def test_numbers_repeat_only_on_a_known_model():
    one = EXPERIMENTS["fafed_theorem1"]
    found = read_results(RESULTS, one, "small")

    def said(*processors):
        runs = [row | {"processor": name} for row, name in zip(found.runs, processors)]
        return page(RESULTS, one, "small", dataclasses.replace(found, runs=runs), {})

    known = "AMD EPYC (family 25, model 1, stepping 1), AVX2"
    assert "repeats these numbers to the last digit" in said(known, known)
    text = said("AMD EPYC", known, "AMD EPYC")
    assert "For 2 of the 3 runs the model of the processor is not known" in text
    assert "cannot be said whether" in text and "repeats these numbers" not in text
    assert "on a GPU differ by rounding" in said(f"GPU: NVIDIA H200; {known}", "AMD EPYC")
