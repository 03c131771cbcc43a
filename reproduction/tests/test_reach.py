"""Claims about whole curves: rounds until a value is reached, shares of them that are saved, and fluctuations."""

import dataclasses

import pytest

from fedmpi.cli.comparison import Method
from reproduction.claims import outcomes
from reproduction.experiment import Experiment
from reproduction.reach import rounds_to_reach, saving, wavering
from reproduction.results import Results
from reproduction.strength import graded, p_value
from reproduction.tests.test_claims import run


def method(name, curves, metric="accuracy"):
    """A method with a curve {round: value} per seed; None is a seed with which it diverged."""
    runs = []
    for seed, curve in enumerate(curves):
        lines = {r: {"round": r, metric: value} for r, value in (curve or {}).items()}
        runs.append(run(seed, lines, curve is not None))
    return Method(name, runs)


def line(slope, at=(10, 20, 30, 40)):
    return {r: slope * r for r in at}


@pytest.mark.parametrize(("level", "expected"), [(0.1, 10), (0.15, 15), (0.2, 20), (0.05, 10), (0.35, 35), (0.5, None)])
def test_rounds_are_interpolated_between_evaluations(level, expected):
    found = rounds_to_reach([10, 20, 30, 40], [0.1, 0.2, 0.3, 0.4], level)
    assert found == (expected and pytest.approx(expected))


def points(curve):
    return list(curve), list(curve.values())


def test_a_single_lucky_seed_decides_nothing():
    ours = method("A", [line(0.02), line(0.02), line(0.02)])
    theirs = method("B", [line(0.01), line(0.01), {10: 0.1, 20: 0.9, 30: 0.3, 40: 0.4}])
    found = outcome(FASTER, ours, theirs)
    assert found.state == "undecided" and "-4 % ± 94 % saved" in found.words


def test_twice_as_fast_saves_half_of_the_rounds():
    found = saving(points(line(0.02)), points(line(0.01)), "accuracy")
    assert found.level == pytest.approx(0.4 - 0.01 * 0.3) and found.share == pytest.approx(0.5)
    assert found.theirs == pytest.approx(39.7)
    losses = [{r: 1 - value for r, value in line(slope).items()} for slope in (0.02, 0.01)]
    same = saving(*map(points, losses), "train_loss")
    assert same.share == pytest.approx(0.5) and same.level == pytest.approx(1 - found.level)


def outcome(claim, *methods, metric="accuracy"):
    one = Experiment("x", ".yaml", "", "", "", panels={"p": {}}, metric=metric, claims=[claim | {"claim": "c"}])
    (found,) = outcomes(one, Results([], {"p": list(methods)}))
    return found


def at_full(claim, *methods):
    one = Experiment("x", ".yaml", "", "", "", panels={"p": {}}, metric="accuracy", claims=[claim | {"claim": "c"}])
    results = Results([], {"p": list(methods)})
    (found,) = graded(one, list(outcomes(one, results)), "full", results)
    return found


FASTER = {"ahead": "A", "of": ["B"], "saves": 0}
NOISY = [line(0.011), line(0.008), line(0.012)]


def test_the_lead_with_a_seed_is_the_share_that_is_saved_less_the_claimed_one():
    ours = method("A", [line(0.02), line(0.025), line(0.04)])
    (lead,) = outcome(FASTER | {"saves": 0.4}, ours, method("B", [line(0.01)] * 3)).leads
    assert lead == ("B", pytest.approx([0.1, 0.2, 0.348111], abs=1e-6))  # a first evaluation is an upper bound


@pytest.mark.parametrize(
    ("slopes", "saves", "state", "p"),
    [
        ([0.02, 0.021, 0.022], 0, "confirmed", "p 0.00063, corrected 0.00063"),
        ([0.0102, 0.0104, 0.0112], 0, "ahead", "p 0.17, corrected 0.17"),
        ([0.02, 0.021, 0.022], 0.45, "confirmed", "p 0.031, corrected 0.031"),
        ([0.02, 0.021, 0.022], 0.5, "ahead", "p 0.22, corrected 0.22"),
        ([0.02] * 3, 0, "confirmed", "p 0, corrected 0"),  # the same saving with all seeds
        ([0.01] * 3, 0, "undecided", "p 1, corrected 1"),
    ],
)
def test_a_claim_to_be_faster_needs_p_as_any_other(slopes, saves, state, p):
    methods = method("A", [line(slope) for slope in slopes]), method("B", [line(0.01)] * 3)
    found = at_full(FASTER | {"saves": saves}, *methods)
    assert found.state == state and found.numbers.endswith(p), found


def test_without_p_no_lead_is_confirmed():
    """A rival that never comes to a value leaves no lead to test."""
    found = at_full(FASTER, method("A", [line(0.02)] * 3), method("B", [None, line(0.01), line(0.01)]))
    assert found.state == "ahead" and found.numbers == "a run over B diverged"
    assert "B 39.7 (1 of 3 diverged): 50 % ± 0 % saved" in found.words


