"""Ranks that are stuck, launchers that are killed, ranks that differ: the job ends, and no process stays behind."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import time

import pytest
from helpers import launch_words, train, wait_for

from fedmpi.ground.files.run_files import find_checkpoints, is_complete


@pytest.mark.rarely
def test_a_stopped_rank_is_named_and_the_job_ends(tmp_path, any_mpi):
    stuck = ("--model", "faulty.Faulty", "--model.kind", "stop", "--timeout", 5)
    ended = train(3, tmp_path, "--clients", 6, "--rounds", 50, *stuck, mpi=any_mpi)
    # MPICH's mpirun may pass on the signal by which it ends the other ranks, where it should pass on 75.
    assert ended.returncode == 75 or (any_mpi == "default" and ended.returncode == signal.SIGKILL)
    line = r"error: no sign of rank 1 on \S+ \(clients 2 to 3\) for 5 s during the local steps of round 1: "
    assert re.search(line, ended.stderr), ended.stderr
    assert ended.stderr.count("fedmpi: error") == 1
    wait_for(lambda: not processes(tmp_path), 10)


def test_a_stopped_rank_is_named_where_mpi_does_not_sum(tmp_path):
    """With NCCL, for which gloo stands in, the losses of a round are exchanged by MPI before that."""
    stuck = ("--model", "faulty.Faulty", "--model.kind", "stop", "--timeout", 5, "--transport", "nccl")
    ended = train(3, tmp_path, "--clients", 3, "--rounds", 50, *stuck)
    line = r"error: no sign of rank 1 on \S+ \(client 1\) for 5 s during the local steps of round 1: "
    assert re.search(line, ended.stderr), ended.stderr
    wait_for(lambda: not processes(tmp_path), 10)


def processes(out):
    """Numbers of the processes that have a folder in their command line, zombies left out."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(out).encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize("killed", ["launcher", "parent of a rank"])
def test_no_rank_outlives_its_launcher(tmp_path, any_mpi, killed):
    settings = ("--out", tmp_path, "--rounds", 10**6, "--check_replicas", 1)
    words, variables = launch_words(2, "-m", "fedmpi.train", *settings, mpi=any_mpi)
    job = subprocess.Popen(
        words, env={**os.environ, **variables}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for(lambda: any(path.stat().st_size for path in tmp_path.glob("*/metrics.jsonl")), 120)
        ranks = [pid for pid in processes(tmp_path) if pid != job.pid]
        ranks = [pid for pid in ranks if b"mpirun" not in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]
        parent = int(pathlib.Path(f"/proc/{max(ranks)}/stat").read_text().rpartition(")")[2].split()[1])
        began = time.monotonic()
        os.kill(job.pid if killed == "launcher" else parent, signal.SIGKILL)
        wait_for(lambda: not processes(tmp_path), 30)
        assert time.monotonic() - began < 10
        assert job.wait(10) != 0
    finally:
        for pid in processes(tmp_path):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        job.wait()


@pytest.mark.parametrize(("every", "checkpoints"), [(3, [2]), (5, [])])
def test_ranks_that_differ_end_the_run(tmp_path, every, checkpoints):
    """They differ after round 3. In the second case a check is due because of a checkpoint, which is not written."""
    checks = ("--check_replicas", every, "--checkpoint-every", 2 if checkpoints else 3)
    ended = train(3, tmp_path, "--rounds", 6, "--algorithm", "flips.Flips", *checks)
    assert ended.returncode == 1
    assert "error: after round 3: row x on rank 1 is not that of the other ranks" in ended.stderr, ended.stderr
    assert ("; the last checkpoint is that of round 2" in ended.stderr) == bool(checkpoints)
    assert find_checkpoints(next(tmp_path.iterdir())) == checkpoints
    assert not list(tmp_path.glob("*/model*"))


@pytest.mark.parametrize(("change", "code"), [(1e-3, 2), (1e-7, 0)])
def test_a_saved_result_that_ranks_do_not_share_is_named(tmp_path, change, code):
    """Without --check_replicas, too: more than rounding is an error, and the model is saved all the same."""
    words = ("--rounds", 3, "--algorithm", "flips.Flips", "--algorithm.change", change, "--name", "it")
    ended = train(3, tmp_path, *words)
    lines = [line for line in ended.stderr.splitlines() if "the largest relative difference is" in line]
    assert ended.returncode == code and len(lines) == 1, ended.stderr
    assert "row x on rank 1 is not that of the other ranks" in lines[0] and is_complete(tmp_path / "it")
