"""Jobs that cannot go well end with one line, a non-zero exit code, and no process left behind."""

import json
import os
import re

import pytest
from helpers import launchers
from rarely import SLURM as PLACES
from slurm_jobs import SLURM, TINY, options

pytestmark = pytest.mark.rarely(*PLACES)

TWO = options(nodes=2, ntasks_per_node=1, cpus_per_task=1)
QUICK = {"FEDMPI_DOCTOR": "0", "FEDMPI_LAUNCH": "mpirun -np 2"}


def script(folder, *lines):
    """A job script of some lines."""
    path = folder / "job.sh"
    path.write_text("\n".join(["#!/usr/bin/env bash", *lines, ""]))
    return path


def errors(log):
    return [line for line in log.splitlines() if line.startswith("fedmpi: error")]


@pytest.mark.parametrize("kind", [pytest.param("none", marks=pytest.mark.always), "cray_shasta", "pmix"])
def test_ranks_that_do_not_find_each_other(slurm, tmp_path, kind):
    """srun with another PMI than MPICH's starts every task as a job of its own: one of them says so, and all fail."""
    line = f"srun --mpi={kind} python -m mpi4py -m fedmpi.train"
    job = slurm.wait(slurm.submit(tmp_path, script(tmp_path, line), options=TWO))
    assert job.code != 0 and not (tmp_path / "runs").exists()
    if kind == "pmix" and job.code != 2:  # SLURM itself fails at it, where it has no PMIx
        assert re.search("PMIx|pmix", job.log), job.log
        return
    assert job.code == 2, job.log
    (said,) = errors(job.log)
    assert said == (
        "fedmpi: error: srun (SLURM_STEP_NUM_TASKS) started 2 processes but each of them is alone: "
        "mpi4py uses MPICH, which needs srun --mpi=pmi2, or its own mpirun instead of srun"
    )


def test_the_wrong_pmi_for_open_mpi(slurm, tmp_path):
    if "openmpi" not in launchers():
        pytest.skip("FEDMPI_TEST_OPENMPI does not name an environment with Open MPI")
    line = "srun --mpi=pmi2 python -m mpi4py -m fedmpi.train"
    variables = launchers()["openmpi"][1]
    variables["LD_LIBRARY_PATH"] = os.path.dirname(variables["MPI4PY_LIBMPI"])  # which its mpirun would set
    job = slurm.wait(slurm.submit(tmp_path, script(tmp_path, line), options=TWO, **variables))
    assert job.code == 2, job.log
    (said,) = errors(job.log)
    assert said.endswith(
        "each of them is alone: mpi4py uses Open MPI, which needs srun --mpi=pmix, or its own mpirun instead of srun"
    )


def test_one_process_on_purpose_is_no_mistake(slurm, tmp_path):
    words = " ".join(map(str, TINY))
    job = slurm.wait(slurm.submit(tmp_path, script(tmp_path, f"python -m fedmpi.train {words}"), options=TWO))
    assert job.code == 0, job.log


def test_a_launcher_that_starts_the_wrong_number(slurm, tmp_path):
    """The checks before the start find it."""
    job = slurm.wait(slurm.submit(tmp_path, SLURM / "train.sbatch", *TINY, options=TWO, FEDMPI_LAUNCH="mpirun -np 1"))
    assert job.code == 2
    assert errors(job.log)[0].startswith("fedmpi: error: ranks = 2: but 1 ranks found each other")
    assert "fedmpi: the checks failed: nothing was started" in job.log
    assert not (tmp_path / "runs").exists()


def test_the_doctor_of_ranks_that_do_not_find_each_other(slurm, tmp_path):
    """One of them says so, and its JSON contains this check alone."""
    line = "srun --mpi=none python -m fedmpi doctor --json > doctor.json"
    job = slurm.wait(slurm.submit(tmp_path, script(tmp_path, line), options=TWO))
    assert job.code == 2 and len(errors(job.log)) == 1, job.log
    found = json.loads((tmp_path / "doctor.json").read_text())
    (check,) = found["checks"]
    assert (
        not found["ok"] and (check["name"], check["state"]) == ("ranks", "failed") and "--mpi=pmi2" in check["advice"]
    )
    assert check["text"].startswith("srun (SLURM_STEP_NUM_TASKS) started 2 processes but each of them is alone")


@pytest.mark.parametrize("kind", ["exception", "kill"])
def test_a_rank_that_dies(slurm, tmp_path, kind):
    words = ("--rounds", 50, "--model", "faulty.Faulty", "--model.kind", kind, "--out", tmp_path / "out")
    number = slurm.submit(tmp_path, SLURM / "train.sbatch", *words, options=TWO, FEDMPI_RESTARTS="1", **QUICK)
    if kind == "kill":  # once more, in the same folder: nobody knows why it was killed
        slurm.until(number, lambda: slurm.fields(number)["Restarts"] == "1")
        slurm.let_run_again(number, 1)
    job = slurm.wait(number)
    assert job.state == "FAILED" and job.code != 0
    if kind == "kill":
        assert f"it is requeued, and continues later in {tmp_path}/out/fedmpi-{number}" in job.log, job.log
        assert "after 1 of at most 1 requeues" in job.log and job.fields["Comment"] == "fedmpi-losses-1"
    else:
        assert re.search(r"error on rank 1, client 1: RuntimeError: the silo is on fire", job.log), job.log
    assert not re.search(r"^\[(mpiexec|proxy:\S+)@", job.log, re.MULTILINE), job.log  # MPICH's launcher about itself
    assert not list(tmp_path.glob("out/*/model.*"))
    assert not slurm.processes(str(tmp_path))


def test_a_cancelled_job(slurm, tmp_path):
    words = ("--rounds", 100000, "--out", tmp_path / "out", "--threads", 1)
    number = slurm.submit(tmp_path, SLURM / "train.sbatch", *words, options=TWO, **QUICK)
    slurm.until(number, lambda: list(tmp_path.glob("out/*/metrics.jsonl")))
    slurm.run("scancel", number, check=True)
    job = slurm.wait(number)
    assert job.state == "CANCELLED"
    assert not slurm.processes(str(tmp_path))
    assert job.log.splitlines()[-1].startswith(f"fedmpi: job {number} was ended by SLURM"), job.log
