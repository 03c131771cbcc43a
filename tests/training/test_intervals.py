"""How sure the first line of the baselines is: exact for shares of right answers, resampled cases otherwise."""

import numpy as np
import pytest

from fedmpi.comm.solo import SoloLink
from fedmpi.runs import baselines
from fedmpi.tasks.base import Support
from fedmpi.training import intervals

stats = pytest.importorskip("scipy.stats")


def shares(*rights):
    def support(right):
        right = np.asarray(right, bool)
        return Support(len(right), lambda indices: right[indices].mean(), right)

    return dict(enumerate(map(support, rights)))


def values(*columns):
    def support(column):
        column = np.asarray(column, float)
        return Support(len(column), lambda indices: column[indices].mean() if len(indices) else np.nan)

    return dict(enumerate(map(support, columns)))


@pytest.mark.parametrize("right", [[9, 14, 17], [20, 20, 20], [0, 0, 0]])
def test_the_interval_of_an_accuracy_is_clopper_and_pearsons(right):
    found = intervals.of_mean(SoloLink(), 0, shares(*(np.arange(20) < number for number in right)))
    exact = stats.binomtest(sum(right), 60).proportion_ci(method="exact")
    assert (found["low"], found["high"]) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_the_interval_of_a_gain_is_that_of_the_answers_that_changed():
    stream = np.random.default_rng(1)
    first, second = (stream.random((3, 40)) < share for share in (0.8, 0.6))
    found = intervals.of_difference(SoloLink(), 0, shares(*first), shares(*second))
    better, worse = (first & ~second).sum(), (second & ~first).sum()
    exact = stats.binomtest(int(better), int(better + worse)).proportion_ci(method="exact")
    share = (better + worse) / 120
    assert found["low"] == pytest.approx(share * (2 * exact.low - 1)) and found["rows"] == 120
    assert found["high"] == pytest.approx(share * (2 * exact.high - 1))
    of_silos = [(own.astype(int) - other).std() / np.sqrt(40) for own, other in zip(first, second)]
    assert found["deviation"] == pytest.approx(np.sqrt(np.sum(np.square(of_silos))) / 3)
    same = intervals.of_difference(SoloLink(), 0, shares(*first), shares(*first))
    assert same == {"low": 0, "high": 0, "deviation": 0, "rows": 120}


def test_resampled_intervals_contain_the_truth_about_as_often_as_they_say():
    stream, hits, number = np.random.default_rng(2), 0, 60
    for seed in range(number):
        first, second = stream.normal(1.0, 1, (2, 30)), stream.normal(0.7, 1, (2, 30))
        found = intervals.of_difference(SoloLink(), seed, values(*first), values(*second))
        hits += found["low"] <= 0.3 <= found["high"]
        assert found["deviation"] == pytest.approx((first - second).std() / np.sqrt(60), rel=0.25)
    assert 50 <= hits <= number
    again = intervals.of_difference(SoloLink(), seed, values(*first), values(*second))
    assert again == found


def test_silos_without_cases_do_not_count_and_unknown_cases_have_no_interval():
    first, second = shares([1, 1, 0, 1], []), shares([0, 1, 0, 0], [])
    assert intervals.of_difference(SoloLink(), 0, first, second)["rows"] == 4
    assert intervals.of_mean(SoloLink(), 0, first)["low"] == pytest.approx(stats.beta.ppf(0.025, 3, 2))
    assert intervals.of_mean(SoloLink(), 0, None) == {} == intervals.of_difference(SoloLink(), 0, first, None)
    assert intervals.of_mean(SoloLink(), 0, shares([])) == {}
    found = intervals.of_mean(SoloLink(), 0, values([1.0, 2.0, 4.0], []))
    assert 1 <= found["low"] < 7 / 3 < found["high"] <= 4


@pytest.mark.parametrize(("deviation", "clear"), [(0.04, True), (0.06, False)])
def test_a_gain_is_clear_if_it_is_larger_than_its_deviation(deviation, clear):
    rows = [{"method": "federated", "clients": [0.2, 0.6], "mean": 0.4, "low": 0.1, "high": 0.7},
            {"method": "local", "clients": [0.3, 0.6], "mean": 0.45}]  # fmt: skip
    gain = {"low": -0.1, "high": 0.02, "deviation": deviation, "rows": 154}
    content = {"metric": "test_loss", "tests": "own tests", "names": [], "rows": rows, "gain": gain}
    unclear = "" if clear else "; not clear with 154 test rows"
    assert f"by 0.0500 on average (95 % interval -0.0200 to 0.1000{unclear}), from" in baselines.gain_in_words(content)
    found = baselines.gain_of(content)
    assert found.mean == pytest.approx(0.05) and (found.low, found.high) == (-0.02, 0.1) and found.is_clear == clear
    worse = {**content, "metric": "accuracy"}
    found = baselines.gain_in_words(worse)
    assert found.startswith("taking part worsens the test accuracy of a silo on its own tests by 0.0500 on average")
    assert f"average (95 % interval -0.0200 to 0.1000{unclear})" in found
