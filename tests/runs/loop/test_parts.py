"""Parts of a run that a program adds: what they see, on which ranks, and what goes on from a checkpoint."""

import ast

import pytest
from helpers import PROGRAMS, start

import fedmpi
from fedmpi import UserError
from fedmpi.runs.loop.part import Part, check_parts


@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_that_a_program_adds(ranks, tmp_path):
    done = start(ranks, PROGRAMS / "own_parts.py", tmp_path)
    assert done.returncode == 0, done.stderr
    found = {line.partition(" ")[0]: line.partition(" ")[2] for line in done.stdout.splitlines()}
    whole = ast.literal_eval(found["whole"])
    assert [(number, evaluated) for number, _, evaluated in whole] == [(1, False), (2, True), (3, False), (4, True)]
    assert all(before[1] < after[1] for before, after in zip(whole, whole[1:]))
    # A run in two halves knows where it began.
    assert ast.literal_eval(found["halves"]) == whole
    # A part ends the run, which is evaluated then.
    early, is_final = found["early"].rsplit(" ", 1)
    assert ast.literal_eval(early) == [*whole[:2], (*whole[2][:2], True)] and is_final == "True"
    assert found["equal"] == "True ['calls.txt']"
    calls = [f"{word} {number}" for number in range(4) for word in ("before",)]
    expected = [line for number in range(4) for line in (calls[number], f"after {number + 1} ")]
    assert [line.partition("[")[0] for line in ast.literal_eval(found["calls"])] == expected
    records, calls = found["loop"].split("] [")
    assert [(number, evaluated) for number, _, evaluated in ast.literal_eval(f"{records}]")] == [
        (1, False),
        (2, True),
        (3, False),
    ]
    assert len(ast.literal_eval(f"[{calls}")) == 6


class Slow(Part):
    """One more."""


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (Slow(), "parts is a Slow: expected a list of fedmpi.Part objects"),
        ([Slow], "parts is a list with a type: expected a list of fedmpi.Part objects"),
        ([Slow(), Slow()], "parts: two are of the class Slow: expected one, or a subclass for each"),
    ],
)
def test_other_parts_are_named_before_the_run_begins(parts, expected, tmp_path):
    with pytest.raises(UserError, match=expected):
        check_parts(parts)
    with pytest.raises(UserError, match=expected):
        fedmpi.train(parts=parts, out=str(tmp_path), rounds=1)
    with pytest.raises(UserError, match=expected):
        fedmpi.Recording(tmp_path / "loop", parts=parts)
    assert not [*tmp_path.iterdir()]


class Wrong(Part):
    """Expects a state that it never gave."""

    def state(self):
        return {"known": 1.0}

    def restore(self, state):
        state["unknown"]


def test_a_part_that_cannot_go_on_ends_the_run_in_one_line(tmp_path):
    settings = {"out": str(tmp_path), "algorithm": "fedavg", "clients": 2, "checkpoint_every": 1, "threads": 1}
    fedmpi.train(**settings, name="it", rounds=1, parts=[Wrong()])
    with pytest.raises(UserError, match="part Wrong: cannot go on from its state: KeyError: 'unknown'"):
        fedmpi.train(**settings, rounds=2, resume=str(tmp_path / "it"), parts=[Wrong()])
    fedmpi.train(**settings, rounds=2, resume=str(tmp_path / "it"), parts=[Slow()])  # a part may be left out, or be new


def test_a_run_that_ended_early_goes_on_when_it_is_asked_for_more_rounds(tmp_path):
    settings = {"out": str(tmp_path), "algorithm": "fedavg", "clients": 2, "stop": "train_loss>0", "eval_every": 2}
    early = fedmpi.train(**settings, name="it", rounds=10)
    assert len(early.metrics) == 2
    more = fedmpi.train(**settings, resume=str(tmp_path / "it"), rounds=12)
    assert len(more.metrics) == 4, "it ended again at its next evaluation"
    again = fedmpi.train(**settings, resume=str(tmp_path / "it"), rounds=12)
    assert len(again.metrics) == 4
