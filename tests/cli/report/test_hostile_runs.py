"""Reports on run folders from strangers: a damaged one is left out, and the page is still made."""

import csv
import json
import os
import re
import sys

import pytest
import yaml
from helpers import execute

from fedmpi.runs.folder import find_runs

RECORD = {"round": 1, "iteration": 5, "loss": 1.5, "accuracy": 0.5, "seconds": 1.0, "bytes": 80, "gradients": 10}
NASTY = "<script>alert(1)</script> $x_{$ | `b` \x1b[31m **[a](javascript:x)**"


def write(folder, settings=None, *lines):
    """A run folder with some settings and lines of its records; by default good ones."""
    folder.mkdir(parents=True)
    content = {"algorithm": {"name": "fafed"}, "task": {"name": "classification", "data": "digits"}, "seed": 0}
    (folder / "settings.yaml").write_text(yaml.safe_dump({**content, **(settings or {})}))
    lines = lines or [json.dumps({**RECORD, "round": number, "seconds": number}) for number in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def report(*words):
    return execute([sys.executable, "-m", "fedmpi", "report", *words])


def with_values(**values):
    return json.dumps({**RECORD, **values})


HOSTILE = {
    "digits": ({}, with_values(bytes=10**400)),
    "digits-of-a-metric": ({}, with_values(accuracy=10**400)),
    "many-rounds": ({}, with_values(round=10**30)),
    "deep": ({}, "[" * 100_000),
    "long": ({}, with_values(note="x" * 100_000)),
    "names": ({}, json.dumps({**RECORD, NASTY: 0.5, "=1+1": 2.0, "": 1, "x" * 100_000: 1.0})),
    "nan": ({}, with_values(accuracy=float("nan"), loss=float("inf"))),
    "infinite": ({}, with_values(accuracy=float("-inf"), loss=1e308), with_values(round=2, loss=float("inf"))),
    "settings": ({"algorithm": {"name": NASTY, NASTY: NASTY}, "model": {"name": "=cmd()", "x": 10**300}},),
    "nested": ({"algorithm": {"name": "fafed", "x": {"y": {"z": [1, {"a": 2}]}}}},),
    "words": ({"rounds": "many"},),
    "numbers": ({"clients": 10**300, "rounds": 3},),
    "no-line": ({}, "\x00\x01"),
    "paper": ({"paper": {"printed": 3}},),
}


@pytest.mark.rarely
def test_hostile_folders_cost_at_most_themselves(tmp_path):
    write(tmp_path / "runs" / "good")
    for name, content in HOSTILE.items():
        write(tmp_path / "runs" / name, *content)
    write(tmp_path / "runs" / f"odd \x1b[31m {os.fsdecode(bytes([0xFF]))} | $ <b>")
    (tmp_path / "runs" / "fifo").mkdir()
    os.mkfifo(tmp_path / "runs" / "fifo" / "metrics.jsonl")
    (tmp_path / "runs" / "fifo" / "settings.yaml").write_text("seed: 0\n")
    (tmp_path / "runs" / "no-settings").mkdir()
    (tmp_path / "runs" / "no-settings" / "settings.yaml").write_text("a: &a [*a]\n")
    ended = report(tmp_path / "runs", "--out", tmp_path / "page.html")
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr and "\x1b" not in ended.stdout + ended.stderr
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page and "fafed" in page
    tables = (tmp_path / "page" / "tables.md").read_text()
    assert "<script" not in tables and not re.search(r"(?<!\\)\$", tables)
    with open(tmp_path / "page" / "finals.csv", newline="") as file:
        assert not [cell for row in csv.reader(file) for cell in row[:3] if cell[:1] in tuple("=+-@")]


@pytest.mark.parametrize("name", HOSTILE)
def test_each_is_read_or_left_out_in_one_line(tmp_path, name):
    write(tmp_path / "good")
    write(tmp_path / name, *HOSTILE[name])
    runs, complaints = find_runs([tmp_path / "good", tmp_path / name])
    assert len(runs) + len(complaints) == 2 and runs[0].path.name == "good"
    assert all(line.isprintable() and len(line) < 400 for line in complaints)


@pytest.mark.slow
def test_500_runs_are_reported_in_time(tmp_path):
    lines = [with_values(round=number, seconds=number, bytes=80 * number) for number in range(1, 101)]
    for number in range(500):
        settings = {"seed": number % 5, "algorithm": {"name": "fafed", "step_size": 0.001 * (1 + number // 5 % 20)}}
        write(tmp_path / "runs" / f"{number:03d}", {**settings, "batch_size": 10 + number // 100}, *lines)
    began = os.times().children_user
    ended = report(tmp_path / "runs", "--out", tmp_path / "page.html")
    assert ended.returncode == 0, ended.stderr
    assert os.times().children_user - began < 15  # of CPU time, which a busy machine does not stretch


@pytest.mark.parametrize("name", ["metrics.jsonl", "baselines.json", "roc.csv", "data.json", "clients.json"])
def test_no_file_of_a_run_folder_is_read_through_a_link(tmp_path, name):
    write(tmp_path / "good")
    write(tmp_path / "it")
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / "it" / name).unlink(missing_ok=True)
    (tmp_path / "it" / name).symlink_to(tmp_path / "elsewhere")
    runs, complaints = find_runs([tmp_path / "good", tmp_path / "it"])
    assert [run.path.name for run in runs] == ["good"] and f"it/{name}: is a link" in complaints[0]
