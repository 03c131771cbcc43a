"""What JSON cannot say: nan is null in metrics.jsonl and nan again for all that read it; records of any length."""

import json
import math

import pytest

from fedmpi.runs.folder import read_run
from fedmpi.runs.lock import RunLock
from fedmpi.runs.recorder import Recorder, make_run_folder
from fedmpi.training.api import Run

AMOUNTS = {"iteration": 1, "seconds": 1.0, "bytes": 8, "gradients": 2}


def recorded(out, *rounds):
    """A run folder with some rounds: (loss, metrics, the clients' values of the training loss)."""
    recorder = Recorder(make_run_folder(out, "it", ""), len(rounds))
    recorder.begin({"task": "quadratic", "algorithm": "fedavg", "rounds": len(rounds), "seed": 0})
    for number, (loss, metrics, clients) in enumerate(rounds, 1):
        measured = Metrics(metrics)
        measured.clients = {"train_loss": clients}
        recorder.round({"round": number, **AMOUNTS, "loss": loss}, measured)
    recorder.close()
    return recorder.folder


class Metrics(dict):
    """Metrics with those of each client, as an evaluation returns them."""


def refuse(word):
    raise AssertionError(f"{word} is no JSON")


def test_nan_is_null_on_disk_and_nan_for_every_reader(tmp_path, capsys):
    folder = recorded(
        tmp_path, (math.nan, {"accuracy": 0.5}, [1.0, math.nan]), (2.0, {"accuracy": math.nan}, [math.nan, 3.0])
    )
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=refuse) for line in lines)
    assert first["loss"] is None and second["accuracy"] is None and second["clients"] == {"train_loss": [None, 3.0]}
    run = read_run(folder)
    assert math.isnan(run.records[0]["loss"]) and math.isnan(run.final("accuracy"))
    assert math.isnan(run.clients["train_loss"][0]) and run.clients["train_loss"][1] == 3.0
    frame = Run(None, run.records, {}, folder, {}).frame()
    assert frame["loss"].dtype == "float64" and frame["loss"].isna().tolist() == [True, False]
    going_on = Recorder(RunLock(folder), 3)
    going_on.begin({"seed": 0}, len("".join(lines)) + 2, 2)
    assert math.isnan(going_on.last["accuracy"]) and going_on.last["round"] == 2
    going_on.close()
    assert "not all records" not in capsys.readouterr().err


def test_infinite_metrics_stay_infinite(tmp_path):
    folder = recorded(tmp_path, (1.0, {"perplexity": math.inf, "gap": -math.inf}, [1.0]))
    json.loads((folder / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert read_run(folder).final("perplexity") == math.inf


@pytest.mark.parametrize("size", [100_000, 1_000_000])
def test_a_record_of_any_length_is_continued(tmp_path, capsys, size):
    """With the values of so many clients."""
    folder = recorded(tmp_path, (1.0, {}, [0.5]), (2.0, {}, [0.123456789] * size))
    before = (folder / "metrics.jsonl").read_bytes()
    going_on = Recorder(RunLock(folder), 3)
    assert going_on.last_round() == 2
    going_on.begin({"seed": 0}, len(before), 2)
    assert going_on.last["loss"] == 2.0 and "not all records" not in capsys.readouterr().err
    going_on.close()
    assert (folder / "metrics.jsonl").read_bytes() == before
