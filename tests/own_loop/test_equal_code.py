"""The user's code behind the names of models, losses, algorithms and so on is compared between the ranks."""

import json
import re

import pytest
from helpers import PROGRAMS, launchers, start

DIFFERENT = {
    "activation": "the code of mine.Net.forward is ",
    "activation, average": "the code of mine.Net.forward is ",
    "activation, train": "the code of mine.Net.forward is ",
    "layer": "layer '1' is Tanh() on rank 0, ReLU(inplace=False) on rank 1",
    "dropout": "layer '1' is Dropout(inplace=False, p=0.5) on rank 0, Dropout(inplace=False, p=0.1) on rank 1",
    "helper": "the code of helpers.act is ",
    "imported": "the code of helpers.act is ",
    "constant": "helpers.RATE is 0.5 on rank 0, 0.25 on rank 1",
    "global": "mine.RATE is 1 on rank 0, 2 on rank 1",
    "list": "mine.D is an expression ",
    "alias": "mine.F is torch.tanh on rank 0, torch.relu on rank 1",
    "base": "the code of mine.Base.act is ",
    "base's name": "the code of mine.Net is ",
    "decorator": "the code of mine.f is ",
    "default": "the code of mine.f is ",
    "lambda": "the code of mine.<lambda> is ",
    "two lambdas": "mine.FS is an expression ",
    "partial": "mine.F is partial(torch.mul, list(), dict('other': 2)) on rank 0",
    "closure": "'k' in mine.make.<locals>.<lambda> is 2 on rank 0, 3 on rank 1",
    "nested class": "the code of mine.Net.Act.__call__ is ",
    "dataclass": "the code of mine.C is ",
    "enum": "the code of mine.E is ",
    "own attribute": "model is mine.Net(k=2) on rank 0, mine.Net(k=3) on rank 1",
    "hook": "the code of mine.Net.<locals>.<lambda> is ",
    "cached": "the code of mine.f is ",
    "no_grad": "the code of mine.f is ",
    "conditional": "the code of mine.F is ",
    "static": "the code of mine.Net.act is ",
    "property": "the code of mine.Net.k is ",
    "model function": "the code of mine.Made.forward is ",
    "loss": "the code of mine.Task.loss is ",
    "loss's helper": "the code of mine.Task.scaled is ",
    "loss's value": "mine.Task.sign is 1 on rank 0, -1 on rank 1",
    "metric": "the code of mine.score is ",
    "task's model": "the code of mine.Net.forward is ",
    "algorithm": "the code of mine.Mine.server_step is ",
    "joined algorithm": "the code of mine.Mine.server_step is ",
    "beside the hostile": "the code of mine.Net.forward is ",
    "oracle": "the code of mine.Careful.gradient is ",
    "partition": "the code of mine.Split.split is ",
    "stage": "the code of mine.Bound.apply is ",
    "aggregation": "the code of mine.Whole.facts is ",
    "not on all ranks": "may_differ is missing on rank 0, code on rank 1",
    "unknown": "may_differ = 'data': expected",
}
EQUAL = (
    "comments, texts, line breaks and order", "order of functions", "what nothing uses", "data", "device", "tensor",
    "installed", "allowed", "joined, allowed", "exec", "hostile", "rank", "MPI's rank",
)  # fmt: skip


@pytest.fixture(scope="module", params=launchers())
def ended(request, tmp_path_factory):
    """(case -> what each of two ranks got, of which the last has other modules; the errors' text)."""
    folder = tmp_path_factory.mktemp("code")
    job = start(2, PROGRAMS / "code_differs.py", folder, mpi=request.param)
    assert job.returncode == 0, job.stdout + job.stderr
    return [json.loads((folder / f"found{rank}.json").read_text()) for rank in (0, 1)], job.stderr


@pytest.mark.rarely
@pytest.mark.parametrize("case", DIFFERENT)
def test_one_line_names_what_differs(ended, case):
    first, last = ended[0]
    assert first[case] == last[case] and DIFFERENT[case] in first[case], first[case]


@pytest.mark.parametrize("case", EQUAL)
def test_nothing_differs_that_matters(ended, case):
    assert [found[case] for found in ended[0]] == ["nothing"] * 2


def test_what_is_allowed_or_not_compared_is_said_once(ended):
    lines = [line for line in ended[1].splitlines() if line.startswith("fedmpi: ")]
    allowed = [line for line in lines if "as may_differ = code allows: the code of mine.Net.forward is " in line]
    unread = [line for line in lines if re.search("not compared between the ranks: mine.Net.*no source", line)]
    assert len(allowed) == 2 and len(unread) == 1, lines
    assert sum("not compared between the ranks: mine.P (RuntimeError)" in line for line in lines) == 2, lines
