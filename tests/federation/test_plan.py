"""A plan says who takes part, with which weight and for how long; what is wrong in it is said in one line."""

import numpy as np
import pytest
import torch

import fedmpi
from fedmpi.federation import Plan
from fedmpi.federation.participation import draw_participants, spread
from fedmpi.ground.errors import UserError


def test_a_round_of_all_and_of_some():
    plan = Plan(4, lambda client: 1 + client, weights=[1, 2, 3, 4])
    all_clients = plan.round(0)
    assert (all_clients.index, all_clients.iteration, all_clients.first_iteration) == (0, 4, 0)
    assert all_clients.participants == (0, 1, 2, 3)
    assert all_clients.participation == 1
    assert all_clients.num_steps == (1 * 1 + 2 * 2 + 3 * 3 + 4 * 4) / 10
    some = Plan(4, 2, lambda r: {3, 1}, weights=[1, 2, 3, 4]).round(2)
    assert sorted(some.participants) == [1, 3]
    assert dict(zip(some.participants, some.weights)) == {1: 2, 3: 4}
    assert some.participation == 0.6
    assert (some.iteration, some.first_iteration) == (6, 4)
    start = plan.start()
    assert (start.index, start.iteration, start.num_steps, start.participation) == (-1, 0, 0, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_clients": 0}, "num_clients = 0: expected at least 1"),
        ({"local_steps": 0}, "local_steps = 0: expected at least 1"),
        ({"local_steps": lambda client: 2 - client}, "local_steps = 0: expected at least 1"),
        ({"weights": [1, 2]}, "weights: 2 given: expected one for each of the 3 clients"),
        ({"weights": [1, 0, 2]}, "weights: client 1 has 0: expected a finite number > 0"),
        ({"weights": [1, 2, float("nan")]}, "weights: client 2 has nan"),
        ({"weights": [-1, 2, 3]}, "weights: client 0 has -1"),
        ({"weights": [1, 2, float("inf")]}, "weights: client 2 has inf"),
        ({"weights": torch.tensor([1.0, -2.0, 3.0])}, "weights: client 1 has -2.0: expected a finite number > 0"),
        ({"weights": [None, 2, 3]}, "weights: client 0 has None"),
        ({"weights": ["1", 2, 3]}, "weights: client 0 has '1'"),
        ({"weights": np.ma.array([1, 2, 3], mask=[0, 1, 0])}, "weights: client 1 has None"),
        ({"weights": np.ones((3, 1))}, r"weights: client 0 has \[1.0\]"),
        ({"weights": [1e39, 1, 1]}, r"weights: client 0 has 1e\+39: expected 1e-20 to 1e\+20"),
        ({"weights": [1, 1e-320, 1]}, "weights: client 1 has 1e-320: expected 1e-20"),
        ({"weights": 5}, "weights = 5: expected a list, an array or a tensor, a number per client"),
        ({"weights": "123"}, "weights = '123': expected a list"),
        ({"weights": {0: 1, 1: 2, 2: 3}}, "weights = .0: 1, 1: 2, 2: 3.: expected a list"),
        ({"weights": {1, 2, 3}}, "weights = .1, 2, 3.: expected a list"),
    ],
)
def test_settings_that_make_no_plan(settings, message):
    with pytest.raises(UserError, match=message):
        Plan(**{"num_clients": 3, **settings})


@pytest.mark.parametrize("participants", [[], [0, 0], [3], [-1, 0], [0, 1, 2, 3]])
def test_participants_are_different_clients(participants):
    with pytest.raises(UserError, match="participants of round 7 = .*: expected at least one of the clients 0 to 2"):
        Plan(3, participants=lambda r: participants).round(7)


def test_the_one_that_works_alone():
    drawn = [Plan(5, seed=seed).draw_one(Plan(5).round(0)) for seed in range(40)]
    assert set(drawn) == set(range(5))
    some = Plan(5, participants=lambda r: [1, 3])
    assert {some.draw_one(some.round(number)) for number in range(20)} == {1, 3}
    plan = Plan(5, participants=lambda r: [1, 3], chosen=lambda r: r)
    assert plan.draw_one(plan.round(3)) == 3
    with pytest.raises(UserError, match="chosen of round 2 = 2: expected one of its participants 1, 3"):
        plan.draw_one(plan.round(2))


def test_clients_are_spread_evenly():
    assert spread(7, 3) == [range(0, 2), range(2, 4), range(4, 7)]
    with pytest.raises(UserError, match=r"and 3 ranks were started: start at most 2 ranks, or .*--clients 3"):
        spread(2, 3)
    with pytest.raises(UserError, match=r"and 2 ranks were started: start one rank \(without mpirun.*--clients 2"):
        spread(1, 2)


def test_participants_are_drawn_without_replacement_and_by_round():
    drawn = [draw_participants(10, 0.5, 0, r) for r in range(50)]
    assert all(len(set(one)) == 5 and one == sorted(one) for one in drawn)
    assert len({tuple(one) for one in drawn}) > 20
    assert drawn == [draw_participants(10, 0.5, 0, r) for r in range(50)]
    sizes = {(10, 0.05): 1, (10, 0.59): 5, (3, 0.7): 2, (100, 0.29): 29, (7, 1): 7}  # 0.29 * 100 is below 29
    assert {key: len(draw_participants(*key, seed=0, round_index=0)) for key in sizes} == sizes


def test_weights_may_be_an_array():
    lists, *others = (
        fedmpi.simulate(
            fedmpi.algorithms.FedAvg(), lambda client, x, sample: x - client, [9.0], rounds=2, weights=weights
        )
        for weights in ([1, 2, 5], np.array([1, 2, 5]), np.array([1.0, 2.0, 5.0], np.float32), torch.tensor([1, 2, 5]))
    )
    assert all(other[-1]["rows"]["x"][0, 0] == lists[-1]["rows"]["x"][0, 0] for other in others)
    for wrong in (np.ones((3, 1)), np.ones(2), np.float64(1)):
        with pytest.raises(UserError, match="^weights"):
            Plan(3, weights=wrong)
