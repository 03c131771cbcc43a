"""The doctor finds what is wrong with a place, on real ranks where that can be had, and says what to do."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import types

import h5py
import numpy as np
import pytest
import torch
from helpers import ROOT, disk_of, execute, launchers, start

from fedmpi.algorithms import FedAvg
from fedmpi.cli.doctor.__main__ import _check_launch
from fedmpi.cli.doctor.checks import check_clocks, check_cores, check_devices, check_memory, check_ranks
from fedmpi.cli.doctor.collect import _check_rows
from fedmpi.cli.doctor.facts import RankFacts
from fedmpi.comm.solo import SoloLink
from fedmpi.ground.errors import UserError

FACTS = RankFacts(0, "n1", 0, [0, 1], 2, 1, "cpu", "", "", {"MPI": "MPICH 5.0.2"}, 0.0)


def doctor(ranks, out, *words, **options):
    return start(ranks, "-m", "fedmpi", "doctor", "--out", out, *words, **options)


def failed(ended, own=""):
    """Name -> check of the failed ones of a program that printed JSON. own: how the line of a rank begins, if any."""
    assert ended.returncode == 2, ended.stdout + ended.stderr
    checks = {check["name"]: check for check in json.loads(ended.stdout)["checks"] if check["state"] == "failed"}
    *lines, last = ended.stderr.splitlines()
    assert last.startswith(f"fedmpi: error: {len(checks)} check") and len(lines) == bool(own), ended.stderr
    assert not own or lines[0].startswith(own)
    assert all(check["advice"] for check in checks.values())
    return checks


def ranks_on(*nodes, **facts):
    """`RankFacts` of ranks on nodes, like "n1", "n1", "n2"; facts: values of all of them."""
    return [
        dataclasses.replace(FACTS, rank=rank, node=node, leader=nodes.index(node), **facts)
        for rank, node in enumerate(nodes)
    ]


def test_a_good_place(tmp_path, any_mpi):
    ended = doctor(2, tmp_path / "out", "--clients", 4, "--json", mpi=any_mpi)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["ok"] and [facts["rank"] for facts in found["ranks"]] == [0, 1]
    states = {check["name"]: check["state"] for check in found["checks"]}
    names = [
        "ranks",
        "cores",
        "device",
        "versions",
        "settings",
        "clocks",
        "data",
        "memory",
        "run folder",
        "link inside nodes",
    ]
    assert list(states) == names and "failed" not in states.values()
    assert found["link"]["inside nodes"]["bandwidth"] > 1e6
    assert not list((tmp_path / "out").iterdir())


def test_one_process(tmp_path):
    ended = doctor(1, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "  0     " in ended.stdout and "read" in ended.stdout


def test_data_that_one_rank_cannot_read_and_too_large_a_model(tmp_path):
    silos = tmp_path / "silo_{client}.h5"
    with h5py.File(tmp_path / "silo_0.h5", "w") as file:
        for split in ("train", "test"):
            file[f"{split}/images"] = np.zeros((8, 8, 8), np.uint8)
            file[f"{split}/labels"] = np.arange(8) % 2
    ended = doctor(2, tmp_path, "--data", silos, "--json")
    checks = failed(ended, f"fedmpi: on rank 1: task.data = {silos}: client 1 has no file")
    assert list(checks) == ["data"] and checks["data"]["text"] == "on rank 1: an error, which that rank prints"
    shutil.copy(tmp_path / "silo_0.h5", tmp_path / "silo_1.h5")
    huge = ("--model", "mlp", "--model.hidden", 10**10, "--data", silos)  # no machine of today has 3 TB for a rank
    checks = failed(doctor(2, tmp_path, *huge, "--json"))
    assert list(checks)[0] == "memory" and "2 ranks of" in checks["memory"]["text"]


def test_two_ranks_on_one_core(tmp_path):
    if not shutil.which("taskset") or (os.cpu_count() or 1) < 2:
        pytest.skip("needs taskset and two cores")
    core = min(os.sched_getaffinity(0))
    words = [
        "taskset",
        "-c",
        core,
        "mpirun",
        "-np",
        2,
        sys.executable,
        "-m",
        "fedmpi.cli.doctor",
        "--json",
        "--out",
        tmp_path,
    ]
    checks = failed(execute(words, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}))
    assert checks["cores"]["text"].startswith(f"ranks 0 and 1 share core {core} of ")


def test_mixed_versions_and_a_full_disk(tmp_path):
    """Rank 1 has another copy of the package in which one file differs; the disk has no room for the run."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        shutil.copytree(ROOT / "fedmpi", tmp_path / "other" / "fedmpi")
        with open(tmp_path / "other" / "fedmpi" / "errors.py", "a") as file:
            file.write("# changed\n")
        here, there = (
            ["env", f"PYTHONPATH={path}", sys.executable, "-m", "fedmpi", "doctor", "--json", "--out", folder]
            for path in (ROOT, tmp_path / "other")
        )
        checks = failed(execute(["mpirun", "-np", 1, *here, ":", "-np", 1, *there], cwd=tmp_path))
    finally:
        subprocess.run(["umount", folder], check=True)
    assert checks["versions"]["text"].startswith("fedmpi ")
    assert "No space left on device" in checks["run folder"]["text"]


