"""The gradient of a minibatch in parts is that of the whole."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

import fedmpi
from fedmpi.data.sampler import EpochSampler
from fedmpi.federation.client import Client
from fedmpi.oracles.autograd_kind import Autograd
from fedmpi.oracles.base import LocalObjective
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.oracles.micro_batches import micro_batches

INPUTS, LABELS = torch.randn(20, 6, generator=torch.Generator().manual_seed(1)).double(), torch.arange(20) % 3


class Rows:
    """The least of a task: rows and labels in memory; it notes the sizes of the minibatches of its losses."""

    carries = False

    def __init__(self):
        self.sizes = []

    def batch(self, client, indices):
        return INPUTS[indices], LABELS[indices]

    def loss(self, module, batch):
        self.sizes.append(len(batch[1]))
        return functional.cross_entropy(module(batch[0]), batch[1])


def make(module, accumulate, batch_size=10, task=None):
    flat = FlatModule(module.double())
    kind = Autograd(accumulate=accumulate)
    task = task or Rows()
    objective = LocalObjective(flat, task, EpochSampler(20, batch_size, 8, seed=0, client=0))
    return flat, task, kind.make(Client(0, buffers=flat.buffers), objective, kind.workspace(flat))


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize(("accumulate", "sizes"), [(3, [4, 3, 3]), (10, [1] * 10), (50, [1] * 10)])
def test_the_sum_over_the_parts_is_the_gradient_of_the_whole(accumulate, sizes):
    flat, _, whole = make(linear(), 1)
    _, task, in_parts = make(linear(), accumulate)
    z, z_prev = torch.randn(2, flat.dim, dtype=torch.float64).unbind()
    expected = [row.clone() for row in whole.gradient_pair(z, z_prev, whole.draw())]
    found = in_parts.gradient_pair(z, z_prev, in_parts.draw())
    torch.testing.assert_close(found, tuple(expected))
    torch.testing.assert_close(in_parts.take_losses(), whole.take_losses())
    assert task.sizes == 2 * sizes and in_parts.client.num_gradients == 2


def test_both_gradients_of_a_pair_have_the_same_dropout_masks():
    flat, _, oracle = make(nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 3)), 4)
    first, second = oracle.gradient_pair(flat.x, flat.x.clone(), oracle.draw())
    assert torch.equal(first, second)


def test_batch_norm_is_one_line_unless_it_is_frozen():
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(fedmpi.UserError, match="accumulate = 2: '1' has statistics of a whole minibatch"):
        make(module, 2)
    module[1].requires_grad_(False)
    make(module, 2)


def test_minibatches_of_many_kinds():
    batch = {"ids": torch.arange(5), "more": [torch.eye(5), (torch.zeros(5, 2), "text")], "number": 3}
    parts = micro_batches(batch, 2)
    assert [share for share, _ in parts] == [0.6, 0.4]
    assert torch.equal(torch.cat([part["ids"] for _, part in parts]), batch["ids"])
    assert parts[1][1]["more"][0].shape == (2, 5) and parts[1][1]["more"][1][1] == "text" and parts[0][1]["number"] == 3


@dataclasses.dataclass
class Other:
    ids: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ((torch.zeros(3), torch.zeros(4)), r"tensors of lengths \[3, 4\]"),
        (Other(torch.zeros(3)), "a Other"),
        (torch.zeros(()), r"tensors of lengths \[0\]"),
    ],
)
def test_other_minibatches_are_one_line(batch, found):
    with pytest.raises(fedmpi.UserError, match=f"accumulate = 2: a minibatch is {found}: expected tensors"):
        micro_batches(batch, 2)


def test_a_graph_of_a_whole_minibatch_is_one_line():
    with pytest.raises(fedmpi.UserError, match="accumulate = 2: a CUDA graph is of one whole minibatch"):
        Autograd(accumulate=2, compile="cuda_graph")
