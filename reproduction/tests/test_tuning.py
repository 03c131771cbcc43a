"""Tuning: chosen on training data, by the mean that the answer has, and not lost by a kill."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml
from helpers import ROOT

from fedmpi.ground.errors import UserError
from fedmpi.ground.files.run_files import RECORDS
from reproduction.csv_files import read_rows, write_tables
from reproduction.experiment import SCALES, find_experiments
from reproduction.running import How
from reproduction.summary import _with_ends
from reproduction.tests.tiny import TINY, rows
from reproduction.tuning import tune

DIGITS = {"task": "classification", "clients": 2, "rounds": 1, "local_steps": 3}
STEPS = "algorithm.step_size"
KEYS = ("method", "settings", "metric", "mean", "deviation", "runs", "diverged", "seeds", "chosen")


def written(folder, tune, panel=DIGITS, **changed):
    """The path of an experiment's file whose methods have these grids."""
    one = TINY | {"panels": {"digits": panel}, "metric": "accuracy", "printed": {}, "claims": []} | changed
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(one | {"tune": {"panel": "digits"} | tune}), encoding="utf-8")
    return file


def tuned(file, folder, capsys, scale="small", adds=False):
    """What `--tune` prints in this process, run folders and results in a folder."""
    how = How(1, 2, 1, None, None, None, folder / "runs", "python -m reproduction tiny.yaml --tune")
    (one,) = find_experiments([str(file)])
    capsys.readouterr()
    tune(one, scale, None, folder / "results", how, adds)
    return capsys.readouterr().out


def grid(folder, name="tiny"):
    return rows(folder / "results" / "tuning" / f"{name}.csv")


def of(found):
    return [tuple(row[name] for name in KEYS) for row in found]


def test_tuning_chooses_on_held_out_data_and_keeps_the_whole_grid(tmp_path, capsys):
    grids = {"FedAvg": {STEPS: [1.0e-06, 0.1]}, "FAFED": {STEPS: [1.0e-06, 0.001]}}
    file = written(tmp_path, {"grids": grids})
    tuned(file, tmp_path, capsys)
    found = grid(tmp_path)
    assert [row["chosen"] for row in found] == ["", "yes", "", "yes"]
    assert {row["metric"] for row in found} == {"holdout_accuracy"} and all(row["commit"] for row in found)
    assert [_with_ends(row, found) for row in found if row["chosen"]] == [
        "step_size 0.001 (largest)",
        "step_size 0.1 (largest)",
    ]
    longer = {"settings": {"rounds": 2}, "grids": {"FAFED": {STEPS: [0.01]}}}
    file = written(tmp_path, {"grids": grids, "full": longer}, scales={"small": {}, "full": {}})
    tuned(file, tmp_path, capsys, "full")
    (row,) = grid(tmp_path, "tiny-full")
    assert "--rounds=2" in row["command"] and (row["settings"], row["chosen"]) == ("step_size 0.01", "yes")
    assert grid(tmp_path) == found
    with pytest.raises(UserError, match="has no grids for --tune --scale mlp"):
        tuned(file, tmp_path, capsys, "mlp")


@pytest.mark.rarely("reproduction", "fedmpi/cli/sweep", "fedmpi/config")
def test_a_killed_tuning_goes_on_where_it_was(tmp_path, capsys):
    """SIGKILL ends the program amid its runs: the file has what has ended, and the same command makes the rest."""
    panel = {"task": "quadratic", "clients": 2, "rounds": 20, "local_steps": 2}
    grids = {"FedAvg": {STEPS: [0.1, 0.2]}, "FAFED": {STEPS: [0.1, 0.2]}}
    file = written(tmp_path, {"metric": "loss", "seeds": [0, 1], "grids": grids}, panel)
    csv = tmp_path / "results" / "tuning" / "tiny.csv"
    words = [sys.executable, "-m", "reproduction", file, "--tune", "--at-a-time", "1"]
    words += ["--out", tmp_path / "runs", "--results", tmp_path / "results"]
    with subprocess.Popen(list(map(str, words)), cwd=ROOT, stdout=subprocess.DEVNULL) as program:
        until = time.monotonic() + 300
        while not csv.exists() or sum(int(row["runs"]) for row in read_rows(csv)) < 5:
            assert program.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        os.kill(program.pid, signal.SIGKILL)
    partial = grid(tmp_path)
    ended = sum(int(row["runs"]) for row in partial)  # all points with seed 0, and then with seed 1, FAFED's first
    assert 5 <= ended < 8 and not any(row["chosen"] for row in partial if row["method"] == "FedAvg")
    left = int(re.search(r"(\d+) of them still to do", tuned(file, tmp_path, capsys))[1])
    assert left <= 8 - ended
    whole = grid(tmp_path)
    assert [row["runs"] for row in whole] == ["2"] * 4 and os.listdir(csv.parent) == ["tiny.csv"]
    tuned(file, tmp_path / "at_one_go", capsys)
    assert of(whole) == of(grid(tmp_path / "at_one_go"))
    # Without the run folders: points of which all runs had ended are kept, the others are made again.
    again = tmp_path / "again" / "results" / "tuning" / "tiny.csv"
    write_tables((again, list(partial[0]), partial))
    kept = sum(row["runs"] == "2" for row in partial)
    assert kept >= 1
    said = tuned(file, tmp_path / "again", capsys, adds=True)
    assert f"{kept} of 4 points are kept" in said and f"{8 - 2 * kept} of them still to do" in said
    assert of(whole) == of(grid(tmp_path / "again"))