def test_a_disk_without_room_for_the_run(tmp_path):
    with disk_of(tmp_path / "disk", "512k") as folder:
        checks = failed(doctor(1, folder, "--json"))
    assert re.fullmatch(rf"{folder} has room for .*; a run needs up to .* MiB", checks["run folder"]["text"])


def test_a_read_only_disk(tmp_path):
    with disk_of(tmp_path / "disk", "1m") as folder:
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        checks = failed(doctor(1, folder, "--json"))
    assert "cannot be written: Read-only file system" in checks["run folder"]["text"]


def test_ranks_of_another_mpi(tmp_path):
    """The other MPI's mpirun starts two jobs of one rank; one line says so."""
    if "openmpi" not in launchers():
        pytest.skip("FEDMPI_TEST_OPENMPI does not name an environment with Open MPI")
    variables = launchers()["openmpi"][1]
    variables["LD_LIBRARY_PATH"] = os.path.dirname(variables["MPI4PY_LIBMPI"])  # which its own mpirun would set
    ended = doctor(2, tmp_path, env=variables)
    assert ended.returncode == 2
    said = [line for line in ended.stderr.splitlines() if line.startswith("fedmpi")]
    assert len(said) == 1 and "started 2 processes but each of them is alone" in said[0], ended.stderr


def test_wrong_words(tmp_path):
    for words in (("--list", "tasks"), ("--no-such-setting", "1")):
        ended = doctor(1, tmp_path, *words)
        assert ended.returncode == 2 and ended.stderr.count("fedmpi: error") == 1


def test_fewer_ranks_than_were_started(monkeypatch, capsys):
    """The JSON has this check alone, and rank 0 prints it."""
    monkeypatch.setenv("PMI_SIZE", "3")
    monkeypatch.setenv("PMI_RANK", "0")
    for as_json, rank, is_printed in [(True, 0, True), (True, 1, False), (False, 0, False)]:
        link = SoloLink()
        link.rank = rank
        with pytest.raises(UserError, match="started 3 processes but each of them is alone: ") as error:
            _check_launch(link, as_json)
        printed = capsys.readouterr().out
        assert bool(printed) == is_printed
        if is_printed:
            (check,) = json.loads(printed).pop("checks")
            assert json.loads(printed) == {"ok": False, "ranks": [], "checks": [check], "link": {}}
            assert (check["name"], check["state"], check["text"]) == ("ranks", "failed", str(error.value))
            assert "mpirun" in check["advice"]


