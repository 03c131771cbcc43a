"""Gradients are those that the user meant, in loops of the user's own and in `fedmpi.train`."""

import functools

import pytest
from helpers import PROGRAMS, start

CHECKS = (
    "autocast", "checkpoints", "hooks", "odd_parameters", "frozen_later", "random_numbers", "reading", "alone", "lazy",
    "metrics",
)  # fmt: skip


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """What the checks printed, all of them in one job for each number of ranks."""
    return functools.cache(lambda ranks: start(ranks, PROGRAMS / "own_gradients.py", tmp_path_factory.mktemp("runs")))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("check", CHECKS)
def test_on_all_ranks(checked, check, ranks):
    """See the functions of tests/programs/own_gradients.py."""
    ended = checked(ranks)
    assert f"{check}: ok" in ended.stdout.splitlines(), ended.stdout + ended.stderr


def test_with_another_mpi(any_mpi, tmp_path):
    ended = start(2, PROGRAMS / "own_gradients.py", tmp_path, mpi=any_mpi)
    assert all(f"{check}: ok" in ended.stdout.splitlines() for check in CHECKS), ended.stdout + ended.stderr
