"""What a recorded loop's `evaluate` returns is a number by name, or all ranks end with one line that names it."""

import pytest
from helpers import start


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("list", "evaluate: recall is a list: expected a number"),
        ("none", "evaluate: recall is a NoneType"),
        ("array", "evaluate: recall is a ndarray of shape [3]"),
        ("no dict", "evaluate returned a list: expected a dict"),
        ("raises", "on rank 1: evaluate: ZeroDivisionError: no positive cases"),
    ],
)
def test_what_is_no_number_is_named(tmp_path, how, message):
    ended = start(2, "-m", "bad_evaluate", tmp_path / "run", how)
    assert message in ended.stderr and ended.returncode != 0, ended.stdout + ended.stderr


def test_tensors_of_one_number_count(tmp_path):
    assert start(2, "-m", "bad_evaluate", tmp_path / "run", "numbers").stdout.split()[-1] == "0.5"
