"""`trace.rounds` of `fedmpi.simulate`: a record per round, with the state after its communication."""

import numpy as np
import pytest

import fedmpi
from fedmpi import algorithms
from fedmpi.ground.registry import known

LATE = {0: (0, 1, 2), 1: (0, 2), 2: (0, 1, 2), 3: (1,)}  # round -> who takes part


def run(algorithm, rounds=4, local_steps=3):
    return fedmpi.simulate(
        algorithm, lambda i, x, sample: x - i, [4.0, 1.0], 3, rounds, local_steps, lambda number: LATE[number]
    )


def test_a_record_per_round_is_the_average_that_one_computes_by_hand():
    x, expected = np.array([4.0, 1.0]), []
    for clients in LATE.values():
        moved = []
        for client in clients:
            y = x.copy()
            for _ in range(3):
                y = y - 0.1 * (y - client)
            moved.append(y)
        x = np.mean(moved, axis=0)
        expected.append(x)
    found = run(algorithms.FedAvg(step_size=0.1)).rounds
    assert [record["round"] for record in found] == [0, 1, 2, 3]
    assert [record["participants"] for record in found] == list(LATE.values())
    np.testing.assert_allclose([record["x"] for record in found], expected, rtol=1e-15)


@pytest.mark.parametrize("name", ["fafed", "scaffold", "mimeadam", "ce_lsgd", "desloc", "fedadam", "local_amsgrad"])
def test_it_has_the_last_moment_of_every_round(name):
    """Also of methods with initial estimates, with two averages a round, or with rows that skip rounds."""
    trace = run(known(algorithms, algorithms.Algorithm)[name]())
    assert len(trace.rounds) == 4 < len(trace)
    for record, after in zip(trace.rounds, (one for one in trace if one["step"] is None and one["round"] >= 0)):
        assert record["rows"] is after["rows"] and record["round"] == after["round"]
        assert record["x"].shape == (2,) and record["x"].dtype == np.float64
        assert (record["rows"]["x"] == record["x"]).all()
    assert trace.rounds[-1]["rows"] is trace[-1]["rows"]


def test_without_rounds_there_is_the_start_only():
    trace = run(algorithms.FedAvg(), rounds=0)
    assert trace.rounds == [] and [record["round"] for record in trace] == [-1]
    assert isinstance(trace, list)
