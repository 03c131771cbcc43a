"""What is kept when a command is repeated, changed, or ended by force: runs, results of other seeds, provenance."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import yaml
from helpers import LIMIT, ROOT, wait_for
from tiny import TINY, reproduce, rows

from fedmpi.cli.sweep.local import is_running
from fedmpi.cli.sweep.plan import Plan, Planned
from reproduction.experiment import SCALES, experiment_names, find_experiments
from reproduction.results import left_to_make, paths
from reproduction.running import How, plan_runs

pytestmark = pytest.mark.rarely("reproduction", "fedmpi/cli/sweep", "fedmpi/runs", "fedmpi/config/presets")

FIRST = {"task": "quadratic", "clients": 2, "rounds": 2, "local_steps": 1, "eval_every": 2}
RESULTS = ROOT / "reproduction" / "results"
AFTER_FIRST = TINY | {
    "methods": {"FedAvg": {"algorithm": "fedavg", "algorithm.step_size": 0.1, "init": "{first}"}},
    "first": FIRST,
    "printed": {},
    "claims": [],
}


def write(folder, content):
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


def test_runs_that_used_another_first_run_are_made_again_and_not_added_to(tmp_path):
    words = ("--out", tmp_path / "runs", "--results", tmp_path / "results")
    file = write(tmp_path, AFTER_FIRST)
    assert reproduce(file, *words, "--seeds", "0,1").returncode == 0
    ended = reproduce(file, *words, "--seeds", "0,1")
    assert ended.stdout.count(" 0 of them still to do") == 2, ended.stdout
    write(tmp_path, AFTER_FIRST | {"first": FIRST | {"rounds": 3}})
    before = rows(tmp_path / "results" / "small" / "tiny-runs.csv")
    ended = reproduce(file, *words, "--seeds", "2", "--add")
    assert ended.returncode == 2 and "the run 'first' whose model the others use was made with other" in ended.stderr
    assert rows(tmp_path / "results" / "small" / "tiny-runs.csv") == before
    ended = reproduce(file, *words, "--seeds", "0")
    assert ended.stdout.count(" 1 of them still to do") == 2, ended.stdout + ended.stderr
    ended = reproduce(file, *words, "--seeds", "0,1")  # seed 1 still had the model of the older first run
    assert " 1 of them still to do" in ended.stdout, ended.stdout


def test_a_changed_first_run_is_noticed_after_its_folder_was_deleted(tmp_path):
    words = ("--out", tmp_path / "runs", "--results", tmp_path / "results", "--seeds", "0")
    file, first = write(tmp_path, AFTER_FIRST), tmp_path / "runs" / "tiny" / "small" / "first"
    assert reproduce(file, *words).returncode == 0
    (first / "model.safetensors").unlink()
    assert reproduce(file, *words).stdout.count(" 0 of them still to do") == 1  # made as before: its user is kept
    first.rename(tmp_path / "elsewhere")
    write(tmp_path, AFTER_FIRST | {"first": FIRST | {"rounds": 3}})
    assert reproduce(file, *words).stdout.count(" 1 of them still to do") == 2


@pytest.mark.rarely("reproduction", "fedmpi/algorithms", "fedmpi/config", "fedmpi/ground/settings.py")
@pytest.mark.parametrize("scale", SCALES)
def test_a_seed_can_be_added_to_all_committed_results(scale):
    """Also to runs that were compiled for a GPU: what was run is still what would be run."""
    runs = pathlib.Path("runs")
    how = How(ranks=1, at_a_time=1, threads=1, launch=None, compile=None, data_dir=None, out=runs, command="")
    num_added = 0
    for experiment in find_experiments(experiment_names()):
        if paths(RESULTS, experiment, scale)[1].is_file():
            planning = plan_runs(experiment.first_run(scale), experiment.points(scale), [99], runs, how)
            assert left_to_make(RESULTS, experiment, scale, planning) == planning, experiment.name
            num_added += len(planning.plan.runs)
    assert num_added >= 30  # all scales have results


def test_results_of_other_seeds_are_kept_in_old_files(tmp_path):
    words = ("--out", tmp_path / "runs", "--results", tmp_path / "results")
    file, results = write(tmp_path, TINY), tmp_path / "results" / "small"
    assert reproduce(file, *words, "--seeds", "0,1").returncode == 0
    names = ("tiny.csv", "tiny-runs.csv")
    before = [(results / name).read_text(encoding="utf-8") for name in names]
    ended = reproduce(file, *words, "--seeds", "2")
    assert "tiny-runs.csv also has seeds 0, 1: its page will not show them" in ended.stdout.splitlines()[0]
    assert [(results / f"{name}.1.old").read_text(encoding="utf-8") for name in names] == before
    assert {row["seed"] for row in rows(results / "tiny-runs.csv")} == {"2"}
    assert reproduce(file, *words, "--seeds", "3").returncode == 0  # the old files of seeds 0 and 1 stay
    assert len(list(results.glob("*.old"))) == 4
    assert [(results / f"{name}.1.old").read_text(encoding="utf-8") for name in names] == before


def jobs_of(folder):
    """The processes of the program and its runs, which are copies of it, as folders in /proc."""
    while not (folder / "tiny.yaml").exists():
        folder = folder.parent
    for job in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder / "tiny.yaml").encode() in (job / "cmdline").read_bytes():
                yield job


@pytest.fixture
def start(tmp_path):
    """A function that starts the program with a long run, and returns (process, folder of the run) once it has begun.

    What is left of both at the end is killed.
    """

    def started(*before, rounds=10**9):
        its = TINY["panels"]["quadratic"] | {"rounds": rounds, "eval_every": 1000, "checkpoint_every": 100}
        methods = {"FedAvg": TINY["methods"]["FedAvg"]}
        file = write(tmp_path, TINY | {"panels": {"quadratic": its}, "methods": methods, "printed": {}, "claims": []})
        words = [*before, sys.executable, "-m", "reproduction", file, "--seeds", "0", "--out", tmp_path / "runs"]
        process = subprocess.Popen(
            [*map(str, words), "--results", str(tmp_path / "results")],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            preexec_fn=hear_hangups,
        )  # fmt: skip
        runs = tmp_path / "runs" / "tiny" / "small"
        wait_for(lambda: process.poll() is not None or any(runs.glob("*/checkpoint*")))
        (found,) = runs.glob("*/checkpoint*")
        return process, found.parent

    yield started
    for job in jobs_of(tmp_path):
        with contextlib.suppress(OSError):
            os.kill(int(job.name), signal.SIGKILL)


def hear_hangups():
    """In a new process: not to ignore SIGHUP, as these tests may do, under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def still_running(run):
    return is_running(Plan(run.parent, {}, []), Planned(run.name, {}))


