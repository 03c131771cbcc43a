"""How many threads a rank takes, and who decides it."""

import contextlib
import math
import os
import platform
import re
import subprocess
import sys
import types

import pytest
import torch
from helpers import PROGRAMS, ROOT, execute, launch_words

import fedmpi
from fedmpi.comm.settings import MachineSettings
from fedmpi.comm.start.mpi_library import MPI
from fedmpi.comm.sums.mpi import MPILink
from fedmpi.ground.machine import cores
from fedmpi.ground.machine.cores import choose_threads, usable_cores
from fedmpi.own_loop import base
from fedmpi.training import build

LINK = types.SimpleNamespace(usable_cores=8, free_cores=8, local_size=2, rank=0)
HERE = platform.node()
VARIABLES = ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "NCPUS", "PBS_JOBID", "SLURM_CPUS_ON_NODE", "PBS_NUM_PPN",
             "LSB_MCPU_HOSTS", "LSB_BIND_CPU_LIST")  # fmt: skip


@pytest.mark.parametrize(
    ("given", "variables", "changes", "expected"),
    [
        (3, {"OMP_NUM_THREADS": "2"}, {}, (3, "setting threads")),
        (None, {"OMP_NUM_THREADS": "2,1", "SLURM_CPUS_PER_TASK": "5"}, {}, (2, "OMP_NUM_THREADS")),
        (None, {"OMP_NUM_THREADS": "", "SLURM_CPUS_PER_TASK": "5"}, {}, (5, "SLURM_CPUS_PER_TASK")),
        (None, {}, {}, (4, "")),
        (None, {}, {"bound": 1}, (1, "bound to 1 of 8 cores")),
        (None, {}, {"usable_cores": 3, "quota": 3.5}, (1, "quota of the node: 3.5 cores")),
        (None, {}, {"free_cores": 5}, (2, "free cores: 5 of 8")),
        (None, {}, {"free_cores": 0}, (1, "free cores: 0 of 8")),
        (None, {}, {"free_cores": 0, "by_load": False}, (4, "")),
        (None, {"SLURM_CPUS_ON_NODE": "6"}, {}, (3, "SLURM_CPUS_ON_NODE=6")),
        # PBS Pro sets OMP_NUM_THREADS to the cores of all ranks of a chunk, unless it was asked for threads.
        (None, {"PBS_JOBID": "1", "NCPUS": "8", "OMP_NUM_THREADS": "8"}, {}, (4, "")),
        (None, {"PBS_JOBID": "1", "NCPUS": "2", "OMP_NUM_THREADS": "2"}, {}, (2, "NCPUS")),
        (None, {"PBS_JOBID": "1", "NCPUS": "8", "OMP_NUM_THREADS": "5"}, {}, (5, "OMP_NUM_THREADS")),
        (None, {"PBS_NUM_PPN": "4"}, {}, (2, "PBS_NUM_PPN=4")),
        (None, {"LSB_MCPU_HOSTS": f"elsewhere 2 {HERE} 4"}, {}, (2, "LSB_MCPU_HOSTS=4")),
        (None, {"LSB_MCPU_HOSTS": f"{HERE} 2", "LSB_BIND_CPU_LIST": "0,1"}, {}, (4, "")),
    ],
)
def test_what_decides_the_threads(monkeypatch, given, variables, changes, expected):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    changes = dict(changes)
    bound, quota, by_load = changes.pop("bound", 8), changes.pop("quota", float("inf")), changes.pop("by_load", True)
    monkeypatch.setattr(cores, "usable_cores", lambda: list(range(bound)))
    monkeypatch.setattr(cores, "core_quota", lambda: quota)
    link = types.SimpleNamespace(**{**vars(LINK), **changes})
    assert choose_threads(link, given, by_load) == expected


@pytest.mark.parametrize(
    ("quota", "variables", "expected"),
    [(math.inf, {}, 8), (3.5, {}, 3), (0.5, {}, 1), (5, {"SLURM_CPUS_ON_NODE": "4"}, 4), (2, {"PBS_NUM_PPN": "4"}, 2)],
)
def test_a_job_has_the_cores_that_its_limits_leave(monkeypatch, quota, variables, expected):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cores, "usable_cores", lambda: list(range(8)))
    monkeypatch.setattr(cores, "core_quota", lambda: max(1, quota))
    assert cores.cores_of_job() == expected


