"""Tests are found in any folder; one that exceeds its time limit fails alone, and leaves no process."""

import os
import pathlib
import sys

import pytest
from helpers import ROOT, execute, start, wait_for

pytestmark = pytest.mark.rarely("tests/conftest.py", "tests/machinery", "pytest.ini", "launch")
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


def test_folders_are_collected_together():
    """tests/mpi has a conftest.py, too; a module that imports from `conftest` finds whichever came first."""
    paths = [ROOT / "tests" / name for name in ("mpi", "cli/report", "test_time_limits.py")]
    ended = execute([sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu or not gpu", *paths], cwd=ROOT)
    assert ended.returncode == 0, ended.stdout
    importing = [
        path for path in (ROOT / "tests").rglob("*.py") if "from conftest " in path.read_text(encoding="utf-8")
    ]
    assert not [path for path in importing if path != pathlib.Path(__file__)]


def test_a_folder_takes_the_place_of_all_tests(tmp_path):
    """launch/test.sh with programs that only print how they were called."""
    for name in ("ruff", "mypy", "mpirun", "python", "timeout"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    script = (ROOT / "launch" / "test.sh").read_text(encoding="utf-8")
    begin, end = script.index("part() {"), len(script)
    calls = {}
    for words in ("", "-k simulate", "tests/cli/report", "tests/mpi/test_links.py -x"):
        program = f"say() {{ :; }}\nset -euo pipefail\nset -- {words}\n{script[begin:end]}"
        ended = execute(["bash", "-c", program], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
        assert ended.returncode == 0, ended.stderr
        calls[words] = [line for line in ended.stdout.splitlines() if "pytest" in line]
    assert len(calls[""]) == 5 and calls[""][-1].endswith(" tests reproduction/tests --ignore tests/mpi")
    assert all(line.endswith(" -k simulate") for line in calls["-k simulate"]) and len(calls["-k simulate"]) == 5
    (only,) = calls["tests/cli/report"]
    assert only.endswith(" tests/cli/report")
    assert (
        len(calls["tests/mpi/test_links.py -x"]) == 4
        and "-q tests/mpi/test_links.py -x" in calls["tests/mpi/test_links.py -x"][0]
    )