def test_add_keeps_points_with_equal_settings_and_no_others(tmp_path, capsys):
    few, more = {STEPS: [0.01, 0.1]}, {STEPS: [0.01, 0.1, 0.3]}
    tuned(written(tmp_path, {"grids": {"FedAvg": few}}), tmp_path, capsys)
    before = grid(tmp_path)

    def again(panel=DIGITS, **its):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        return tuned(written(tmp_path, its, panel), tmp_path, capsys, adds=True)

    said = again(grids={"FedAvg": more})
    assert "2 of 3 points are kept" in said and "1 of them still to do" in said
    after = grid(tmp_path)
    assert [row["settings"] for row in after] == ["step_size 0.01", "step_size 0.1", "step_size 0.3"]
    assert sum(row["chosen"] == "yes" for row in after) == 1
    assert [row | {"chosen": ""} for row in before] == [row | {"chosen": ""} for row in after[:2]]  # with the date
    assert "0 of 3 points are kept" in again(DIGITS | {"rounds": 2}, grids={"FedAvg": more})
    assert "0 of 3 points are kept" in again(DIGITS | {"rounds": 2}, grids={"FedAvg": more}, seeds=[1])
    with pytest.raises(UserError, match="has FedAvg with step_size 0.3 on digits, which is not in the grid"):
        again(grids={"FedAvg": few})
    tuned(written(tmp_path, {"grids": {"FedAvg": few}}), tmp_path, capsys)
    assert [path.name for path in (tmp_path / "results" / "tuning").glob("*.old")] == ["tiny.csv.1.old"]


def test_the_value_is_the_mean_of_the_last_tenth_as_in_the_answer(tmp_path, capsys):
    its = {"grids": {"FedAvg": {STEPS: [0.1]}}}
    said = tuned(written(tmp_path, its, DIGITS | {"rounds": 30, "eval_every": 1}), tmp_path, capsys)
    assert "one evaluation" not in said
    (path,) = (tmp_path / "runs" / "tiny" / "tuning").rglob(RECORDS)
    records = list(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
    last = [line["holdout_accuracy"] for line in records if line["round"] > 27]
    assert len(last) == 3 and last[-1] != pytest.approx(sum(last) / 3)
    assert float(grid(tmp_path)[0]["mean"]) == pytest.approx(sum(last) / 3, rel=1e-12)
    said = tuned(written(tmp_path, its, DIGITS | {"rounds": 30, "eval_every": 30}), tmp_path, capsys)
    assert "in 30 rounds, each value is from one evaluation" in said


@pytest.mark.rarely("reproduction", "fedmpi/cli/sweep", "fedmpi/config")
def test_an_attack_is_tuned_at_its_scale_by_its_objective_and_after_its_network(tmp_path, capsys):
    network = {"task": "classification", "task.data": "digits", "task.mean": "[0.5]", "task.std": "[1.0]"}
    network |= {"model": "mlp", "algorithm": "fedavg", "clients": 1, "rounds": 3, "local_steps": 20}
    attack = {"task": "attack", "task.classifier": "{first}", "clients": 2, "rounds": 2, "local_steps": 1}
    attack |= {"oracle.directions": 4}
    few = {"FedAvg": {STEPS: [0.1]}}
    mlp = {"metric": "train_loss", "grids": {"FedAvg": {STEPS: [0.1, 1.0]}, "FAFED": {STEPS: [0.1]}}}
    mlp["unequal"] = "FAFED's is the printed one."

    def again(first=network, scale="mlp", adds=False):
        scales = {"small": {"says": "x"}, "mlp": {"says": "y"}}
        file = written(tmp_path, {"grids": few, "mlp": mlp}, attack, first=first, scales=scales)
        return tuned(file, tmp_path, capsys, scale, adds)

    again()
    found = grid(tmp_path, "tiny-mlp")
    assert {row["metric"] for row in found} == {"train_loss"} and len(found) == 3
    assert all("; after python -m fedmpi.train " in row["with"] for row in found)
    shutil.rmtree(tmp_path / "runs")
    assert "3 of 3 points are kept" in again(adds=True) and not list((tmp_path / "runs").rglob("first"))
    assert "0 of 3 points are kept" in again(network | {"rounds": 2}, adds=True)  # they attacked another network
    # As a program: a run prints why it ended, which this process would keep for capsys.
    words = [sys.executable, "-m", "reproduction", tmp_path / "tiny.yaml", "--tune", "--at-a-time", "1"]
    words += ["--out", tmp_path / "runs", "--results", tmp_path / "results"]
    ended = subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True)
    missing = "tiny: tune.metric is missing, .*: expected tune.metric: train_loss"
    assert ended.returncode == 2 and re.search(missing, ended.stderr), ended.stdout + ended.stderr


def test_grids_of_unequal_size_have_a_reason():
    for one in find_experiments(["all"]):
        for scale in SCALES:
            tuning = one.tuning(scale)
            if tuning and not tuning.get("unequal"):
                points = one.tuning_points(scale)
                assert len({sum(point.method == name for point in points) for name in tuning["grids"]}) == 1, one.name
