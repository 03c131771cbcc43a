"""How strong an outcome is: p, intervals, Holm's correction, the length of runs, and guessing."""

import pytest
import scipy.stats
from test_claims import run

from fedmpi.cli.comparison import Method
from reproduction.claims import Outcome, outcomes
from reproduction.experiment import Experiment
from reproduction.results import Results
from reproduction.strength import agreement, graded, holm, interval, p_of_level, p_value
from reproduction.summary import Row


def test_values_of_tables():
    """t = 4.303 and 12.706 are the 97.5 % quantiles of Student's t with 2 and 1 degrees of freedom."""
    spread = 3**0.5 / 4.303
    leads = [1 - spread, 1.0, 1 + spread]  # their t is 4.303
    assert p_value(leads) == pytest.approx(0.05, abs=1e-4)
    assert interval(leads) == pytest.approx((0, 2), abs=1e-3)
    assert p_value([1 - 1 / 12.706, 1 + 1 / 12.706]) == pytest.approx(0.05, abs=1e-4)
    assert p_value([1.0, 1.0]) is None


def test_holms_correction_of_an_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0] and holm([]) == []


def results(**curves):
    """Methods whose seeds have these accuracies, one evaluation each."""
    methods = [
        Method(name, [run(seed, {10: {"accuracy": value}}) for seed, value in enumerate(its)])
        for name, its in curves.items()
    ]
    return Results([], {"p": methods})


def grade(scale="full", claims=1, **curves):
    claim = {"claim": "best", "ahead": "A", "of": [name for name in curves if name != "A"]}
    one = Experiment("x", ".yaml", "", "", "", panels={"p": {}}, metric="accuracy", claims=[claim] * claims)
    found = results(**curves)
    return graded(one, list(outcomes(one, found)), scale, found)[0]


CLEAR, MILD = [0.7, 0.71, 0.72], [0.62, 0.66, 0.72]  # ahead of 0.5 with p 0.0008 and 0.029
LEVEL = [0.5] * 3


@pytest.mark.parametrize(
    ("scale", "ours", "claims", "state"),
    [
        ("full", CLEAR, 1, "confirmed"),
        ("mlp", CLEAR, 1, "confirmed"),
        ("small", CLEAR, 1, "indicative: holds"),
        ("full", MILD, 1, "confirmed"),
        ("full", MILD, 2, "ahead"),  # two comparisons in this experiment
        ("full", CLEAR[:2], 1, "ahead"),  # two seeds
        ("full", [0.5, 0.5, 0.6], 1, "undecided"),
        ("full", [0.3, 0.29, 0.28], 1, "contradicted"),
        ("full", [0.38, 0.34, 0.28], 2, "behind"),  # the same bar as for "ahead"
        ("full", [0.3, 0.29], 1, "behind"),
        ("small", [0.4, 0.41, 0.42], 1, "indicative: does not hold"),
        ("small", [0.7], 1, "one seed: ahead"),
    ],
)
def test_an_outcome_is_as_strong_as_what_it_rests_on(scale, ours, claims, state):
    assert grade(scale, claims, A=ours, B=LEVEL[: len(ours)]).state == state


def test_one_of_several_rivals_is_ahead_with_p_times_their_number():
    lags = [0.2, 0.21, 0.26]
    found = grade(A=[0.5 - lag for lag in lags], B=LEVEL, C=[0.1, 0.4, 0.2])
    p = p_value(lags)
    assert found.state == "contradicted" and f"p {2 * p:.2g}, corrected {2 * p:.2g}" in found.numbers


def test_the_family_of_a_correction_is_the_paper():
    claim = {"claim": "best", "ahead": "A", "of": ["B"]}
    one = Experiment("x", ".yaml", "", "", "", panels={"p": {}}, metric="accuracy", claims=[claim])
    found = results(A=MILD, B=LEVEL)
    made = list(outcomes(one, found))
    states = []
    for others in ({}, {("y", "mlp"): [0.5, None]}, {("y", "small"): [0.5], ("x", "full"): [0.5]}):
        states.append(graded(one, made, "full", found, others)[0].state)
    assert states == ["confirmed", "ahead", "confirmed"]


