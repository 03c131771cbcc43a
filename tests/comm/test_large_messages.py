"""Messages of more bytes and elements than one call of MPI takes."""

import pytest
from helpers import PROGRAMS, start

GIB = 1 << 30


@pytest.mark.rarely
@pytest.mark.parametrize("ranks", [2, 3])
def test_many_calls_make_one_message(any_mpi, ranks):
    """The limits of a call are set so low that every message needs many."""
    ended = start(ranks, PROGRAMS / "large_messages.py", "1.2e5", "split", mpi=any_mpi)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("right:") == 4


@pytest.mark.slow
def test_more_than_two_gigabytes(any_mpi):
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    if available < 12 * GIB:
        pytest.skip(f"needs 12 GiB of memory, and {available / GIB:.1f} are available")
    ended = start(2, PROGRAMS / "large_messages.py", "2.2e9", mpi=any_mpi, timeout=3600)  # 2 minutes of CPU time
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("right:") == 4
