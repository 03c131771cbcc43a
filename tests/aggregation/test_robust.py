"""Rules that a few clients with wrong rows cannot lead astray, against plain computations and known answers."""

import dataclasses

import numpy as np
import pytest
import torch

import fedmpi
from fedmpi.aggregation import Aggregation
from fedmpi.aggregation.robust import CentredClipping, Median, TrimmedMean, trimmed_mean
from fedmpi.ground.errors import UserError

ROWS = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [2, 1, 0], [100, -100, 50]], dtype=torch.float64)


def after_a_round(rule, start=(0.0, 0.0, 0.0), **settings):
    """[3] x after one round in which client i sends ROWS[i]."""
    algorithm, sending = fedmpi.algorithms.FedAvg(step_size=1.0), fedmpi.Sending(rule)
    settings = {"num_clients": len(ROWS), "local_steps": 1, "rounds": 1, "sending": sending} | settings
    trace = fedmpi.simulate(algorithm, lambda i, x, sample: x - ROWS[i], x0=list(start), **settings)
    return trace[-1]["rows"]["x"][0]


@pytest.mark.parametrize("num", [*range(1, 12), 16, 17, 33])
def test_every_trimmed_mean_is_that_of_sorted_values(num):
    rows = torch.randn(num, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(num))
    ordered = rows.sort(0).values
    for trim in range((num - 1) // 2 + 1):
        assert torch.allclose(trimmed_mean(list(rows), trim), ordered[trim : num - trim].mean(0), rtol=0, atol=1e-14)
    assert np.allclose(trimmed_mean(list(rows), (num - 1) // 2), np.median(rows.numpy(), 0), rtol=0, atol=1e-14)


def test_known_answers():
    assert after_a_round(Median()).tolist() == [4, 2, 6]
    assert np.allclose(after_a_round(TrimmedMean(trim=1)), [13 / 3, 8 / 3, 6], rtol=0, atol=1e-12)


@pytest.mark.parametrize("radius", [0.5, 5.0, 1e4])
def test_centred_clipping_shortens_moves_from_the_start_of_the_round(radius):
    start = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    moves = ROWS - start
    shortened = moves * (radius / moves.norm(dim=1, keepdim=True)).clamp(max=1)
    found = after_a_round(CentredClipping(radius=radius), start.tolist())
    assert np.allclose(found, start + shortened.mean(0), rtol=0, atol=1e-12)


@pytest.mark.rarely
def test_two_liars_of_seven_do_not_move_the_optimum_far():
    """FAFED exchanges a mean of squares, too, which stays >= 0."""

    def gradient(client, x, sample):
        return x - 1 if client < 5 else torch.full_like(x, -1000.0)

    for rule in (Median(), TrimmedMean(trim=2), CentredClipping(radius=0.5)):
        sending, algorithm = fedmpi.Sending(rule), fedmpi.algorithms.FAFED(step_size=0.05)
        trace = fedmpi.simulate(algorithm, gradient, x0=[9.0], rounds=300, num_clients=7, sending=sending)
        assert abs(trace[-1]["rows"]["x"][0, 0] - 1) < 0.5, rule
        assert (trace[-1]["rows"]["v"] >= 0).all()


@pytest.mark.parametrize(
    ("rule", "settings", "said"),
    [
        (TrimmedMean(trim=3), {}, "aggregation trimmed_mean needs at least 7 clients that take part, not 5"),
        (
            Median(),
            {"participants": lambda r: [3]},
            "median needs at least 2 clients that take part, not 1",
        ),
        (Median(), {"weights": [1, 1, 2, 1, 1]}, "aggregation median counts all clients equally, and their weights"),
    ],
)
def test_what_a_rule_cannot_do_is_said_before_the_round(rule, settings, said):
    with pytest.raises(UserError, match=said):
        after_a_round(rule, **settings)


def test_one_client_alone_is_refused_where_rows_are_compared_or_hidden():
    @dataclasses.dataclass(kw_only=True)
    class Hidden(Aggregation):
        exposes_rows = False

        def average(self, out):
            raise AssertionError("no round begins")

    for rule in (Median(), Hidden()):
        sending = fedmpi.Sending(rule)
        with pytest.raises(UserError, match="ce_lsgd lets one client work alone in a part of each round"):
            fedmpi.simulate(fedmpi.algorithms.CELSGD(), lambda i, x, s: x, x0=[1.0], rounds=1, sending=sending)


@pytest.mark.parametrize("num_clients", [1, 3])
def test_a_rule_knows_whose_slices_it_has_and_where_they_lie(num_clients):
    seen = []

    @dataclasses.dataclass(kw_only=True)
    class Spy(Aggregation):
        def average(self, out):
            self.reduce_slices(note, out)

    def note(slices):
        seen.append((list(slices.clients), slices.place, len(slices)))
        return torch.stack(slices).mean(0)

    sending = fedmpi.Sending(Spy())
    settings = {"rounds": 2, "num_clients": num_clients + 1, "participants": lambda r: list(range(r, num_clients + 1))}
    fedmpi.simulate(fedmpi.algorithms.FedAvg(), lambda i, x, s: x - i, x0=[1.0, 2.0], sending=sending, **settings)
    expected = [([*range(r, num_clients + 1)], slice(0, 2), num_clients + 1 - r) for r in range(2)]
    assert seen == [entry for entry in expected if entry[2] > 1]  # a single client's rows are taken as they are


def test_numbers_of_exchanges_are_never_given_twice(tmp_path):
    serials, rounds = [], []

    @dataclasses.dataclass(kw_only=True)
    class Noted(fedmpi.aggregation.mean.Mean):
        def begin(self, moment, weights):
            super().begin(moment, weights)
            serials.append(moment.serial)
            rounds.append(moment.round_index)

    model = torch.nn.Linear(1, 1)
    fed = fedmpi.join(model, algorithm="fedavg", local_steps=1, aggregation=Noted())
    fed.step(lambda: model(torch.ones(1, 1)).sum())
    state = fed.state_dict()
    for _ in range(2):
        fed.step(lambda: model(torch.ones(1, 1)).sum())
    fed.load_state_dict(state)
    fed.step(lambda: model(torch.ones(1, 1)).sum())
    fed.finish()
    assert rounds == [0, 1, 2, 1] and serials == [0, 1, 2, 3]


@pytest.mark.parametrize("rule", [Median(), CentredClipping(radius=100.0)], ids=str)
def test_kinds_of_rows_that_are_not_exchanged_do_not_matter(rule):
    @dataclasses.dataclass(frozen=True)
    class Keeps(fedmpi.algorithms.FedAvg):
        client_rows = ("delta",)
        kinds = {"delta": "difference"}

    settings = {"x0": [4.0], "rounds": 1, "local_steps": 1, "sending": fedmpi.Sending(rule)}
    trace = fedmpi.simulate(Keeps(step_size=0.5), lambda i, x, sample: x - i, **settings)
    assert trace[-1]["rows"]["x"][0, 0] == 2.5


def test_a_part_may_make_what_it_keeps_in_its_first_exchange():
    @dataclasses.dataclass(kw_only=True)
    class Lazy(fedmpi.aggregation.mean.Mean):
        def begin(self, moment, weights):
            super().begin(moment, weights)
            self.kept_sum = 0.0

        def state(self):
            return {"sum": self.kept_sum}

    trace = fedmpi.simulate(
        fedmpi.algorithms.FedAvg(), lambda i, x, s: x - i, x0=[4.0], rounds=1, sending=fedmpi.Sending(Lazy())
    )
    assert trace[-1]["round"] == 0
