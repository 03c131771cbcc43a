"""A goal by which a run chooses is a number that is measured: an error in one line before the first round otherwise."""

import math
import types

import pytest
import torch
from torch.utils.data import TensorDataset

import fedmpi
from fedmpi.comm.solo import SoloLink
from fedmpi.ground.errors import UserError
from fedmpi.runs.record import HELD_OUT
from fedmpi.tasks.base import Metrics
from fedmpi.training.early_stopping import Callbacks, EarlyStopping, check_goal
from fedmpi.training.result import ResultRule
from tests.machinery.helpers import start

PROGRAM = """
import fedmpi
import pathlib
from tests.training.test_goal import Nan, Unknown, Vector
best, patience = {"result": "best"}, {"patience": 2, "eval_every": 1}
for task, settings in ((Unknown, best), (Vector, patience), (Nan, best)):
    try:
        fedmpi.train(task=task(), algorithm="fedavg", clients=2, rounds=4, threads=1, **settings)
    except fedmpi.UserError as error:
        print(error, flush=True)
assert not pathlib.Path("runs").exists()
"""


def network(shape):
    return torch.nn.Linear(8, 2)


def data(client):
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(client))
    return TensorDataset(x, (x.sum(1) > 0).long())


class Nan(fedmpi.Task):
    metrics = {"auc": lambda scores, targets: math.nan}
    goal = ("auc", 1)
    model = "tests.training.test_goal.network"

    def train(self, client, num_clients):
        return data(client)

    def test(self):
        return data(99)

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


class Unknown(Nan):
    metrics = {"right": lambda scores, targets: (scores.argmax(1) == targets).float().mean().item()}
    goal = ("macro_auc", 1)


class Vector(Unknown):
    metrics = {"recall": ("sklearn.metrics.recall_score", {"average": None})}
    goal = ("recall", 1)


def spread_of_answers(scores, targets):
    """nan for constant answers, as of a model whose last layer begins with zeros."""
    return scores.std().item() or math.nan


def zeros(shape):
    model = torch.nn.Linear(8, 2)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return model


class Late(Unknown):
    metrics = {"spread": spread_of_answers}
    goal = ("spread", 1)
    model = "tests.training.test_goal.zeros"


def train(task, **settings):
    return fedmpi.train(task=task, algorithm="fedavg", clients=2, rounds=4, threads=1, **settings)


@pytest.mark.parametrize("settings", [{"result": "best", "eval_every": 2}, {"patience": 2, "eval_every": 1}], ids=str)
@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (Unknown, "goal macro_auc is not measured; measured are the numbers train_loss, test_loss, right: set"),
        (Vector, "goal recall is a vector or a matrix, not a number; measured are the numbers train_loss, test_loss: "),
        (Nan, "goal auc is nan; measured are the numbers train_loss, test_loss: "),
    ],
)
def test_a_goal_without_a_number_is_an_error_before_the_first_round(tmp_path, monkeypatch, task, problem, settings):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        train(task(), **settings)
    assert problem in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith(next(iter(settings)))
    assert not (tmp_path / "runs").exists()


def test_a_goal_that_nothing_chooses_by_is_not_needed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(train(Unknown()).metrics) == 4


@pytest.mark.parametrize("task", ["quadratic", "saddle_quadratic", "classification"])
def test_our_tasks_measure_their_goals(tmp_path, monkeypatch, task):
    monkeypatch.chdir(tmp_path)
    run = fedmpi.train(task=task, clients=2, rounds=2, threads=1, result="best", patience=5)
    assert len(run.metrics) == 2


def test_a_number_that_only_the_untrained_model_lacks_is_a_goal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = train(Late(), result="best", eval_every=1)
    assert run.final["spread"] == max(record["spread"] for record in run.metrics)
    last = train(Late(), eval_every=1)
    assert [record["loss"] for record in run.metrics] == [record["loss"] for record in last.metrics]


def test_every_rank_says_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = start(2, "-c", PROGRAM)
    assert result.returncode == 0, result.stderr
    for word in ("macro_auc is not measured", "recall is a vector", "auc is nan"):
        assert result.stdout.count(word) == 2, result.stdout


def test_held_out_data_and_clients_count():
    check_goal(("auc", 1), Metrics({"auc": math.nan, f"{HELD_OUT}auc": 0.5}), "result = best")
    check_goal(("auc", 1), Metrics({"auc": math.nan}, {"auc": [math.nan, 0.5]}), "result = best")
    with pytest.raises(UserError, match=f"goal {HELD_OUT}auc is nan; measured are the numbers auc: "):
        check_goal(("auc", 1), Metrics({"auc": 0.5, f"{HELD_OUT}auc": math.nan}), "result = best")


def test_a_goal_that_becomes_nan_later_is_said(capsys):
    federation = types.SimpleNamespace(link=SoloLink(), selected=None, round_index=1)
    rule = ResultRule("best", 2, 0, ("auc", 1))
    rule.consider(federation, {"auc": math.nan})
    rule.consider(federation, {"auc": math.nan})
    assert capsys.readouterr().err.count("auc is nan after round 1") == 1
    with pytest.raises(UserError, match="auc was not a finite number at any evaluation"):
        rule.check_selected(None)
    ResultRule("last", 2, 0, ("auc", 1)).check_selected(None)
    stopping = EarlyStopping(types.SimpleNamespace(stop=None, patience=1), ("auc", 1), SoloLink(), Callbacks())
    assert stopping.after({"round": 1}, {"auc": math.nan})
    assert stopping.reason == "auc was not a finite number in 1 evaluations"
