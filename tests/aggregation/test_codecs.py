"""What rows become that travel in a codec, what is kept of differences, checkpoints, and what does not compose."""

import collections
import dataclasses
import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import fedmpi
from fedmpi.aggregation import Aggregation
from fedmpi.aggregation.codecs import Codec
from fedmpi.aggregation.codecs.half import Half
from fedmpi.aggregation.codecs.random_k import RandomK, subset
from fedmpi.aggregation.mean import Mean
from fedmpi.aggregation.reproducible import Reproducible
from fedmpi.aggregation.robust import CentredClipping, Median
from fedmpi.aggregation.sending import Sending, chosen, in_codec
from fedmpi.aggregation.words import moves
from fedmpi.comm.solo import SoloLink
from fedmpi.federation import Federation, Plan, Variables
from fedmpi.federation.private import PRIVATE
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import known
from fedmpi.oracles import FunctionOracle

OPTIMA = np.array([[4.0, -1.0], [0.0, 2.0], [-3.0, 1.0]])


@dataclasses.dataclass(kw_only=True)
class Doubled(Codec):
    """Linear, without loss; it has a state, which must not matter, and counts."""

    is_linear = True
    calls = 0

    def begin(self, moment):
        super().begin(moment)
        self.calls += 1

    def encode(self, moves):
        return moves * 2.0 ** (self.calls % 3)

    def decode(self, words):
        return words / 2.0 ** (self.calls % 3)

    def state(self):
        return {"calls": self.calls}

    def restore(self, state):
        self.calls = state["calls"]

    def facts(self):
        return {"calls": self.calls}


def federation_of(algorithm, sending, seed=0, num_clients=3, start=4.0, **variables):
    oracle = functools.partial(FunctionOracle, lambda client, x, sample: x - client)
    plan, x = Plan(num_clients, 2, seed=seed), torch.full((4,), start, dtype=torch.float64)
    federation = Federation(
        algorithm, SoloLink(), dict.fromkeys(range(num_clients), oracle), plan, Variables(x, **variables), sending
    )
    federation.start()
    return federation


@pytest.mark.parametrize("weights", [None, (1.0, 2.0, 5.0)])
def test_half_is_fedavg_with_two_roundings(weights):
    x, of = np.array([9.0, -2.0]), np.array(weights or (1.0, 1.0, 1.0))
    trace = fedmpi.simulate(
        fedmpi.algorithms.FedAvg(step_size=0.1), lambda i, x, sample: x.numpy() - OPTIMA[i], x0=x, rounds=4,
        local_steps=1, sending=Sending(codec=Half()), weights=weights,
    )  # fmt: skip
    for record in (record for record in trace if record["step"] is None and record["round"] >= 0):
        sent = [x + _half(-0.1 * (x - optimum)) for optimum in OPTIMA]
        x = x + _half(np.average(sent, axis=0, weights=of) - x)
        np.testing.assert_allclose(record["rows"]["x"][0], x, rtol=1e-12)


def _half(values):
    return torch.as_tensor(values).to(torch.bfloat16).double().numpy()


def test_random_k_is_unbiased():
    """All draws of one of four coordinates have, in the mean, the mean without a codec."""
    plain = federation_of(fedmpi.algorithms.FedAvg(step_size=0.5), None)
    plain.run_round()
    found, places = [], set()
    for seed in range(100):
        federation = federation_of(fedmpi.algorithms.FedAvg(step_size=0.5), Sending(codec=RandomK(fraction=0.25)), seed)
        federation.run_round()
        moved = federation.server.x - 4
        place = int(moved.nonzero()[0, 0])
        assert moved.count_nonzero() == 1 and torch.allclose(moved[place], 4 * (plain.server.x[place] - 4))
        places.add(place)
        found.append(place)
    assert places == {0, 1, 2, 3} and max(np.bincount(found)) < 45  # 25 are expected, with a deviation of 4


@pytest.mark.parametrize("number", [0, 1, 2, 3, 5])
def test_every_set_of_places_is_as_likely_as_any_other(number):
    draw, found = np.random.default_rng(0), collections.Counter()
    for _ in range(3000):
        found[tuple(subset(draw, 5, number).tolist())] += 1
    expected = 3000 / math.comb(5, number)
    assert len(found) == math.comb(5, number) and all(len({*places}) == number for places in found)
    assert sum((times - expected) ** 2 / expected for times in found.values()) < 28  # of 9 degrees of freedom: 1e-3


@pytest.mark.rarely
@pytest.mark.parametrize("codec", [Half(), RandomK(fraction=0.5)], ids=["half", "random_k"])
@pytest.mark.parametrize("name", ["SCAFFOLD", "SCAFFOLDM", "SCAFFOLDMVR", "CODASCA", "Scaffnew", "FedDyn"])
def test_control_variates_take_note_of_what_is_read(name, codec):
    plain = {"CODASCA": {"prox_weight": 0.0}, "FedDyn": {"proximal_weight": 1.0}}.get(name, {})
    plain |= {"fresh_weight": 1.0} if name.startswith("SCAFFOLDM") else {}
    c = "h" if name == "FedDyn" else "c"
    trace = fedmpi.simulate(
        getattr(fedmpi.algorithms, name)(step_size=0.08, **plain), lambda i, x, sample: x.numpy() - OPTIMA[i],
        x0=[5.0, 5.0], rounds=100, local_steps=5, participants=lambda r: [r % 3, (r + 1) % 3],
        sending=Sending(codec=codec),
    )  # fmt: skip
    for rows in (record["rows"] for record in trace if record["step"] is None):
        assert np.abs(rows[c] - rows[f"{c}_i"].mean(0)).max() < 1e-12
    assert np.abs(trace[-1]["rows"]["x"][0] - OPTIMA.mean(0)).max() < 0.01