def test_a_hangup_stops_the_runs(start):
    process, run = start()
    process.send_signal(signal.SIGHUP)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 75 and "stopped by SIGHUP; to continue: the same command" in output
    assert not still_running(run)


def test_nohup_lets_the_runs_go_on(start):
    process, run = start("nohup")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 75 and "stopped by SIGTERM" in output and not still_running(run)


def test_a_run_that_outlives_its_program_has_the_provenance_of_that(tmp_path, start):
    """Also if another command is started meanwhile, and waits for the run."""
    process, run = start(rounds=5000)
    process.kill()
    process.communicate()
    words = ("--seeds", "0", "--out", tmp_path / "runs", "--results", tmp_path / "results", "--threads", "2")
    ended = reproduce(tmp_path / "tiny.yaml", *words)
    assert ended.returncode == 0, ended.stderr
    (row,) = rows(tmp_path / "results" / "small" / "tiny-runs.csv")
    assert row["commit"] and row["processor"] and row["ranks"] == row["threads"] == "1"
    assert float(row["wall_seconds"]) > 0 and row["cpu_seconds"] == ""


def test_a_run_with_other_settings_that_is_still_running_is_not_taken_for_a_new_one(tmp_path, start):
    process, run = start()
    process.kill()
    process.communicate()
    file = tmp_path / "tiny.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("eval_every: 1000", "eval_every: 900"), encoding="utf-8")
    ended = reproduce(file, "--seeds", "0", "--out", tmp_path / "runs", "--results", tmp_path / "results")
    assert ended.returncode == 2 and "is still running, with other settings: stop it, or wait" in ended.stderr


def test_first_runs_that_came_out_differently_are_both_shown(tmp_path):
    words = ("--out", tmp_path / "runs", "--results", tmp_path / "results")
    file, results = write(tmp_path, AFTER_FIRST), tmp_path / "results" / "small"
    assert reproduce(file, *words, "--seeds", "0").returncode == 0
    path = results / "tiny-first.csv"
    elsewhere = path.read_text(encoding="utf-8").replace("distance to the solution", "measured elsewhere")
    path.write_text(elsewhere, encoding="utf-8")
    assert reproduce(file, *words, "--seeds", "1", "--add").returncode == 0
    assert len(rows(path)) == 2
    page = (results / "tiny.md").read_text(encoding="utf-8")
    assert page.count("run whose model the others use") == 2 and "attack the same network" not in page
    assert "`python -m reproduction tiny.yaml --scale small --seeds 0,1`" in page
