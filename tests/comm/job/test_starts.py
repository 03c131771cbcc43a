"""How jobs begin, at every door: launchers that are not MPI's, ranks that do not come, signals, small shared memory."""

import contextlib
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import pytest
from helpers import LIMIT, PROGRAMS, ROOT, execute, launch_words, launchers, ranks_of, running, start, wait_for

from fedmpi.comm.start.process import started_by

BEGINS = PROGRAMS / "begins.py"
NAMES = ("PMI_", "PMIX_", "OMPI_", "SLURM_")


def alone(variables, *words):
    """The same program without a launcher, with some variables of one."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(NAMES)}
    command = ["env", "-i", *(f"{name}={value}" for name, value in {**clean, **variables}.items())]
    return execute([*command, f"PYTHONPATH={ROOT}", sys.executable, BEGINS, *words])


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("no launcher", 1, 0)),
        ({"WORLD_SIZE": "2"}, ("no launcher", 1, 0)),
        ({"WORLD_SIZE": "2", "RANK": "1"}, ("torchrun or a relative (WORLD_SIZE)", 2, 1)),
        ({"PMI_RANK": "1"}, ("the launcher (PMI_RANK)", 2, 1)),
        ({"PMI_SIZE": "4", "PMI_RANK": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
         ("the launcher (PMI_SIZE)", 4, 1)),
        ({"FLUX_JOB_SIZE": "3", "FLUX_TASK_RANK": "0"}, ("flux run (FLUX_JOB_SIZE)", 3, 0)),
        ({"PALS_RANKID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, ("srun (SLURM_STEP_NUM_TASKS)", 2, 0)),
        ({"PALS_RANKID": "2"}, ("the launcher of PALS (PALS_RANKID)", 3, 2)),
        ({"PMIX_RANK": "1"}, ("the launcher of PMIx (PMIX_RANK)", 2, 1)),
        ({"SLURM_PROCID": "0"}, ("srun (SLURM_PROCID)", 1, 0)),  # in the script of a job
    ],
)  # fmt: skip
def test_who_started_this_process(variables, expected):
    assert started_by(variables) == expected


@pytest.mark.parametrize(
    ("variables", "hint"),
    [
        ({"PMI_RANK": "1"}, "PMI_RANK comes from an outer job"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "99"}, "PMI_SIZE comes from an outer job"),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "it"}, "PMIX_RANK comes from an outer job"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "without torchrun"),
    ],
)
def test_an_own_loop_that_is_alone_ends_with_one_line(variables, hint):
    ended = alone(variables)
    assert ended.returncode == 2 and "done" not in ended.stdout
    (line,) = ended.stderr.splitlines()
    assert "started 2 processes but each of them is alone: " in line and hint in line


def test_a_rank_alone_says_that_there_is_no_mpi():
    """With the number of a later rank, which an outer job had left, it ended with code 2 and without a line."""
    ended = alone({"PMI_RANK": "1", "MPI4PY_LIBMPI": "/no/libmpi.so"})
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2 and line.startswith("fedmpi: error: mpi4py finds no MPI library: ")


LEFT = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "it", "PMIX_SERVER_URI2": "it;tcp4://127.0.0.1:1"}  # nobody listens there


def test_a_shell_that_an_ended_job_of_open_mpi_left(any_mpi):
    """Open MPI ended with 14 lines of its own, and MPICH's ranks ended where they found variables of both launchers."""
    command, variables = launch_words(2, BEGINS, mpi=any_mpi)
    if any_mpi == "openmpi":
        folder = f"{os.environ['FEDMPI_TEST_OPENMPI']}/lib"
        ended = alone({**LEFT, **variables, "LD_LIBRARY_PATH": folder})
        (line,) = ended.stderr.splitlines()
        assert ended.returncode == 2 and "PMIX_RANK comes from an outer job" in line
    ended = execute(command, env={**LEFT, **variables})
    assert ended.returncode == 0 and ended.stdout.count("done 2") == 2, ended.stderr


