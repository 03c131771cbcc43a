"""The autograd oracle: the right gradient, the same noise for both of a pair, statistics moved once."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedmpi.data.sampler import EpochSampler
from fedmpi.federation.client import Client
from fedmpi.ground.streams import FIRST, WHOLE
from fedmpi.models.cnn import FashionCNN, LambCNN
from fedmpi.oracles import AutogradOracle, captured
from fedmpi.oracles.base import LocalObjective
from fedmpi.oracles.drawing import may_draw
from fedmpi.oracles.flat_module import FlatModule

INPUTS, LABELS = torch.randn(20, 6, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 3


class Rows:
    """The least of a task: rows and labels in memory."""

    def batch(self, client, indices):
        return INPUTS[indices], LABELS[indices]

    def loss(self, module, batch):
        return functional.cross_entropy(module(batch[0]), batch[1])


def make(module, batch_size=5, **settings):
    flat = FlatModule(module)
    return flat, make_oracle(flat, 0, batch_size, **settings)


def make_oracle(flat, client, batch_size=5, **settings):
    sampler = EpochSampler(20, batch_size, 8, seed=0, client=client)
    objective = LocalObjective(flat, Rows(), sampler, **settings)
    return AutogradOracle(Client(client, buffers=flat.buffers), objective, torch.zeros(2, flat.dim))


def linear():
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def expected_gradient(module, inputs, labels):
    """By plain PyTorch, on a copy of nothing but the module itself."""
    loss = functional.cross_entropy(module(inputs), labels)
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(module.parameters()))])


def test_gradient_at_any_vector_is_pytorchs():
    flat, oracle = make(linear())
    for _ in range(3):
        z = torch.randn(flat.dim)
        sample = oracle.draw()
        found = oracle.gradient(z, sample).clone()
        flat.point_at(z)
        torch.testing.assert_close(found, expected_gradient(flat.module, *sample.batch))


def test_a_pass_draws_every_sample_once_and_the_first_batch_is_apart():
    _, oracle = make(linear(), batch_size=6)
    sampler = oracle._objective.sampler
    drawn = [sampler(t) for t in range(8)]
    for first in (0, 4):
        assert sorted(torch.cat(drawn[first : first + 4]).tolist()) == list(range(20))
    assert [len(d) for d in drawn[:4]] == [6, 6, 6, 2]
    assert not torch.equal(drawn[0], drawn[4])
    assert len(sampler(FIRST)) == 8
    assert sampler(WHOLE).tolist() == list(range(20))
    assert torch.equal(sampler(1), drawn[1])  # any draw at any time


class ShakenRows(Rows):
    """Every batch is made with random numbers, as augmentation does."""

    def batch(self, client, indices):
        return INPUTS[indices] + torch.rand(len(indices), 6), LABELS[indices]


def test_samples_do_not_depend_on_how_many_are_made_ahead():
    drawn = []
    for expected in (1, 3, 20):
        flat, oracle = make(nn.Sequential(nn.Dropout(), linear()))
        oracle._task = ShakenRows()
        oracle.expect(expected)
        batches = []
        for t in range(7):
            if t == 5:
                oracle.expect(expected)
            batches.append(oracle.draw())
            oracle.gradient(flat.x, batches[-1])  # moves torch's generator
        drawn.append(batches)
    for one, two in ((drawn[0], drawn[1]), (drawn[0], drawn[2])):
        for a, b in zip(one, two):
            assert (a.number, a.noise) == (b.number, b.noise)
            assert all(map(torch.equal, a.batch, b.batch))


def test_no_more_is_made_ahead_than_asked_for():
    made = []
    _, oracle = make(linear())
    oracle.sample = lambda number, sample=oracle.sample: made.append(number) or sample(number)
    oracle.expect(3)
    [oracle.draw() for _ in range(4)]
    assert made == [0, 1, 2, 3]


class Shaky(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs + torch.rand_like(inputs))


def hooked():
    module = linear()
    module[0].register_forward_hook(lambda part, inputs, outputs: functional.dropout(outputs))
    return module


@pytest.mark.parametrize(
    ("module", "may"),
    [
        (linear(), False), (FashionCNN((1, 28, 28), 10), False), (nn.Sequential(linear(), nn.BatchNorm1d(3)), False),
        (LambCNN((1, 28, 28), 10), True), (nn.Sequential(linear(), nn.RReLU()), True), (nn.LSTM(6, 3), True),
        (nn.Sequential(Shaky(6, 3)), True), (hooked(), True),
    ],
)  # fmt: skip
def test_only_a_module_of_layers_that_never_draw_needs_no_seed(module, may):
    assert may_draw(FlatModule(module).module) is may


def test_a_pair_sees_the_same_dropout_mask():
    module = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 3))
    flat, oracle = make(module)
    for _ in range(3):
        g, g_prev = oracle.gradient_pair(flat.x, flat.x.clone(), oracle.draw())
        assert torch.equal(g, g_prev)
    sample = oracle.draw()
    torch.manual_seed(123)  # what others do to the global stream does not matter
    first = oracle.gradient(flat.x, sample).clone()
    torch.randn(7)
    assert torch.equal(oracle.gradient(flat.x, sample), first)
    other_noise = dataclasses.replace(sample, noise=oracle.draw().noise)
    assert not torch.equal(oracle.gradient(flat.x, other_noise), first)


def test_a_pair_moves_batch_norm_statistics_once():
    def statistics(evaluate):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        flat, oracle = make(module)
        evaluate(flat, oracle, oracle.draw())
        return flat.buffers.clone(), module[1].num_batches_tracked.item()

    once, count = statistics(lambda flat, oracle, xi: oracle.gradient(flat.x, xi))
    pair, pair_count = statistics(lambda flat, oracle, xi: oracle.gradient_pair(flat.x, flat.x + 1, xi))
    assert torch.equal(once, pair)
    assert count == pair_count == 1


def test_integer_buffers_are_each_clients_own():
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3))
    flat = FlatModule(module)
    first, second = (make_oracle(flat, client) for client in (0, 1))
    counts = []
    for oracle in (first, first, second, first):
        oracle.gradient(flat.x, oracle.draw())
        counts.append(module[1].num_batches_tracked.item())
    assert counts == [1, 2, 1, 3]
    assert [oracle.client.counters[0].item() for oracle in (first, second)] == [3, 1]


def test_losses_are_those_of_the_first_of_a_pair():
    flat, oracle = make(linear())
    sample = oracle.draw()
    oracle.gradient_pair(flat.x, flat.x + 10, sample)
    flat.point_at(flat.x)
    with torch.no_grad():
        loss = functional.cross_entropy(flat.module(sample.batch[0]), sample.batch[1]).item()
    (found,) = oracle.take_losses()
    assert abs(found.item() - loss) < 1e-6
    assert oracle.take_losses() == []
    assert oracle.client.num_gradients == 2


def test_clipping_comes_before_weight_decay_and_leaves_small_gradients_alone():
    flat, plain = make(linear())
    z = torch.randn(flat.dim)
    g = plain.gradient(z, plain.draw()).clone()
    norm = torch.linalg.vector_norm(g)
    for clip_norm, factor in ((norm / 2, 0.5), (norm * 2, 1.0)):
        _, oracle = make(linear(), clip_norm=float(clip_norm), weight_decay=0.1)
        torch.testing.assert_close(oracle.gradient(z, oracle.draw()), factor * g + 0.1 * z)


def test_a_minibatch_of_a_graph_is_copied_with_all_its_parts():
    """Which a GPU is needed to replay; tensors in nested tuples are copied, and numbers say which graph it is."""
    batch, other = ((torch.ones(2), (torch.zeros(3), 4)) for _ in range(2))
    kept = captured._clone(batch)
    other[0].fill_(5.0)
    other[1][0].fill_(6.0)
    captured._copy(other, kept)
    assert (kept[0].tolist(), kept[1][0].tolist(), kept[1][1]) == ([5.0, 5.0], [6.0, 6.0, 6.0], 4)
    assert batch[0].tolist() == [1.0, 1.0] and other[0].tolist() == [5.0, 5.0]
    assert captured._shape(batch) == captured._shape(kept) != captured._shape((torch.ones(2), (torch.zeros(3), 5)))
    assert captured._shape((torch.ones(2), (torch.zeros(3), "a word"))) is None
    assert captured._shape(torch.ones(2, 3)) != captured._shape(torch.ones(3, 2).t()), "other strides"
    assert captured._shape(torch.ones(2)) != captured._shape(torch.ones(2).double())
