"""`fedmpi.join`: an algorithm in a loop of the user's own."""

import pytest
import torch
from torch import nn

import fedmpi
from fedmpi.federation.client import Client
from fedmpi.oracles.closure import ClosureOracle
from fedmpi.oracles.flat_module import FlatModule


def oracle_of(module, **settings):
    flat = FlatModule(module, direct_gradients=False)
    client = Client(0, buffers=flat.buffers)
    flat.point_at(flat.x, client.buffers)
    return ClosureOracle(client, flat, flat.x.new_zeros(2, flat.dim), **settings), flat


def test_both_gradients_of_a_pair_see_the_same_dropout_and_count_once():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 50), nn.BatchNorm1d(50), nn.Dropout(0.5), nn.Linear(50, 1))
    oracle, flat = oracle_of(module)
    inputs = torch.randn(8, 3)
    oracle.closure = lambda: module(inputs + torch.rand(1)).square().mean()
    torch.manual_seed(1)
    g, g_prev = oracle.gradient_pair(flat.x, flat.x, oracle.draw())
    assert torch.equal(g, g_prev)
    after_two = torch.get_rng_state(), flat.buffers.clone(), int(module[1].num_batches_tracked)
    assert len(oracle.take_losses()) == 1 and oracle.client.num_gradients == 2

    other, flat = oracle_of(nn.Sequential(nn.Linear(3, 50), nn.BatchNorm1d(50), nn.Dropout(0.5), nn.Linear(50, 1)))
    other._flat.x.copy_(oracle._flat.x)
    other.closure = lambda: flat.module(inputs + torch.rand(1)).square().mean()
    torch.manual_seed(1)
    assert torch.equal(other.gradient(flat.x, other.draw()), g)
    assert torch.equal(torch.get_rng_state(), after_two[0])
    assert torch.equal(flat.buffers, after_two[1]) and int(flat.module[1].num_batches_tracked) == after_two[2] == 1


def test_parameters_that_a_closure_does_not_use_have_gradient_zero():
    module = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    oracle, flat = oracle_of(module)
    oracle.closure = lambda: module[0](torch.ones(1)).sum()
    oracle.gradient(flat.x, oracle.draw())
    oracle.closure = lambda: module[1](torch.ones(1)).sum()
    assert oracle.gradient(flat.x, oracle.draw()).tolist() == [0.0, 1.0]


def test_parameters_that_are_frozen_later_do_not_decay():
    module = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    oracle, flat = oracle_of(module, clip_norm=0.5, weight_decay=0.25)
    flat.x.fill_(2.0)
    oracle.closure = lambda: module[1](torch.ones(1)).sum()
    assert oracle.gradient(flat.x, oracle.draw()).tolist() == [0.5, 1.0]
    module[0].requires_grad_(False)
    oracle.closure = lambda: module[1](torch.ones(1)).sum()
    assert oracle.gradient(flat.x, oracle.draw()).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"algorithm": "scafold"}, "did you mean 'scaffold'"),
        ({"step_sice": 0.1}, "algorithm fafed has schedule, .*did you mean 'step_size'"),
        ({"lr": 0.1}, "unknown setting lr: .*; its name in fedmpi is step_size"),
        ({"step_size": -1.0}, "algorithm.step_size = -1.0: expected a number > 0"),
        ({"algorithm": 3}, "expected a name like 'fafed'"),
        ({"local_steps": 0}, "local_steps = 0: expected a whole number > 0"),
        (
            {"local_steps": 10**5000},
            "local_steps = an object of type int .*: expected a whole number > 0, at most 1e.30",
        ),
        ({"weight": "2"}, "weight = '2': expected a number > 0"),
        ({"model": nn.Linear}, "model is a type: expected a torch.nn.Module"),
        ({"weight": -1.0}, "weight = -1.0: expected a number > 0"),
        ({"weight": float("inf")}, "weight = inf: expected a number > 0"),
        ({"local_steps": 1.5}, "local_steps = 1.5: expected a whole number > 0"),
        ({"participation": 1.5}, "participation = 1.5: expected a number > 0, at most 1"),
        ({"seed": -1}, "seed = -1: expected a whole number >= 0"),
        ({"clip_norm": -1}, "clip_norm = -1: expected a number > 0"),
        ({"weight_decay": -1}, "weight_decay = -1: expected a number >= 0"),
        ({"model": nn.Linear(1, 1).to(torch.cfloat)}, "complex64 on cpu: expected all of them in float32 or float64"),
        ({"model": nn.ReLU()}, "has no trainable parameter"),
    ],
)
def test_wrong_settings_are_one_line(settings, message):
    with pytest.raises(fedmpi.UserError, match=message):
        fedmpi.join(**{"model": nn.Linear(1, 1), **settings})


@pytest.mark.parametrize(
    "algorithm, closure, message",
    [
        ("fedavg", lambda: 3.0, "returned a float: expected the loss"),
        ("fedavg", lambda: torch.ones(2, requires_grad=True), r"a tensor of shape \[2\]"),
        ("fedavg", lambda: torch.ones(1), "does not depend on a trainable parameter"),
        ("mimeadam", lambda: torch.ones(1, requires_grad=True), "assign fed.whole = CLOSURE"),
    ],
)
def test_wrong_closures_are_one_line(algorithm, closure, message):
    fed = fedmpi.join(nn.Linear(1, 1), algorithm)
    with pytest.raises(fedmpi.UserError, match=message):
        fed.step(closure)


def test_algorithms_that_draw_between_steps_are_refused():
    model = nn.Linear(1, 1)
    fed = fedmpi.join(model, "ce_lsgd", local_steps=2)
    with pytest.raises(fedmpi.UserError, match="draws samples of its own between local steps"):
        for _ in range(2):
            fed.step(lambda: model(torch.ones(1)).sum())


def test_a_state_of_another_algorithm_is_refused():
    state = fedmpi.join(nn.Linear(1, 1), "fedavg").state_dict()
    for other, change, message in (
        ("fafed", {}, "algorithm fedavg: expected algorithm fafed"),
        ("fedavg", {"loop/rank": 1}, "rank 1: expected rank 0"),
        ("fedavg", {"loop/ranks": 2}, "ranks 2: expected ranks 1"),
        ("fedavg", {"loop/local_steps": 5}, "local_steps 5: expected local_steps 10"),
    ):
        with pytest.raises(fedmpi.UserError, match=f"the state was taken with {message}"):
            fedmpi.join(nn.Linear(1, 1), other).load_state_dict(state | change)
    del state["loop/step"]
    with pytest.raises(fedmpi.UserError, match="does not belong to this rank, model and algorithm"):
        fedmpi.join(nn.Linear(1, 1), "fedavg").load_state_dict(state)


def test_the_step_size_can_follow_a_schedule_of_the_users_own():
    model = nn.Linear(1, 1, bias=False)
    fed = fedmpi.join(model, "fedavg", local_steps=1, step_size=1.0)
    before = model.weight.item()
    for step_size in (1.0, 0.5):
        fed.step_size = step_size
        fed.step(lambda: model.weight.sum())
    assert model.weight.item() == pytest.approx(before - 1.5)
    fed.finish()
    with pytest.raises(fedmpi.UserError, match="finish"):
        fed.step(lambda: model.weight.sum())
