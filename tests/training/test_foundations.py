"""What a run rests on: which samples are trained on, weights, bounds at which it ends, which model is its result."""

import types

import pytest
import torch

import fedmpi
from fedmpi.algorithms import FedAvg
from fedmpi.comm.link import SoloLink
from fedmpi.federation import Plan, Variables
from fedmpi.oracles import FunctionOracle
from fedmpi.training.early_stopping import Callbacks, EarlyStopping
from fedmpi.training.result import ResultRule


class Noted(torch.nn.Linear):
    """Notes the first feature of every sample, separately in training and in evaluation."""

    seen = {True: set(), False: set()}

    def forward(self, inputs):
        self.seen[self.training].update(inputs[:, 0].tolist())
        return super().forward(inputs)


def test_held_out_samples_are_not_trained_on():
    samples = [
        torch.utils.data.TensorDataset(torch.rand(50, 3, generator=torch.Generator().manual_seed(client)), labels)
        for client, labels in enumerate(torch.arange(100).reshape(2, 50) % 2)
    ]
    all_of_them = {value for data in samples for value in data.tensors[0][:, 0].tolist()}
    fedmpi.train(
        algorithm="fedavg", model=Noted(3, 2), data=samples, holdout=0.4, rounds=30, local_steps=10, threads=1,
        eval_every=1,
    )  # fmt: skip
    trained, evaluated = Noted.seen[True], Noted.seen[False]
    assert len(trained) == 60 and evaluated - trained and trained | evaluated == all_of_them


def federation_of(weights):
    def make(client):
        return FunctionOracle(lambda index, x, sample: x - index, client)

    plan = Plan(num_clients=3, weights=weights)
    start = Variables(torch.tensor([4.0], dtype=torch.float64))
    return fedmpi.Federation(FedAvg(step_size=0.5), SoloLink(), dict.fromkeys(range(3), make), plan, start)


@pytest.mark.parametrize("weights", [None, [1.0, 1.0, 1.0], [1.0, 2.0, 5.0], [7.0, 0.5, 0.5]])
def test_an_average_has_the_weights_of_its_clients(weights):
    federation = federation_of(weights)
    federation.start()
    federation.run_round()
    moved = [4.0 - 0.5 * (4.0 - index) for index in range(3)]
    shares = [weight / sum(weights or [3.0]) for weight in weights or [1.0] * 3]
    expected = sum(share * x for share, x in zip(shares, moved))
    assert federation.server.x.item() == pytest.approx(expected, rel=1e-15)


def test_each_client_is_evaluated_on_samples_that_are_drawn_for_it():
    for seen in Noted.seen.values():
        seen.clear()
    numbered = torch.arange(200.0).reshape(2, 100, 1).expand(2, 100, 3)
    samples = [torch.utils.data.TensorDataset(inputs / 200, torch.arange(100) % 2) for inputs in numbered]
    fedmpi.train(
        algorithm={"name": "fedavg", "step_size": 1e-6}, model=Noted(3, 2), data=samples, rounds=1, local_steps=1,
        threads=1, evaluate_samples=40,
    )  # fmt: skip
    places = [round(200 * value) for value in Noted.seen[False]]
    drawn = [{place % 100 for place in places if place // 100 == client} for client in range(2)]
    assert all(20 <= len(one) <= 22 for one in drawn)  # a few more on which metrics are tried first
    assert len(drawn[0] & drawn[1]) < 12


@pytest.mark.parametrize(
    ("condition", "value", "ends"),
    [
        ("loss <= 0.5", 0.5, True),
        ("loss <= 0.5", 0.5000001, False),
        ("loss < 0.5", 0.5, False),
        ("loss >= 0.5", 0.5, True),
        ("loss > 0.5", 0.5, False),
        ("loss > 0.5", 0.5000001, True),
    ],
)
def test_a_run_ends_at_its_bound(condition, value, ends):
    run = types.SimpleNamespace(stop=condition, patience=None)
    stopping = EarlyStopping(run, ("loss", -1), SoloLink(), Callbacks())
    assert stopping.after({"round": 1}, {"loss": value}) == ends


def test_the_result_is_the_model_after_the_round_that_was_drawn():
    """Its number is from 1 to the number of rounds, the model is the one after that many rounds."""
    drawn = set()
    for seed in range(40):
        federation = federation_of(None)
        federation.start()
        rule, after = ResultRule("uniform", 3, seed, ("loss", -1)), {}
        for _ in range(3):
            federation.run_round()
            rule.consider(federation, {})
            after[federation.round_index] = federation.server.x.clone()
        chosen = federation.selected
        assert torch.equal(chosen.x, after[chosen.round])
        drawn.add(chosen.round)
    assert drawn == {1, 2, 3}
