"""Fixtures that many tests use: each MPI, each kind of device, the real data sets if they are there."""

import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest
from helpers import PROGRAMS, ROOT, WARM, forget_users_variables, fork_server, launchers
from rarely import SLOW, changed_since_green, goes_through, has_changed, rooms
from xdist.scheduler import LoadScopeScheduling


def pytest_addoption(parser):
    parser.addoption("--write-golden", action="store_true", help="write tests/golden anew instead of comparing with it")
    parser.addoption("--all", action="store_true", help="also the tests that run rarely, see tests/machinery/rarely.py")


def pytest_report_header(config):
    if config.option.all:
        return "rarely run tests: all"
    changed, since = changed_since_green()
    where = "everywhere" if changed is None else ", ".join(rooms(changed)) or "nothing"
    return f"rarely run tests: those of what has changed: {where} ({since})"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Two processes at most: most tests start ranks of their own."""
    return min(2, len(os.sched_getaffinity(0)))


def pytest_configure(config):
    """Forget what the user has set for other work, and the user's home; one fork server for all processes of the tests.

    Without it (FEDMPI_TEST_WARM=) every rank is a new Python.
    """
    forget_users_variables()
    own = tempfile.TemporaryDirectory(prefix="fedmpi-state-")
    os.environ["XDG_STATE_HOME"] = own.name  # for clients' checkpoints of runs that hide rows
    config.add_cleanup(own.cleanup)
    under_mpirun = getattr(config.option, "with_mpi", False)
    if WARM not in os.environ and not config.option.collectonly and not under_mpirun:
        server = fork_server()
        server.__enter__()
        config.add_cleanup(lambda: server.__exit__(None, None, None))


class SharedFiles(LoadScopeScheduling):
    """Tests of a file whose fixtures serve several of them share a process; so do those of SLURM, with one cluster."""

    def _split_scope(self, nodeid):
        file = nodeid.partition("::")[0]
        return "slurm" if file.startswith("tests/slurm/") else file if _shares(file) else nodeid


@functools.cache
def _shares(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    return 'scope="module"' in text or "functools.cache" in text


def pytest_xdist_make_scheduler(config, log):
    return SharedFiles(config, log)


def pytest_collection_modifyitems(config, items):
    """Leave out what runs rarely."""
    if config.option.all:
        return
    changed, _ = changed_since_green()
    named = {str(pathlib.Path(word.partition("::")[0]).resolve()) for word in config.invocation_params.args}
    first = {item.path: item for item in reversed(items)}
    left_out = [item for item in items if not _runs_now(item, item is first[item.path], changed, named)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _runs_now(item, is_first, changed, named):
    mark, path = item.get_closest_marker("rarely"), item.path.relative_to(ROOT)
    is_slow = any(path.is_relative_to(f"tests/{place}") for place in SLOW) and not is_first
    is_always = item.get_closest_marker("always") and "rarely" not in (own.name for own in item.own_markers)
    if not (mark or is_slow) or is_always or str(item.path) in named:
        return True
    places = (mark and mark.args) or goes_through(item.path)
    return has_changed([*places, str(path), "setup.py", "tests/machinery", "tests/programs"], changed)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run what is marked `alone`, tests that fork, in a new pytest: a large process may be refused a copy of itself."""
    if not pyfuncitem.get_closest_marker("alone") or ALONE in os.environ:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "--all", "-m", "", pyfuncitem.nodeid]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | {ALONE: "1"}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert ended.returncode == 0 and " 1 passed" in f" {ended.stdout.splitlines()[-1]}", ended.stdout
    return True


ALONE = "FEDMPI_TEST_ALONE"  # the variable that says so to that pytest
SECOND_MPI = pytest.mark.rarely("fedmpi/comm", "fedmpi/comm/job", "fedmpi/comm/job", "fedmpi/aggregation")


@pytest.fixture
def one_thread():
    """Loops that are not recorded take as many threads as cores are free, and bits depend on that."""
    import torch  # most tests' processes do without it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["default", pytest.param("openmpi", marks=SECOND_MPI)])
def any_mpi(request):
    """Each MPI in turn, as a name for `start`."""
    if request.param not in launchers():
        pytest.skip("FEDMPI_TEST_OPENMPI does not name an environment with Open MPI")
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Each kind of device in turn, as --device takes it; skips the GPU where there is none."""
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return request.param


@pytest.fixture(scope="session")
def data_dir():
    """The folder with fashion_mnist.h5 and the others; skips where there is none."""
    folder = pathlib.Path(os.environ.get("FEDMPI_TEST_DATA") or ROOT.parent / "shared" / "data")
    if not (folder / "fashion_mnist.h5").is_file():
        pytest.skip(f"no data sets in {folder} (FEDMPI_TEST_DATA names their folder)")
    return folder


@pytest.fixture(scope="session")
def slurm():
    """A real SLURM of two nodes (a `Cluster`), whose jobs find this environment's programs; skips where none can be."""
    from cluster import Cluster, missing

    if why := missing():
        pytest.skip(f"no SLURM here: {why}")
    with tempfile.TemporaryDirectory(prefix="fedmpi-slurm-") as folder:  # a short name, for sockets
        cluster = Cluster(pathlib.Path(folder))
        cluster.environment |= {
            "PATH": os.pathsep.join([str(pathlib.Path(sys.executable).parent), cluster.environment["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(PROGRAMS), str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
        }
        yield cluster
        cluster.stop()


@pytest.fixture(scope="session", autouse=True)
def threads_at_start():
    """Torch's number of threads."""
    import torch

    return torch.get_num_threads()


@pytest.fixture(autouse=True)
def as_many_threads_as_at_start(threads_at_start):
    """Restore torch's number of threads, which runs in this process set to their share of the cores.

    Beside other tests on the same cores, small tensors take many times as long with two threads as with one.
    """
    import torch

    yield
    torch.set_num_threads(threads_at_start)


@pytest.fixture(scope="session", autouse=True)
def mpirun_is_here():
    """Without mpirun nothing here makes sense."""
    if shutil.which("mpirun") is None:
        pytest.exit("no mpirun in PATH: run ./launch/test.sh", returncode=2)
