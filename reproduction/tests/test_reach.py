"""Claims about whole curves: rounds until a value is reached, shares of them that are saved, and fluctuations."""

import pytest

from fedmpi.runs.comparison import Method
from reproduction.claims import outcomes
from reproduction.experiment import Experiment
from reproduction.reach import rounds_to_reach, saving, wavering
from reproduction.results import Results
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


def test_a_single_lucky_seed_reaches_nothing():
    """The mean over the seeds is what must reach the level, a hundredth below the best of the slower method."""
    ours = method("A", [line(0.02), line(0.02), line(0.02)])
    theirs = method("B", [line(0.01), line(0.01), {10: 0.1, 20: 0.9, 30: 0.3, 40: 0.4}])
    found = saving(ours, theirs, "accuracy", [0, 1, 2])
    best = (0.2 + 0.2 + 0.9) / 3
    level = best - 0.01 * (best - 0.1)
    assert found.level == pytest.approx(level)
    assert found.ours == pytest.approx(level / 0.02) and 10 < found.theirs < 20


def test_twice_as_fast_saves_half_of_the_rounds():
    found = saving(method("A", [line(0.02)] * 3), method("B", [line(0.01)] * 3), "accuracy", [0, 1, 2])
    assert found.share == pytest.approx(0.5) and found.deviation == pytest.approx(0)
    assert found.theirs == pytest.approx(39.7)
    losses = [{r: 1 - value for r, value in line(slope).items()} for slope in (0.02, 0.01)]
    same = saving(*(method("A", [one] * 3, "train_loss") for one in losses), "train_loss", [0, 1, 2])
    assert same.share == pytest.approx(0.5) and same.level == pytest.approx(1 - found.level)


def test_the_interval_is_that_of_leaving_out_seeds():
    ours = method("A", [line(0.02), line(0.025), line(0.03)])
    theirs = method("B", [line(0.01), line(0.012), line(0.009)])
    found = saving(ours, theirs, "accuracy", [0, 1, 2])
    shares = [saving(ours, theirs, "accuracy", some).share for some in ([1, 2], [0, 2], [0, 1])]
    mean = sum(shares) / 3
    assert found.deviation == pytest.approx((2 / 3 * sum((one - mean) ** 2 for one in shares)) ** 0.5)


def outcome(claim, *methods, metric="accuracy"):
    one = Experiment("x", ".yaml", "", "", "", panels={"p": {}}, metric=metric, claims=[claim | {"claim": "c"}])
    (found,) = outcomes(one, Results([], {"p": list(methods)}))
    return found


FASTER = {"ahead": "A", "of": ["B"], "saves": 0}
NOISY = [line(0.011), line(0.008), line(0.012)]


@pytest.mark.parametrize(
    ("ours", "theirs", "saves", "state"),
    [
        ([line(0.02)] * 3, [line(0.01)] * 3, 0, "confirmed"),
        ([line(0.02)] * 3, [line(0.01)] * 3, 0.45, "confirmed"),
        ([line(0.02)] * 3, [line(0.01)] * 3, 0.55, "not confirmed"),
        ([line(0.01)] * 3, [line(0.02)] * 3, 0, "not confirmed"),
        (NOISY, [line(0.01)] * 3, 0, "not confirmed: undecided"),
        ([line(0.01)] * 3, [line(0.01)] * 3, 0, "not confirmed: undecided"),
        ([line(0.02)], [line(0.01)], 0, "one seed: ahead"),
        ([line(0.01)], [line(0.02)], 0, "one seed: not ahead"),
        ([line(0.02)] * 3, [None] * 3, 0, "confirmed"),
        ([line(0.02)] * 3, [line(0.01), None, None], 0, "confirmed"),
        ([line(0.02), None, line(0.02)], [line(0.01)] * 3, 0, "not confirmed"),
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
    assert found.state == "not confirmed: undecided" and "not run: C" in found.words


def test_fluctuation_is_the_sum_of_the_steps_in_the_wrong_direction():
    rising = method("A", [{1: 1.0, 2: 1.3, 3: 0.5, 4: 0.6}], "train_loss")
    assert wavering(rising, "train_loss", [0]) == pytest.approx({0: 0.4})
    assert wavering(method("A", [{1: 0.5, 2: 0.3, 3: 0.9}]), "accuracy", [0]) == pytest.approx({0: 0.2})
    calm = method("B", [{1: 1.0, 2: 0.9, 3: 0.5, 4: 0.4}] * 3, "train_loss")
    claim, many = {"of": ["B"], "ahead": "A", "calmer": True}, method("A", [{1: 1.0, 2: 1.3, 3: 0.5}] * 3, "train_loss")
    assert outcome(claim, many, calm, metric="train_loss").state == "not confirmed"
    other = {"of": ["A"], "ahead": "B", "calmer": True}
    assert outcome(other, many, calm, metric="train_loss").state == "confirmed"