@pytest.mark.parametrize(
    "name", ["fedavg", "fafed", "scaffold", "local_adam", "mimeadam", "fedavg_m_vr", "coda", "feddyn"]
)
def test_a_codec_without_loss_changes_nothing(name):
    given = {"x0": [5.0, 5.0, 1.0], "rounds": 4, "num_clients": 3}
    algorithm = fedmpi.ground.registry.find("algorithm", name, fedmpi.algorithms, fedmpi.algorithms.Algorithm)()
    found = [
        fedmpi.simulate(algorithm, lambda i, x, sample: x.numpy() - i, sending=Sending(codec=codec), **given)
        for codec in (None, Doubled(), RandomK(fraction=1.0))
    ]
    for records in zip(*found, strict=True):
        for other in records[1:]:
            for row, values in records[0]["rows"].items():
                np.testing.assert_allclose(other["rows"][row], values, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("codec", [Half(), RandomK(fraction=0.5), Doubled()], ids=["half", "random_k", "own"])
@pytest.mark.parametrize("algorithm", [fedmpi.algorithms.FAFED(), fedmpi.algorithms.SCAFFOLD(step_size=0.1)])
@pytest.mark.parametrize("num_clients", [1, 3])
def test_it_goes_on_to_the_same_bits(algorithm, codec, num_clients):
    whole = federation_of(algorithm, Sending(codec=codec), num_clients=num_clients)
    for _ in range(2):
        whole.run_round()
    state = {name: value.clone() if torch.is_tensor(value) else value for name, value in whole.state().items()}
    again = federation_of(algorithm, Sending(codec=codec), num_clients=num_clients, start=1.0)
    again.restore(state)
    for _ in range(3):
        whole.run_round()
        again.run_round()
        assert torch.equal(whole.server.x, again.server.x) and whole.facts() == again.facts()
    assert ("codec_calls" in whole.facts()) == isinstance(codec, Doubled)


@pytest.mark.parametrize("codec", [Half(), RandomK(fraction=0.5)], ids=["half", "random_k"])
def test_private_coordinates_stay_those_of_each_client(codec):
    found = []
    for sending in (Sending(codec=codec), None):
        federation = federation_of(fedmpi.algorithms.FedAvg(step_size=0.1), sending, private=(slice(1, 2),))
        for _ in range(3):
            federation.run_round()
        found.append([client.kept[PRIVATE]["x"].tolist() for client in federation.clients])
    assert len({*map(tuple, found[0])}) == 3 and found[0] == found[1]


def test_masks_among_the_buffers_hinder_no_rule():
    infinite = torch.tensor([np.inf, 1.0, -np.inf])
    for num_finite in (-5, 0):
        assert moves(infinite, infinite, num_finite).tolist() == [0, 0, 0]
        assert moves(infinite, torch.zeros(3), num_finite)[0] == np.inf
    assert moves(infinite[1:], torch.ones(2), 2).tolist() == (infinite[1:] - 1).tolist()


def test_a_model_with_masks_is_averaged_in_half_precision():
    class Masked(torch.nn.Sequential):
        def __init__(self):
            super().__init__(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
            self.register_buffer("mask", torch.tensor([0.0, -np.inf]))

    def loss(model):
        return model(torch.randn(8, 3)).square().mean()

    for codec in ("none", "half", "random_k"):
        torch.manual_seed(0)
        model = Masked()
        fed = fedmpi.join(model, algorithm="fedavg", step_size=0.1, local_steps=1, codec=codec)
        for _ in range(3):
            fed.step(functools.partial(loss, model))
        fed.finish()
        assert all(value.isfinite().all() for name, value in model.state_dict().items() if name != "mask")
        assert model.mask.tolist() == [0.0, -np.inf] and model[1].running_mean.abs().sum() > 0


def test_what_does_not_compose_is_one_line():
    for aggregation, codec in [(Reproducible(), Half()), (Median(), RandomK()), (CentredClipping(), RandomK())]:
        with pytest.raises(UserError, match=r"^codec (half|random_k) does not work with aggregation .*: expected"):
            Sending(aggregation, codec=codec)

    @dataclasses.dataclass(kw_only=True)
    class Own(Mean):
        """A user's mean, which knows nothing of codecs."""

    with pytest.raises(UserError, match="^codec half does not work with aggregation own"):
        Sending(Own(), codec=Half())
    for codec, message in [
        ("hlaf", r"unknown codec 'hlaf'; did you mean 'half'\?"),
        (Mean(), "codec is a Mean: expected a name, or an object of Codec"),
    ]:
        with pytest.raises(UserError, match=message):
            chosen("mean", (), codec)
    assert chosen("mean", (), "none").codec is chosen("mean", ()).codec is None
    assert chosen("mean", (), RandomK).codec == chosen("mean", (), "random-k").codec == RandomK()


def test_the_pages_table_of_what_composes():
    page = (Path(__file__).parents[2] / "docs" / "aggregation.md").read_text()
    for name, codec in known(fedmpi.aggregation.codecs, Codec).items():
        works = [f"`{of}`" for of, cls in known(fedmpi.aggregation, Aggregation).items() if in_codec(cls(), codec())]
        (line,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert line.split(" | ")[-1] == f"{', '.join(works)} |"
