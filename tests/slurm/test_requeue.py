"""A job that is longer than its time limit is submitted once and ends some requeues later, with the same bits."""

import re
import sys

import h5py
import numpy as np
import pytest
from helpers import train
from rarely import SLURM as PLACES
from slurm_jobs import SLURM, TINY, options

from fedmpi.runs.folder import find_runs

pytestmark = pytest.mark.rarely(*PLACES)

TWO = options(nodes=2, ntasks_per_node=1, cpus_per_task=1)
QUICK = {"FEDMPI_DOCTOR": "0", "FEDMPI_LAUNCH": "mpirun -np 2"}
LONG = ("--rounds", 40, "--local-steps", 4, "--threads", 1, "--eval-every", 20, "--model", "slow.Slow")


@pytest.fixture
def slow(tmp_path):
    """A file: while it exists, a round of the jobs takes 0.4 s at least, so that no signal comes after the last one."""
    path = tmp_path / "slow"
    path.touch()
    return path


def submit(slurm, folder, slow, *words, options=TWO, **variables):
    """(id of a training job whose runs are in `folder`/out, path of its records)."""
    words = (SLURM / "train.sbatch", *LONG, *words, "--out", folder / "out")
    number = slurm.submit(folder, *words, options=options, SLOW_WHILE=str(slow), **QUICK, **variables)
    return number, folder / "out" / f"fedmpi-{number}" / "metrics.jsonl"


def rounds(records):
    """How many rounds are recorded."""
    return records.read_bytes().count(b"\n") if records.is_file() else 0


def run_in(folder):
    (run,) = find_runs([folder])[0]
    return run


def result(run):
    """Name -> [dim] of the rows that a run ended with."""
    with h5py.File(run.path / "model.h5") as file:
        return {name: row[:] for name, row in file["rows"].items()}


def assert_same_runs(here, there, num_rounds):
    """Fail if two complete runs differ in a loss or in a bit of their results."""
    assert [record["round"] for record in here.records] == list(range(1, num_rounds + 1))
    assert [record["loss"] for record in here.records] == [record["loss"] for record in there.records]
    rows, expected = result(here), result(there)
    assert rows.keys() == expected.keys()
    for name, row in rows.items():
        np.testing.assert_array_equal(row, expected[name], err_msg=name)


def interrupt(slurm, number, records, restarts):
    """Warn a job as SLURM does before the time limit, once it has made rounds, and let it start again."""
    before = rounds(records)
    slurm.until(number, lambda: rounds(records) >= before + 2)
    slurm.run("scancel", "--signal=USR1", "--batch", number, check=True)
    job = slurm.wait(number, ["PENDING", "COMPLETED"])
    assert job.state == "PENDING", job.log
    slurm.let_run_again(number, restarts)


def test_three_time_limits_end_with_the_bits_of_one(slurm, tmp_path, slow):
    number, records = submit(slurm, tmp_path, slow)
    interrupt(slurm, number, records, 1)
    interrupt(slurm, number, records, 2)
    slow.unlink()
    job = slurm.wait(number)
    assert (job.state, job.fields["Restarts"]) == ("COMPLETED", "2"), job.log
    assert job.log.count("is not finished (exit code 75): it is requeued") == 2
    assert "MPI_Abort" not in job.log
    assert train(2, tmp_path / "once", *LONG).returncode == 0
    assert_same_runs(run_in(tmp_path / "out"), run_in(tmp_path / "once"), 40)


def test_no_more_requeues_than_allowed(slurm, tmp_path, slow):
    number, records = submit(slurm, tmp_path, slow, FEDMPI_MAX_REQUEUES="0")
    slurm.until(number, lambda: rounds(records))
    slurm.run("scancel", "--signal=USR1", "--batch", number, check=True)
    job = slurm.wait(number)
    assert (job.state, job.code) == ("FAILED", 75)
    assert "ended with exit code 75 after 0 of at most 0 requeues" in job.log


@pytest.mark.always
def test_a_warning_during_the_checks(slurm, tmp_path):
    """The time limit is short: the run has half of what is left, here minutes, and ends before."""
    number = slurm.submit(tmp_path, SLURM / "train.sbatch", *TINY, options=TWO, FEDMPI_LAUNCH="mpirun -np 2")
    slurm.until(number, lambda: any("started by: " in log.read_text() for log in tmp_path.glob(f"{number}.out")))
    slurm.run("scancel", "--signal=USR1", "--batch", number, check=True)
    job = slurm.wait(number)
    assert (job.state, job.fields["Restarts"]) == ("COMPLETED", "0"), job.log


