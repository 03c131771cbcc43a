"""What killed jobs leave in shared memory is removed at the next start, and nothing else."""

import mmap
import os
import signal
import time

import pytest
from helpers import ranks_of, running, train, wait_for

from fedmpi.comm import shared_memory
from fedmpi.comm.shared_memory import SHARED_FOLDER, remove_remains


@pytest.fixture
def make(monkeypatch):
    """A function that makes a file of some age in shared memory; what is left at the end is removed."""
    monkeypatch.setattr(shared_memory, "LOCAL_RANKS", ())
    paths = []

    def file(name, age):
        path = f"{SHARED_FOLDER}/{name}-{os.getpid()}".replace("-", "" if name.startswith("mpich") else ".")
        with open(path, "wb") as new:
            new.truncate(4096)
        os.utime(path, (time.time() - age,) * 2)
        paths.append(path)
        return path

    yield file
    for path in filter(os.path.lexists, paths):
        os.unlink(path)


def test_only_files_of_dead_jobs_are_removed(make):
    dead, openmpi = make("mpich_shm_0", 100), make("sm_segment.it.0", 100)
    young, foreign, used = make("mpich_shm_1", 1), make("mine", 100), make("mpich_shm_2", 100)
    link = make("mpich_shm_3", 100)
    os.unlink(link)
    os.symlink("/nowhere", link)  # not MPI's, and no reason to leave the others
    with open(used, "r+b") as file, mmap.mmap(file.fileno(), 4096):
        remove_remains()
    assert not os.path.exists(dead) and not os.path.exists(openmpi)
    assert all(map(os.path.lexists, (young, foreign, used, link)))


def test_the_next_start_removes_what_a_killed_job_left(tmp_path, any_mpi):
    before = set(os.listdir(SHARED_FOLDER))
    with running(2, "-m", "fedmpi.train", "--out", tmp_path, "--rounds", 10**6, "--name", "it", mpi=any_mpi) as job:
        wait_for((tmp_path / "it" / "metrics.jsonl").is_file)
        mine = {name for pid in ranks_of(job) for name in mapped_by(pid)} - before
        for pid in [job.pid, *ranks_of(job)]:
            os.kill(pid, signal.SIGKILL)
    left = [f"{SHARED_FOLDER}/{name}" for name in mine if os.path.exists(f"{SHARED_FOLDER}/{name}")]
    assert left
    for path in left:
        os.utime(path, (time.time() - 100,) * 2)
    assert train(1, tmp_path, "--rounds", 1).returncode == 0
    assert not [path for path in left if os.path.exists(path)]


def mapped_by(pid):
    """Names of the files in shared memory that a process maps."""
    with open(f"/proc/{pid}/maps") as file:
        return {line.rsplit("/", 1)[1].strip() for line in file if f"{SHARED_FOLDER}/" in line}
