"""Flat vectors: parameters are views of them and stay so."""

import pytest
import torch
from torch import nn

from fedmpi.algorithms import FAFED, FedAvg
from fedmpi.errors import UserError
from fedmpi.federation.rows import RowStore
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


@pytest.mark.parametrize("num_local", [1, 3])
def test_exchanged_rows_are_one_contiguous_block(num_local):
    state = RowStore(FAFED(), dim=5, num_buffers=2, num_local=num_local, dtype=torch.float32)
    region = state.region(("x", "m", "v"))
    assert (region.start, region.stop) == (0, 17)
    assert state.region(("m", "v")) == slice(5, 17)  # the buffers travel behind the last row
    assert state.region(("x",)) == slice(0, 5)
    with pytest.raises(ValueError, match="not consecutive"):
        state.region(("x", "v"))
    rows = state.client_rows(0)
    assert rows["m"].data_ptr() == rows["x"].data_ptr() + 5 * 4
    assert rows["v"].data_ptr() == rows["m"].data_ptr() + 5 * 4
    assert state.work_buffers.data_ptr() == rows["v"].data_ptr() + 5 * 4


def test_one_client_per_rank_copies_nothing():
    state = RowStore(FAFED(), dim=5, num_buffers=0, num_local=1, dtype=torch.float32)
    client, averaged = state.client_rows(0), state.averaged_rows()
    summed = state.sum(state.region(("x", "m", "v")), 1)
    for name in ("x", "m", "v"):
        assert client[name].data_ptr() == averaged[name].data_ptr()
    assert summed.data_ptr() == client["x"].data_ptr()


@pytest.mark.parametrize("num_turns", range(1, 9))
def test_sums_over_a_ranks_clients_are_pairwise(num_turns):
    state = RowStore(FedAvg(), dim=1, num_buffers=0, num_local=8, dtype=torch.float32)
    region = state.region(("x",))
    values = torch.rand(num_turns) * 10.0 ** torch.randint(-6, 6, (num_turns,))

    def tree(terms):
        if len(terms) == 1:
            return terms[0]
        left = 1 << ((len(terms) - 1).bit_length() - 1)
        return tree(terms[:left]) + tree(terms[left:])

    for turn, value in enumerate(values):
        state.begin_turn(turn, True, region)
        state.client_rows(turn)["x"].fill_(value)
        state.end_turn(turn, region, 1, turn)
    assert state.sum(region, num_turns).item() == tree(list(values)).item()


def test_nobody_working_sums_to_zero():
    for num_local in (1, 2):
        state = RowStore(FedAvg(), dim=3, num_buffers=0, num_local=num_local, dtype=torch.float32)
        state.client_rows(0)["x"].fill_(7)
        assert torch.equal(state.sum(state.region(("x",)), 0), torch.zeros(3))