def test_a_warning_between_two_runs_of_a_sweep(slurm, tmp_path):
    """The job's script gets it while it prepares the next run: this run is made after the requeue."""
    launcher = tmp_path / "launcher"
    launcher.write_text(
        '#!/usr/bin/env bash\nmpirun -np 2 "$@" || exit\n'
        "(sleep 0.3; kill -USR1 $PPID) >/dev/null 2>&1 &\n"  # fedmpi.cli.sweep takes longer to say what comes next
    )
    launcher.chmod(0o755)
    words = ("--grid", "seed=0,1", *TINY, "--clients", 2, "--out", tmp_path / "sweep")
    quick = {"FEDMPI_DOCTOR": "0", "FEDMPI_LAUNCH": str(launcher)}
    number = slurm.submit(tmp_path, SLURM / "sweep.sbatch", *words, options=TWO, **quick)
    slurm.until(number, lambda: slurm.fields(number)["Restarts"] == "1")
    slurm.let_run_again(number, 1)
    job = slurm.wait(number)
    assert job.code == 0, job.log
    runs, complaints = find_runs([tmp_path / "sweep"])
    assert [run.is_complete for run in runs] == [True, True] and not complaints


@pytest.mark.slow
def test_a_lost_node(slurm, tmp_path, slow):
    """The job goes on from its newest checkpoint when it runs again."""
    number, records = submit(slurm, tmp_path, slow, "--checkpoint-every", 2)
    slurm.until(number, lambda: rounds(records) >= 5)
    slurm.lose("n2")
    log = tmp_path / f"{number}.out"
    slurm.until(number, lambda: "was ended by SLURM" in log.read_text() or "it is requeued" in log.read_text())
    slurm.start_node("n2")
    slurm.let_run_again(number, 1)
    slow.unlink()
    job = slurm.wait(number)
    assert (job.state, job.fields["Restarts"]) == ("COMPLETED", "1"), job.log
    assert "continuing after round" in job.log
    assert "was ended by SLURM" in job.log or f"and continues later in {tmp_path}" in job.log
    assert [record["round"] for record in run_in(tmp_path / "out").records] == list(range(1, 41))


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [["--signal=B:USR1@20"], []], ids=["20 s before", "as the script says"])
def test_three_real_time_limits_end_with_the_bits_of_one(slurm, tmp_path, slow, chosen):
    """SLURM enforces its shortest limit three times; the script's own warning then comes during its checks."""
    longer = ("--rounds", 400, "--eval-every", 100)
    environment = {**QUICK} if chosen else {"FEDMPI_VENV": sys.prefix}
    words = (*LONG, *longer, "--out", tmp_path / "out")
    number = slurm.submit(
        tmp_path, SLURM / "train.sbatch", *words, options=[*TWO, "--time=1", *chosen], SLOW_WHILE=str(slow),
        **environment,
    )  # fmt: skip
    for restarts in (1, 2, 3):
        slurm.until(number, lambda: slurm.fields(number)["Restarts"] == str(restarts))  # noqa: B023
        slurm.let_run_again(number, restarts)
    slow.unlink()
    job = slurm.wait(number)
    restarts = int(job.fields["Restarts"])
    assert job.state == "COMPLETED" and restarts >= 3, job.log
    assert job.log.count("is not finished (exit code 75): it is requeued") == restarts
    assert len(re.findall(r"continuing after round \d+", job.log)) == restarts, job.log
    assert train(2, tmp_path / "once", *LONG, *longer).returncode == 0
    assert_same_runs(run_in(tmp_path / "out"), run_in(tmp_path / "once"), 400)


@pytest.mark.slow
@pytest.mark.parametrize(("warning", "heard"), [("USR1@20", "SIGUSR1"), ("URG@1", "SIGTERM")])
def test_a_real_time_limit(slurm, tmp_path, slow, warning, heard):
    """SLURM itself warns; and a job that it did not warn has the seconds between its first and its last signal."""
    chosen = [*TWO, "--time=1", f"--signal=B:{warning}"]
    number, _ = submit(slurm, tmp_path, slow, "--rounds", 100000, options=chosen)
    slurm.until(number, lambda: slurm.fields(number)["Restarts"] == "1")
    log = (tmp_path / f"{number}.out").read_text()
    slurm.run("scancel", number, check=True)
    assert re.search(rf"stopped after round \d+ by {heard}", log) and "it is requeued" in log, log
    assert not run_in(tmp_path / "out").is_complete
