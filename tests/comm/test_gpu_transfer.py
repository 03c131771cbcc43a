"""Whether MPI reads GPU memory is tried in another process: what ends that process, or keeps it, is a no."""

import sys

import pytest
from helpers import start

from fedmpi.comm.start.gpu_transfer import why_not


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("print('right')", ""),
        ("print('wrong')", "MPI transfers wrong values of GPU memory"),
        ("", "MPI transfers wrong values of GPU memory"),
        ("import os; os.abort()", "a process that transfers GPU memory by MPI ended with signal 6"),
        ("raise SystemExit(3)", "a process that transfers GPU memory by MPI ended with code 3"),
        ("import time; time.sleep(100)", "a transfer of GPU memory by MPI did not end (TimeoutExpired)"),
        ("import sys; print('right' if sys.argv[1] == 'cuda:1' else '')", ""),
        ("import os; print('right' if 'PMI_RANK' not in os.environ and 'HOME' in os.environ else '')", ""),
    ],
)
def test_answers(program, answer, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    assert why_not("cuda:1", (sys.executable, "-c", program), limit=2 if "sleep" in program else 60) == answer


@pytest.mark.rarely
def test_a_rank_tries_it_in_a_process_of_its_own(any_mpi):
    """On the CPU, whose memory MPI reads; a device that is not there ends the process."""
    code = (
        "from mpi4py import MPI; from fedmpi.comm.start.gpu_transfer import why_not; "
        "print(repr((why_not('cpu'), why_not('cuda:0'))))"
    )
    done = start(2, "-c", code, mpi=any_mpi)
    assert done.returncode == 0, done.stderr
    right, missing = "''", "'a process that transfers GPU memory by MPI ended with code 1'"
    assert done.stdout.splitlines() == [f"({right}, {missing})"] * 2
