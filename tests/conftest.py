"""What many tests use: starting ranks as a user would, and the real data sets if they are there."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "tests" / "programs"


def pytest_addoption(parser):
    parser.addoption("--write-golden", action="store_true", help="write tests/golden anew instead of comparing with it")


def _launchers():
    """MPI's name -> (words before the program, environment), of the MPIs that are here.

    FEDMPI_TEST_OPENMPI names an environment with Open MPI beside the one that the tests run in.
    """
    found = {"default": (["mpirun"], {})}
    openmpi = os.environ.get("FEDMPI_TEST_OPENMPI")
    if openmpi:
        library = {"MPI4PY_LIBMPI": f"{openmpi}/lib/libmpi.so.40", "MPI4PY_MPIABI": "openmpi"}
        found["openmpi"] = ([f"{openmpi}/bin/mpirun", "--oversubscribe", "--bind-to", "none"], library)
    return found


@pytest.fixture(params=["default", "openmpi"])
def any_mpi(request):
    """Each MPI in turn, as a name for `start`."""
    if request.param not in _launchers():
        pytest.skip("FEDMPI_TEST_OPENMPI does not name an environment with Open MPI")
    return request.param


def start(ranks, *words, mpi="default", timeout=120, env=None):
    """Run ``mpirun -np RANKS python WORDS`` and return the completed process, its output as text."""
    launcher, variables = _launchers()[mpi]
    command = [*launcher, "-np", str(ranks), sys.executable, *map(str, words)]
    variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **variables}
    path = os.pathsep.join([str(PROGRAMS), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables, **(env or {})}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment, stdin=subprocess.DEVNULL
    )


def train(ranks, out, *settings, **options):
    """Run fedmpi.train on some ranks with its run folders under `out`."""
    return start(ranks, "-m", "fedmpi.train", "--out", out, "--threads", 1, *settings, **options)


def hear_ctrl_c():
    """In a new process: not to ignore Ctrl-C, as the processes of jobs in the background do."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="session")
def data_dir():
    """The folder with fashion_mnist.h5 and the others; skips where there is none."""
    folder = pathlib.Path(os.environ.get("FEDMPI_DATA") or ROOT.parent / "shared" / "data")
    if not (folder / "fashion_mnist.h5").is_file():
        pytest.skip(f"no data sets in {folder} (FEDMPI_DATA names their folder)")
    return folder


@pytest.fixture(scope="session", autouse=True)
def mpirun_is_here():
    """Without mpirun nothing here makes sense."""
    if shutil.which("mpirun") is None:
        pytest.exit("no mpirun in PATH: run ./launch/test.sh", returncode=2)
