"""Under mpirun a failing test ends the job, and ranks do not drift apart."""

import faulthandler
import sys

import pytest
from mpi4py import MPI

from fedmpi.comm.sums.mpi import MPILink

LIMIT = 300  # seconds of a test; pytest's own limit cannot interrupt a rank that waits inside MPI


@pytest.fixture
def link():
    """A link over all ranks."""
    return MPILink()


@pytest.fixture
def open_link():
    """Opens links by a transport's name; they are closed after the test."""
    links = []

    def make(transport):
        links.append(MPILink(transport=transport))
        return links[-1]

    yield make
    for link in links:
        link.close()


@pytest.fixture(autouse=True)
def barrier_after_each_test():
    """A rank that strayed is caught in its own test: after LIMIT it shows where it hangs and ends the job."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    yield
    MPI.COMM_WORLD.Barrier()
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that fails on one rank leaves the others inside a collective: end the job."""
    outcome = yield
    report = outcome.get_result()
    if report.failed and MPI.COMM_WORLD.size > 1:
        print(f"rank {MPI.COMM_WORLD.rank}: {item.nodeid} failed\n{report.longreprtext}", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)
