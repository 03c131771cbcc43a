"""Numbers that are averaged beside the rows: the same weights, through the aggregation, past stages and codecs."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch

import fedmpi
from fedmpi.aggregation import Aggregation
from fedmpi.aggregation.codecs.half import Half
from fedmpi.aggregation.codecs.random_k import RandomK
from fedmpi.aggregation.mean import Mean
from fedmpi.aggregation.reproducible import Reproducible
from fedmpi.aggregation.robust import Median
from fedmpi.aggregation.sending import Sending
from fedmpi.aggregation.stages.norm_bound import NormBound
from fedmpi.algorithms import FedAvg
from fedmpi.comm.solo import SoloLink
from fedmpi.federation import Federation, Plan, Variables
from fedmpi.ground.errors import Diverged, UserError
from fedmpi.oracles import FunctionOracle
from fedmpi.oracles.flat_module import BufferPart

N, DIM, q, ROUNDS = 3, 2, 2, 5
CENTRES = np.array([[4.0, -1.0], [0.0, 2.0], [-3.0, 1.0]])
WEIGHTS = np.array([1.0, 2.0, 5.0])


def steps(client):
    return 1 + client % 2


def active(round_index):
    return [[0, 1, 2], [0, 2], [1, 2]][round_index % 3]


def gradient(client, x, sample):
    return x.numpy() - CENTRES[client] + 0.1 * np.sin(sample + client)


@dataclasses.dataclass(frozen=True)
class Scaled(FedAvg):
    """The server's step depends on four numbers: one of each local step, two of a round, and one of the start."""

    record: list = dataclasses.field(default_factory=list, compare=False)
    server_rows = ("start", "scale")
    numbers_at_start = 1

    def start(self, client, server, oracle):
        client.numbers[0] = 2.0**-client.index

    def server_start(self, server):
        server.start.copy_(server.x)
        server.scale.fill_(server.numbers[0])

    def exchanges(self):
        return (
            fedmpi.Exchange(("x",), then=self.server_step, numbers=lambda longest: longest + 1),
            fedmpi.Exchange((), work=self.of_model, then=self.second_step, numbers=1),
        )

    def local_step(self, client, server, oracle):
        client.numbers[client.step_index] = client.x.sum()
        super().local_step(client, server, oracle)

    def upload(self, client, server, oracle):
        moved = client.x - server.start
        client.numbers[-1] = torch.dot(moved, moved)

    def server_step(self, server):
        self.record.append(server.numbers.tolist())
        factor = server.scale / (1 + server.numbers[-1] + server.numbers[:-1].square().sum())
        torch.lerp(server.start, server.x, factor, out=server.x)

    def of_model(self, client, server, oracle):
        client.numbers[0] = client.x[0] + client.index

    def second_step(self, server):
        self.record.append(server.numbers.tolist())
        server.x.add_(server.numbers[0] / 100)
        server.start.copy_(server.x)


def by_numpy(x, weights, step_size, sees=lambda start, rows: rows):
    """The same as one array; `sees`: what the aggregation gets of a client's row."""
    draws, record, at = [0] * N, [], np.asarray(weights)
    scale = np.average(2.0 ** -np.arange(N), weights=at)
    for r in range(ROUNDS):
        of = at[active(r)]
        sent, numbers = [], []
        for i in active(r):
            y, found = x.copy(), np.zeros(q + 1)
            for k in range(steps(i)):
                found[k] = y.sum()
                y = y - step_size * (y - CENTRES[i] + 0.1 * np.sin(draws[i] + i))
                draws[i] += 1
            found[-1] = ((y - x) ** 2).sum()
            sent.append(sees(x, y))
            numbers.append(found)
        mean = np.average(numbers, axis=0, weights=of)
        record.append(mean.tolist())
        x = x + scale / (1 + mean[-1] + (mean[:-1] ** 2).sum()) * (np.average(sent, axis=0, weights=of) - x)
        second = np.average(x[0] + np.array(active(r)), weights=of)
        record.append([second])
        x = x + second / 100
    return x, record


