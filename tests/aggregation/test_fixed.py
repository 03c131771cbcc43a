"""Sums of whole numbers: how far means are from the exact ones, and that nothing else decides about their bits."""

import dataclasses
import fractions
import functools
import math

import numpy as np
import pytest
import torch

import fedmpi
from fedmpi.aggregation import Layout, Moment
from fedmpi.aggregation.codecs.fixed import (
    LOWEST,
    Fixed,
    exponent_above,
    fraction_bits,
    put_mean_of_two,
    put_values,
    put_words,
    scratch,
    unit_of,
)
from fedmpi.aggregation.masked import Masked
from fedmpi.aggregation.mean import Mean
from fedmpi.aggregation.reproducible import Reproducible
from fedmpi.aggregation.robust import Median
from fedmpi.aggregation.sending import Sending, chosen
from fedmpi.aggregation.stages import Stage
from fedmpi.algorithms import FAFED, FedAvg
from fedmpi.comm.solo import SoloLink
from fedmpi.federation import Federation, Plan, Variables
from fedmpi.ground.errors import Diverged, UserError
from fedmpi.oracles import FunctionOracle
from fedmpi.oracles.flat_module import BufferPart


def mean_of(rows, weights, aggregation=None):
    """(what the aggregation makes of [n, d] rows, its F) where all clients are on one rank."""
    number, dim = rows.shape
    aggregation = aggregation or Reproducible()
    aggregation.open(SoloLink(), Layout(("x",), dim, dim, rows.dtype, "cpu"), range(number))
    aggregation.begin(Moment(0, 0, ("x",), slice(0, dim)), dict(enumerate(weights)))
    for client, row in enumerate(rows):
        aggregation.take(client, row.clone())
    exponent = max(exponent_above(w * float(row.abs().max())) for w, row in zip(weights, rows))
    aggregation.scale([(dim, exponent)], [])
    out = torch.empty(dim, dtype=rows.dtype)
    aggregation.average(out)
    return out, fraction_bits(exponent, number)


def drawn(number, dim, dtype, low, seed=0):
    """Values of all sizes from the smallest to 1, denormal ones among them, and some zeros."""
    draw = np.random.default_rng(seed)
    values = draw.standard_normal((number, dim)) * 2.0 ** draw.uniform(low, 0, (number, dim))
    return torch.from_numpy(values * (draw.random((number, dim)) > 0.01)).to(dtype)


@pytest.mark.rarely
@pytest.mark.parametrize("largest", [1.0, 2.0**-130, 1e30])
def test_means_of_a_million_float32_vectors_are_the_exact_ones_but_for_a_rounding(largest):
    weights = [1.0, 3.0, 0.5, 250.0]
    rows = (drawn(4, 1_000_000, torch.float64, -40) * largest / 1e3).float()
    mean, bits = mean_of(rows, weights)
    weighted = rows.double() * torch.tensor(weights, dtype=torch.float64)[:, None]  # exact
    exact = np.array([math.fsum(column) for column in weighted.T.tolist()]) / sum(weights)
    unit = np.spacing(np.abs(mean.numpy())).astype(np.float64)
    bound = len(weights) / sum(weights) * math.ldexp(1, -bits - 1) + unit / 2 * (1 + 2**-20)
    assert (np.abs(mean.numpy().astype(np.float64) - exact) <= bound).all()


@pytest.mark.parametrize("low", [-40, -1074])
@pytest.mark.parametrize("largest", [1.0, 2.0**-1040])
def test_so_are_those_of_float64(low, largest):
    rows = drawn(3, 3000, torch.float64, low, 1) * largest
    mean, bits = mean_of(rows, [1.0, 1.0, 1.0])
    of_words = fractions.Fraction(1, 2) * (fractions.Fraction(2) ** -bits)
    for column, found in zip(rows.T.tolist(), mean.tolist()):
        exact = sum(map(fractions.Fraction, column)) / 3
        assert abs(fractions.Fraction(found) - exact) <= of_words + fractions.Fraction(math.ulp(found)) / 2


@pytest.mark.parametrize("exponent", [-120, -88, -40, 0, 8, 120])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.5, 8.0), (2.0, 2.0), (1.0, 3.0)])
def test_the_mean_of_two_float32_vectors_is_that_of_their_words_to_the_bit(weights, exponent):
    largest = 2.0**exponent / max(weights)
    rows = [(row * largest).float().clamp(-largest, largest).mul_(1 - 2**-24) for row in drawn(2, 40_000, None, -70)]
    rows[1][:9000] = -rows[0][:9000]  # what cancels, and words that are 0
    unit, memory = unit_of(fraction_bits(exponent, 2), torch.float32), scratch(len(rows[0]))
    found, expected = np.full((2, len(rows[0])), np.nan, np.float32)
    is_made = put_mean_of_two(list(zip(weights, (row.numpy() for row in rows))), unit, sum(weights), memory, found)
    words = np.empty((2, len(rows[0])), np.int64)
    for row, weight, of_row in zip(rows, weights, words):
        put_words(row.numpy(), weight, unit, memory, of_row)
    put_values(words.sum(0), sum(weights) * unit, memory, expected)
    assert is_made == (math.frexp(sum(weights))[0] == 0.5 and 3.0 not in weights and exponent > -80)
    assert not is_made or found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("number", [1, 2, 3, 100, 128])
