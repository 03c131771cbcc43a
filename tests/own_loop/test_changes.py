"""Models that change in a loop of the user's own, and their buffers."""

import pytest
from helpers import PROGRAMS, start

# See the functions of tests/programs/own_changes.py.
CHECKS = (
    "changes", "values", "constants", "start", "private_alone", "finite", "kinds", "set_model", "optimizer", "resume",
    "end", "ended", "moved", "private_resume", "plain", "large", "two_names", "integers", "dropped", "saved",
)  # fmt: skip


@pytest.fixture(scope="module", params=[(2, "average"), (2, "join"), (3, "average"), (1, "join")], ids=str)
def checked(request):
    """What the checks printed on some ranks."""
    ranks, api = request.param
    few = {"optimizer"} if api == "join" else set()
    few |= {"start", "finite"} if ranks == 1 else set()  # nothing differs
    checks = [check for check in CHECKS if check not in few]
    return start(ranks, "-W", "ignore", PROGRAMS / "own_changes.py", api, *checks), few


@pytest.mark.rarely
@pytest.mark.parametrize("check", CHECKS)
def test_a_model_and_its_buffers(checked, check):
    ended, few = checked
    if check not in few:
        assert f"{check}: ok" in ended.stdout.splitlines(), ended.stdout + ended.stderr


def test_with_another_mpi(any_mpi):
    ended = start(2, "-W", "ignore", PROGRAMS / "own_changes.py", "average", "constants", "changes", mpi=any_mpi)
    assert ended.stdout.splitlines() == ["constants: ok", "changes: ok"], ended.stderr


@pytest.mark.always
@pytest.mark.parametrize("api", ["average", "join"])
def test_another_parameter_ends_the_job_with_one_line_and_code_2(api):
    ended = start(2, PROGRAMS / "own_changes.py", api, "exit")
    lines = [line for line in ended.stderr.splitlines() if line.startswith("fedmpi: error")]
    assert ended.returncode == 2 and len(lines) == 1 and "adds 'more.weight'" in lines[0], ended.stderr
