"""What many tests use: starting ranks as a user would, and the real data sets if they are there."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "tests" / "programs"
LIMIT = 600  # seconds for one program: the slowest of them needs a minute, on a busy machine eight times as long


def pytest_addoption(parser):
    parser.addoption("--write-golden", action="store_true", help="write tests/golden anew instead of comparing with it")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Two processes at most: most tests start ranks of their own."""
    return min(2, len(os.sched_getaffinity(0)))


def pytest_collection_modifyitems(items):
    """Where tests run in several processes, those of a file share one, and those of SLURM, which share a cluster."""
    for item in items:
        is_slurm = item.path.is_relative_to(ROOT / "tests" / "slurm")
        item.add_marker(pytest.mark.xdist_group("slurm" if is_slurm else str(item.path)))


def launchers():
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
    if request.param not in launchers():
        pytest.skip("FEDMPI_TEST_OPENMPI does not name an environment with Open MPI")
    return request.param


def execute(words, timeout=LIMIT, env=None, **options):
    """Run a program to its end and return the completed process, its output as text.

    After `timeout` seconds it is killed with all processes that it started, and the test fails with what they printed.

    Args:
        words: the command. env: variables besides those of this process. options: as `subprocess.Popen` takes them.
    """
    words = [str(word) for word in words]
    job = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **(env or {})}, start_new_session=True, **options,
    )  # fmt: skip
    try:
        output, errors = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_session(job)
        output, errors = job.communicate()
        command = " ".join(words)
        pytest.fail(f"no end within {timeout} s: {command}\n{output}\n--- stderr:\n{errors}", pytrace=False)
    except BaseException:
        kill_session(job)
        job.communicate()
        raise
    return subprocess.CompletedProcess(words, job.returncode, output, errors)


def kill_session(job):
    """Kill a process that was started with start_new_session, and its descendants: mpirun's ranks have other groups."""
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(folder.name)) == job.pid:
                os.kill(int(folder.name), signal.SIGKILL)


def launch_words(ranks, *words, mpi="default", options=()):
    """(the command ``mpirun -np RANKS python WORDS``, the variables that it needs); `options` are the launcher's."""
    launcher, variables = launchers()[mpi]
    variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **variables}
    path = os.pathsep.join([str(PROGRAMS), str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}
    return [str(word) for word in (*launcher, *options, "-np", ranks, sys.executable, *words)], variables


def start(ranks, *words, mpi="default", timeout=LIMIT, env=None):
    """Run ``mpirun -np RANKS python WORDS``, see `execute`."""
    command, variables = launch_words(ranks, *words, mpi=mpi)
    return execute(command, timeout, {**variables, **(env or {})})


@contextlib.contextmanager
def running(ranks, *words, mpi="default", env=None):
    """The same job in the background, as a `subprocess.Popen`; what is left of it at the end is killed."""
    command, variables = launch_words(ranks, *words, mpi=mpi)
    job = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**os.environ, **variables, **(env or {})}, start_new_session=True, preexec_fn=hear_ctrl_c,
    )  # fmt: skip
    try:
        yield job
    finally:
        kill_session(job)
        job.communicate()


def ranks_of(job):
    """The processes of a `running` job that are its ranks, in no certain order."""
    parents, names = {}, {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            names[int(folder.name)], parents[int(folder.name)] = name, int(rest.split()[1])

    def is_below(process):
        return process == job.pid or (process in parents and is_below(parents[process]))

    return [process for process, name in names.items() if name.startswith("python") and is_below(process)]


def train(ranks, out, *settings, **options):
    """Run fedmpi.train on some ranks with its run folders under `out`."""
    return start(ranks, "-m", "fedmpi.train", "--out", out, "--threads", 1, *settings, **options)


def wait_for(condition, seconds=LIMIT):
    """Return when `condition()` is true; fail after some seconds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.05)


def hear_ctrl_c():
    """In a new process: not to ignore Ctrl-C, as the processes of jobs in the background do."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def disk_of(folder, size):
    """A context in which a new folder is a disk of its own of `size`, like "40k"; skips without the right to mount."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    if subprocess.run(words, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


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
    folder = pathlib.Path(os.environ.get("FEDMPI_DATA") or ROOT.parent / "shared" / "data")
    if not (folder / "fashion_mnist.h5").is_file():
        pytest.skip(f"no data sets in {folder} (FEDMPI_DATA names their folder)")
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
