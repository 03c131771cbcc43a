"""What must hold on any number of ranks; launch/test.sh runs this on 1, 2, 3 and 4."""

import functools

import numpy as np
import pytest
import torch
from mpi4py import MPI

from fedmpi import simulate
from fedmpi.aggregation.robust import Median
from fedmpi.aggregation.sending import Sending
from fedmpi.algorithms import FAFED, FedAvg, NaiveAdaptiveFedAvg
from fedmpi.comm.faults.rollcall import RollCall
from fedmpi.federation.buffers import SentBuffers
from fedmpi.federation.losses import Losses, Reports
from fedmpi.federation.participation import Plan, spread
from fedmpi.federation.rounds import Federation
from fedmpi.federation.variables import Variables
from fedmpi.ground.errors import Diverged, UserError
from fedmpi.ground.streams import generator
from fedmpi.oracles import FunctionOracle

pytestmark = pytest.mark.mpi

DIM = 7


def gradient(client, x, sample):
    """Noisy gradient of a quadratic whose minimum differs between the clients."""
    noise = generator(1, "test", client, sample).standard_normal(x.numel())
    return (1 + client) * (x.double().numpy() - client) + 0.1 * noise


def make_federation(link, algorithm, plan, oracle, x0, sending=None):
    """This rank's part of a federation; `oracle(client)` makes a client's oracle."""
    mine = spread(plan.num_clients, link.size)[link.rank]
    federation = Federation(algorithm, link, dict.fromkeys(mine, oracle), plan, Variables(x0), sending, poison=True)
    federation.start()
    return federation


def run(link, algorithm, plan, rounds=4, dtype=torch.float64, oracle=FunctionOracle):
    """This rank's part of a federation that has run `rounds` rounds."""
    x0 = torch.linspace(-1, 1, DIM, dtype=dtype)
    federation = make_federation(link, algorithm, plan, functools.partial(oracle, gradient), x0)
    for _ in range(rounds):
        federation.run_round()
    return federation


class OfThisRank(Median):
    """Every rank keeps what its own clients have sent."""

    def average(self, out):
        out.copy_(torch.stack([row.clone() for row in self.kept_regions()]).mean(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_averages_that_differ_between_ranks_are_named(link, dtype):
    """Each rank went on with a model of its own."""
    oracle, x0 = functools.partial(FunctionOracle, gradient), torch.linspace(-1, 1, DIM, dtype=dtype)
    clients, plan = [2 * link.rank, 2 * link.rank + 1], Plan(2 * link.size)
    sending = Sending(OfThisRank())
    federation = Federation(FedAvg(), link, dict.fromkeys(clients, oracle), plan, Variables(x0), sending)
    federation.start()
    if link.size == 1:
        federation.run_round()
        return
    with pytest.raises(UserError, match="in round 1: aggregation ofthisrank gave ranks different values of row x"):
        federation.run_round()


def test_what_ranks_report_after_a_round_counts_all_of_them(link):
    """Rank r has r + 1 losses, whose mean is r + 0.5, and has evaluated r + 5 gradients."""
    losses, ranks = Losses(), range(link.size)
    losses.total, losses.number = (link.rank + 0.5) * (link.rank + 1), link.rank + 1
    reports = Reports(link, SentBuffers(torch.empty(0)))
    report = reports.exchange(losses, link.rank + 5, 1 << link.rank, 3)
    assert report.mean == pytest.approx(sum((r + 0.5) * (r + 1) for r in ranks) / sum(r + 1 for r in ranks))
    assert report.num_gradients == sum(r + 5 for r in ranks)
    assert report.requests == 2**link.size - 1 and report.bad == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 3, 1000, 100_003])
def test_sum_is_numpys_and_the_same_everywhere(link, dtype, size):
    everyone = [generator(0, "sum", rank, size).standard_normal(size) for rank in range(link.size)]
    block = torch.tensor(everyone[link.rank], dtype=dtype)
    link.allreduce(block)
    np.testing.assert_allclose(
        block.numpy(), np.sum(everyone, axis=0), rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-6
    )
    first = block.numpy().copy()
    MPI.COMM_WORLD.Bcast(first)
    assert first.tobytes() == block.numpy().tobytes()


def test_gather_and_concatenate(link):
    np.testing.assert_array_equal(link.allgather([link.rank, 5]), [[rank, 5] for rank in range(link.size)])
    mine = np.full(link.rank, float(link.rank))  # rank 0 has nothing
    expected = [rank for rank in range(link.size) for _ in range(rank)]
    np.testing.assert_array_equal(link.allgatherv(mine), expected)


