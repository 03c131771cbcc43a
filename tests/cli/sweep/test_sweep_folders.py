"""A sweep writes into its own folder only, and goes on with what a killed one left there."""

import errno
import json
import os

import pytest
import yaml
from test_own_files import foreign, snapshot
from test_report import make_run

from fedmpi.cli.sweep.__main__ import main
from fedmpi.cli.sweep.plan import Plan
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import MARK, make_folder, write_mark
from fedmpi.ground.files.run_files import is_complete

GRID = ["--grid", "seed=0,1", "--task", "quadratic", "--clients", "2", "--rounds", "2"]
TABLE = ["--holdout", "0", "--metric", "loss"]


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """A function that runs a sweep in the folder `sweep` in this process: (exit code, its output, its one line)."""
    monkeypatch.chdir(tmp_path)

    def ended(*words):
        code = 0
        try:
            main([*GRID, *TABLE, "--out", "sweep", *words])
        except SystemExit as error:
            code = error.code
        output, errors = capsys.readouterr()
        lines = errors.splitlines()
        assert len(lines) == (code == 2), errors
        return code, output, errors

    return ended


def test_a_folder_that_is_not_the_sweeps_is_refused_before_any_work(tmp_path, run):
    foreign(tmp_path / "sweep")
    for name in ("common.yaml", "best.yaml", "sweep.csv", "seed=0.log"):
        (tmp_path / "sweep" / name).write_text("services: {web: {image: mine}}\n")
    before = snapshot(tmp_path)
    for words in ([], ["--todo"], ["--table"], ["--emit-slurm", "job.sh"]):
        code, output, line = run(*words)
        assert (code, output) == (2, "") and "sweep: is not empty, and fedmpi did not make it" in line
    assert snapshot(tmp_path) == before


def test_a_folder_with_the_name_of_a_run_is_refused_before_any_work(tmp_path, run):
    """It was removed with all that was in it, if it contained a settings.yaml."""
    make_folder(tmp_path / "sweep", "sweep")
    foreign(tmp_path / "sweep" / "seed=1")
    (tmp_path / "sweep" / "seed=1" / "settings.yaml").write_text("mine: true\n")
    before = snapshot(tmp_path)
    code, output, line = run()
    assert (code, output) == (2, "") and "seed=1: is not empty, and fedmpi did not make it" in line
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["sweep.csv", "best.yaml", "common.yaml", "seed=0.log"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_links_and_pipes_in_the_folder_are_not_written_to(tmp_path, run, name, kind):
    make_folder(tmp_path / "sweep", "sweep")
    (tmp_path / "mine").write_text("mine, all mine")
    if kind == "link":
        (tmp_path / "sweep" / name).symlink_to(tmp_path / "mine")
    else:
        os.mkfifo(tmp_path / "sweep" / name)
    if name in ("sweep.csv", "best.yaml"):
        for seed in (0, 1):
            make_run(tmp_path / "sweep" / f"seed={seed}", "fedavg", seed)
    code, _, line = run()
    assert code == 2 and name in line
    assert (tmp_path / "mine").read_text() == "mine, all mine"


def test_a_file_of_the_users_is_not_replaced_by_the_best_settings_or_a_job_script(tmp_path, run):
    make_folder(tmp_path / "sweep", "sweep")
    (tmp_path / "job.sh").write_text("#!/bin/bash\n# my own\n")
    assert "job.sh: exists, and fedmpi did not write it" in run("--emit-slurm", "job.sh")[2]
    (tmp_path / "job.sh").unlink()
    for _ in range(2):
        assert run("--emit-slurm", "job.sh")[0] == 0
    for seed in (0, 1):
        make_run(tmp_path / "sweep" / f"seed={seed}", "fedavg", seed)
    (tmp_path / "sweep" / "best.yaml").write_text("mine: true\n")
    assert "best.yaml: exists, and fedmpi did not write it" in run("--table")[2]
    assert (tmp_path / "sweep" / "best.yaml").read_text() == "mine: true\n"
    (tmp_path / "sweep" / "best.yaml").unlink()
    for _ in range(2):
        assert run("--table")[0] == 0


@pytest.mark.parametrize("name", ["common.yaml", "seed=0.log", "seed=1.log"])
@pytest.mark.parametrize("text", ["rounds: '9'\n", "mine, all mine", "mine\n"])
def test_a_file_of_the_users_with_a_name_of_a_sweeps_is_left(tmp_path, run, name, text):
    """The folder has the sweep's mark, and yet the file is not the sweep's: common.yaml and logs were emptied."""
    make_folder(tmp_path / "sweep", "sweep")
    (tmp_path / "sweep" / name).write_text(text)
    for words in ((), ("--emit-slurm", "job.sh"), ("--todo",)):
        code, _, line = run(*words)
        assert code == 2 and f"{name}: " in line and "move it" in line or "other settings" in line
        assert (tmp_path / "sweep" / name).read_text() == text
    assert sorted(os.listdir(tmp_path / "sweep")) == sorted([MARK, name])


@pytest.mark.parametrize("text", ["mine, all mine", "mine\n", '{"name": 1}'])
def test_a_file_of_the_users_with_the_name_of_a_searchs_is_left(tmp_path, text):
    make_folder(tmp_path / "sweep", "sweep")
    (tmp_path / "trials.jsonl").write_text(text)
    with pytest.raises(UserError, match="trials.jsonl: "):
        search(tmp_path).recall()
    assert (tmp_path / "trials.jsonl").read_text() == text


def test_the_best_settings_of_runs_that_may_be_resumed_start_a_new_run(tmp_path, run):
    make_folder(tmp_path / "sweep", "sweep")
    for seed in (0, 1):
        make_run(tmp_path / "sweep" / f"seed={seed}", "fedavg", seed, resume="auto")
    assert run("--table")[0] == 0
    assert "resume" not in yaml.safe_load((tmp_path / "sweep" / "best.yaml").read_text())


BEGUN = {"name": "000,a=1", "varied": {"local_steps": "1"}, "parameters": {"local_steps": 1}}
PRUNED = {"name": "000,a=1", "varied": {"local_steps": "1"}, "pruned": True}


def search(folder):
    pytest.importorskip("optuna")
    from fedmpi.cli.sweep.search import Search, make_space

    return Search(Plan(folder, {}, []), make_space(["local_steps=1:9"], []), "random", 0, "train_loss", False)


@pytest.mark.parametrize("torn", ['{"name": "001,a=2", "var', "{", "\0\0\0\0", '{"name": "001,a=2"}', "\udcff"])
def test_a_search_goes_on_after_a_last_line_that_is_not_whole(tmp_path, capsys, torn):
    """It ended with a traceback ever after."""
    text = json.dumps(BEGUN) + "\n" + json.dumps(PRUNED) + "\n"
    path = tmp_path / "trials.jsonl"
    path.write_bytes(text.encode() + torn.encode(errors="surrogateescape"))
    one = search(tmp_path)
    assert one.recall() == 1
    assert capsys.readouterr().err == f"fedmpi: {path}: the last line is not whole, and is ignored\n"
    one._next()
    lines = path.read_text().splitlines()
    assert lines[:2] == text.splitlines() and json.loads(lines[2])["parameters"] and len(lines) == 3
    assert search(tmp_path).recall() == 1 and not capsys.readouterr().err


def test_a_last_line_without_its_end_is_read(tmp_path, capsys):
    (tmp_path / "trials.jsonl").write_text(json.dumps(BEGUN))
    one = search(tmp_path)
    assert one.recall() == 0 and [run.name for run in one._plan.runs] == ["000,a=1"]
    one._next(), one._next()  # the begun one, and a new one
    assert len((tmp_path / "trials.jsonl").read_text().splitlines()) == 2 and not capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "{", "", "[]", "null", "1", '"x"', "[" * 9000, "{}", {"name": 1}, {"varied": None}, {"varied": {"seed": 1}},
        {"parameters": []}, {"parameters": {"other": 1}}, {"parameters": {"local_steps": 99}},
        {"parameters": {"local_steps": "x"}}, {"name": ""}, {"name": "."}, {"name": ".."}, {"name": "../x"},
        {"name": "/tmp/x"}, {"name": "a/b"}, {"name": "a\0b"}, {"name": "n" * 300}, {"name": "\ud800"},
        {"parameters": None}, {"pruned": "yes", "parameters": None},
    ],
)  # fmt: skip
def test_a_damaged_line_is_one_clear_line(tmp_path, line):
    folder = tmp_path / "in" / "sweep"
    folder.mkdir(parents=True)
    text = json.dumps(BEGUN | line) if isinstance(line, dict) else line
    (folder / "trials.jsonl").write_text(f"{json.dumps(BEGUN)}\n{text}\n{json.dumps(PRUNED)}\n")
    with pytest.raises(UserError, match="trials.jsonl: (line 2|trial 000,a=1 does not fit)") as caught:
        search(folder).recall()
    assert "\n" not in str(caught.value)


