"""Rows that skip rounds: every layout of clients on ranks learns the same, is equal on all ranks, and goes on."""

import functools

import pytest
import torch
from test_ranks import DIM, gradient

import fedmpi
from fedmpi.aggregation.codecs.half import Half
from fedmpi.aggregation.codecs.random_k import RandomK
from fedmpi.aggregation.mean import Mean
from fedmpi.aggregation.reproducible import Reproducible
from fedmpi.aggregation.robust import CentredClipping
from fedmpi.aggregation.sending import Sending
from fedmpi.aggregation.stages.norm_bound import NormBound
from fedmpi.algorithms import DESLOC, FAFED, FAFEDCode, FedLAMB, LocalAMSGrad, Scaffnew
from fedmpi.comm.job.replicas import check_replicas
from fedmpi.comm.solo import SoloLink
from fedmpi.federation.client_state import SKIPPED
from fedmpi.federation.participation import Plan, draw_participants, spread
from fedmpi.federation.rounds import Federation
from fedmpi.federation.variables import Variables
from fedmpi.oracles import FunctionOracle
from fedmpi.oracles.flat_module import BufferPart

pytestmark = pytest.mark.mpi

N, ROUNDS = 4, 7
ALGORITHMS = [
    DESLOC(step_size=0.05, epsilon=0.1, m_every=2, v_every=3),
    FAFED(step_size=0.05, epsilon=0.1, v_every=2),
    FAFEDCode(step_size=0.05, epsilon=0.1, m_every=3, v_every=2),
    LocalAMSGrad(step_size=0.05, v_every=3),
    LocalAMSGrad(step_size=0.05, v_every=2, refresh="after"),
    FedLAMB(step_size=0.05, epsilon=0.1, v_every=2),
]
SENDINGS = [
    Sending(Mean()),
    Sending(Reproducible()),
    Sending(stages=[NormBound(bound=0.5)]),
    Sending(CentredClipping(radius=0.5)),
    Sending(codec=Half()),
    Sending(codec=RandomK(fraction=0.5)),
]


class Counting(FunctionOracle):
    """Every gradient moves a buffer."""

    def gradient(self, z, xi):
        self.client.buffers += 1 + self.client.index
        return super().gradient(z, xi)


def make(link, algorithm, sending, participants, num_clients=N):
    mine = spread(num_clients, link.size)[link.rank]
    plan = Plan(num_clients, 2, participants, seed=3, weights=None)
    x0 = torch.linspace(-1, 1, DIM, dtype=torch.float64)
    parts = [BufferPart("mean", 0, 2, torch.float64)]
    variables = Variables(x0, torch.zeros(2, dtype=torch.float64), buffer_parts=parts)
    oracle = functools.partial(Counting, gradient)
    return Federation(algorithm, link, dict.fromkeys(mine, oracle), plan, variables, sending, poison=True)


def rows_of(federation):
    """Name -> row: the server's, the buffers, and those that clients have for themselves now."""
    store = federation.store
    found = {**store.averaged_rows(), **store.server_rows(), "buffers": store.buffers}
    for client in federation.clients:
        found |= {f"{client.index}/{name}": client.kept[SKIPPED][name] for name in client.skipped}
        found |= {f"{client.index}/{name}": client.rows[name] for name in client.own}
    return found


@pytest.mark.parametrize(
    ("algorithm", "sending"),
    [*((algorithm, SENDINGS[0]) for algorithm in ALGORITHMS), *((ALGORITHMS[2], sending) for sending in SENDINGS[1:])],
)
def test_all_layouts_learn_the_same(link, algorithm, sending):
    learn_the_same(link, algorithm, sending, lambda index: [c for c in range(N) if (c + index) % 3], N)


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("algorithm", [ALGORITHMS[0], FAFEDCode(step_size=0.05, epsilon=0.1, m_every=2, v_every=3)])
def test_periods_2_and_3_of_half_of_the_clients(link, algorithm, each):
    """One client on each rank, or three."""
    number = each * link.size
    drawn = functools.partial(draw_participants, number, 0.5, 3)
    learn_the_same(link, algorithm, Sending(Reproducible()), drawn, number)


def learn_the_same(link, algorithm, sending, participants, num_clients):
    """As one process with all clients, also where another federation goes on."""
    whole, ours = (make(each, algorithm, sending, participants, num_clients) for each in (SoloLink(), link))
    whole.start()
    ours.start()
    for number in range(ROUNDS):
        whole.run_round()
        ours.run_round()
        check_replicas(ours)
        expected, found = rows_of(whole), rows_of(ours)
        assert set(found) <= set(expected)
        for name, row in found.items():
            exact = type(sending.aggregation) is Reproducible
            tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-9, "atol": 1e-11}
            if not isinstance(sending.codec, Half):  # whose roundings may fall on the other side
                torch.testing.assert_close(row, expected[name], **tolerance, msg=lambda m, n=name: f"{n}: {m}")
        if number % 3 == 1:  # goes on as another federation
            state = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in ours.state().items()}
            ours = make(link, algorithm, sending, participants, num_clients)
            ours.restore(state)


class Point(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.linspace(-1, 1, DIM, dtype=torch.float64))


@pytest.mark.parametrize("rounds", [6, 7, 8])
@pytest.mark.parametrize("algorithm", [ALGORITHMS[0], Scaffnew(step_size=0.05, average_chance=0.4)])
def test_a_loop_of_ones_own_ends_with_the_last_averages(link, algorithm, rounds):
    """The coin says that rounds 1, 5 and 8 average x itself."""
    model = Point()
    fed = fedmpi.join(model, algorithm, local_steps=2)
    for step in range(2 * rounds):
        fed.step(lambda step=step: (gradient_of(fed.rank, model.w, step) * model.w).sum())
    fed.finish()
    expected = last_average(algorithm, link.size, rounds)
    torch.testing.assert_close(model.w.detach(), expected, rtol=1e-12, atol=1e-13)


def gradient_of(client, x, sample):
    return torch.as_tensor(gradient(client, x.detach(), sample))


def last_average(algorithm, num_clients, rounds):
    """The server's x, all clients in one process."""
    oracle = functools.partial(FunctionOracle, gradient)
    variables = Variables(torch.linspace(-1, 1, DIM, dtype=torch.float64))
    whole = Federation(
        algorithm, SoloLink(), dict.fromkeys(range(num_clients), oracle), Plan(num_clients, 2), variables
    )
    whole.start()
    for _ in range(rounds):
        whole.run_round()
    return whole.store.averaged_rows()["x"]
