"""Ranks that end without Python, and signals before the first round: the job ends with a code that is not 0."""

import builtins
import concurrent.futures
import inspect
import os
import signal
import sys
import uuid

import pytest
import torch
from helpers import PROGRAMS, ranks_of, running, start, wait_for
from test_time_limits import processes_with

import fedmpi
from fedmpi.comm.job import exits

ENDS = PROGRAMS / "ends.py"
# How a rank ends -> (exit codes of the launchers, what is said); the second may come too late if the launcher is fast.
KINDS = {
    "_exit": ((1,), "its process ended"), "exit": ((1,), "its process ended"), "exec": ((1,), "its process ended"),
    "exec and stay": ((1,), "its process ended"), "exit3": ((1, 3), ""), "kill": ((1, 9, 137), ""),
    "segmentation fault": ((1, 11, 139), ""), "child": ((0,), ""),
}  # fmt: skip


def run(how, ranks, rank, door, *words, mpi="default"):
    """A job of tests/programs/ends.py, of which nothing stays behind."""
    job = uuid.uuid4().hex
    ended = start(ranks, ENDS, how, rank, door, *words, job, mpi=mpi, is_forked=False)
    wait_for(lambda: not processes_with(job), 10)
    return ended


def test_a_rank_that_ends_without_python_ends_the_job(any_mpi):
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        jobs = {
            (how, ranks, rank): pool.submit(run, how, ranks, rank, "watch", mpi=any_mpi)
            for how, (ranks, rank) in zip(KINDS, [(2, 1), (3, 0), (3, 1), (2, 0), (3, 2), (3, 1), (2, 1), (2, 1)])
        }
    for (how, _, rank), job in jobs.items():
        (codes, said), ended = KINDS[how], job.result()
        lines = [line for line in ended.stderr.splitlines() if line.startswith("fedmpi: ")]
        assert ended.returncode in codes, (how, ended.stderr)
        assert len(lines) <= 1 and all(f"error on rank {rank}: its process ended" in line for line in lines), how
        assert lines or not said, how


@pytest.mark.parametrize(
    ("how", "door", "line"),
    [
        ("_exit", "train", r"error on rank 1 on \S+ (client 1): its process ended"),
        ("abort", "average", "error on rank 1: MPI_Abort(0) was called after 7 steps, and the job is not finished"),
        ("os._exit", "average", "error on rank 1: os._exit(0) was called after 7 steps, and the job is not finished"),
    ],
)
def test_the_same_at_other_doors(tmp_path, any_mpi, how, door, line):
    ended = run(how, 2, 1, door, tmp_path, mpi=any_mpi)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.count("fedmpi: error") == 1, ended.stderr
    assert line.split(r"\S+")[0] in ended.stderr and line.split(r"\S+")[-1] in ended.stderr
    assert not list(tmp_path.glob("*/model*"))


@pytest.mark.parametrize(("how", "name", "to"), [("in C", "SIGTERM", "all"), ("asleep", "SIGINT", "one")])
def test_a_signal_before_the_first_round_ends_the_job_at_once(tmp_path, any_mpi, how, name, to):
    words = ("-m", "fedmpi.train", "--model", "never_built.model", "--out", tmp_path / "runs")
    with running(2, *words, mpi=any_mpi, env={"STUCK": how, "STUCK_IN": str(tmp_path)}) as job:
        wait_for(lambda: len(list(tmp_path.glob("stuck-*"))) == 2, 100)
        for rank in ranks_of(job)[: None if to == "all" else 1]:
            os.kill(rank, getattr(signal, name))
        output, _ = job.communicate(timeout=120)
    assert job.returncode in {"SIGTERM": (15, 143), "SIGINT": (130,)}[name], output
    assert "Traceback" not in output and not list(tmp_path.glob("runs/*"))
    assert name == "SIGTERM" or output.count("fedmpi: interrupted during the preparation") == 1, output
    wait_for(lambda: not processes_with(str(tmp_path)), 10)


def test_what_is_replaced_while_a_loop_is_open_keeps_its_arguments_and_comes_back():
    from fedmpi.comm.start.mpi_library import MPI

    exits._opened.clear()  # of loops that other tests in this process have not ended
    exits._uninstall()
    places = [(os, "_exit"), (sys, "exit"), (sys, "excepthook"), (MPI.Comm, "Abort")]
    places += [(builtins, name) for name in ("exit", "quit") if hasattr(builtins, name)]
    before = [getattr(place, name) for place, name in places]
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    fed = fedmpi.average(torch.nn.Linear(2, 2), every=2)
    for (place, name), usual in zip(places, before):
        assert getattr(place, name) is not usual
        assert inspect.signature(getattr(place, name)) == inspect.signature(usual)
    for arguments, keywords in ((("x",), {}), ((), {}), ((1, 2), {}), ((), {"code": 3})):
        with pytest.raises(TypeError):
            os._exit(*arguments, **keywords)
    with pytest.raises(SystemExit, match="3"):
        builtins.exit(code=3)
    fed.finish()
    assert [getattr(place, name) for place, name in places] == before
    assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers
