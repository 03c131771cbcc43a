"""A rank's rows: exchanged ones are one block, sums are pairwise, nothing is copied."""

import pytest
import torch

from fedmpi.algorithms import FAFED, FedAvg
from fedmpi.federation.rows import RowStore


def make_store(algorithm, dim, num_local, num_buffers=0):
    return RowStore(algorithm, dim, num_buffers, num_local, torch.float32)


@pytest.mark.parametrize("num_local", [1, 3])
def test_exchanged_rows_are_one_contiguous_block(num_local):
    store = make_store(FAFED(), 5, num_local, num_buffers=2)
    # the buffers travel behind the last row
    for rows, start, stop in ((("x", "m", "v"), 0, 17), (("m", "v"), 5, 17), (("x",), 0, 5), ((), 0, 0)):
        store.begin_exchange(rows, first_in_round=True)
        assert store.averages().numel() == stop - start
        if rows:
            assert store.averages().data_ptr() == store.block[start:].data_ptr()
    with pytest.raises(ValueError, match="not consecutive"):
        store.begin_exchange(("x", "v"), first_in_round=True)
    rows = store.client_rows(0)
    assert rows["m"].data_ptr() == rows["x"].data_ptr() + 5 * 4
    assert rows["v"].data_ptr() == rows["m"].data_ptr() + 5 * 4
    assert store.work_buffers.data_ptr() == rows["v"].data_ptr() + 5 * 4


def test_one_client_per_rank_copies_nothing():
    store = make_store(FAFED(), 5, num_local=1)
    client, averaged = store.client_rows(0), store.averaged_rows()
    store.begin_exchange(("x", "m", "v"), first_in_round=True)
    store.begin_turn(0)
    store.end_turn(0, weight=1)
    for name in ("x", "m", "v"):
        assert client[name].data_ptr() == averaged[name].data_ptr()
    assert store.sum().data_ptr() == store.averages().data_ptr() == client["x"].data_ptr()


@pytest.mark.parametrize("num_turns", range(1, 9))
def test_sums_over_a_ranks_clients_are_pairwise(num_turns):
    store = make_store(FedAvg(), 1, num_local=8)
    values = torch.rand(num_turns) * 10.0 ** torch.randint(-6, 6, (num_turns,))

    def tree(terms):
        if len(terms) == 1:
            return terms[0]
        left = 1 << ((len(terms) - 1).bit_length() - 1)
        return tree(terms[:left]) + tree(terms[left:])

    store.begin_exchange(("x",), first_in_round=True)
    for turn, value in enumerate(values):
        store.begin_turn(turn)
        store.client_rows(turn)["x"].fill_(value)
        store.end_turn(turn, weight=1)
    assert store.sum().item() == tree(list(values)).item()


def test_nobody_working_sums_to_zero():
    for num_local in (1, 2):
        store = make_store(FedAvg(), 3, num_local)
        store.client_rows(0)["x"].fill_(7)
        store.begin_exchange(("x",), first_in_round=True)
        assert torch.equal(store.sum(), torch.zeros(3))
