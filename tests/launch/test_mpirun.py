"""launch/mpirun.sh under every MPI that is here: hosts, restarts, and the job scripts of PBS and LSF that use it."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from helpers import PROGRAMS, ROOT, execute, kill_session, launchers, wait_for

from fedmpi.comm.solo import SoloLink
from fedmpi.comm.start.launch import check_launch
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.run_files import find_checkpoints
from fedmpi.ground.machine.cores import usable_cores

SCRIPT = ROOT / "launch" / "mpirun.sh"
DIES = PROGRAMS / "dies_once.py"


def environment(mpi, variables):
    """The variables with which the script finds this environment's Python first, and an MPI."""
    if mpi != "default":
        launcher, libraries = launchers()[mpi]
        folder = os.path.dirname(libraries["MPI4PY_LIBMPI"])
        variables |= {**libraries, "LD_LIBRARY_PATH": folder, "MPIRUN": launcher[0]}
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "", **variables}


def mpirun(*words, mpi="default", **variables):
    """Run the script to its end."""
    return execute([SCRIPT, *words], env=environment(mpi, variables))


@pytest.mark.rarely
def test_a_signal_to_the_script_stops_the_run_in_order(tmp_path):
    """Open MPI's mpirun itself would kill the ranks."""
    if "openmpi" not in launchers():
        pytest.skip("FEDMPI_TEST_OPENMPI does not name an environment with Open MPI")
    run = ("--rounds", 10**6, "--local-steps", 1, "--algorithm", "fedavg", "--out", tmp_path, "--name", "it")
    words = [str(word) for word in (SCRIPT, "-np", 2, "--max-restarts", 3, "python", "-m", "fedmpi.train", *run)]
    variables = {**os.environ, **environment("openmpi", {})}
    job = subprocess.Popen(
        words, env=variables, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        wait_for(lambda: (tmp_path / "it" / "metrics.jsonl").is_file())
        job.terminate()
        _, errors = job.communicate(timeout=200)
    finally:
        kill_session(job)
        job.communicate()
    assert job.returncode == 75, errors
    assert b"fedmpi: stopped after round" in errors and b"restart" not in errors
    assert find_checkpoints(tmp_path / "it")


def test_a_signal_before_the_first_round_ends_the_job_at_once(tmp_path):
    """Under Open MPI, too, where a later one is passed on as a warning of the time limit."""
    mpi = "openmpi" if "openmpi" in launchers() else "default"
    run = ("--model", "never_built.model", "--out", tmp_path / "runs")
    words = [str(word) for word in (SCRIPT, "-np", 2, "python", "-m", "fedmpi.train", *run)]
    variables = {"PYTHONPATH": f"{ROOT}{os.pathsep}{PROGRAMS}", "STUCK": "asleep", "STUCK_IN": str(tmp_path)}
    variables = {**os.environ, **environment(mpi, {}), **variables}
    job = subprocess.Popen(
        words, env=variables, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        wait_for(lambda: len(list(tmp_path.glob("stuck-*"))) == 2, 100)
        job.terminate()
        _, errors = job.communicate(timeout=120)
    finally:
        kill_session(job)
        job.communicate()
    assert job.returncode not in (0, 75), errors


@pytest.mark.parametrize(("how", "code"), [("_exit", 1), ("child", 0)])
def test_a_rank_that_ends_without_python_where_none_is_left_to_say_so(how, code):
    """The launcher returns 0; not so the script, if the loop was not finished."""
    ended = mpirun("-np", 1, "python", PROGRAMS / "ends.py", how, 0, "average")
    assert ended.returncode == code, ended.stderr
    assert ("returned 0, but a rank ended before it was finished" in ended.stderr) == (code == 1)


def test_a_killed_rank(any_mpi, tmp_path):
    """Without restarts the job fails; with one it begins again."""
    for restarts, code in ((0, None), (1, 0)):
        marker = tmp_path / str(restarts)
        ended = mpirun("-np", 2, "--max-restarts", restarts, "python", DIES, marker, "kill", mpi=any_mpi)
        assert ended.returncode == code if code is not None else ended.returncode not in (0, 1, 2), ended.stderr
        assert ("2 ranks" in ended.stdout) == (restarts == 1)
    assert "restart 1 of 1" in ended.stderr


def test_a_run_that_continues_without_lost_ranks(tmp_path):
    """Open MPI's mpirun needs an option for it."""
    if "openmpi" not in launchers():
        pytest.skip("FEDMPI_TEST_OPENMPI does not name an environment with Open MPI")
    run = ("--rounds", 1, "--local-steps", 1, "--out", tmp_path, "--on-loss", "continue")
    ended = mpirun("-np", 2, "python", "-m", "fedmpi.train", *run, mpi="openmpi")
    assert ended.returncode == 0, ended.stderr


def test_a_killed_launcher(any_mpi, tmp_path):
    ended = mpirun("-np", 2, "--max-restarts", 1, "python", DIES, tmp_path / "marker", "launcher", mpi=any_mpi)
    assert ended.returncode == 0 and "2 ranks" in ended.stdout, ended.stderr
    assert "restart 1 of 1" in ended.stderr


@pytest.mark.parametrize(("code", "again"), [(75, True), (2, False), (1, False)])
def test_only_what_may_go_better_is_repeated(tmp_path, code, again):
    ended = mpirun("-np", 2, "--max-restarts", 3, "python", DIES, tmp_path / "marker", code)
    assert ended.returncode == (0 if again else code), ended.stderr
    assert ("restart 1 of 3" in ended.stderr) == again


def test_hosts(any_mpi, tmp_path):
    hosts, marker = tmp_path / "hosts", tmp_path / "marker"
    hosts.write_text("# two on this one\nlocalhost:2\n\nlocalhost slots=1 # and one more\n")
    marker.touch()
    ended = mpirun("--hosts", hosts, "python", DIES, marker, 0, mpi=any_mpi)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("3 ranks, ")


def test_both_scripts_leave_out_the_same_words_of_the_launcher():
    found = [re.findall("^NOISE=.*", path.read_text(), re.MULTILINE) for path in (SCRIPT, ROOT / "slurm" / "job.sh")]
    assert found[0] == found[1] and len(found[0]) == 1


def test_a_lost_host_is_told_without_assertions_of_the_launcher(tmp_path):
    """MPICH's mpirun reaches two hosts that are this machine; the launcher's part on the second is killed."""
    if "HYDRA" not in execute(["mpirun", "--version"]).stdout:
        pytest.skip("these are words of MPICH's launcher")
    program, remote, hosts = tmp_path / "program.py", tmp_path / "remote", tmp_path / "hosts"
    program.write_text(
        "import os, signal, sys, time\n"
        "from mpi4py import MPI\n"
        "MPI.COMM_WORLD.barrier()\n"
        "print('rank', MPI.COMM_WORLD.rank, 'is there', file=sys.stderr, flush=True)\n"
        "MPI.COMM_WORLD.barrier()\n"
        "time.sleep(1)\n"
        "if MPI.COMM_WORLD.rank == 1: os.kill(os.getppid(), signal.SIGKILL)\n"
        "time.sleep(3)\n"
    )
    remote.write_text('#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nshift\nexec bash -c "$*"\n')
    remote.chmod(0o755)
    hosts.write_text("127.0.0.2:1\n127.0.0.3:1\n")
    ended = mpirun("--hosts", hosts, "python", program, HYDRA_LAUNCHER="ssh", HYDRA_LAUNCHER_EXEC=str(remote))
    assert ended.returncode == 255, ended.stderr
    assert sorted(ended.stderr.splitlines()) == ["rank 0 is there", "rank 1 is there"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no program"),
        (("-np", "many", "python"), "-np many: expected a whole number"),
        (("--max-restarts", "-1", "python"), "--max-restarts -1: expected a whole number"),
        (("--np", "2", "python"), "--np: expected -np, --hosts or --max-restarts"),
        (("--hosts", "/no/such/file", "python"), "--hosts /no/such/file: cannot be read"),
        (("--hosts", __file__, "python"), "expected lines like host1:4, and not"),
    ],
)
def test_wrong_words_get_one_line(words, message):
    ended = mpirun(*words)
    assert ended.returncode == 2
    assert message in ended.stderr and len(ended.stderr.splitlines()) == 1, ended.stderr


def test_the_example_of_a_hosts_file_has_the_form_that_is_read():
    lines = (ROOT / "launch" / "hosts.example").read_text().splitlines()
    assert all(re.fullmatch(r"#.*|\w+(:\d+| slots=\d+)?", line) for line in lines)


@pytest.mark.parametrize(
    ("script", "variables"),
    [
        ("job.pbs", {"PBS_O_WORKDIR": ROOT, "PBS_NODEFILE": "hosts", "PBS_JOBNAME": "mine"}),
        ("job.lsf", {"LS_SUBCWD": ROOT, "LSB_DJOB_HOSTFILE": "hosts", "LSB_JOBNAME": "mine"}),
    ],
)
def test_job_scripts_of_other_schedulers(tmp_path, script, variables):
    """With the variables that the scheduler sets, on this machine alone."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost\nlocalhost\n")
    variables = {name: str(hosts if value == "hosts" else value) for name, value in variables.items()}
    settings = f"--rounds 2 --local-steps 1 --algorithm fedavg --out {tmp_path}"
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    variables |= {"FEDMPI_SETTINGS": settings, "PATH": path, "PYTHONPATH": str(ROOT)}
    ended = execute(["bash", ROOT / "launch" / script], env=variables)
    assert ended.returncode == 0, ended.stderr
    assert "2 on 2 ranks" in ended.stdout
    assert (tmp_path / "mine" / "model.h5").is_file()


@pytest.mark.skipif(len(usable_cores()) < 2, reason="the machine has one core only")
def test_a_job_takes_no_more_cores_than_its_scheduler_gives():
    """nproc counts all cores of the machine."""
    words = ("python", "-c", "import os; print(os.environ['OMP_NUM_THREADS'])")
    assert mpirun(*words, PBS_NUM_PPN="1").stdout.split() == ["1"]  # of one rank
    assert mpirun("-np", "1", *words, PBS_NUM_PPN="1").stdout.split() == ["1"]


def test_the_number_of_ranks_that_the_user_expects():
    check_launch(SoloLink())
    check_launch(SoloLink(), 1)
    with pytest.raises(UserError, match="^ranks = 2: but 1 ranks found each other; start with the mpirun of the MPI"):
        check_launch(SoloLink(), 2)