@pytest.mark.parametrize(
    ("cores", "online", "state"),
    [
        ([[0, 1], [0, 1]], 2, "ok"),  # not bound: they take turns on all cores, and there are enough
        ([[0], [1]], 2, "ok"),
        ([[0], [0]], 2, "failed"),
        ([[0], [1], [0], [1]], 2, "failed"),  # bound, and more ranks than cores
        ([[0, 1], [1, 2]], 4, "failed"),
        ([[0, 1], [0, 1], [0, 1]], 2, "warning"),  # more ranks than cores
        ([[0, 1, 2, 3], [0, 1, 2, 3]], 64, "ok"),  # SLURM's share of the node
        ([[0], [1]], 64, "warning"),  # Open MPI binds each rank to one core
    ],
)
def test_cores(cores, online, state):
    ranks = [dataclasses.replace(FACTS, rank=rank, cores=own, cores_online=online) for rank, own in enumerate(cores)]
    assert check_cores(ranks).state == state


def test_two_ranks_on_one_gpu():
    facts = ranks_on("n1", "n1", "n2", device="cuda:0 (NVIDIA H100)", device_key="GPU-1")
    check = check_devices(facts)
    assert check.state == "failed" and check.text == "ranks 0 and 1 share cuda:0 (NVIDIA H100) on n1"
    assert check_devices(facts[1:]).state == "ok"  # one on each node
    assert check_devices([facts[0], ranks_on("n1", "n2")[1]]).state == "warning"  # a GPU and a CPU
    far = dataclasses.replace(facts[1], cores=[0, 1], near_cores=[8, 9, 10])
    check = check_devices([far])
    assert check.state == "warning"
    assert check.text == "rank 1 (n1) runs on core 0-1, and cuda:0 (NVIDIA H100) is near cores 8-10"
    assert check_devices([dataclasses.replace(far, cores=[1, 8])]).state == "ok"


def test_the_sum_is_made_by_the_transport_of_the_run(tmp_path):
    ended = doctor(2, tmp_path, "--transport", "nccl")
    assert ended.returncode == 0, ended.stderr
    assert "a test sum by gloo in the place of NCCL is right" in ended.stdout
    ended = doctor(2, tmp_path, "--transport", "cuda_aware")
    assert ended.returncode == 2
    assert "transport = cuda_aware: it needs rows on a GPU, and they are on the CPU" in ended.stderr


def test_memory_of_nodes():
    facts = ranks_on("n1", "n1", "n2")
    assert check_memory(facts, [10, 10, 10], [20, 20, 20]).state == "ok"
    check = check_memory(facts, [10, 10, 10], [19, 19, 20])
    assert check.state == "failed" and check.text.startswith("2 ranks of n1 need 20 B")
    assert check_memory(facts, [10, 10, 10], [float("nan")] * 3).state == "ok"


def test_the_memory_of_a_ranks_rows():
    """FedAvg has four vectors for two clients; the model, its vector and a gradient come to them: 7 of 4 bytes each."""
    words = types.SimpleNamespace(algorithm=FedAvg())
    context = types.SimpleNamespace(clients=[0, 1], dtype=torch.float32, device=torch.device("cpu"))
    ranks = ranks_on("n1")
    sizes = [_check_rows(SoloLink(), ranks, words, context, (dim, 0), [""])[0] for dim in (1000, 2000)]
    assert sizes == [28_000, 56_000]
    rows, check = _check_rows(SoloLink(), ranks, words, context, (1000, 0), ["no such layer"])
    assert (rows, check.state, check.text) == (0, "failed", "rank 0: no such layer")


def test_clocks_and_unused_nodes(monkeypatch):
    facts = ranks_on("n1", "n2")
    assert check_clocks(facts).state == "ok"
    late = [facts[0], dataclasses.replace(facts[1], time=100.0)]
    assert check_clocks(late).text == "rank 1 (n2) is 100 s ahead of rank 0 (n1)"
    assert check_ranks(facts, True, "Allreduce").text == "2 on 2 nodes (1 on each); a test sum by Allreduce is right"
    assert check_ranks(ranks_on("n1", "n1", "n2"), True, "Allreduce").text.startswith("3 on 2 nodes (1 to 2 on each); ")
    assert check_ranks(facts, True, "Allreduce").state == "ok"
    assert check_ranks(facts, False, "Allreduce").state == "failed"
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    assert check_ranks(facts, True, "Allreduce").state == "warning"
