"""Nobody waits forever: ranks that end, break, or are stuck."""

import os
import re
import time
import types
import uuid

import pytest
from helpers import PROGRAMS, start, wait_for
from test_time_limits import processes_with

import fedmpi
from fedmpi.comm.job import exits
from fedmpi.ground.errors import AgreedUserError, Diverged

LIMIT = 240  # seconds of one job, which needs 5 to 30 on a machine of its own


def run(how, ranks=2, mpi="default"):
    """A job of tests/programs/exits.py, of which nothing stays behind."""
    job = uuid.uuid4().hex  # other tests may run the same program
    ended = start(ranks, PROGRAMS / "exits.py", how, job, mpi=mpi, timeout=LIMIT, is_forked=False)
    wait_for(lambda: not processes_with(job), 10)
    return ended, [line for line in ended.stderr.splitlines() if line.startswith("fedmpi: ")]


# How rank 1 ends after 23 of 30 steps -> (exit code, the line).
ALONE = {
    "return": (1, "error: rank 1 ended after 23 steps, while other ranks continue"),
    "exit3": (3, "error: rank 1 ended after 23 steps with exit code 3, while"),
    "thread": (1, "error: rank 1 ended after 23 steps with exit code 0, while"),
    "interrupt": (1, "error: rank 1 ended after 23 steps, while"),
    "two": (1, "error: rank 1 ended after 23 steps, while"),
    "os_exit0": (1, r"error on rank 1: os._exit\(0\) was called after 23 steps"),
    "os_exit5": (5, r"error on rank 1: os._exit\(5\) was called after 23 steps"),
    "raise": (1, "error on rank 1: ValueError after 23 steps"),
    "stuck": (75, r"error: no sign of rank 1 on \S+ for 5 s during the local steps of round 5: "),
    "late": (75, "error: not all ranks have begun a federation within 5 s"),
}


@pytest.mark.rarely
@pytest.mark.parametrize("how", ALONE)
def test_a_rank_that_ends_alone_ends_the_job_with_one_line(how):
    ended, lines = run(how)
    code, line = ALONE[how]
    assert ended.returncode == code or (code == 75 and ended.returncode == 9), ended.stderr  # MPICH may pass on SIGKILL
    assert len(lines) == 1 and re.match(f"fedmpi: {line}", lines[0]), ended.stderr


@pytest.mark.parametrize("how", ["return", "stop", "all_exit3", "between"])
def test_with_three_ranks_and_each_mpi(how, any_mpi):
    ended, lines = run(how, 3, any_mpi)
    expected = {
        "return": ((1,), "rank 1 ended"),
        "stop": ((75, 9), "no sign of rank 1"),
        "all_exit3": ((3,), "the last 3"),
        "between": ((1,), "rank 1 ended, while other ranks begin a federation"),  # sys.exit is Python's own again
    }
    assert ended.returncode in expected[how][0] and len(lines) == 1 and expected[how][1] in lines[0], ended.stderr


@pytest.mark.parametrize("how, code", [("all_return", 0), ("all_two", 0), ("all_interrupt", 0)])
def test_ranks_that_end_together_keep_their_exit_code(how, code):
    ended, lines = run(how)
    assert ended.returncode == code, ended.stderr
    assert lines == ["fedmpi: the program ended without fed.finish(): the last 3 steps were not averaged"]


@pytest.mark.always
def test_one_rank_does_not_wait():
    began = time.monotonic()
    ended, lines = run("all_exit3", 1)
    assert ended.returncode == 3 and not lines and time.monotonic() - began < LIMIT


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (fedmpi.UserError("it"), "error: it", 2), (AgreedUserError("it", True), "error: it", 2),
        (AgreedUserError("it", False), "", 2), (Diverged("it"), "error: it", 1),
        (ValueError("it"), "error on rank 1: ValueError after 3 steps", 1),
        (KeyboardInterrupt(), "error on rank 1: KeyboardInterrupt after 3 steps", 130),
    ],
)  # fmt: skip
def test_what_an_error_says_that_nobody_caught_and_its_code(monkeypatch, error, line, code):
    loops = [
        types.SimpleNamespace(rank=rank, progress=(steps, 0), roll_call="open") for rank, steps in ((0, 7), (1, 3))
    ]
    ends, reports = [], []
    monkeypatch.setattr(exits, "_end", lambda *how: ends.append(how))
    monkeypatch.setattr(exits, "_process", os.getpid())
    monkeypatch.setattr(exits, "OUTPUT_SECONDS", 0)
    monkeypatch.setattr(exits, "_opened", loops)
    exits._end_by_error(lambda *error: reports.append(error), type(error), error, None)
    assert ends == [(line, code)] and len(reports) == (not line.startswith("error: ") and line != "")
    monkeypatch.setattr(exits, "_opened", [])  # no loop is open: as without fedmpi
    exits._end_by_error(lambda *error: reports.append(error), type(error), error, None)
    assert len(ends) == 1 and reports[-1] == (type(error), error, None)


def test_different_numbers_of_steps_in_the_last_round_are_named(tmp_path):
    program = tmp_path / "uneven.py"
    program.write_text(
        "import fedmpi, torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "fed = fedmpi.join(model, 'fedavg', local_steps=5, step_size=0.1)\n"
        "for _ in range(15 - fed.rank):\n"
        "    fed.step(lambda: model(torch.ones(1, 2)).square().mean())\n"
        "fed.finish()\n"
    )
    ended = start(2, program)
    assert "different numbers of steps (rank 0: 15, rank 1: 14)" in ended.stderr, ended.stderr
