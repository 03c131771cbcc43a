"""Local steps that take far longer than they compute are explained in one line: why, and what to set."""

import os
import subprocess
import sys
import types

import pytest
import torch

from fedmpi.comm.solo import SoloLink
from fedmpi.training import slow_steps
from fedmpi.training.build import prepare
from fedmpi.training.config import read_command_line
from fedmpi.training.slow_steps import SlowSteps

MOST = 120  # seconds of local steps until the line must be there


def train_until_it_is_said(capfd, monkeypatch, *words):
    """Run rounds until something is printed on standard error; returns it."""
    monkeypatch.setattr(slow_steps, "LONG", 0.3)
    settings = "--algorithm fedavg --clients 2 --local-steps 4 --threads 1 --model slow.Slow"
    federation = prepare(read_command_line([*settings.split(), *words]), SoloLink()).federation
    federation.start()
    said = ""
    while not said and federation.worked.wall() < MOST:
        federation.run_round()
        said = capfd.readouterr().err
    for _ in range(3):
        federation.run_round()
    assert capfd.readouterr().err == ""  # it is said once
    assert federation.worked.wall() == pytest.approx(federation.seconds["local"])
    return said


def test_steps_that_wait_for_something_else(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("SLOW_WHILE", str(tmp_path))  # each step sleeps
    said = train_until_it_is_said(capfd, monkeypatch)
    assert said.startswith("fedmpi: rank 0 on ") and said.count("\n") == 1
    assert " s: they waited, but not for a core; " in said


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="this system does not count waits for cores")
def test_steps_whose_core_is_busy(capfd, monkeypatch):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    code = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(6)]  # on the same core
    try:
        said = train_until_it_is_said(capfd, monkeypatch)
    finally:
        for process in busy:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, before)
    assert " left no core to them; start fewer ranks on this node, or end the other processes\n" in said


@pytest.mark.parametrize(
    ("wall", "cpu", "device", "local_rank", "number"),
    [(10, 4, "cpu", 0, 1), (10, 6, "cpu", 0, 0), (4, 1, "cpu", 0, 0), (10, 1, "cuda", 0, 0), (10, 1, "cpu", 1, 0)],
)
def test_only_long_waits_on_the_first_rank_of_a_node_are_said(capsys, wall, cpu, device, local_rank, number):
    clock = types.SimpleNamespace(wall=lambda: wall, cpu=lambda: cpu)
    look = SlowSteps(types.SimpleNamespace(rank=3, local_rank=local_rank), torch.device(device))
    for _ in range(2):
        look(types.SimpleNamespace(worked=clock), 0, 0, None)
    assert capsys.readouterr().err.count(f"local steps of {cpu:.1f} s CPU time took {wall:.1f} s: ") == number


def test_steps_are_compared_since_the_last_comparison(capsys):
    look = SlowSteps(types.SimpleNamespace(rank=0, local_rank=0), torch.device("cpu"))
    said = []
    for wall, cpu in ((6, 6), (10, 6.5), (12, 7)):  # computing all the time; too early; waiting
        look(types.SimpleNamespace(worked=types.SimpleNamespace(wall=lambda: wall, cpu=lambda: cpu)), 0, 0, None)  # noqa: B023
        said.append(capsys.readouterr().err)
    assert said[:2] == ["", ""] and "local steps of 1.0 s CPU time took 6.0 s: " in said[2]


def test_threads_are_named_if_there_are_several():
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert ("--threads 1, " in slow_steps._why(10, 9)) == (threads == 2)
    finally:
        torch.set_num_threads(before)