@pytest.mark.parametrize("mpis", [("default", "openmpi"), ("openmpi", "default")], ids=str)
def test_the_launcher_of_another_mpi_is_named(mpis):
    """MPICH ends each process within MPI_Init where it finds Open MPI's launcher, and Open MPI warns of MPICH's."""
    if "openmpi" not in launchers():
        pytest.skip("FEDMPI_TEST_OPENMPI does not name an environment with Open MPI")
    begins = (BEGINS, "late", 60)  # the process that says it is the last to come: the others ended the job before
    words, (_, variables) = launch_words(2, *begins, mpi=mpis[0])[0], launch_words(2, *begins, mpi=mpis[1])
    ended = execute(words, env={"LD_LIBRARY_PATH": f"{os.environ['FEDMPI_TEST_OPENMPI']}/lib", **variables})
    assert ended.returncode == 2 and "done" not in ended.stdout
    own, *more = ended.stderr.split("---", 1)[0].splitlines()  # Open MPI's mpirun says between such lines what failed
    assert "started 2 processes but each of them is alone: this mpirun belongs to another MPI than mpi4py's, " in own
    assert not more


def test_mpi_begins_although_mpi4py_was_not_to_begin_it(any_mpi):
    ended = start(2, BEGINS, "rc", mpi=any_mpi)
    assert ended.returncode == 0 and ended.stdout.count("done 2") == 2, ended.stderr


def test_a_rank_that_never_begins_mpi_is_named():
    ended = start(3, BEGINS, "without", 5, is_forked=False)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("fedmpi: ")]
    assert ended.returncode in (75, 9) and len(lines) == 1, ended.stderr  # MPICH may pass on SIGKILL
    assert "not all 3 ranks have begun MPI within 5 s: no sign on " in lines[0] and " of rank 1: " in lines[0]


@pytest.mark.parametrize(("code", "late"), [(3, 0), (0, 0), (3, 10)])
def test_a_rank_that_ends_before_mpi_begins_ends_the_others(code, late):
    """MPICH's launcher goes on then, for as long as the others wait; it is said once, although one comes late."""
    ended = start(3, BEGINS, "leaves", LIMIT, code, late, is_forked=False)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("fedmpi: ")]
    assert ended.returncode in (code or 1, 9) and len(lines) == 1, ended.stderr  # MPICH may pass on SIGKILL
    assert "error: rank 1 on " in lines[0] and "ended before MPI began, and the others wait" in lines[0]