def simulated(weights=None, sending=None):
    algorithm = Scaled(step_size=0.1)
    trace = fedmpi.simulate(
        algorithm, gradient, [9.0, -2.0], N, ROUNDS, steps, active, weights=weights, sending=sending
    )
    return trace[-1]["rows"]["x"][0], algorithm.record


@pytest.mark.parametrize("aggregation", [Mean, Reproducible])
@pytest.mark.parametrize("weights", [None, WEIGHTS.tolist()])
def test_they_are_the_weighted_means_of_those_who_take_part(aggregation, weights):
    x, record = simulated(weights, Sending(aggregation()))
    expected, numbers = by_numpy(np.array([9.0, -2.0]), weights or [1.0] * N, 0.1)
    np.testing.assert_allclose(x, expected, rtol=1e-13)
    for ours, theirs in zip(record, numbers, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-13)


def test_stages_and_codecs_leave_them_alone():
    def shortened(start, row):
        norm = np.linalg.norm(row - start)
        return start + (row - start) * min(1, 0.05 / norm)

    x, record = simulated(None, Sending(stages=[NormBound(bound=0.05)]))
    expected, numbers = by_numpy(np.array([9.0, -2.0]), [1.0] * N, 0.1, shortened)
    np.testing.assert_allclose(x, expected, rtol=1e-13)
    np.testing.assert_allclose(record[-2], numbers[-2], rtol=1e-13)
    for codec in (Half(), RandomK(fraction=0.5)):
        _, record = simulated(None, Sending(codec=codec))
        np.testing.assert_allclose(record[0], numbers[0], rtol=1e-15)  # of the first round, which nothing has changed


def federation_of(algorithm, sending=None, dtype=torch.float64, parts=(), oracle=FunctionOracle, num_clients=N):
    make = functools.partial(oracle, gradient)
    buffers = torch.zeros(sum(part.numel for part in parts), dtype=dtype) if parts else None
    variables = Variables(torch.tensor([9.0, -2.0], dtype=dtype), buffers, buffer_parts=list(parts) or None)
    plan = Plan(num_clients, steps, weights=WEIGHTS.tolist()[:num_clients])
    federation = Federation(algorithm, SoloLink(), dict.fromkeys(range(num_clients), make), plan, variables, sending)
    federation.start()
    return federation


def test_the_ledger_has_their_bytes():
    federation = federation_of(Scaled(step_size=0.1))
    traffic = federation.link.traffic
    assert (traffic.nbytes, traffic.collectives) == (8, 1)
    federation.run_round()
    assert (traffic.nbytes, traffic.collectives) == (8 + 8 * DIM + 8 * (q + 1) + 8, 4)


@pytest.mark.parametrize("faulty", ["end", "leave_out"])
def test_one_that_is_not_finite_is_named(faulty):
    class Bad(Scaled):
        name = "bad"

        def upload(self, client, server, oracle):
            super().upload(client, server, oracle)
            if client.index == 2:
                client.numbers[1] = math.inf

    federation = federation_of(Bad(step_size=0.1), Sending(faulty=faulty))
    if faulty == "end":
        with pytest.raises(Diverged, match=r"^in round 1: number 1 of client 2 on rank 0 is not finite"):
            federation.run_round()
        return
    federation.run_round()
    assert federation.left_out.clients == {2} and federation.server.x.isfinite().all()
    assert federation.algorithm.record[0][0] == pytest.approx(7.0)  # the first two clients begin at (9, -2)


def test_a_client_begins_its_turn_with_zeros():
    class Never(FedAvg):
        name = "never"

        def exchanges(self):
            return (fedmpi.Exchange(("x",), then=self.server_step, numbers=3),)

        def upload(self, client, server, oracle):
            assert not client.numbers.any()
            client.numbers[client.index] = 8.0

        def server_step(self, server):
            assert server.numbers.tolist() == [1.0, 2.0, 5.0]

    federation = federation_of(Never(step_size=0.1))
    for _ in range(3):
        federation.run_round()