def test_a_trial_that_was_not_begun_is_one_clear_line(tmp_path):
    (tmp_path / "trials.jsonl").write_text(json.dumps(PRUNED) + "\n")
    with pytest.raises(UserError, match="line 1: trial 000,a=1 was not begun"):
        search(tmp_path).recall()


def test_a_search_in_another_folder_is_refused(tmp_path, run):
    pytest.importorskip("optuna")
    foreign(tmp_path / "sweep")
    (tmp_path / "sweep" / "trials.jsonl").write_text("{")
    before = snapshot(tmp_path)
    assert "did not make it" in run("--search", "random", "--range", "local_steps=1:3")[2]
    write_mark(tmp_path / "sweep", "sweep")
    before[tmp_path / "sweep" / MARK] = (tmp_path / "sweep" / MARK).read_bytes()
    line = {"name": "notes.txt", "varied": {"seed": "0"}, "parameters": {"local_steps": 1, "seed": "0"}}
    (tmp_path / "sweep" / "trials.jsonl").write_text(json.dumps(line) + "\n")
    before[tmp_path / "sweep" / "trials.jsonl"] = (tmp_path / "sweep" / "trials.jsonl").read_bytes()
    assert "notes.txt: is a file" in run("--search", "random", "--range", "local_steps=1:3")[2]
    assert snapshot(tmp_path) == before


def test_files_with_a_second_name_are_not_changed(tmp_path, run):
    """A log was emptied, and with it the user's file."""
    make_folder(tmp_path / "sweep", "sweep")
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "sweep" / "seed=0.log").hardlink_to(tmp_path / "mine")
    assert "seed=0.log: has a second name" in run()[2] and (tmp_path / "mine").read_text() == "mine"


def test_a_search_may_begin_at_zero(tmp_path, run):
    pytest.importorskip("optuna")
    assert "no run is complete" in run("--search", "tpe", "--range", "seed=0:9", "--table")[2]
    words = [*GRID[2:], *TABLE, "--out", "sweep", "--search", "tpe", "--range", "seed=0:9", "--trials", "1"]
    main(words)


def test_a_fork_for_which_there_is_no_memory_becomes_a_new_program(tmp_path, run, monkeypatch):
    def fork():
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("os.fork", fork)
    assert run("--grid", "seed=3")[0] == 0
    assert is_complete(tmp_path / "sweep" / "seed=3")
