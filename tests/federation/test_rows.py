"""A rank's rows: exchanged ones are one block, sums are pairwise, nothing is copied."""

import pytest
import torch

from fedmpi.aggregation import Layout, Moment
from fedmpi.aggregation.mean import Mean
from fedmpi.algorithms import FAFED, FedAvg, LocalAMSGrad, NaiveAdaptiveFedAvg
from fedmpi.comm.solo import SoloLink
from fedmpi.federation.buffers import SentBuffers
from fedmpi.federation.memory import num_bytes
from fedmpi.federation.rows import RowStore
from fedmpi.oracles.flat_module import BufferPart


def sent(size):
    return SentBuffers(torch.zeros(size), [BufferPart("buffer", 0, size, torch.float32)])


@pytest.mark.parametrize("num_local", [1, 3])
def test_exchanged_rows_are_one_contiguous_block(num_local):
    store = RowStore(FAFED(), dim=5, buffers=sent(2), num_local=num_local, dtype=torch.float32)
    rows = store.client_rows(0)
    assert rows["m"].data_ptr() == rows["x"].data_ptr() + 5 * 4
    assert rows["v"].data_ptr() == rows["m"].data_ptr() + 5 * 4
    store.tail.sent.send([1])
    store.begin_exchange(("m", "v"), True)
    region = store.region_of(store.work)
    assert region.data_ptr() == rows["m"].data_ptr() and region.numel() == 12, "they are sent behind"
    assert store.buffers.numel() == 2
    with pytest.raises(ValueError, match="not consecutive"):
        store.begin_exchange(("x", "v"), True)


def test_one_client_per_rank_copies_nothing():
    store = RowStore(FAFED(), dim=5, buffers=None, num_local=1, dtype=torch.float32)
    client, averaged = store.client_rows(0), store.averaged_rows()
    for name in ("x", "m", "v"):
        assert client[name].data_ptr() == averaged[name].data_ptr()
    assert store.aggregation.block.data_ptr() == client["x"].data_ptr()


def summed(aggregation, values, participants):
    """The sum that x is the mean of after an exchange in which each participant sends its value."""
    divided_by = []

    class Summing(SoloLink):
        def average(self, block, divisor, out, kind):
            divided_by.append(divisor)
            out.copy_(block)

    aggregation.open(Summing(), Layout(("x",), 1, 1, torch.float32, torch.device("cpu")), range(len(values)))
    store = RowStore(FedAvg(), 1, None, len(values), torch.float32, aggregation=aggregation)
    store.begin_exchange(("x",), True)
    aggregation.begin(Moment(0, 0, ("x",), store.region), dict.fromkeys(participants, 1))
    for client in participants:
        store.begin_turn(client)
        store.client_rows(client)["x"].fill_(values[client])
        store.end_turn(client, client)
    store.aggregation.average(store.region_of(store.block))
    assert divided_by == [len(participants)]
    return store.averaged_rows()["x"].item()


@pytest.mark.parametrize("num_turns", range(1, 9))
def test_sums_over_a_ranks_clients_are_pairwise(num_turns):
    values = torch.rand(num_turns) * 10.0 ** torch.randint(-6, 6, (num_turns,))

    def tree(terms):
        if len(terms) == 1:
            return terms[0]
        left = 1 << ((len(terms) - 1).bit_length() - 1)
        return tree(terms[:left]) + tree(terms[left:])

    assert summed(Mean(), values, range(num_turns)) == tree(list(values)).item()


@pytest.mark.parametrize("num_local", [1, 2])
def test_without_participants_the_sum_is_zero(num_local):
    store = RowStore(FedAvg(), dim=3, buffers=None, num_local=num_local, dtype=torch.float32)
    store.client_rows(0)["x"].fill_(7)
    store.begin_exchange(("x",), True)
    store.aggregation.begin(Moment(0, 0, ("x",), store.region), {num_local: 1})  # of another rank
    store.aggregation.average(store.region_of(store.block))
    assert torch.equal(store.averaged_rows()["x"], torch.zeros(3))


@pytest.mark.parametrize("poison", [False, True])
def test_scratch_rows_are_filled_with_nan_only_if_asked_for(poison):
    store = RowStore(NaiveAdaptiveFedAvg(), dim=3, buffers=None, num_local=2, dtype=torch.float32, poison=poison)
    store.begin_turn(1)
    assert store.client_rows(1)["denominator"].isnan().all() == poison
    assert not store.client_rows(1)["x"].isnan().any()


@pytest.mark.parametrize(
    ("algorithm", "num_local", "num_blocks", "num_vectors", "num_rows"),
    [
        (FedAvg(), 1, 1, 2, 0),  # the buffers, and the values of those that are not sent
        (FedAvg(), 5, 2 + 3, 3, 0),  # work, average; sums of 1, 2 and 4 clients
        (LocalAMSGrad(), 2, 2 + 2 + 2, 3 + 2, 2 * 2 + 1),  # what is to be sent of each; m, v of each, scratch
    ],
)
def test_bytes_are_those_of_all_rows_and_sums(algorithm, num_local, num_blocks, num_vectors, num_rows):
    store = RowStore(algorithm, dim=100, buffers=sent(7), num_local=num_local, dtype=torch.float32)
    block = 100 * len(algorithm.exchanged) + 7
    num_rows += len(algorithm.server_rows)
    assert num_bytes(store) == 4 * (num_blocks * block + 7 * num_vectors + 100 * num_rows)
