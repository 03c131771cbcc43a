"""The table of a record's fields agrees with what runs write and tasks measure."""

import json

import pytest
from helpers import train

import fedmpi.tasks
from fedmpi.ground.registry import known
from fedmpi.ground.text import UNITS
from fedmpi.runs.record import AMOUNTS, AXES, CLIENTS_KEY, FORMAT_KEY, METRICS, field, less_is_better, title
from fedmpi.runs.recorder import Recorder, make_run_folder
from fedmpi.tasks.base import BaseTask, LoadedTask


def test_a_run_writes_the_fields_of_the_table(tmp_path):
    words = ("--rounds", 2, "--eval-every", 2, "--local-steps", 1, "--holdout", 0.1, "--name", "it")
    assert train(1, tmp_path, *words).returncode == 0
    first, second = map(json.loads, (tmp_path / "it" / "metrics.jsonl").read_text().splitlines())
    assert set(first) == {*AMOUNTS, "loss"}
    measured = set(second) - set(first) - {CLIENTS_KEY, FORMAT_KEY}
    assert measured == {"train_loss", "test_loss", "accuracy", "holdout_loss", "holdout_accuracy"}
    assert measured <= set(METRICS)


def test_long_runs_say_the_time_left(tmp_path, capsys):
    recorder = Recorder(make_run_folder(tmp_path, "it", ""), 40)
    recorder.begin({"seed": 0})
    recorder.round({"round": 10, "seconds": 1200.0}, {"accuracy": 0.5})
    recorder.round({"round": 39, "seconds": 1200.0}, {"accuracy": 0.625})
    recorder.close()
    assert capsys.readouterr().out == "round 10/40: accuracy 0.5000; 60.0 min left\nround 39/40: accuracy 0.6250\n"


def test_the_better_value_of_a_metric_is_the_one_that_its_task_wants():
    assert known(fedmpi.tasks, BaseTask)  # imports all of them
    loaded = [cls for cls in _subclasses(LoadedTask) if cls.__module__.startswith("fedmpi.") and hasattr(cls, "goal")]
    assert len(loaded) >= 4
    for metric, sign in (cls.goal for cls in loaded):
        assert metric in METRICS and less_is_better(metric) == (sign < 0), metric


def _subclasses(cls):
    return [cls, *(inner for own in cls.__subclasses__() for inner in _subclasses(own))]


@pytest.mark.parametrize(
    ("name", "words", "is_less"),
    [
        ("accuracy", "test accuracy", False),
        ("my_loss", "my loss", True),
        ("f1_score", "f1 score", False),
        *(
            (name, name.replace("_", " "), True)
            for name in (
                "mean_absolute_error",
                "word_perplexity",
                "distance_to_goal",
                "mean_distortion",
                "duality_gap",
                "weight_norm",
                "brier",
            )
        ),
    ],
)
def test_metrics_of_own_tasks_are_described_by_their_names(name, words, is_less):
    assert (title(name), less_is_better(name)) == (words, is_less)


def test_amounts_have_units_and_metrics_have_none():
    assert all(one.unit in UNITS for one in AMOUNTS.values()) and not any(one.unit for one in METRICS.values())
    assert set(AXES) <= set(AMOUNTS) and field("bytes").label == "sent per client"