@pytest.mark.parametrize(
    ("ours", "theirs", "saves", "state"),
    [
        ([line(0.02)] * 3, [line(0.01)] * 3, 0, "confirmed"),
        ([line(0.02)] * 3, [line(0.01)] * 3, 0.45, "confirmed"),
        ([line(0.02)] * 3, [line(0.01)] * 3, 0.55, "contradicted"),
        ([line(0.01)] * 3, [line(0.02)] * 3, 0, "contradicted"),
        (NOISY, [line(0.01)] * 3, 0, "undecided"),
        ([line(0.01)] * 3, [line(0.01)] * 3, 0, "undecided"),
        ([line(0.02)], [line(0.01)], 0, "one seed: ahead"),
        ([line(0.01)], [line(0.02)], 0, "one seed: not ahead"),
        ([line(0.02)] * 3, [None] * 3, 0, "confirmed"),
        ([line(0.02)] * 3, [line(0.01), None, None], 0, "confirmed"),
        ([line(0.02), None, line(0.02)], [line(0.01)] * 3, 0, "contradicted"),
        ([{40: 0.4}], [{40: 0.4}], 0, "not tested"),
    ],
)
def test_a_faster_method_saves_more_than_the_interval(ours, theirs, saves, state):
    assert outcome(FASTER | {"saves": saves}, method("A", ours), method("B", theirs)).state == state


def test_the_words_have_the_numbers():
    words = outcome(FASTER, method("A", [line(0.02)] * 3), method("B", [line(0.01)] * 3)).words
    assert "to 0.3970 A needs 19.9 rounds and B 39.7: 50 % ± 0 % saved" in words


def test_a_rival_that_was_not_run_leaves_the_claim_open():
    claim = FASTER | {"of": ["B", "C"]}
    found = outcome(claim, method("A", [line(0.02)] * 3), method("B", [line(0.01)] * 3))
    assert found.state == "undecided" and "not run: C" in found.words


def test_fluctuation_is_the_sum_of_the_steps_in_the_wrong_direction():
    assert wavering([1.0, 1.3, 0.5, 0.6], "train_loss") == pytest.approx(0.4)
    assert wavering([0.5, 0.3, 0.9], "accuracy") == pytest.approx(0.2)


CALMER = {"of": ["B"], "ahead": "A", "calmer": True}
FALLING = {r: 1 / r for r in range(1, 10)}


@pytest.mark.parametrize(
    ("ours", "theirs", "state"),
    [
        (FALLING, FALLING | {2: 1.2}, "confirmed"),
        (FALLING | {2: 1.2}, FALLING, "contradicted"),
        (FALLING | {2: 1.2}, FALLING | {2: 1.2}, "undecided"),
        (FALLING | {3: 0.6}, FALLING | {3: 0.6, 4: 0.9, 8: 2.0}, "undecided"),  # only the first third
        (FALLING, FALLING | {5: 2.0}, "not tested"),  # no curve rises at first
        (FALLING, None, "confirmed"),
        (None, FALLING, "contradicted"),
        ({1: 1.0, 9: 0.5}, {1: 1.0, 9: 0.5}, "not tested"),  # one evaluation in the first third
    ],
)
def test_a_calm_curve_takes_smaller_steps_the_wrong_way_in_the_first_third_of_the_rounds(ours, theirs, state):
    methods = [method(name, [curve] * 3, "train_loss") for name, curve in (("A", ours), ("B", theirs))]
    found = outcome(CALMER, *methods, metric="train_loss")
    assert found.state == state and ("until round 3" in found.words), found


def test_a_comparison_of_curves_that_do_not_fluctuate_counts_in_holms_correction():
    """Otherwise what the curves show would make the other outcomes of the experiment stronger."""
    methods = [method(name, [FALLING] * 3, "train_loss") for name in "AB"]
    calm = outcome(CALMER, *methods, metric="train_loss")
    assert calm.state == "not tested"
    other = dataclasses.replace(calm, state="confirmed", leads=(("B", [1.0, 2.0, 3.0]),))
    one = Experiment("x", ".yaml", "", "", "", metric="train_loss")
    p = p_value([1.0, 2.0, 3.0])
    assert f"p {p:.2g}, corrected {2 * p:.2g}" in graded(one, [calm, other], "full", Results([], {}))[1].numbers


def test_the_best_value_so_far_is_compared_where_the_figure_shows_it():
    ours = method("A", [{5: 0.9, 10: 0.1}, {5: 0.8, 10: 0.2}, {5: 0.7, 10: 0.2}])
    theirs = method("B", [{5: 0.5, 10: 0.6}] * 3)
    claim = {"ahead": "A", "of": ["B"]}
    assert outcome(claim, ours, theirs).state == "contradicted"
    found = outcome(claim | {"best_so_far": True}, ours, theirs)
    assert found.state == "confirmed" and found.words.startswith(
        "best test accuracy so far ↑: A 0.8000 ± 0.1000; ahead"
    )
    losses = method("A", [{5: 0.1, 10: 0.9}] * 3, "test_loss"), method("B", [{5: 0.5, 10: 0.5}] * 3, "test_loss")
    assert outcome(claim | {"best_so_far": True}, *losses, metric="test_loss").state == "confirmed"


def test_a_larger_lead_may_be_one_of_the_best_values_so_far():
    panels = {
        name: [method("A", [{5: best, 10: 0.3}] * 3), method("B", [{5: 0.4, 10: 0.4}] * 3)]
        for name, best in (("p", 0.9), ("q", 0.5))
    }
    claim = {"claim": "c", "panel": "p", "ahead": "A", "of": ["B"], "than": "q", "best_so_far": True}
    one = Experiment("x", ".yaml", "", "", "", panels={"p": {}, "q": {}}, metric="accuracy", claims=[claim])
    (found,) = outcomes(one, Results([], panels))
    assert found.state == "confirmed" and "0.5000 ± 0.0000; on q: 0.1000" in found.words
