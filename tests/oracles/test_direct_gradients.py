"""Large linear layers compute their weights' gradients in the gradient's row: the same gradients."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedmpi.oracles import flat_module as vectors
from fedmpi.oracles.flat_module import FlatModule


class Twice(nn.Module):
    """One layer used twice, and another once; 3-d inputs."""

    def __init__(self, bias):
        super().__init__()
        self.first = nn.Linear(6, 6, bias=bias)
        self.last = nn.Linear(6, 3, bias=bias)

    def forward(self, inputs):
        return self.last(torch.tanh(self.first(torch.tanh(self.first(inputs)))))


class Once(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 5, bias=bias), nn.Tanh(), nn.Linear(5, 3, bias=bias))

    def forward(self, inputs):
        return self.net(inputs)


@pytest.fixture(autouse=True)
def every_layer_is_large(monkeypatch):
    monkeypatch.setattr(vectors, "LARGE_LAYER", 1)


def loss_of(module):
    inputs = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return module(inputs).square().sum()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [Once, Twice])
def test_same_gradient(kind, bias):
    torch.manual_seed(0)
    module = kind(bias).double()
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(module), list(module.parameters()))])
    flat = FlatModule(module)
    for _ in range(2):
        row = torch.full_like(flat.x, torch.nan)
        loss = flat.gradient(loss_of, row)
        torch.testing.assert_close(row, wanted, rtol=1e-13, atol=1e-13)
        assert not loss.requires_grad


def test_nothing_is_copied():
    """What a weight's gradient needs is one product, written where it is wanted."""
    flat, plain = (FlatModule(Once(False).double(), direct_gradients=direct) for direct in (True, False))
    row, copied = torch.zeros_like(flat.x), []
    original = torch._foreach_copy_
    torch._foreach_copy_ = lambda to, tensors: copied.extend(tensors)
    try:
        flat.gradient(loss_of, row)
        assert row.abs().sum() > 0
        assert copied == []
        plain.gradient(loss_of, torch.zeros_like(row))
        assert len(copied) == 2
    finally:
        torch._foreach_copy_ = original


def test_losses_that_contain_gradients():
    """A penalty on the gradient at the inputs: the layer's backward pass is differentiated itself."""

    def penalty(module):
        inputs = torch.ones(2, 6, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(module(inputs).square().sum(), inputs, create_graph=True)
        return slope.square().sum()

    torch.manual_seed(0)
    module = Once(True).double()
    wanted = torch.autograd.grad(penalty(module), list(module.parameters()), materialize_grads=True)
    flat = FlatModule(module)
    row = torch.zeros_like(flat.x)
    flat.gradient(penalty, row)
    torch.testing.assert_close(row, torch.cat([g.flatten() for g in wanted]), rtol=1e-12, atol=1e-12)


def test_evaluation_and_autocast_go_the_usual_way():
    flat = FlatModule(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
    inputs = torch.ones(3, 8)
    with torch.no_grad():
        expected = functional.linear(functional.linear(inputs, *flat.parameters[:2]), *flat.parameters[2:])
        assert flat.module(inputs).equal(expected)
    row = torch.full_like(flat.x, torch.nan)

    def in_bfloat16(module):
        with torch.autocast("cpu", torch.bfloat16):
            return module(inputs).float().square().sum()

    flat.gradient(in_bfloat16, row)
    assert row.isfinite().all()
    assert row.dtype == torch.float32


def test_views_are_remembered_but_do_not_keep_the_vector():
    flat = FlatModule(Once(True))
    row = torch.zeros_like(flat.x)
    first = flat._known_views(row)
    assert flat._known_views(row) is first
    number = len(flat._views)
    del row
    assert len(flat._views) == number - 1
