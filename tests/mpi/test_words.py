"""Rows that travel in codecs: what arrives is written down here again, and the bytes that are sent are counted."""

import numpy as np
import pytest
import torch

from fedmpi.aggregation import Layout, Moment
from fedmpi.aggregation.codecs.half import Half
from fedmpi.aggregation.codecs.random_k import RandomK
from fedmpi.aggregation.mean import Mean
from fedmpi.aggregation.robust import CentredClipping, Median
from fedmpi.aggregation.sending import Sending
from fedmpi.ground.streams import generator

DIM = 3000
KINDS = {"v": "square", "delta_c": "difference"}


def rows_of(client, number, num_rows):
    """What a client sends in an exchange: close to what the round began with, and four buffers behind it."""
    torch.manual_seed(100 * client + number + 1)
    return start_of(number, num_rows) + 1e-3 * torch.randn(num_rows * DIM + 4)


def start_of(number, num_rows):
    torch.manual_seed(number)
    return torch.randn(num_rows * DIM + 4)


def exchanged(link, sending, rows, clients, weights, device="cpu"):
    """[what three exchanges of some rows make], and the bytes that each of them sent."""
    layout = Layout(rows, DIM, len(rows) * DIM + 4, torch.float32, torch.device(device), kinds=KINDS)
    aggregation, _ = sending.opened(link, layout, clients)
    found, sent = [], []
    for number in range(3):
        aggregation.start = start_of(number, len(rows))
        aggregation.begin(Moment(number, 0, rows, slice(0, layout.numel), number, 7), weights)
        for client in clients:
            if client in weights:
                work = aggregation.block if len(clients) == 1 else torch.empty_like(aggregation.block)
                work.copy_(rows_of(client, number, len(rows)))
                aggregation.take(client, work)
        before = link.traffic.nbytes
        out = aggregation.block if len(clients) == 1 else torch.empty_like(aggregation.block)
        aggregation.average(out)
        found.append(out.clone())
        sent.append(link.traffic.nbytes - before)
    return found, sent


def placed(link):
    """(this rank's clients, weights of all that take part): ranks have one, two and no participants."""
    of_ranks = [[2 * rank] if rank % 2 else [2 * rank, 2 * rank + 1] for rank in range(link.size)]
    weights = {client: 1.0 + client % 3 for of_rank in of_ranks for client in of_rank if client != 2}
    return of_ranks[link.rank], weights


def same_everywhere(link, found):
    return all(torch.equal(torch.from_numpy(other).float(), found[-1]) for other in link.allgather(found[-1]))


def drawn_places(draw, k):
    """k of all coordinates, by the fewer ones that are drawn or left out."""
    drawn, fewer = set(), min(k, DIM - k)
    while len(drawn) < fewer:
        drawn.update(draw.integers(DIM, size=fewer - len(drawn)).tolist())
    return torch.tensor(sorted(drawn if fewer == k else {*range(DIM)} - drawn), dtype=torch.int64)


def rounded(values):
    return values.to(torch.bfloat16).float()


@pytest.mark.mpi
@pytest.mark.parametrize("transport", ["auto", "allreduce"])
def test_half_rounds_moves_on_both_ways(open_link, transport):
    link = open_link(transport)
    clients, weights = placed(link)
    found, sent = exchanged(link, Sending(codec=Half()), ("x", "v"), clients, weights)
    for number, mean in enumerate(found):
        start = start_of(number, 2)
        moves = [w * (start + rounded(rows_of(k, number, 2) - start)) for k, w in weights.items()]
        expected = start + rounded(sum(moves) / sum(weights.values()) - start)
        expected[DIM : 2 * DIM].clamp_(min=0)
        torch.testing.assert_close(mean, expected, rtol=0, atol=1e-4)  # a sum in another order may round otherwise
        assert (mean - expected).abs().mean() < 1e-7
    number_sent = sum(client in weights for client in clients)
    assert sent == [(2 * DIM + 4) * (1 + number_sent)] * 3  # half of two bytes for each word, there and back
    assert same_everywhere(link, found)


@pytest.mark.mpi
def test_the_mean_of_differences_is_that_of_what_was_read(open_link):
    link = open_link("auto")
    clients, weights = placed(link)
    found, sent = exchanged(link, Sending(codec=Half()), ("x", "delta_c"), clients, weights)
    start = start_of(2, 2)
    moves = sum(w * rounded(rows_of(k, 2, 2) - start).double() for k, w in weights.items()) / sum(weights.values())
    torch.testing.assert_close(found[2].double(), start + moves, rtol=0, atol=1e-6)
    number_sent = sum(client in weights for client in clients)
    assert sent == [(2 * DIM + 4) * (2 + number_sent)] * 3
    assert same_everywhere(link, found)


@pytest.mark.mpi
@pytest.mark.parametrize("transport", ["auto", "allreduce"])
@pytest.mark.parametrize("fraction", [0.1, 0.8, 1.0, 1e-9])
def test_random_k_sends_the_same_coordinates_of_every_row(open_link, transport, fraction):
    link = open_link(transport)
    clients, weights = placed(link)
    found, sent = exchanged(link, Sending(codec=RandomK(fraction=fraction)), ("x", "v"), clients, weights)
    k = max(1, round(fraction * DIM))
    for number, mean in enumerate(found):
        start = start_of(number, 2)
        exact = sum(w * rows_of(client, number, 2) for client, w in weights.items()) / sum(weights.values())
        places = drawn_places(generator(7, "random_k", number, 0), k)
        expected = start.clone()
        expected[places] += (exact - start)[places] * (DIM / k)
        expected[DIM + places] = exact[DIM + places]
        expected[DIM : 2 * DIM].clamp_(min=0)
        expected[2 * DIM :] = exact[2 * DIM :]
        torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-5 * DIM / k)
    assert sent == [4 * (2 * k + 4)] * 3
    assert same_everywhere(link, found)


@pytest.mark.mpi
@pytest.mark.parametrize("rule", [Median(), CentredClipping(radius=0.01)], ids=["median", "centred_clipping"])
def test_a_rule_works_on_what_it_reads(open_link, rule):
    link = open_link("auto")
    clients, _ = placed(link)
    weights = {int(client): 1.0 for client in link.allgatherv(clients)}
    if len(weights) < 3:
        return
    read, plain = (exchanged(link, Sending(rule, codec=c), ("x",), clients, weights)[0] for c in (Half(), None))
    for number, (a, b) in enumerate(zip(read, plain)):
        moved = (b - start_of(number, 1)).abs()
        assert 0 < (a - b).abs().max() < 0.01 * moved.max()


@pytest.mark.mpi
def test_means_on_one_rank_and_on_several_are_the_same(open_link):
    """A codec that loses nothing gives the mean."""
    link = open_link("auto")
    clients, weights = placed(link)
    whole = exchanged(link, Sending(codec=RandomK(fraction=1.0)), ("x", "v"), clients, weights)[0]
    plain = exchanged(link, Sending(Mean()), ("x", "v"), clients, weights)[0]
    for a, b in zip(whole, plain):
        assert np.abs((a - b)[:DIM]).max() < 1e-5