def test_a_rank_of_another_user_that_begins_late_has_not_ended(tmp_path):
    """Whether it has cannot be seen: what other users' processes are is not in /proc."""
    as_other = ["setpriv", "--reuid", "2000", "--clear-groups", sys.executable, "-c", "import torch"]
    if os.getuid() or subprocess.run(as_other, check=False, capture_output=True).returncode:
        pytest.skip("not root, or other users cannot start this Python")
    as_user = "[ $PMI_RANK = 0 ] || sleep 6; u=$((2000 + $PMI_RANK)); "
    as_user += 'exec setpriv --reuid $u --regid $u --clear-groups "$@"'
    env = {"UCX_TLS": "tcp,self", "MPIR_CVAR_NOLOCAL": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    words = ("mpirun", "-np", 2, "sh", "-c", as_user, "-", sys.executable, BEGINS)
    ended = execute(words, env={**env, "HOME": str(tmp_path)}, cwd="/")
    assert ended.returncode == 0 and ended.stdout.count("done 2") == 2, ended.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_signals_end_a_rank_that_waits_for_mpi_to_begin(name):
    """The other rank never begins it."""
    with running(2, "-c", f"import runpy, sys; sys.argv = ['', 'without', '{LIMIT}']; "
                 f"import signal; signal.signal(signal.{name}, lambda *_: None); "
                 f"runpy.run_path('{BEGINS}', run_name='__main__')") as job:  # fmt: skip
        wait_for(lambda: any(_waits(process) for process in ranks_of(job)), 100)
        waiting = next(process for process in ranks_of(job) if _waits(process))
        # One that ends while the library still starts is none of the job yet: MPICH's launcher goes on without it.
        begun, until = _cpu_seconds(waiting), time.monotonic() + 10
        wait_for(lambda: _cpu_seconds(waiting) > begun + 0.3 or time.monotonic() > until, 100)
        os.kill(waiting, getattr(signal, name))
        wait_for(lambda: waiting not in ranks_of(job), 15)
        assert job.wait(30) != 0


def _waits(process):
    """Whether a process waits in MPI_Init: the thread that watches it has begun."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{process}/task")) > 1
    return False


def _cpu_seconds(process):
    """The CPU time of a process: MPICH's ranks do not sleep while they wait in MPI_Init."""
    words = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def test_a_child_that_breaks_does_not_end_the_job():
    ended = start(2, BEGINS, "fork", is_forked=False)
    assert ended.returncode == 0 and ended.stdout.count("done 2") == 2, ended.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_import_the_program_are_no_ranks(any_mpi, method):
    ended = start(2, PROGRAMS / "begins_workers.py", method, mpi=any_mpi, is_forked=False)
    assert ended.returncode == 0 and ended.stdout.count("worker of 2") == 2, ended.stderr
    assert ended.stderr.count("fedmpi: a worker process is no rank, and begins MPI alone: ") == 2, ended.stderr


def test_ranks_of_an_own_loop_end_with_their_launcher():
    with running(2, BEGINS, "trains") as job:
        assert job.stdout.readline() == "trains\n"
        ranks = ranks_of(job)
        parent = int(pathlib.Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
        wait_for(lambda: not any(map(_is_there, ranks)), 15)


def _is_there(process):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(("size", "used", "code"), [("64m", "0", 0), ("64m", "62m", 2), ("1m", "0", 2)])
def test_many_ranks_with_little_shared_memory(size, used, code):
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    command = f"mount -t tmpfs -o size={size} tmpfs /dev/shm && head -c {used} /dev/zero > /dev/shm/mpich_shm_old "
    command += f"&& mpirun -np 14 {sys.executable} {BEGINS} ranks"
    ended = execute(["unshare", "-m", "bash", "-c", command], env={"PYTHONPATH": str(ROOT)})
    assert ended.returncode == code, ended.stderr
    if code == 0:
        assert ended.stdout.count("14 ranks") == 14 and "mpich_shm_old" in ended.stdout  # nothing foreign is removed
    else:
        (line,) = [line for line in ended.stderr.splitlines() if line.startswith("fedmpi: error: /dev/shm has ")]
        assert line.endswith("rm /dev/shm/mpich_shm_old")


def test_without_shared_memory(tmp_path):
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    command = f"cp -a /dev/null /dev/zero /dev/urandom {tmp_path} && mount --bind {tmp_path} /dev && "
    command += f"mpirun -np 2 {sys.executable} {BEGINS} ranks"
    ended = execute(["unshare", "-m", "bash", "-c", command], env={"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("fedmpi: error: /dev/shm is missing: expected ")


def test_containers_of_one_pod_begin_jobs_at_the_same_time(any_mpi, tmp_path):
    """They share the machine's name and /dev/shm, and count processes anew: both MPIs give two jobs the same names."""
    if subprocess.run(["unshare", "-p", "-f", "--mount-proc", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make namespaces")
    words, variables = launch_words(2, BEGINS, "ranks", mpi=any_mpi)
    one = f"TMPDIR=$(mktemp -d -p {tmp_path}) unshare -p -f --mount-proc {shlex.join(map(str, words))}"
    ended = execute(["bash", "-c", f"{one} & first=$!; {one} & wait $first && wait $!"], env=variables)
    assert ended.returncode == 0 and ended.stdout.count("2 ranks") == 4, ended.stderr


def test_an_own_loop_without_a_library_of_mpi():
    ended = alone({"MPI4PY_LIBMPI": "/no/libmpi.so"}, "trains")
    assert ended.returncode == 2
    assert ended.stderr.startswith("fedmpi: error: mpi4py finds no MPI library: ") and ended.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [(), ("-m", "mpi4py")], ids=["python", "mpi4py"])
def test_the_users_files_do_not_hide_those_of_python(tmp_path, words):
    for name in ("random", "queue", "json", "logging"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong one')\n")
    (tmp_path / "mymodel.py").write_text("import torch\n\nclass Net(torch.nn.Linear):\n    pass\n")
    command = [sys.executable, *words, "-m", "fedmpi.train", "--model", "mymodel.Net", "--print_config"]
    ended = execute(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0 and "mymodel.Net" in ended.stdout, ended.stderr
