"""A rank's rows: exchanged ones are one block, sums are pairwise, nothing is copied."""

import pytest
import torch

from fedmpi.algorithms import FAFED, FedAvg
from fedmpi.federation.rows import RowStore


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
