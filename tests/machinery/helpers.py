"""What many tests use: starting ranks as a user would, and waiting for what they do."""

import contextlib
import multiprocessing
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "programs"
WARM = "FEDMPI_TEST_WARM"  # the variable that names the socket of the fork server
LIMIT = 600  # seconds for one program: the slowest of them needs a minute, on a busy machine eight times as long


# Variables by which a user changes what programs do or print; those that MPI, SLURM and Python's paths need stay.
USERS = ("FEDMPI_", "PYTHONSTARTUP", "PYTHONWARNINGS", "PYTHONUNBUFFERED", "PYTHONHASHSEED", "PYTHONOPTIMIZE")
USERS += (
    "LANG",
    "LC_",
    "COLUMNS",
    "LINES",
    "NO_COLOR",
    "FORCE_COLOR",
    "CLICOLOR",
    "TQDM_",
    "MPLBACKEND",
    "MPLCONFIGDIR",
    "XDG_STATE_HOME",
)
USERS += ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MLFLOW_", "WANDB_", "TORCH_LOGS")


def forget_users_variables():
    """Remove from this process's environment, and so from its children's, what a user may have set for other work."""
    for name in [*os.environ]:
        if name.startswith(USERS) and not name.startswith("FEDMPI_TEST_"):
            del os.environ[name]


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


def start(ranks, *words, mpi="default", timeout=LIMIT, env=None, is_forked=True):
    """Run ``mpirun -np RANKS python WORDS``, see `execute`.

    Args:
        is_forked: whether ranks may be forks of a process that has torch loaded (`warm_server.py`), which starts them
            in a fraction of the time; False: as users start them.
    """
    command, variables = launch_words(ranks, *words, mpi=mpi)
    if is_forked and mpi == "default" and may_be_forked(words, env):
        place = command.index(sys.executable)
        command[place : place + 1] = forking()
    return execute(command, timeout, {**variables, **(env or {})})


# Variables that Python, torch or its libraries read when they are loaded.
READ_EARLY = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "TORCH", "LD_", "MALLOC_", "CUDA_", "FEDMPI_TEST_WARM")


def may_be_forked(words, env=None):
    """Whether a fork of a loaded process does the same as a new Python with these arguments and variables."""
    first = str(words[0]) if words else "-"
    is_program = first in ("-m", "-W") or not first.startswith("-")
    return is_program and bool(os.environ.get(WARM)) and not any(name.startswith(READ_EARLY) for name in env or ())


def forking():
    """The words that stand for ``python`` where `may_be_forked`."""
    wait_for(lambda: os.path.exists(os.environ[WARM]), 60)
    return [sys.executable, "-IS", str(ROOT / "tests" / "machinery" / "warm.py"), os.environ[WARM]]


def shim():
    """The text of a program that stands for ``python`` in PATH: the commands of documents run through it."""
    words = forking() if os.environ.get(WARM) else [sys.executable]
    return f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'


@contextlib.contextmanager
def fork_server():
    """A context with a `warm_server.py`, which processes find by the variable `WARM`."""
    with tempfile.TemporaryDirectory(prefix="fedmpi-warm-") as folder:  # a short name, for a socket
        variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, ROOT / "tests" / "machinery" / "warm_server.py", f"{folder}/socket"]
        server = subprocess.Popen(words, stdin=subprocess.DEVNULL, env={**os.environ, **variables}, cwd="/")
        os.environ[WARM] = f"{folder}/socket"
        try:
            yield
        finally:
            del os.environ[WARM]
            server.kill()
            server.wait()


@contextlib.contextmanager
def running(ranks, *words, mpi="default", env=None):
    """The same job in the background, as a `subprocess.Popen`; what is left of it at the end is killed."""
    command, variables = launch_words(ranks, *words, mpi=mpi)
    job = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**os.environ, **variables, **(env or {})}, start_new_session=True,
        preexec_fn=hear_ctrl_c if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else None,  # it costs a whole fork
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


def forked(function, *arguments):
    """A started process that calls a function and has the memory of this one; for tests that are marked `alone`."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process
