"""Clients whose losses or rows are not finite: averages are made without them, equally on all ranks."""

import functools
import json
import math

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import fedmpi
from fedmpi.aggregation.codecs.half import Half
from fedmpi.aggregation.codecs.random_k import RandomK
from fedmpi.aggregation.mean import Mean
from fedmpi.aggregation.reproducible import Reproducible
from fedmpi.aggregation.robust import Median, TrimmedMean
from fedmpi.aggregation.sending import Sending
from fedmpi.aggregation.stages.norm_bound import NormBound
from fedmpi.comm.solo import SoloLink
from fedmpi.federation import Federation, Plan, Variables
from fedmpi.ground.errors import Diverged, UserError
from fedmpi.oracles import FunctionOracle

SENDINGS = {
    "mean": {},
    "reproducible": {"aggregation": Reproducible()},
    "median": {"aggregation": Median()},
    "half": {"codec": Half()},
    "random_k": {"codec": RandomK(fraction=0.5)},
    "norm_bound": {"stages": [NormBound(bound=0.5)]},
}


def federation_of(algorithm, sending, bad=(), absent=(), num_clients=4):
    """Clients with f_i = ½ (x - i)²; those of `bad`, (round, client), have a gradient that is not finite."""

    def gradient(client, x, sample):
        number = federation.round_index
        return torch.full_like(x, math.inf if (number, client) in bad else client + 0.0) * -1 + x

    participants = lambda r: [k for k in range(num_clients) if (r, k) not in absent]  # noqa: E731
    oracle = functools.partial(FunctionOracle, gradient)
    federation = Federation(
        algorithm, SoloLink(), dict.fromkeys(range(num_clients), oracle), Plan(num_clients, 2, participants),
        Variables(torch.full((4,), 4.0, dtype=torch.float64)), sending,
    )  # fmt: skip
    federation.start()
    return federation


@pytest.mark.parametrize("given", SENDINGS.values(), ids=SENDINGS)
@pytest.mark.parametrize("name", ["FedAvg", "SCAFFOLD", "FedAvgMVR", "MimeAdam", "FedAMS"])
def test_an_average_is_one_without_the_client(name, given, caplog):
    """Bit by bit that of a run in which the client is absent."""
    algorithm = getattr(fedmpi.algorithms, name)(step_size=0.1)
    bad = {(1, 0), (1, 3), (3, 2)}
    found = []
    for federation in (
        federation_of(algorithm, Sending(**given, faulty="leave_out"), bad=bad),
        federation_of(algorithm, Sending(**given), absent=bad),
    ):
        rows, losses = [], []
        for _ in range(5):
            losses.append(federation.run_round())
            rows.append({n: row.clone() for n, row in federation.store.averaged_rows().items()})
            rows[-1] |= {f"server {n}": row.clone() for n, row in federation.store.server_rows().items()}
            rows[-1] |= {f"{c.index} {n}": c.rows[n].clone() for c in federation.clients for n in c.own}
        found.append((rows, federation))
    for a, b in zip(found[0][0], found[1][0], strict=True):
        for row in a:
            assert torch.equal(a[row], b[row]), row
    federation = found[0][1]
    assert federation.left_out.number == federation.facts()["times_left_out"] == 3
    assert federation.left_out.clients == frozenset()
    state = federation.state()
    again = federation_of(algorithm, Sending(**given, faulty="leave_out"))
    again.restore(state)
    assert again.left_out.number == 3


def test_otherwise_the_run_ends_and_so_it_does_if_nobody_is_left():
    fedavg = fedmpi.algorithms.FedAvg(step_size=0.1)
    with pytest.raises(Diverged, match="in round 1: row x of client 1 on rank 0"):
        federation_of(fedavg, Sending(), bad={(0, 1)}).run_round()
    nobody = federation_of(fedavg, Sending(faulty="leave_out"), bad={(0, k) for k in range(4)})
    with pytest.raises(Diverged, match="in round 1: clients 0 to 3, all that take part, have a loss or rows"):
        nobody.run_round()
    few = federation_of(fedavg, Sending(TrimmedMean(trim=1), faulty="leave_out"), bad={(0, 0), (0, 1)})
    with pytest.raises(UserError, match="in round 1: aggregation trimmed_mean needs at least 3 clients .*, not 2"):
        few.run_round()
    with pytest.raises(UserError, match="faulty = 'drop': expected end or leave_out"):
        Sending(Mean(), faulty="drop")


@pytest.mark.parametrize("stages", [[NormBound(bound=0.5)], [NormBound(bound=0.5), NormBound(bound=0.1)]])
def test_a_stage_that_looks_at_the_rows_is_not_taken_for_who_made_them(stages):
    fedavg, bad = fedmpi.algorithms.FedAvg(step_size=0.1), {(0, 1)}
    with pytest.raises(Diverged, match="in round 1: row x of client 1 on rank 0"):
        federation_of(fedavg, Sending(stages=stages), bad=bad).run_round()


def test_a_stage_that_makes_nan_still_ends_the_run():
    class Breaks(NormBound):
        def apply(self, sent):
            sent.rows["x"].fill_(math.nan)

    federation = federation_of(
        fedmpi.algorithms.FedAvg(step_size=0.1), Sending(stages=[Breaks()], faulty="leave_out"), bad={(0, 1)}
    )
    with pytest.raises(Diverged, match="stage breaks made values of row x of client 0"):
        federation.run_round()


class Odd(torch.nn.Linear):
    """Its training fails on large inputs."""

    def __init__(self):
        super().__init__(2, 1)

    def forward(self, inputs):
        return super().forward(inputs) * (math.inf if self.training and inputs.max() > 5 else 1)


def test_a_run_says_who_was_left_out(tmp_path):
    data = [TensorDataset(torch.full((8, 2), value), torch.zeros(8, 1)) for value in (1.0, 2.0, 10.0)]
    given = {
        "task": "regression",
        "test_data": data[0],
        "rounds": 2,
        "algorithm": "fedavg",
        "local_steps": 1,
        "model": Odd,
    }
    run = fedmpi.train(data=data, faulty="leave_out", out=str(tmp_path), **given)
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["left_out"] for record in records] == [[2], [2]]
    assert [record["times_left_out"] for record in records] == [1, 2]
    assert np.isfinite([record["loss"] for record in records]).all()
    with pytest.raises(Diverged, match="client 2"):
        fedmpi.train(data=data, out=str(tmp_path), **given)


class Lost(torch.nn.Linear):
    """Infinite on large inputs, also when it is evaluated."""

    def __init__(self):
        super().__init__(2, 1)

    def forward(self, inputs):
        return super().forward(inputs) * (math.inf if inputs.max() > 5 else 1)


def test_a_client_on_whose_data_no_loss_is_finite_is_left_out_to_the_end(tmp_path, capsys):
    data = [TensorDataset(torch.full((8, 2), value), torch.zeros(8, 1)) for value in (1.0, 2.0, 10.0)]
    given = {"task": "regression", "test_data": data[0], "rounds": 2, "algorithm": "fedavg", "model": Lost}
    run = fedmpi.train(data=data, faulty="leave_out", out=str(tmp_path), **given)
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["left_out"] for record in records] == [[2], [2]]
    assert not math.isfinite(run.final["train_loss"]) and math.isfinite(run.final["test_loss"])
    of_clients = run.metrics[-1]["clients"]["train_loss"]
    assert max(of_clients[:2]) < 1 and of_clients[2] > 1e300  # JSON has no infinity
