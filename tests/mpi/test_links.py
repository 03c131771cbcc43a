"""What every link promises, on the ranks that there are; with one rank, MPI's link and the solo link agree."""

import time

import numpy as np
import pytest
import torch
from mpi4py import MPI

from fedmpi.cli.bench.timing import Case, time_cases
from fedmpi.comm.agreement import agree
from fedmpi.comm.solo import SoloLink
from fedmpi.comm.sums.mpi import MPILink
from fedmpi.ground.errors import AgreedUserError, UserError
from fedmpi.own_loop.checks import check_known

pytestmark = pytest.mark.mpi


@pytest.fixture(params=["mpi", "solo"])
def any_link(request):
    """A link over all ranks; the solo link only where there is one."""
    if request.param == "solo" and MPI.COMM_WORLD.size > 1:
        pytest.skip("the solo link has one rank")
    link = MPILink() if request.param == "mpi" else SoloLink()
    yield link
    link.close()


def test_the_ranks_are_counted(any_link):
    assert (any_link.rank, any_link.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert (any_link.local_rank, any_link.local_size) == (any_link.rank, any_link.size)  # one machine
    assert any_link.num_nodes == 1
    assert any_link.usable_cores >= 1
    assert any_link.oversubscribed == (any_link.size > any_link.usable_cores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 5, 100_003])
def test_averages_in_place_and_elsewhere(any_link, dtype, size):
    block = any_link.allocate(size, dtype)
    assert not block.any()
    out = torch.full((size,), 7, dtype=dtype)
    block.fill_(any_link.rank + 1)
    any_link.average(block, 4, out)
    expected = sum(range(1, any_link.size + 1)) / 4
    assert torch.equal(out, torch.full((size,), expected, dtype=dtype))
    block.fill_(any_link.rank + 1)
    any_link.average(block[:1], 1, block[:1])
    assert block[0] == 4 * expected
    assert (block[1:] == any_link.rank + 1).all()
    nbytes = size * block.element_size()
    assert any_link.traffic.collectives == 2
    assert any_link.traffic.nbytes == nbytes + block.element_size()
    assert any_link.traffic.largest == nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 1000, 16383, 16384, 100_003])
def test_a_copy_has_the_values_of_all_ranks(any_link, dtype, size):
    copy = any_link.allocate_copy(size, dtype)
    assert copy.vector.shape == (size,) and copy.vector.dtype == dtype and not copy.vector.any()
    any_link.barrier()
    for number in range(1, 4):
        values = torch.arange(size, dtype=dtype) * number
        copy.take(values)
        assert torch.equal(copy.vector, values)
        any_link.barrier()


@pytest.mark.parametrize("nodes", ["one", "two", "alone"])
def test_the_ranks_of_a_node_have_one_copy(nodes):
    """Each writes its part: what it gives of another rank's part does not matter."""
    world = MPI.COMM_WORLD
    link = MPILink(colour={"one": 0, "two": world.rank % 2, "alone": world.rank}[nodes])
    size = 100_000
    copy = link.allocate_copy(size, torch.float32)
    copy.take(torch.full((size,), float(link.local_rank)))
    assert sorted({*copy.vector.tolist()}) == [float(rank) for rank in range(link.local_size)]
    link.barrier()
    link.transport = "allreduce"  # and with it, no memory is shared
    alone = link.allocate_copy(size, torch.float32)
    alone.take(torch.full((size,), float(link.rank)))
    assert (alone.vector == link.rank).all()
    link.close()


def test_lists_of_numbers_from_all_ranks(any_link):
    rank, size = any_link.rank, any_link.size
    np.testing.assert_array_equal(any_link.allgather([rank, 0.5]), [[r, 0.5] for r in range(size)])
    np.testing.assert_array_equal(any_link.allgatherv([rank] * rank), [r for r in range(size) for _ in range(r)])
    assert any_link.allgatherv([]).shape == (0,)
    assert any_link.first_rank_where(False) is None
    assert any_link.first_rank_where(rank == size - 1) == size - 1
    any_link.barrier()


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_rows_to_every_rank(any_link, shape):
    """Rank r sends to rank s its rows r, r + s, ... of which there may be none."""
    rank, size = any_link.rank, any_link.size
    rows = np.arange(4 * int(np.prod(shape))).reshape(4, *shape).astype(np.uint8) + 10 * rank
    wanted = [np.arange(0, 4)[: (rank + other) % 4] for other in range(size)]
    received = any_link.alltoallv(rows, wanted)
    expected = [rows - 10 * rank + 10 * other for other in range(size)]
    np.testing.assert_array_equal(received, np.concatenate([expected[o][: (o + rank) % 4] for o in range(size)]))
    assert received.dtype == np.uint8


def test_all_ranks_agree_on_an_error_of_one(any_link):
    assert agree(any_link, lambda: 5) == 5
    last = any_link.size - 1

    def fails_on_the_last():
        if any_link.rank == last:
            raise UserError("the step is not a number", where="line 5")

    def is_set_wrongly_on_the_last():
        check_known("outer adam", ["momentum"], ["speed"] if any_link.rank == last else [])

    where = f"on rank {last}: " if last else ""
    of_setting = "unknown setting speed: outer adam has momentum"
    for fails, tells, line, others_know in (
        (is_set_wrongly_on_the_last, True, of_setting, of_setting),
        (fails_on_the_last, True, "the step is not a number", "an error, which that rank prints"),  # not our code
        (fails_on_the_last, False, "the step is not a number", "an error in line 5, which that rank prints"),
    ):
        with pytest.raises(AgreedUserError) as caught:
            agree(any_link, fails, tells)
        assert str(caught.value) == f"{where}{line if any_link.rank == last else others_know}"
        assert caught.value.is_printed == (any_link.rank == last)


def test_lost_clients_are_those_of_lost_ranks():
    link = SoloLink()
    assert (link.lost_clients(), link.num_present(5)) == (frozenset(), 5)
    link.lost, link.clients = (0, 2), ((0, 1), (2, 3), (4,))
    assert (link.lost_clients(), link.num_present(5)) == ({0, 1, 4}, 2)


def test_a_time_is_that_of_the_slowest_rank():
    link = MPILink()
    times = time_cases(
        link, [Case("sleep", lambda: time.sleep(0.06 * (1 + link.rank)))], 0.01, min_cycles=2, max_cycles=2
    )
    everyone = link.allgather(times["sleep"].seconds)
    assert (everyone >= 0.06 * link.size).all() and (everyone == everyone[0]).all()
    link.close()
