"""Flat vectors: parameters are views of them and stay so."""

import pytest
import torch
from torch import nn

from fedmpi.ground.errors import UserError
from fedmpi.oracles.flat_module import FlatModule


def network():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 36, 5),
        nn.Linear(5, 3, bias=False),
    )


def is_view(tensor, vector):
    begin, size = vector.data_ptr(), vector.numel() * vector.element_size()
    return begin <= tensor.data_ptr() < begin + size


@pytest.mark.parametrize("channels_last", [False, True])
def test_parameters_and_buffers_are_views(channels_last):
    module = network()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    flat = FlatModule(module, channels_last)
    assert flat.dim == sum(p.numel() for p in module.parameters())
    assert flat.num_buffers == 8
    assert all(is_view(p, flat.x) for p in module.parameters())
    assert is_view(module[1].running_mean, flat.buffers)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("channels_last", [False, True])
def test_flatten_and_views_are_inverse(channels_last):
    flat = FlatModule(network(), channels_last)
    vector = torch.randn(flat.dim)
    assert torch.equal(flat.flatten(flat.views(vector)), vector)
    assert [tuple(view.shape) for view in flat.views(vector)] == flat.shapes
    assert flat.segments[0].start == 0
    assert flat.segments[-1].stop == flat.dim


def test_views_survive_to_and_follow_the_vector():
    module = network()
    flat = FlatModule(module)
    module.to(torch.float64)  # replaces every parameter's memory behind our back
    vector = torch.randn(flat.dim, dtype=torch.float64)
    flat.point_at(vector, flat.buffers.double())
    assert all(is_view(p, vector) for p in module.parameters())
    module(torch.randn(2, 2, 8, 8, dtype=torch.float64)).sum().backward()
    vector.zero_()
    assert all((p == 0).all() for p in module.parameters())


def test_frozen_parameters_and_integer_buffers_stay_out():
    module = network()
    module[4].weight.requires_grad_(False)
    flat = FlatModule(module)
    assert "4.weight" not in flat.names
    assert not is_view(module[4].weight, flat.x)
    assert module[1].num_batches_tracked.dtype == torch.int64
    assert flat.num_buffers == 8


def test_a_module_without_parameters_is_refused():
    with pytest.raises(UserError, match="model ReLU has no trainable parameter"):
        FlatModule(nn.ReLU())
