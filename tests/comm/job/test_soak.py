"""kill -9 of a random rank at random times, again and again, each time followed by --resume auto: no bit is lost."""

import os
import random
import signal
import time

import pytest
from dies import check_checkpoints, outcome
from helpers import ranks_of, running, start, wait_for

from fedmpi.ground.files.run_files import is_complete

KILLS = 100  # under each MPI
ROUNDS = 400
WORDS = (
    "-m", "fedmpi.train", "--task", "quadratic", "--clients", 6, "--algorithm", "scaffold", "--participation", 0.7,
    "--local-steps", 2, "--rounds", ROUNDS, "--eval-every", 50, "--checkpoint-every", 7, "--threads", 1,
)  # fmt: skip


def lines(folder):
    """Number of records so far."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_200_kills_of_ranks(tmp_path, any_mpi):
    words = (*WORDS, "--out", tmp_path)
    assert start(2, *words, "--name", "whole", mpi=any_mpi).returncode == 0
    expected, draw, ended, killed = outcome(tmp_path / "whole"), random.Random(any_mpi), 0, 0
    while killed < KILLS or not ended:
        folder = tmp_path / f"run-{ended}"
        with running(2, *words, "--name", folder.name, "--resume", "auto", mpi=any_mpi) as job:
            if killed < KILLS and draw.random() < 0.85:  # while it trains; otherwise at any time, also while it starts
                before, more = lines(folder), draw.randrange(60)
                wait_for(lambda: lines(folder) != before or job.poll() is not None)  # noqa: B023
                before = lines(folder)
                wait_for(lambda: lines(folder) >= before + more or job.poll() is not None)  # noqa: B023
            elif killed < KILLS:
                time.sleep(draw.uniform(0, 5))
            ranks = ranks_of(job)
            if killed < KILLS and ranks and job.poll() is None:
                os.kill(draw.choice(ranks), signal.SIGKILL)
                killed += 1
            output, _ = job.communicate(timeout=300)
        if job.returncode == 0 and is_complete(folder):
            assert outcome(folder) == expected, f"{folder}\n{output}"
            check_checkpoints(folder)
            ended += 1
            print(f"{killed} kills, {ended} equal ends", flush=True)
        else:
            assert "fedmpi: error" not in output, output
