"""Rows that travel in half precision: what arrives is written down here again, and half of the bytes are sent."""

import pytest
import torch

from fedmpi.aggregation import Layout, Moment
from fedmpi.aggregation.half import Half

DIM = 3000


def rows_of(client, number):
    """What a client sends in an average: close to what all clients have sent before."""
    torch.manual_seed(0)
    first = torch.randn(2 * DIM)
    torch.manual_seed(100 * client + number + 1)
    return first + number * 1e-3 * torch.randn(2 * DIM)


def averages(link, clients, weights):
    """[the average of each of three exchanges], and the bytes that each of them sent."""
    half = Half()
    half.open(link, Layout(("x", "v"), DIM, 2 * DIM, torch.float32, torch.device("cpu")), clients)
    found, sent = [], []
    for number in range(3):
        half.begin(Moment(number, 0, ("x", "v"), slice(0, 2 * DIM)), weights)
        for client in clients:
            half.block.copy_(rows_of(client, number))
            half.add(client, half.block)
        before = link.traffic.nbytes
        half.average(half.block)
        found.append(half.block.clone())
        sent.append(link.traffic.nbytes - before)
    return found, sent


@pytest.mark.mpi
@pytest.mark.parametrize("transport", ["auto", "allreduce"])
def test_x_is_sent_as_a_difference_and_v_as_it_is(open_link, transport):
    link = open_link(transport)
    clients = [2 * link.rank, 2 * link.rank + 1][: 1 if link.rank == 1 else 2]
    of_ranks = [[2 * rank, 2 * rank + 1][: 1 if rank == 1 else 2] for rank in range(link.size)]
    weights = {client: 1.0 + client for of_rank in of_ranks for client in of_rank}
    found, sent = averages(link, clients, weights)
    exact = [sum(w * rows_of(k, n).double() for k, w in weights.items()) / sum(weights.values()) for n in range(3)]
    torch.testing.assert_close(found[0].double(), exact[0], rtol=1e-6, atol=1e-6)  # the first is sent as it is
    for number in (1, 2):
        last = torch.cat([found[number - 1][:DIM], torch.zeros(DIM)])  # of x
        rounded = []
        for of_rank in of_ranks:
            sums = sum(weights[client] * (rows_of(client, number) - last) for client in of_rank)
            rounded.append(sums.to(torch.bfloat16))
        mean = (torch.stack(rounded).float().sum(0) / sum(weights.values())).to(torch.bfloat16)
        assert torch.equal(found[number], last + mean)
        errors, sizes = (found[number] - exact[number]).abs(), (exact[number] - last).abs()
        assert errors[:DIM].max() < 0.02 * sizes[:DIM].max() < 2e-4  # far less than a value in bfloat16 can say
        assert (errors[DIM:] <= 0.01 * sizes[DIM:] + 1e-4).all()
    assert sent == [2 * DIM * 4, 2 * DIM * 2, 2 * DIM * 2]
    for other in link.allgather(found[-1]):
        assert torch.equal(torch.from_numpy(other).float(), found[-1])


@pytest.mark.mpi
def test_it_goes_on_from_its_state(open_link):
    link = open_link("auto")
    weights = dict.fromkeys(range(link.size), 1.0)
    layout = Layout(("x", "v"), DIM, 2 * DIM, torch.float32, torch.device("cpu"))
    (*_, expected), _ = averages(link, [link.rank], weights)
    half, again = Half(), Half()
    for number in range(3):
        one = again if number == 2 else half
        if number in (0, 2):
            one.open(link, layout, [link.rank])
        if number == 2:
            again.restore(half.state())
        one.begin(Moment(number, 0, ("x", "v"), slice(0, 2 * DIM)), weights)
        one.block.copy_(rows_of(link.rank, number))
        one.add(link.rank, one.block)
        one.average(one.block)
    assert torch.equal(again.block, expected)
