"""What must hold of `fedmpi.join` and `fedmpi.average` on every rank: one table of the checks in tests/programs."""

import functools

import pytest
from helpers import start

LOOP = ("train", "participation", "absent", "model", "backward", "resume", "communicator", "caught")
AVERAGE = ("hand", "bound", "outer", "diloco", "resume")
AGREE = ("any", "mean", "one_pass", "short", "calls", "distributed")
GRADIENTS = (
    "autocast", "checkpoints", "hooks", "odd_parameters", "frozen_later", "random_numbers", "reading", "alone", "lazy",
    "metrics",
)  # fmt: skip
CHANGES = (
    "changes", "values", "constants", "start", "private_alone", "finite", "kinds", "set_model", "resume", "end",
    "ended", "moved", "private_resume", "plain", "large", "two_names", "integers", "dropped", "saved",
)  # fmt: skip
JOBS = (  # ranks, module, and part of it -> see tests/programs/checks.py; one job makes all checks of a row
    (2, "own_loop", LOOP),
    (4, "own_loop", ("participation", "absent")),
    (2, "own_average", AVERAGE),
    (2, "loops_agree", AGREE),
    *((ranks, "own_gradients", GRADIENTS) for ranks in (1, 2, 3)),
    *((ranks, "own_changes:average", (*CHANGES, "optimizer")) for ranks in (2, 3)),
    (2, "own_changes:join", CHANGES),
    (1, "own_changes:join", tuple(check for check in CHANGES if check not in ("start", "finite"))),  # nothing differs
)
QUICK = {(2, "own_loop"), (2, "own_average"), (2, "loops_agree"), (1, "own_gradients")}  # their first check always runs
CASES = [
    pytest.param(
        ranks, module, check, id=f"{module}-{check}-{ranks}",
        marks=[pytest.mark.always] if (ranks, module) in QUICK and check == checks[0] else [],
    )
    for ranks, module, checks in JOBS for check in checks
]  # fmt: skip
ENDS = (  # of the first error in a check: its exit code, and its line
    ("own_loop", "uneven", 2, "all ranks must make the same number of local steps"),
    ("own_loop", "error", 1, "ValueError: there is no such batch"),
    ("own_loop", "schedule", 2, "at the average after round 3 the ranks had different step sizes"),
    ("own_loop", "different", 2, "'weight' is [1, 1] torch.float32 on rank 0, [2, 1] torch.float32 on rank 1"),
    ("own_changes:average", "exit", 2, "adds 'more.weight'"),
    ("own_changes:join", "exit", 2, "adds 'more.weight'"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What the checks of a row printed."""
    checks_of = {(ranks, module): checks for ranks, module, checks in JOBS}

    @functools.cache
    def make(ranks, module):
        folder = tmp_path_factory.mktemp("runs") / "it"
        return start(ranks, "-W", "ignore", "-m", "checks", module, *checks_of[ranks, module], folder)

    return make


@pytest.mark.rarely
@pytest.mark.parametrize(("ranks", "module", "check"), CASES)
def test_on_every_rank(made, ranks, module, check):
    ended = made(ranks, module)
    assert f"{check}: ok" in ended.stdout.splitlines(), ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("module", "checks"),
    [("own_average", ["outer"]), ("own_changes:average", ["constants", "changes"]), ("own_gradients", GRADIENTS)],
)
def test_with_another_mpi(any_mpi, tmp_path, module, checks):
    ended = start(2, "-W", "ignore", "-m", "checks", module, *checks, tmp_path, mpi=any_mpi)
    assert [f"{check}: ok" for check in checks] == [line for line in ended.stdout.splitlines() if ": ok" in line], (
        ended.stdout + ended.stderr
    )


@pytest.mark.parametrize(("module", "check", "code", "message"), ENDS)
def test_an_error_that_nobody_catches_ends_all_ranks(tmp_path, module, check, code, message):
    ended = start(2, "-m", "checks", module, check, tmp_path)
    assert ended.returncode == code and message in ended.stderr, ended.stderr
    assert ("Traceback" in ended.stderr) == (code == 1)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("fedmpi: error")]
    assert code == 1 or (len(lines) == 1 and message in lines[0]), ended.stderr