def test_first_rank_where(link):
    assert link.first_rank_where(False) is None
    assert link.first_rank_where(link.rank == link.size - 1) == link.size - 1


@pytest.mark.parametrize(
    "algorithm", [FedAvg(step_size=0.05), FedAvg(server_step_size=0.5), FAFED(), NaiveAdaptiveFedAvg()]
)
@pytest.mark.parametrize("num_clients", [4, 5, 9])
@pytest.mark.parametrize("participants", [None, lambda r: [r % 4, 3 - r % 2]], ids=["all", "two"])
def test_ranks_do_what_one_process_does(link, algorithm, num_clients, participants):
    federation = run(link, algorithm, Plan(num_clients, 3, participants))
    last = simulate(
        algorithm, gradient, np.linspace(-1, 1, DIM), num_clients, rounds=4, local_steps=3, participants=participants
    )[-1]["rows"]
    for name, row in federation.store.averaged_rows().items():
        np.testing.assert_allclose(row.numpy(), last[name][0], rtol=1e-12, atol=1e-13, err_msg=name)
    for client in federation.clients:
        for name in algorithm.client_rows:
            np.testing.assert_allclose(getattr(client, name).numpy(), last[name][client.index], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_server_is_the_same_bytes_on_every_rank_and_twice(link, dtype):
    def bits():
        federation = run(link, FAFED(), Plan(4, 3), rounds=5, dtype=dtype)
        rows = {**federation.store.averaged_rows(), **federation.store.server_rows()}
        return torch.cat(list(rows.values())).numpy().tobytes()

    first = bits()
    assert bits() == first
    on_rank_0 = np.frombuffer(first, dtype=np.uint8).copy()
    MPI.COMM_WORLD.Bcast(on_rank_0)
    assert on_rank_0.tobytes() == first


@pytest.mark.parametrize("num_clients", [4, 8])
def test_one_allreduce_of_three_vectors_a_round(link, num_clients):
    federation = run(link, FAFED(), Plan(num_clients, 3), rounds=0, dtype=torch.float32)
    assert (link.traffic.collectives, link.traffic.nbytes) == (1, 2 * DIM * 4)  # m and v at the start
    for _ in range(3):
        federation.run_round()
    assert (link.traffic.collectives, link.traffic.nbytes) == (4, 2 * DIM * 4 + 3 * 3 * DIM * 4)
    assert link.traffic.largest == 3 * DIM * 4


def test_absent_clients_do_no_gradient_work(link):
    federation = run(link, FedAvg(), Plan(4, 2, lambda r: [1]), rounds=3)
    for client in federation.clients:
        assert client.num_gradients == (6 if client.index == 1 else 0)
        assert client.num_draws == (6 if client.index == 1 else 0)


class LossyOracle(FunctionOracle):
    """Client 3's loss is not a number from its second step on."""

    def take_losses(self):
        return [torch.tensor(float("nan") if self.client.index == 3 and self.client.num_draws > 1 else 1.0)]


def test_a_loss_that_is_not_a_number_stops_every_rank(link):
    with pytest.raises(Diverged, match="the loss of client 3 on rank"):
        run(link, FedAvg(), Plan(4, 3), rounds=2, oracle=LossyOracle)


def test_weights_weigh(link):
    weights = [1.0, 2.0, 3.0, 4.0]
    oracle = functools.partial(FunctionOracle, lambda client, x, sample: 0 * x - client)
    x0 = torch.zeros(DIM, dtype=torch.float64)
    federation = make_federation(link, FedAvg(step_size=1.0), Plan(4, weights=weights), oracle, x0)
    federation.run_round()
    np.testing.assert_allclose(federation.server.x.numpy(), np.average([0, 1, 2, 3], weights=weights))


def test_ranks_are_killed_only_on_machines_of_ranks_that_wait():
    roll_call = RollCall(MPI.COMM_SELF, 60, str, tuple)
    roll_call._processes = np.array([[machine, number, 0] for number, machine in enumerate([7, 7, 8, 8, 0])])
    allowed = {(): False, (1,): True, (2,): False, (1, 2): False, (4,): False}
    assert {ranks: roll_call._can_kill(ranks) for ranks in allowed} == allowed
    roll_call._waiting = {3}
    allowed = {(1, 2): True, (2,): True, (1, 2, 4): False}
    assert {ranks: roll_call._can_kill(ranks) for ranks in allowed} == allowed
    roll_call._waiting = {4}  # of which the system does not say the machine
    assert not roll_call._can_kill((4,))
    roll_call.close()
