"""Numbers beside rows on several ranks: equal to one process, whatever the aggregation; with absent ranks, too."""

import functools

import pytest
import torch
from test_ranks import DIM, gradient, make_federation

import fedmpi
from fedmpi.aggregation.mean import Mean
from fedmpi.aggregation.reproducible import Reproducible
from fedmpi.aggregation.robust import Median
from fedmpi.aggregation.sending import Sending
from fedmpi.algorithms import FedAvg
from fedmpi.federation.participation import Plan
from fedmpi.oracles import FunctionOracle

pytestmark = pytest.mark.mpi


class Extrapolated(FedAvg):
    """The server's step is longer where clients have moved in different directions."""

    name = "extrapolated"
    server_rows = ("start",)

    def server_start(self, server):
        server.start.copy_(server.x)

    def exchanges(self):
        return (fedmpi.Exchange(("x",), then=self.server_step, numbers=2),)

    def upload(self, client, server, oracle):
        client.numbers[0] = (client.x - server.start).square().sum()
        client.numbers[1] = client.num_steps

    def server_step(self, server):
        moved = server.x - server.start
        factor = server.numbers[0] / moved.square().sum() / server.numbers[1]
        server.x.copy_(server.start + factor * moved)
        server.start.copy_(server.x)


@pytest.mark.parametrize("aggregation", [Mean, Reproducible, Median])
@pytest.mark.parametrize("num_clients", [4, 7])
def test_they_are_those_of_one_process(link, aggregation, num_clients):
    def participants(round_index):
        return [c for c in range(num_clients) if (c + round_index) % 3 < 2]

    weights = None if aggregation is Median else [1.0 + c % 3 for c in range(num_clients)]
    settings, sending = {"participants": participants, "weights": weights}, Sending(aggregation())
    plan, algorithm = Plan(num_clients, lambda c: 1 + c % 2, **settings), Extrapolated(step_size=0.05)
    oracle, x0 = functools.partial(FunctionOracle, gradient), torch.linspace(-1, 1, DIM, dtype=torch.float64)
    federation = make_federation(link, algorithm, plan, oracle, x0, sending)
    for _ in range(5):
        federation.run_round()
    trace = fedmpi.simulate(algorithm, gradient, x0, num_clients, 5, lambda c: 1 + c % 2, sending=sending, **settings)
    expected, tolerance = torch.from_numpy(trace[-1]["rows"]["x"][0]), 1e-12
    if aggregation is Reproducible:
        tolerance = 0
    torch.testing.assert_close(federation.server.x, expected, rtol=tolerance, atol=0)