@pytest.mark.parametrize(
    ("settings", "found", "recorded"),
    [
        ({}, (1, ""), 1),  # on an idle machine; a rerun on a busy one takes as many, too
        ({}, (1, "free cores: 1 of 8"), 1),
        ({}, (1, "quota of the node: 1 cores"), 1),
        ({}, (1, "OMP_NUM_THREADS"), None),
        ({"deterministic": True}, (1, ""), None),
        ({"threads": 1}, (1, "setting threads"), 1),
    ],
)
def test_a_number_that_other_processes_might_change_becomes_a_setting(monkeypatch, settings, found, recorded):
    monkeypatch.setattr(build, "choose_threads", lambda *_: found)
    before = torch.get_num_threads()
    try:
        assert build._take_threads(MachineSettings(**settings), MPILink(MPI.COMM_SELF))[1] == recorded
    finally:
        torch.set_num_threads(before)


FIXED = ["--deterministic", "true", "--name", "fixed"]


@contextlib.contextmanager
def work_on(busy_cores, number):
    """A context in which a number of processes use some cores.

    Each has a session of its own, as ranks have: Linux gives equal shares of a core to sessions, and a session that
    is busy on other cores gets less of this one.
    """
    code = f"import os\nos.sched_setaffinity(0, {list(busy_cores)})\nwhile os.getppid() == {os.getpid()}: pass"
    processes = [subprocess.Popen([sys.executable, "-c", code], start_new_session=True) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.rarely
def test_a_newcomer_on_a_busy_machine_takes_one_thread(tmp_path):
    """Each of its threads would wait at every step for the slowest one: 23 s instead of 3 on two cores at load 6."""
    if len(usable_cores()) < 2:
        pytest.skip("needs two cores")
    train = [sys.executable, "-m", "fedmpi.train"]
    words = [*train, "--clients", "2", "--rounds", "2", "--checkpoint_every", "1", "--out", tmp_path, "--name", "it"]
    environment = {"PYTHONPATH": str(ROOT), **{name: "" for name in VARIABLES}}
    total = len(usable_cores())
    with work_on(usable_cores(), 2 * total):
        by_load, fixed = (execute([*words, *more], env=environment) for more in ([], FIXED))
    assert by_load.returncode == fixed.returncode == 0, by_load.stderr
    assert re.search(rf"1 thread \(free cores: [01] of {total}; --threads chooses\), cpu", by_load.stdout), (
        by_load.stdout
    )
    assert f"{total} threads, cpu" in fixed.stdout
    # Without the other processes: the run's own number, and so its bits.
    again = ["--config", tmp_path / "it" / "settings.yaml", "--name", "again"]
    for more in (again, ["--resume", tmp_path / "it", "--rounds", "3"]):
        later = execute([*train, *more], env=environment)
        assert "1 thread (setting threads), cpu" in later.stdout, later.stderr
    many = execute([*train, *again[:-1], "many", "--threads", 2 * total], env=environment)
    assert (
        f"fedmpi: 1 rank with {2 * total} threads each share {total} cores: --threads {total} is faster" in many.stderr
    )
    assert (tmp_path / "fixed" / "settings.yaml").read_text().count("threads: null") == 1


@pytest.mark.rarely
def test_ranks_that_are_bound_to_a_taken_core_are_told(any_mpi):
    if len(usable_cores()) < 2:
        pytest.skip("needs two cores")
    core = usable_cores()[0]
    words, variables = launch_words(1, PROGRAMS / "begins.py", mpi=any_mpi)
    words = [*words[:-2], "taskset", "-c", core, *words[-2:]]
    with work_on([core], 2):
        ended = execute(words, env=variables)
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("fedmpi: ")]
    assert line == (
        f"fedmpi: the launcher has bound the ranks on {HERE} to core {core}, where other processes run: "
        "start with mpirun --bind-to none"
    )


def test_other_processes_do_not_change_the_threads_of_a_recorded_loop(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(base, "choose_threads", lambda link, by_load: asked.append(by_load) or (1, ""))
    for record in (None, tmp_path / "run"):
        fedmpi.average(torch.nn.Linear(2, 1), every=1, record=record).finish()
    assert asked == [True, False]


@pytest.mark.parametrize(("before", "during"), [(6, 2), (5, 5), (1, 1)])  # 6: as many as torch takes by itself
def test_a_loop_takes_its_share_unless_the_user_has_chosen(monkeypatch, capsys, before, during):
    monkeypatch.setattr(base, "library_threads", lambda: {6})
    monkeypatch.setattr(base, "choose_threads", lambda link, by_load: (2, ""))
    usual = torch.get_num_threads()
    torch.set_num_threads(before)
    try:
        fed = fedmpi.average(torch.nn.Linear(2, 1), every=1)
        assert torch.get_num_threads() == during
        assert ("2 of its 6 threads" in capsys.readouterr().err) == (during == 2)
        fed.finish()
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(usual)
