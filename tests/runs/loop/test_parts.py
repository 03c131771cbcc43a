"""Parts of a run that a program adds: what they see, on which ranks, and what goes on from a checkpoint."""

import ast

import numpy as np
import pytest
import torch
from helpers import PROGRAMS, start

import fedmpi
from fedmpi import UserError
from fedmpi.runs.loop.part import Part, check_parts


@pytest.mark.rarely
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


def made(**methods):
    """A part of the class Mine with some methods."""
    return type("Mine", (Part,), methods)()


def nothing(self, now):
    """What does nothing."""


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (Slow(), "parts is a Slow: expected a list of fedmpi.Part objects"),
        ([Slow], "parts is a list with a type: expected a list of fedmpi.Part objects"),
        ([Slow(), Slow()], "parts: two are of the class Slow: expected one, or a subclass for each"),
        ([made(after_rounds=nothing)], "part Mine: after_rounds is no method of Part; did you mean 'after_round'?"),
        ([made(state=dict, restor=nothing)], "part Mine: restor is no method of Part; did you mean 'restore'?"),
        ([made(state=lambda self: {"n": 1})], "part Mine: it has state, but not restore: expected both, or none"),
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


def test_a_part_may_have_methods_of_its_own():
    check_parts([made(after_round=nothing, after_rounds=nothing, send=nothing, _begin=nothing)])


SETTINGS = {"algorithm": "fedavg", "clients": 2, "threads": 1, "local_steps": 1, "evaluate_samples": 50}


def stating(value):
    return {"state": lambda self: value, "restore": nothing}


def telling(**facts):
    return {"after_round": lambda self, now: now.facts.update(facts)}


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        (stating({"n": "abc"}), r"part Mine: state\(\)\['n'\] is a str: expected a number or tensor"),
        (stating({"n": None}), r"part Mine: state\(\)\['n'\] is a NoneType: expected a number or tensor"),
        (stating({"n": [1, "a"]}), r"part Mine: state\(\)\['n'\] is a list: expected a number or tensor"),
        (stating({"n": np.float32(1)}), r"part Mine: state\(\)\['n'\] is a float32: expected a number or tensor"),
        (stating({1: 2.5}), r"part Mine: state\(\) has the name 1, of int: expected texts as names"),
        (stating(None), r"part Mine: state\(\) returned a NoneType: expected a dict"),
        ({"request": lambda self: None}, r"part Mine: request\(\) returned a NoneType: expected a whole number"),
        (telling(t=torch.tensor(1.5)), r"part Mine: facts\['t'\] is a Tensor: expected a number \(.item\(\)\)"),
        (telling(t=np.float32(1.5)), r"part Mine: facts\['t'\] is a float32: expected a number \(.item\(\)\)"),
        (telling(t="hello"), r"part Mine: facts\['t'\] is a str: expected a number$"),
        (telling(loss=0.0), r"part Mine: facts\['loss'\]: the record of a round has loss already: expected another"),
    ],
)
def test_what_parts_return_is_checked_before_a_round_is_recorded(methods, expected, tmp_path):
    with pytest.raises(UserError, match=expected):
        fedmpi.train(out=str(tmp_path), name="it", rounds=1, parts=[made(**methods)], **SETTINGS)
    assert not (tmp_path / "it" / "metrics.jsonl").read_bytes()


class Behind(Part):
    """Has a state from `begin` on, as authors write it who think of no resumption."""

    def __init__(self):
        self.calls = []

    def begin(self, run):
        self.calls.append("begin")
        self.model = run.federation.server.x
        self.last = self.model.clone()

    def after_parts(self, now):
        self.calls.append("after_parts")

    def state(self):
        return {"last": self.last, "numbers": [1, 2.5]}

    def restore(self, state):
        self.calls.append("restore")
        assert list(state["numbers"]) == [1, 2.5]


def test_a_part_whose_state_begins_with_the_run_goes_on(tmp_path):
    fedmpi.train(out=str(tmp_path), name="it", rounds=1, parts=[Behind()], checkpoint_every=1, **SETTINGS)
    again = Behind()
    fedmpi.train(rounds=2, resume=str(tmp_path / "it"), parts=[again])
    assert again.calls == ["restore", "begin", "after_parts"]


def test_parts_of_a_recorded_loop_are_called_after_every_round(tmp_path):
    model, part = torch.nn.Linear(2, 1), Behind()
    fed = fedmpi.join(model, "fedavg", local_steps=1, record=fedmpi.Recording(tmp_path / "loop", parts=[part]))
    for _ in range(3):
        fed.step(lambda: model(torch.eye(2)).square().mean())
    assert part.calls == ["begin"] + 3 * ["after_parts"]
    fed.finish()


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
