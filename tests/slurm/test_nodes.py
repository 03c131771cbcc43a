"""Several nodes with a network between them: sums, silo files and run folders that not all nodes see."""

import json
import sys

import h5py
import numpy as np
import pytest
from helpers import PROGRAMS, ROOT
from rarely import SLURM as PLACES
from slurm_jobs import closing, options

pytestmark = pytest.mark.rarely(*PLACES)

TWO_EACH = options(nodes=2, ntasks_per_node=2, cpus_per_task=1)
ONE_EACH = options(nodes=2, ntasks_per_node=1, cpus_per_task=1)


def script(folder, *lines):
    """A job script of some lines."""
    path = folder / "job.sh"
    path.write_text("\n".join(["#!/usr/bin/env bash", "set -e", *lines, ""]))
    return path


def test_sums_over_real_nodes(slurm, tmp_path):
    """In the window of each node and between the nodes; also in pieces that are far too small."""
    lines = [
        "mpirun -np 4 python -m mpi4py -m transports real",
        f"mpirun -np 4 python -m mpi4py {PROGRAMS / 'large_messages.py'} 1.2e5 split",
    ]
    job = slurm.wait(slurm.submit(tmp_path, script(tmp_path, *lines), options=TWO_EACH))
    assert job.code == 0, job.log
    assert job.log.count("equal:") == 16 and job.log.count("right:") == 4


def test_the_launcher_script_in_a_job(slurm, tmp_path):
    """It starts as many ranks as SLURM has tasks, on all nodes; more if asked."""
    program = tmp_path / "where.py"
    program.write_text(
        "import platform\n"
        "from mpi4py import MPI\n"
        "names = MPI.COMM_WORLD.gather(platform.node())\n"
        "if MPI.COMM_WORLD.rank == 0: print('ranks on', *names)\n"
    )
    lines = [f"{ROOT}/launch/mpirun.sh {words} python {program}" for words in ("", "-np 1")]
    job = slurm.wait(slurm.submit(tmp_path, script(tmp_path, *lines), options=TWO_EACH))
    assert job.code == 0, job.log
    found = [sorted(line.split()[2:]) for line in job.log.splitlines() if line.startswith("ranks on")]
    assert found == [["n1", "n1", "n2", "n2"], ["n1"]]


def test_silos_and_a_run_folder_that_one_node_sees(slurm, tmp_path):
    """Each node has its own client's file alone, in a folder of another name, and a run folder of its own.

    A run continues where it ran before; where the second node has lost its clients' state, one line says so.
    """
    for client in range(2):
        rng = np.random.default_rng(client)
        with h5py.File(tmp_path / f"made_{client}.h5", "w") as file:
            for split in ("train", "test"):
                file[f"{split}/images"] = rng.integers(0, 255, (40, 8, 8), dtype=np.uint8)
                file[f"{split}/labels"] = np.arange(40) % 4
    silos, own = "/dev/shm/silos/silo_{client}.h5", "/dev/shm/of_node_$SLURM_NODEID"
    settings = f"--data '{silos}' --local-steps 2 --threads 1 --checkpoint-every 2 --out /dev/shm/out"
    train = f"mpirun -np 2 python -m mpi4py -m fedmpi.train {settings}"
    lines = [
        f"srun -N2 -n2 bash -c 'mkdir {own} && ln -s {own} /dev/shm/silos'",
        f"srun -N2 -n2 bash -c 'cp {tmp_path}/made_$SLURM_NODEID.h5 {own}/silo_$SLURM_NODEID.h5'",
        f"mpirun -np 2 python -m mpi4py -m fedmpi doctor {settings}",
        f"{train} --name mine --rounds 3",
        f"{train} --name mine --rounds 5 --resume auto",
        "srun -N2 -n2 bash -c '[ $SLURM_NODEID = 0 ] || rm -r /dev/shm/out'",
        f"! {train} --name mine --rounds 7 --resume auto || exit 3",
        f"srun -N2 -n2 bash -c 'rm {own}/silo_$SLURM_NODEID.h5'",
        f"! {train} --name other --rounds 3 || exit 3",
    ]
    job = slurm.wait(slurm.submit(tmp_path, script(tmp_path, *lines), options=ONE_EACH))
    assert job.code == 0, job.log
    assert "warning  run folder" in job.log and "/dev/shm/out is not the same folder on rank 1 as on rank 0" in job.log
    assert closing(job.log, "clients") == "2 on 2 ranks"
    assert "mine: continuing after round 3" in job.log
    said = [line for line in job.log.splitlines() if line.startswith("fedmpi: error")]
    assert said == [
        "fedmpi: error: on rank 1: resume = /dev/shm/out/mine: rank 0 has its checkpoints, but n2 has not: "
        "use a folder that all nodes share, or --checkpoint_clients FOLDER",
        f"fedmpi: error: task.data = {silos}: client 0 has no file /dev/shm/silos/silo_0.h5",
    ]


def test_the_link_between_nodes_is_measured(slurm, tmp_path):
    """A throttled network shows in the doctor's bandwidth."""
    if not slurm.network:
        pytest.skip("nodes have no networks of their own here")
    line = f"mpirun -np 2 {sys.executable} -m mpi4py -m fedmpi doctor --json > doctor.json"
    slurm.throttle("200mbit")
    try:
        job = slurm.wait(slurm.submit(tmp_path, script(tmp_path, line), options=ONE_EACH))
    finally:
        slurm.unthrottle()
    assert job.code == 0, job.log
    text = (tmp_path / "doctor.json").read_text()
    between = json.JSONDecoder().raw_decode(text)[0]["link"]["between nodes"]  # UCX may write warnings after it
    assert between["bandwidth"] < 1.2 * 200e6 / 8


def test_a_rank_that_is_stopped_on_another_node(slurm, tmp_path):
    """MPICH's MPI_Abort ends nothing then: the step ends all the same."""
    program = tmp_path / "stops.py"
    program.write_text(
        "import os, signal, torch, fedmpi\n"
        "fed = fedmpi.average(torch.nn.Linear(1, 1), every=1, timeout=3)\n"
        "fed.rank == 0 or os.kill(os.getpid(), signal.SIGSTOP)\n"
        "fed.step()\n"
    )
    lines = [f"code=0; timeout 200 srun --mpi=pmi2 python {program} || code=$?", "echo ended with $code"]
    job = slurm.wait(slurm.submit(tmp_path, script(tmp_path, *lines), options=ONE_EACH))
    assert "fedmpi: error: no sign of rank 1 on n2 for 3 s during " in job.log, job.log
    assert "ended with 137" in job.log or "ended with 75" in job.log, job.log  # not 124, of timeout


def test_mpi_begins_whatever_lies_in_memory(slurm, tmp_path):
    """MPICH sends its address together with what lies behind it: random bytes, which do not pack, around every hole."""
    program = tmp_path / "begins.py"
    program.write_text(
        "import os, fedmpi\n"
        "blocks = [os.urandom(size) for size in range(300, 9000, 3) for _ in range(20)]\n"
        "del blocks[::2]\n"
        "from fedmpi.comm.start.mpi_library import MPI\n"
        "print('ranks:', MPI.COMM_WORLD.size, flush=True)\n"
    )
    line = f"timeout 100 srun --kill-on-bad-exit=1 --mpi=pmi2 python {program}"
    job = slurm.wait(slurm.submit(tmp_path, script(tmp_path, line), options=ONE_EACH))
    assert job.code == 0 and job.log.count("ranks: 2") == 2, job.log
    assert "mpi/pmi2" not in job.log
