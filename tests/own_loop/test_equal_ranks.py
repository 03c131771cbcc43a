"""What must be equal on all ranks is compared at every door, before any work."""

import re
import shutil
import sys

import pytest
from helpers import PROGRAMS, ROOT, execute, launch_words, start

DIFFERENT = {
    "outer": "outer is none on ranks 0, 1, momentum on rank 2",
    "outer step size": "server_step_size is 1.0 on ranks 0, 1, 0.5 on rank 2",
    "every": "every is 4.0 on ranks 0, 1, 3.0 on rank 2",
    "exchange": "exchange is ('exp_avg_sq', 'exp_avg') on ranks 0, 1, ('exp_avg', 'exp_avg_sq') on rank 2",
    "no exchange": "on rank 2: exchange = 3: expected names of the optimizer's state",
    "no optimizer": "on rank 2: optimizer is a int: expected a torch.optim.Optimizer",
    "no outer": "on rank 2: outer = ['momentum']: expected one of none",
    "no timeout": "on rank 2: timeout = '60': expected a number of seconds > 0",
    "algorithm": "algorithm is fedavg on ranks 0, 1, scaffold on rank 2",
    "step size": "step_size is 0.1 on ranks 0, 1, 0.01 on rank 2",
    "clip": "clip_norm is None on ranks 0, 1, 1.0 on rank 2",
    "decay": "weight_decay is 0.0 on ranks 0, 1, 0.1 on rank 2",
    "local steps": "local_steps is 4.0 on ranks 0, 1, 3.0 on rank 2",
    "unknown setting": "on rank 2: unknown setting step: algorithm fafed has",
    "shape": "'2.weight' is [301, 144] torch.float32 on ranks 0, 1, [300, 144] torch.float32 on rank 2",
    "name": "'a.weight' is [2, 3] torch.float32 on ranks 0, 1, missing on rank 2",
    "type": "'0.weight' is [4, 3, 3, 3] torch.float32 on ranks 0, 1, [4, 3, 3, 3] torch.float64 on rank 2",
    "order": "'0.weight' is [4, 3, 3, 3] torch.float32 on ranks 0, 1, [4, 3, 3, 3] torch.float32 with strides",
    "frozen": "'0.weight' is [4, 3, 3, 3] torch.float32 on ranks 0, 1, [4, 3, 3, 3] torch.float32 frozen",
    "frozen values": "'0.weight' is [4, 3, 3, 3] torch.float32 frozen with hash ",
    "train step size": "algorithm.step_size is 0.2 on ranks 0, 1, 0.1 on rank 2",
    "train rounds": "rounds is 900 on ranks 0, 1, 2 on rank 2",
    "train algorithm": "algorithm is fedavg on ranks 0, 1, scaffold on rank 2",
    "train local steps": "local_steps is 3 on ranks 0, 1, 2 on rank 2",
    "train weighting": "weighting is uniform on ranks 0, 1, samples on rank 2",
    "train participation": "participation is 1.0 on ranks 0, 1, 0.5 on rank 2",
    "train clip": "clip_norm is 1.0 on ranks 0, 1, 0.5 on rank 2",
    "train holdout": "holdout is 0.0 on ranks 0, 1, 0.2 on rank 2",
    "train aggregation": "aggregation is reproducible on ranks 0, 1, mean on rank 2",
    "train model": "'weight' is [3, 12] torch.float32 on ranks 0, 1, [2, 12] torch.float32 on rank 2",
}
MAY_DIFFER = ("weight", "values", "threads", "out")


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Case -> the line that three ranks printed, of which the last gave something else."""
    folder = tmp_path_factory.mktemp("ranks")
    ended = start(3, PROGRAMS / "ranks_differ.py", folder)
    pairs = [line.split(": ", 1) for line in ended.stdout.splitlines() if ": " in line]
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return {case: line for case, line in pairs if case in {*DIFFERENT, *MAY_DIFFER}}


@pytest.mark.rarely
@pytest.mark.parametrize("case", DIFFERENT)
def test_one_line_names_what_differs(lines, case):
    assert DIFFERENT[case] in lines[case], lines[case]


@pytest.mark.parametrize("case", MAY_DIFFER)
def test_these_may_differ(lines, case):
    assert lines[case] == "nothing"


def two(first, second, folder, program="fedmpi.train", env=()):
    """A job whose two ranks have other settings: (exit code, the lines of fedmpi)."""
    common = ["-m", program, "--threads", "1", "--out", folder, "--algorithm", "fedavg"]
    command, variables = launch_words(1, *common, *first.split())
    there = ["-np", 1, "env", *env, sys.executable, *common, *second.split()]
    (folder.parent / "elsewhere").mkdir(exist_ok=True)  # Python searches the current folder before all others
    ended = execute([*command, ":", *there], env=variables, cwd=folder.parent / "elsewhere")
    return ended.returncode, [line for line in ended.stderr.splitlines() if line.startswith("fedmpi")], ended.stdout


def test_two_settings_files(tmp_path):
    for silo, rounds in (("a", 2), ("b", 3)):
        (tmp_path / f"{silo}.yaml").write_text(f"rounds: {rounds}\nthreads: 1\n")
    files = [f"--config {tmp_path / silo}.yaml" for silo in ("a", "b")]
    code, lines, _ = two(*files, tmp_path / "runs")
    assert code == 2 and len(lines) == 1 and "rounds is 2 on rank 0, 3 on rank 1" in lines[0]
    assert not (tmp_path / "runs").exists()
    code, _, shown = two(*files, tmp_path / "runs", "fedmpi.cli.doctor")
    assert code == 2 and re.search("settings .*rounds is 2 on rank 0, 3 on rank 1", shown), shown


def test_another_fedmpi_on_one_rank(tmp_path):
    shutil.copytree(ROOT / "fedmpi", tmp_path / "fedmpi", ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "fedmpi" / "text.py", "a") as file:
        file.write("# another one\n")
    code, lines, _ = two("--rounds 2", "--rounds 2", tmp_path / "runs", env=[f"PYTHONPATH={tmp_path}"])
    assert code == 2 and len(lines) == 1 and "install the same fedmpi everywhere" in lines[0], lines
