"""Ranks that are killed at random moments: what goes on has the bits of a run that nothing happens to.

The methods that papers compare with today and those with periods, each with clients of unequal weights and numbers of
local steps, several on a rank, some of them absent.
"""

import random

import pytest
from dies import outcome
from helpers import PROGRAMS, start

from fedmpi.ground.files.run_files import find_within

SEVERAL = "--clients 7 --partition dirichlet --partition.concentration 2 --weighting samples --participation 0.7 "
SEVERAL += "--local-epochs 1 --batch-size 70 --rounds 6 --eval-every 3 --device cpu"
FEEDBACK = "--stages error_feedback --stages.error_feedback.compressor"
METHODS = [
    "desloc --algorithm.m_every 2 --algorithm.v_every 3",
    f"feddyn {FEEDBACK} sign",
    "fednova --algorithm.momentum 0.5 --codec random_k",
    "fedexp --stages norm_bound --stages.norm_bound.bound 0.5",
    "fedadamw --aggregation reproducible",
    "fedadamw --algorithm.form code --private 3 --model mlp",
    "fedlada --codec half",
    f"fedmuon {FEEDBACK} top_k",
    "scaffnew --algorithm.average_chance 0.5",
    "scaffnew --faulty leave_out",
    f"fedams {FEEDBACK} top_k",
    "local_adam --algorithm.m_every 3 --faulty leave_out",
    "fafed --algorithm.v_every 2",
    "fafed_code --algorithm.m_every 2 --algorithm.v_every 3 --codec random_k",
    "local_amsgrad --algorithm.v_every 2",
    "fed_lamb --algorithm.v_every 3",
]


def go(out, ranks, name, words, rank=0, at=0, seconds=0.0):
    words = f"--out {out} --name {name} {SEVERAL} {words}".split()
    return start(ranks, PROGRAMS / "killed_ranks.py", rank, at, seconds, *words)


def kill(out, ranks, words, draw):
    """Start or continue the run "it" and kill one of its ranks; returns whether a state within a round is left."""
    rank, at, seconds = draw.randrange(ranks), draw.randrange(1, 6), draw.choice([0.0, draw.uniform(0, 0.05)])
    ended = go(out, ranks, "it", words, rank, at, seconds)
    assert ended.returncode != 0, f"rank {rank} was not killed\n{ended.stdout}"
    return bool(find_within(out / "it"))


@pytest.mark.rarely
@pytest.mark.parametrize(("number", "words"), [*enumerate(METHODS)])
def test_killed_ranks_lose_no_bit(tmp_path, number, words):
    ranks, words, draw = 3 + number % 2, f"--algorithm {words}", random.Random(number)
    assert go(tmp_path, ranks, "whole", words).returncode == 0
    assert sum(kill(tmp_path, ranks, words, draw) for _ in range(3)) > 0
    ended = go(tmp_path, ranks, "it", words)
    assert ended.returncode == 0 and "continuing" in ended.stdout, ended.stderr
    assert outcome(tmp_path / "it") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("words", [METHODS[0], "fednova", "scaffnew", "fedexp"])
def test_other_numbers_of_ranks_lose_no_bit_with_reproducible_sums(tmp_path, words):
    words, draw = f"--algorithm {words} --aggregation reproducible", random.Random(words)
    assert go(tmp_path, 1, "whole", words).returncode == 0
    for ranks in (3, 4, 4, 2):
        kill(tmp_path, ranks, words, draw)
    assert go(tmp_path, 3, "it", words).returncode == 0
    assert outcome(tmp_path / "it")[0] == outcome(tmp_path / "whole")[0]
