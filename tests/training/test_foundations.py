"""What a run rests on: which samples are trained on, weights, bounds at which it ends, which model is its result."""

import copy
import math
import types

import h5py
import numpy as np
import pytest
import torch

import fedmpi
from fedmpi.algorithms import FedAvg
from fedmpi.comm.solo import SoloLink
from fedmpi.data.partitions import Even
from fedmpi.federation import Plan, Variables
from fedmpi.oracles import FunctionOracle
from fedmpi.tasks.base import RankContext
from fedmpi.tasks.classification import Classification
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


@pytest.mark.parametrize(("evaluate", "every"), [("subset", 4), ("full", 2)])
def test_a_run_is_evaluated_about_10_times_or_20_on_all_data(evaluate, every):
    samples = [torch.utils.data.TensorDataset(torch.rand(60, 3), torch.arange(60) % 2) for _ in range(2)]
    run = fedmpi.train(
        algorithm="fedavg", model=torch.nn.Linear(3, 2), data=samples, rounds=42, local_steps=1, threads=1,
        evaluate=evaluate, evaluate_samples=40,
    )  # fmt: skip
    evaluated = [record["round"] for record in run.metrics if "train_loss" in record]
    assert evaluated == [*range(every, 42, every), 42]


def test_each_silo_is_tested_on_samples_that_are_drawn_for_it(tmp_path):
    for client in range(2):
        with h5py.File(tmp_path / f"silo_{client}.h5", "w") as file:
            for split in ("train", "test"):
                file[f"{split}/images"] = np.arange(100, dtype="float32").reshape(100, 1)
                file[f"{split}/labels"] = np.arange(100) % 2
    place = RankContext(2, range(2), 0, 1, 0, None, torch.device("cpu"), torch.float32)
    task = Classification(data=str(tmp_path / "silo_{client}.h5")).load(place, Even())
    task.synchronise(SoloLink())
    seen = []
    task.subset(40).evaluate(
        lambda inputs: seen.append(inputs[:, 0].tolist()) or torch.zeros(len(inputs), 2), SoloLink()
    )
    train, tests = seen[:2], seen[2:]
    assert [len(one) for one in seen] == [20] * 4
    assert task.subset(200) is task is not task.subset(198)
    assert len({*train[0]} & {*train[1]}) < 12 and len({*tests[0]} & {*tests[1]}) < 12


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


def stopping_after(values, callbacks=Callbacks(), **settings):  # noqa: B008  it is frozen
    """(number of the evaluation that ends a run, or None; why)."""
    run = types.SimpleNamespace(**{"stop": None, "patience": None, **settings})
    stopping = EarlyStopping(run, ("accuracy", 1), SoloLink(), callbacks)
    for number, value in enumerate(values, 1):
        if stopping.after({"round": number}, {} if value is None else {"accuracy": value}):
            return number, stopping.reason
    return None, stopping.reason


def test_patience_counts_evaluations_without_a_new_best():
    why = "accuracy has not improved in 2 evaluations"
    assert stopping_after([0.5, 0.5, 0.4, 0.9], patience=2) == (3, why)  # an equal one is no new best
    assert stopping_after([0.5, 0.4, 0.6, 0.5, 0.7, 0.6, 0.7], patience=2) == (7, why)
    assert stopping_after([0.5, None, None, 0.4, None, 0.4], patience=2) == (6, why)
    assert stopping_after([0.5, math.nan, 0.6, math.nan, 0.5], patience=2) == (5, why)
    assert stopping_after([0.1, 0.2, 0.3], patience=1) == (None, "")


def test_the_first_reason_to_end_is_said():
    said = stopping_after([0.5, 0.9], Callbacks(on_round=lambda record: record["round"] == 2), stop="accuracy>=0.9")
    assert said == (2, "accuracy >= 0.9")
    both = Callbacks(on_round=lambda record: True, on_evaluation=lambda record: "accuracy" in record)
    assert stopping_after([None], both) == (1, "by on_round") and stopping_after([0.5], both) == (1, "by on_evaluation")


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


def after_round(federation, rule, **metrics):
    federation.run_round()
    rule.consider(federation, metrics)
    return federation.selected and federation.selected.round


def test_the_best_is_the_first_of_equal_ones_and_never_without_a_number():
    federation = federation_of(None)
    federation.start()
    rule = ResultRule("best", 6, 0, ("loss", -1))
    assert [after_round(federation, rule, loss=loss) for loss in (math.nan, 0.5, 0.5, math.nan, 0.4, 0.6)] == [
        None, 2, 2, 2, 5, 5,
    ]  # fmt: skip
    more_is_better = federation_of(None)
    more_is_better.start()
    rule = ResultRule("best", 3, 0, ("accuracy", 1))
    rounds = [after_round(more_is_better, rule, accuracy=0.5, holdout_accuracy=value) for value in (0.1, 0.3, 0.2)]
    assert rounds == [1, 2, 2]


def test_a_drawn_result_is_kept_where_a_run_goes_on():
    federation = federation_of(None)
    federation.start()
    rule = next(one for seed in range(99) if (one := ResultRule("uniform", 3, seed, ("loss", -1)))._drawn == 2)
    assert [after_round(federation, rule) for _ in range(2)] == [None, 2]
    rule.check(federation)  # after the drawn round itself
    assert federation.selected.round == 2
    assert after_round(federation, rule) == 2
    rule.check(federation)
    longer = next(one for seed in range(99) if (one := ResultRule("uniform", 9, seed, ("loss", -1)))._drawn == 1)
    with pytest.raises(fedmpi.UserError, match="the result is round 1, which has passed"):
        longer.check(federation)


@pytest.mark.parametrize("result", ["best", "uniform"])
def test_a_chosen_result_has_the_statistics_of_its_round(tmp_path, result):
    """Also those of batch norm, which go on changing after it."""
    torch.manual_seed(0)
    inputs = torch.randn(90, 3)
    sets = [torch.utils.data.TensorDataset(one, (one.sum(1) > 0).long()) for one in inputs.split(30)]
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    run = fedmpi.train(
        algorithm={"name": "fedavg", "step_size": 2.0}, model=model, data=sets[:2], test_data=sets[2], rounds=8,
        local_steps=2, threads=1, eval_every=1, result=result, seed=5, out=tmp_path, name="run",
    )  # fmt: skip
    losses = []
    for found in (run.model, fedmpi.load(tmp_path / "run", copy.deepcopy(model))):
        with torch.no_grad():
            losses.append(torch.nn.functional.cross_entropy(found(sets[2].tensors[0]), sets[2].tensors[1]).item())
    of_rounds = [record["test_loss"] for record in run.metrics]
    assert losses == [pytest.approx(run.final["test_loss"], rel=1e-5)] * 2
    assert min(abs(loss - losses[0]) for loss in of_rounds[:-1]) < 1e-5 < abs(of_rounds[-1] - losses[0])
