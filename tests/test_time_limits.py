"""A test that exceeds its time limit fails alone, shows what was printed, and leaves no process."""

import os
import pathlib
import sys

import pytest
from conftest import ROOT, execute, start, wait_for

SLEEPER = "import time; print('this far', flush=True); time.sleep(1000)"


def processes_with(word):
    """Process ids of the processes with a word in their command line."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word in path.read_bytes().decode(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return set(found) - {os.getpid()}


def test_ranks_are_killed_and_their_output_is_shown(any_mpi, tmp_path):
    program = tmp_path / "sleeper.py"
    program.write_text(SLEEPER)
    with pytest.raises(pytest.fail.Exception, match=r"no end within 10 s: .*mpirun (.|\n)*this far"):
        start(2, program, mpi=any_mpi, timeout=10)
    wait_for(lambda: not processes_with(str(program)), 30)  # a killed process exists until its parent waits for it


def test_the_other_tests_run_on(tmp_path):
    (tmp_path / "test_two.py").write_text(
        "import subprocess, time\n"
        "def test_sleeps(): time.sleep(1000)\n"
        "def test_waits(): subprocess.run(['sleep', '1000'])\n"
        "def test_passes(): pass\n"
    )
    ours = ["-c", ROOT / "pytest.ini", "-o", "timeout=1"]
    ended = execute([sys.executable, "-m", "pytest", "-q", *ours, tmp_path], cwd=tmp_path)
    assert "2 failed, 1 passed" in ended.stdout