@pytest.mark.parametrize(
    ("ours", "state"),
    [
        ([0.501, 0.5, 0.499], "confirmed"),
        ([0.504, 0.503, 0.504], "confirmed"),  # clear, and within the margin
        ([0.52, 0.5, 0.49], "undecided"),  # the mean is within, the interval is not
        ([0.6, 0.61, 0.62], "contradicted"),
        ([0.6, 0.55, 0.5], "behind"),
    ],
)
def test_level_needs_a_margin_and_is_shown_by_two_one_sided_tests(ours, state):
    claim = {"claim": "best", "ahead": "A", "of": ["B"], "level": 0.01}
    one = Experiment("x", ".yaml", "", "", "", panels={"p": {}}, metric="accuracy", claims=[claim])
    found = results(A=ours, B=LEVEL)
    (made,) = graded(one, list(outcomes(one, found)), "full", found)
    assert made.state == state and "level within 0.01" in made.words
    if state == "confirmed":
        leads = [value - 0.5 for value in ours]
        sides = ((-0.01, "greater"), (0.01, "less"))
        p = max(scipy.stats.ttest_1samp(leads, bound, alternative=side).pvalue for bound, side in sides)
        assert p_of_level(leads, 0.01) == pytest.approx(p, rel=1e-9) and p < 0.05


def test_an_outcome_that_added_seeds_have_changed_says_so():
    claim = {"claim": "best", "ahead": "A", "of": ["B"]}
    one = Experiment("x", ".yaml", "", "", "", panels={"p": {}}, metric="accuracy", seeds=[0, 1], claims=[claim])
    found = results(A=[*CLEAR, 0.71], B=[0.5] * 4)
    (made,) = graded(one, list(outcomes(one, found)), "full", found)
    assert made.state == "confirmed" and made.words.endswith("; with the 2 seeds that were planned: ahead")


def test_p_is_that_of_the_closest_rival_and_the_interval_is_shown():
    found = grade(A=CLEAR, B=LEVEL, C=[0.69, 0.64, 0.69])
    assert found.state == "ahead" and "0.21 [0.185, 0.235] over B" in found.numbers
    p = p_value([0.01, 0.07, 0.03])
    assert f"p {p:.2g}, corrected {p:.2g}" in found.numbers


@pytest.mark.parametrize(("ours", "is_tested"), [([0.13, 0.14, 0.145], False), ([0.16, 0.17, 0.18], True)])
def test_a_claim_is_not_tested_where_the_best_method_guesses(ours, is_tested):
    found = grade(A=ours, B=[0.1, 0.1, 0.1])
    assert (found.state != "not tested") == is_tested and ("near guessing" in found.words) != is_tested


def test_values_are_means_over_the_last_tenth_of_the_rounds():
    curve = {round_index: {"accuracy": 0.5} for round_index in range(10, 100, 10)}
    ends = {91: {"accuracy": 0.6}, 100: {"accuracy": 0.8}}
    methods = [Method("A", [run(seed, curve | ends) for seed in range(3)]), results(B=[0.65] * 3).panels["p"][0]]
    claim = {"claim": "best", "ahead": "A", "of": ["B"]}
    one = Experiment("x", ".yaml", "", "", "", panels={"p": {}}, metric="accuracy", claims=[claim])
    (found,) = outcomes(one, Results([], {"p": methods}))
    assert "A 0.7000" in found.words and found.state == "confirmed"


def test_the_agreement_of_scales():
    at_full = ("confirmed", "contradicted", "ahead", "not tested")
    rows = [Row("a", "p", "small", 3, "indicative: holds", "", number=number) for number in range(len(at_full))]
    rows += [Row("a", "p", "full", 3, state, "", number=number) for number, state in enumerate(at_full)]
    other = [Row("a", "p", "small", 3, "indicative: holds", ""), Row("a", "p", "full", 1, "one seed: ahead", "")]
    assert "in 2 of 3 comparisons" in agreement({"one": rows, "other": other}) and agreement({"other": other}) == ""
    assert Outcome("a", "p", "ahead", "").numbers == ""
