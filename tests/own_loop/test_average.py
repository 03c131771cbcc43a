"""`fedmpi.average`: periodic averages in a loop that keeps its torch optimizer."""

import pytest
import torch
from torch import nn

import fedmpi
from fedmpi.ground.errors import Diverged


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"outer": "nestorov"}, "outer = 'nestorov': expected one of none, momentum, nesterov, adam; did you mean"),
        ({"exchange": ("exp_avg",)}, "expected the optimizer that has this state, too"),
        ({"participation": 0}, "participation = 0: expected a number > 0, at most 1"),
        ({"every": 0}, "every = 0: expected a whole number > 0"),
        ({"every": "3"}, "every = '3': expected a whole number > 0"),
        ({"weight": float("nan")}, "weight = nan: expected a number > 0"),
        ({"outer": "momentum", "server_lr": 0.5}, "server_lr: .*; its name in fedmpi is server_step_size"),
        ({"outer": "momentum", "momentum": 1.5}, "momentum = 1.5: expected a number >= 0 and < 1"),
    ],
)
def test_wrong_settings_are_one_line(settings, message):
    with pytest.raises(fedmpi.UserError, match=message):
        fedmpi.average(nn.Linear(1, 1), **settings)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exp_average", "no state 'exp_average'; it has exp_avg, exp_avg_sq, step"),
        ("step", r"state 'step' is torch.float32 \[\] for a parameter of torch.float32 \[1, 1\]"),
    ],
)
def test_wrong_states_are_one_line(name, message):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    fed = fedmpi.average(model, optimizer, every=1, exchange=name)
    model(torch.ones(1)).backward()
    optimizer.step()
    with pytest.raises(fedmpi.UserError, match=message):
        fed.step()


def test_a_loss_that_is_not_finite_ends_the_job():
    fed = fedmpi.average(nn.Linear(1, 1), every=2)
    fed.step(torch.tensor(float("nan")))
    with pytest.raises(Diverged, match="the loss of client 0 on rank 0 is nan"):
        fed.step(1.0)


def test_every_parameter_begins_on_a_cache_line_and_keeps_its_layout():
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 3, 3)).to(memory_format=torch.channels_last)
    before = [p.detach().clone() for p in model.parameters()]
    fed = fedmpi.average(model, every=1)
    for parameter, old in zip(model.parameters(), before):
        assert parameter.data_ptr() % 64 == 0
        assert parameter.stride() == old.stride() and torch.equal(parameter, old)
    fed.finish()


def test_parameters_that_other_code_has_moved_are_averaged_where_they_are():
    model = nn.Linear(2, 1)
    fed = fedmpi.average(model, every=1)
    model.weight.data = torch.tensor([[3.0, 4.0]])  # as `model.load_state_dict(..., assign=True)` does
    fed.step()
    assert model.weight.tolist() == [[3.0, 4.0]]
    fed.finish()
    assert model.weight.tolist() == [[3.0, 4.0]]
