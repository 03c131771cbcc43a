"""Stages, codecs and aggregations that keep state: a run killed in any exchange goes on to the same bits."""

import pytest
from helpers import PROGRAMS, start

EXCHANGES = {"rule": 4, "mean": 3, "two": 6}  # of three rounds, and of the start where there is one


@pytest.mark.rarely("fedmpi/aggregation", "fedmpi/runs/checkpoints", "fedmpi/federation")
@pytest.mark.parametrize("way", EXCHANGES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_kill_in_any_exchange_loses_no_bit(ranks, way, tmp_path):
    program, numbers = PROGRAMS / "killed_parts.py", range(EXCHANGES[way])
    for number in numbers:
        killed = start(ranks, program, tmp_path, way, number, "kill")
        assert killed.returncode != 0 and "ends" not in killed.stdout, killed.stdout + killed.stderr
    done = start(ranks, program, tmp_path, way, ",".join(map(str, numbers)))
    ends = [line.split(" ", 2)[1:] for line in done.stdout.splitlines() if line.startswith("ends")]
    assert len(ends) == ranks * (len(numbers) + 1), done.stdout + done.stderr
    assert len({values for _, values in ends}) == 1, ends