def test_an_aggregation_that_hides_rows_gets_them():
    seen = []

    @dataclasses.dataclass(kw_only=True)
    class Hidden(Aggregation):
        exposes_rows = False
        calls = 0

        def begin(self, moment, weights):
            super().begin(moment, weights)
            seen.append((moment.serial, moment.rows, self.layout.dtype))
            self.calls += 1

        def average(self, out):
            def mean(slices):
                of = [self.weights[client] for client in slices.clients]
                return sum(w * rows for w, rows in zip(of, slices)) / sum(of)

            self.reduce_slices(mean, out)

        def state(self):
            return {"calls": self.calls}

        def restore(self, state):
            self.calls = state["calls"]

    x, record = simulated(WEIGHTS.tolist(), Sending(Hidden()))
    expected, numbers = by_numpy(np.array([9.0, -2.0]), WEIGHTS, 0.1)
    np.testing.assert_allclose(x, expected, rtol=1e-13)
    serials = [serial for serial, _, _ in seen]
    assert len({*serials}) == len(serials)  # for nonces
    assert {rows for _, rows, dtype in seen if dtype == torch.float64} == {("numbers",), ("x",), ()}
    federation = federation_of(Scaled(step_size=0.1), Sending(Hidden()))
    federation.run_round()
    again = federation_of(Scaled(step_size=0.1), Sending(Hidden()))
    again.restore(federation.state())
    assert again.aggregation.beside.calls == federation.aggregation.beside.calls == 3


def test_a_rule_that_counts_equally_takes_their_mean():
    algorithm = Scaled(step_size=0.1)
    fedmpi.simulate(algorithm, gradient, [9.0, -2.0], N, 1, steps, sending=Sending(Median()))
    by_mean = Scaled(step_size=0.1)
    fedmpi.simulate(by_mean, gradient, [9.0, -2.0], N, 1, steps)
    np.testing.assert_allclose(algorithm.record[0], by_mean.record[0], rtol=1e-14)


@pytest.mark.parametrize("aggregation", [Mean, Reproducible])
@pytest.mark.parametrize("num_clients", [1, 3])
def test_wide_buffers_go_with_them(aggregation, num_clients):
    """A float64 buffer of a float32 model, which begins to change in the second round, and one that never does."""

    class Changing(FunctionOracle):
        def gradient(self, z, xi):
            if self.client.round_index > 0:
                self.client.buffers[2:4].view(torch.float64).add_(1 / 3 + self.client.index)
            return super().gradient(z, xi)

    parts = [BufferPart("constant", 0, 1, torch.float64), BufferPart("total", 2, 1, torch.float64)]
    make = functools.partial(Changing, gradient)
    variables = Variables(torch.tensor([9.0, -2.0]), torch.zeros(4), buffer_parts=parts)
    plan = Plan(num_clients, 1, weights=WEIGHTS.tolist()[:num_clients])
    of, algorithm = dict.fromkeys(range(num_clients), make), Scaled(step_size=0.1)
    federation = Federation(algorithm, SoloLink(), of, plan, variables, Sending(aggregation()))
    federation.start()
    sent = []
    for _ in range(3):
        before = federation.link.traffic.nbytes
        federation.run_round()
        sent.append(federation.link.traffic.nbytes - before)
    of_losses = 2 * 3 * 8 if aggregation is Reproducible else 0  # 3 sums in each exchange
    of_rows = (8 if of_losses and num_clients > 1 else 4) * DIM
    usual = of_rows + of_losses + 8 * 2 + 8
    assert sent == [usual, usual + 8, usual + 8]
    weights = WEIGHTS[:num_clients]
    mean = np.average(1 / 3 + np.arange(num_clients), weights=weights)
    assert parts[1].of(federation.store.buffers).item() == pytest.approx(2 * mean, rel=1e-14)


def test_what_declares_them_is_checked():
    class Odd(FedAvg):
        name = "odd"

        def exchanges(self):
            return (fedmpi.Exchange(("x",), numbers=-1),)

    class Taken(FedAvg):
        name = "taken"
        client_rows = ("numbers",)

    with pytest.raises(UserError, match="^numbers = -1: expected a whole number >= 0"):
        federation_of(Odd())
    with pytest.raises(UserError, match="numbers is not a row: expected another name"):
        federation_of(Taken())
