"""Loops of one process that would get in each other's way: a line, at once, and what does not is left alone."""

import re

import pytest
from helpers import PROGRAMS, start

# Name -> (ranks, exit code, the one line).
REFUSED = {
    "two": (2, 2, "error: model Linear: a federation of the same ranks that is open has its parameter 'weight', too: "),
    "threads": (2, 2, r"error: thread Thread-\d .* begins a federation while thread Thread-\d .* has one: "),
    "comms": (2, 2, r"error: thread Thread-\d .* begins a federation while thread Thread-\d .* has one: "),
    "sum": (2, 1, "error on rank 0: Alarm has interrupted the exchange of messages with the other ranks, and "),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_would_mix_messages_ends_the_job_with_one_line(how):
    ranks, code, line = REFUSED[how]
    ended = start(ranks, PROGRAMS / "other_loops.py", how)
    lines = [said for said in ended.stderr.splitlines() if said.startswith("fedmpi: ")]
    assert ended.returncode == code and "done" not in ended.stdout, ended.stdout + ended.stderr
    assert lines and all(re.match(f"fedmpi: {line}", said) for said in lines), ended.stderr


@pytest.mark.parametrize(
    "how, ranks, said",
    [("nested", 4, ""), ("two", 1, ""), ("dropped", 2, ""), ("after", 2, ""), ("retried", 2, "equal"),
     ("forked", 2, "this process was forked from the rank that has the federation")],
)  # fmt: skip
def test_what_mixes_none_works(how, ranks, said):
    ended = start(ranks, PROGRAMS / "other_loops.py", how)
    assert ended.returncode == 0 and ended.stdout.count("done") == ranks, ended.stdout + ended.stderr
    assert ended.stdout.count(said) >= ranks, ended.stdout


def test_without_other_ranks_only_the_second_thread_fails():
    ended = start(1, PROGRAMS / "other_loops.py", "threads")
    assert ended.returncode == 0 and ended.stdout.count("done") == 1, ended.stderr
    assert ended.stderr.count("fedmpi.ground.errors.UserError: thread ") == 1, ended.stderr