def test_words_of_the_largest_values_do_not_overflow(number):
    largest = math.nextafter(2.0**8, 0)
    for sign in (1, -1):
        mean, _ = mean_of(torch.full((number, 3), sign * largest, dtype=torch.float64), [1.0] * number)
        assert torch.equal(mean, torch.full((3,), sign * largest, dtype=torch.float64))
    rows = torch.tensor([[2.0**-48], [255.0]], dtype=torch.float64).repeat(64, 1)
    assert mean_of(rows, [1.0] * 128)[0] == (255 + 2.0**-48) / 2, "48 bits of 128 clients"


def test_the_order_of_clients_does_not_matter_and_that_of_a_float_sum_does():
    rows = drawn(7, 1000, torch.float32, -20)
    order = [3, 6, 0, 1, 5, 2, 4]
    weights = torch.tensor([1.0, 2.0, 0.3, 1.0, 7.0, 1.0, 1.0], dtype=torch.float64)
    first, second = (mean_of(rows[o], weights[o].tolist())[0] for o in (list(range(7)), order))
    assert torch.equal(first, second)
    rows = rows.float()
    assert not torch.equal(sum(rows), sum(rows[order]))


@pytest.mark.parametrize(
    ("value", "exponent"), [(0.0, LOWEST), (1.0, 8), (255.9, 8), (256.0, 16), (0.99, 0), (5e-324, -1072)]
)
def test_exponents_are_multiples_of_eight(value, exponent):
    assert exponent_above(value) == exponent


def gradient(client, x, sample):
    return (1 + 0.1 * torch.sin(torch.arange(x.numel(), dtype=x.dtype) * sample + client)) * (x - client)


@dataclasses.dataclass(kw_only=True)
class Larger(Stage):
    """Makes rows larger than they were when the client's turn ended."""

    keeps_finite = True

    def apply(self, sent):
        for row in sent.rows.values():
            row.mul_(1e6)


@pytest.mark.parametrize("algorithm", [FedAvg(), FAFED()])
@pytest.mark.parametrize("stages", [(), (Larger(),)])
def test_a_federation_averages_as_the_mean_does(algorithm, stages):
    def trace(aggregation):
        sending = Sending(aggregation, stages)
        return fedmpi.simulate(algorithm, gradient, [1.0, 2.0], num_clients=5, rounds=2, sending=sending)[-1]

    exact, plain = trace(Reproducible()), trace(Mean())
    for name, row in plain["rows"].items():
        torch.testing.assert_close(exact["rows"][name], row, rtol=1e-12, atol=0)


def test_the_codec_fixed_makes_the_mean_reproducible():
    assert Sending(Mean(), codec=Fixed()) == Sending(Reproducible()) == chosen("mean", [], "fixed")
    assert Sending(Masked(), codec=Fixed()) == Sending(Masked()) == chosen("masked", [], "fixed")
    with pytest.raises(UserError, match="codec fixed does not work with aggregation median"):
        Sending(Median(), codec=Fixed())


def test_values_that_are_not_finite_end_the_run_before_the_sum():
    def spoiled(client, x, sample):
        return gradient(client, x, sample) * (torch.nan if client == 2 else 1)

    with pytest.raises(Diverged, match="row x of client 2 on rank 0 has values that are not finite"):
        fedmpi.simulate(FedAvg(), spoiled, [1.0, 2.0], rounds=2, sending=Sending(Reproducible()))


@pytest.mark.parametrize("wide", [False, True])
def test_a_large_buffer_that_one_client_makes_small_counts_with_what_the_others_have(wide):
    """Only the last client, which has changed it, looks at it before the sum, in which it is 1e6 of the others."""

    class Small(FunctionOracle):
        def gradient(self, z, xi):
            if self.client.index == 2:
                self.client.buffers[:2].view(dtype)[0] = 1e-3
            return super().gradient(z, xi)

    dtype = torch.float64 if wide else torch.float32
    parts, buffers = [BufferPart("large", 0, 1, dtype)], torch.zeros(2)
    buffers.view(dtype)[0] = 1e6
    variables = Variables(torch.tensor([1.0, 2.0]), buffers, buffer_parts=parts)
    oracles = dict.fromkeys(range(3), functools.partial(Small, gradient))
    federation = Federation(FedAvg(), SoloLink(), oracles, Plan(3, 1), variables, Sending(Reproducible()))
    federation.start()
    federation.run_round()
    assert parts[0].of(federation.store.buffers).item() == pytest.approx((2e6 + 1e-3) / 3, rel=1e-7)
