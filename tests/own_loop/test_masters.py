"""Parameters of 16 bits in own loops: the ranks average float32 values, and the parameters are these, rounded."""

import pytest
import torch
from helpers import PROGRAMS, start
from torch import nn

import fedmpi

DIGIT = 2**-7  # the last one of bfloat16 at 1


def ones(dtype=torch.bfloat16):
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("algorithm", ["fedavg", "fafed"])
def test_steps_that_are_smaller_than_a_digit_add_up(algorithm, dtype):
    model = ones(dtype)
    settings = {"step_size": 1e-4} if algorithm == "fedavg" else {"step_size": 1e-3}
    fed = fedmpi.join(model, algorithm=algorithm, local_steps=5, **settings)
    for _ in range(200):
        fed.step(lambda: model.weight.sum().float())
    found = fed.federation.server.x.clone()
    fed.finish()
    assert model.weight.dtype == dtype and torch.equal(model.weight.flatten(), found.to(dtype))
    assert found.dtype == torch.float32 and (found < 1 - DIGIT / 2).all()
    if algorithm == "fedavg":
        torch.testing.assert_close(found, torch.full((3,), 0.98), rtol=1e-5, atol=0)


def test_a_state_within_a_round_restores_the_bits():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fed = fedmpi.average(model, optimizer, every=3)

    def steps(number):
        for _ in range(number):
            optimizer.zero_grad()
            model(torch.ones(4, dtype=torch.bfloat16)).square().sum().backward()
            optimizer.step()
            fed.step()

    steps(4)
    state, before = fed.state_dict(), [p.detach().clone() for p in model.parameters()]
    steps(4)
    after = [p.detach().clone() for p in model.parameters()]
    assert not all(map(torch.equal, before, after))
    fed.load_state_dict(state)
    assert all(map(torch.equal, before, model.parameters()))
    steps(4)
    assert all(map(torch.equal, after, model.parameters()))
    fed.finish()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_what_the_loop_assigns_is_averaged():
    model = ones()
    fed = fedmpi.average(model, every=1)
    model.weight.data = torch.full((1, 3), 2.0, dtype=torch.bfloat16)
    fed.step()
    assert fed.federation.server.x[:3].tolist() == [2, 2, 2]
    model.load_state_dict({"weight": torch.full((1, 3), 3.0)})
    fed.step()
    assert fed.federation.server.x[:3].tolist() == [3, 3, 3]
    fed.set_model({"weight": torch.full((1, 3), 4.0)})
    assert fed.federation.server.x[:3].tolist() == [4, 4, 4] == model.weight[0].tolist()
    fed.finish()
    assert model.weight[0].tolist() == [4, 4, 4]


def test_parameters_of_several_types():
    model = nn.Sequential(nn.Linear(3, 3).to(torch.bfloat16), nn.LayerNorm(3))
    fed = fedmpi.join(model, algorithm="fedavg", local_steps=2, step_size=0.1)
    for _ in range(4):
        fed.step(lambda: model[1](model[0](torch.ones(3, dtype=torch.bfloat16)).float()).square().sum())
    fed.finish()
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    with pytest.raises(fedmpi.UserError, match="are torch.bfloat16 on cpu, torch.float64 on cpu: expected all of them"):
        fedmpi.average(nn.Sequential(nn.Linear(1, 1).to(torch.bfloat16), nn.Linear(1, 1).double()))


def test_the_optimizers_state_is_not_exchanged():
    model = ones()
    with pytest.raises(fedmpi.UserError, match=r"exchange = \('exp_avg',\): expected parameters in float32"):
        fedmpi.average(model, torch.optim.AdamW(model.parameters()), exchange="exp_avg")


def test_the_digits_of_an_average_are_kept(tmp_path):
    ended = start(2, PROGRAMS / "masters.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["well", "well"]


@pytest.mark.parametrize("freeze", ["0.*", "0.weight,0.bias"])
def test_what_is_frozen_is_neither_trained_nor_sent(freeze):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    before = [p.detach().clone() for p in model.parameters()]
    for fed in (fedmpi.join(model, "fedavg", 1, freeze=freeze), fedmpi.average(model, every=1, freeze=freeze)):
        assert fed.federation.server.x.numel() in (4, 32)
        fed.finish()
    assert all(map(torch.equal, before, model.parameters()))
    with pytest.raises(fedmpi.UserError, match="freeze = 3: expected names"):
        fedmpi.average(model, freeze=3)
    with pytest.raises(fedmpi.UserError, match="freeze = \\*: leaves nothing to train"):
        fedmpi.average(model, freeze="*")


def test_a_round_may_end_early():
    model = nn.Linear(2, 1)
    fed = fedmpi.average(model, every=5)
    fed.end_round()
    fed.step()
    assert not fed.averaged
    fed.end_round()
    assert fed.averaged and fed.accounts()["round"] == 1
    fed.finish()
