"""The wheel in an environment of its own does what the clone does, and other packages can add classes."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest
import yaml
from helpers import ROOT, execute

from fedmpi.__main__ import COMMANDS

pytestmark = pytest.mark.rarely(
    "setup.py", "pyproject.toml", "launch", "slurm", "fedmpi/cli", "fedmpi/comm/job", "fedmpi/ground/registry.py"
)
SMALL = ("--rounds", "2", "--clients", "2", "--threads", "1")


def tracked(*patterns):
    """Paths in the repository that git knows and that are still there."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True).stdout
    return [path for path in listed.splitlines() if (ROOT / path).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel, made from what git tracks."""
    sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    files = tracked("fedmpi", "reproduction/*.py", "setup.py", "pyproject.toml", "README.md", "LICENSE")
    if not files:
        pytest.skip("no git here: it lists what belongs into the wheel")
    for path in files:
        (sources / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, sources / path)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, sources]
    ended = execute(pip)
    assert ended.returncode == 0, ended.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def command(wheel, tmp_path_factory):
    """Runs a command of an environment that has the wheel; other packages are found, the clone is not."""
    environment = tmp_path_factory.mktemp("environment")
    bin_folder = environment / "bin"
    for words in (
        [sys.executable, "-m", "venv", "--without-pip", environment],
        [sys.executable, "-m", "pip", "--quiet", "--python", bin_folder / "python", "install", "--no-deps", wheel],
    ):
        ended = execute(words)
        assert ended.returncode == 0, ended.stderr
    libraries = sysconfig.get_paths()["purelib"]  # where torch and the others are; its .pth files do not count here

    def run(folder, *words, path=()):
        variables = {"PYTHONPATH": os.pathsep.join([*map(str, path), libraries]), "OMP_NUM_THREADS": "1"}
        variables["LD_LIBRARY_PATH"] = os.path.join(sys.prefix, "lib")  # of an MPI wheel: mpi4py looks beside Python
        variables["PATH"] = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        ended = execute(words, env=variables, cwd=folder)
        assert ended.returncode == 0, f"{words}\n{ended.stdout}{ended.stderr}"
        return ended.stdout

    return run


def test_the_wheel_contains_every_file_of_the_package(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert [path for path in tracked("fedmpi") if path not in inside] == []


def test_the_launcher_in_the_wheel_can_be_executed(wheel):
    mode = zipfile.ZipFile(wheel).getinfo("fedmpi/launch/mpirun.sh").external_attr >> 16
    assert mode & 0o111 == 0o111


def test_the_wheel_contains_nothing_else(wheel):
    folders = {path.partition("/")[0] for path in zipfile.ZipFile(wheel).namelist()}
    assert {folder.partition("-")[0] for folder in folders} == {"fedmpi"}


def test_the_wheel_trains_sweeps_and_reports_outside_the_clone(command, tmp_path):
    assert "site-packages" in command(tmp_path, "python", "-c", "import fedmpi; print(fedmpi.__file__)")
    output = command(tmp_path, "mpirun", "-np", "2", "fedmpi", "train", *SMALL)
    assert "2 on 2 ranks" in output
    grid = ("--grid", "algorithm.step_size=0.001,0.003", *SMALL)
    command(tmp_path, "fedmpi", "sweep", *grid)
    assert "best:" in command(tmp_path, "fedmpi", "sweep", *grid, "--table")
    command(tmp_path, "fedmpi", "report", "sweep")
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert "lamb/mnist_mlp_noniid" in command(tmp_path, "fedmpi", "train", "--list", "presets")
    assert "digits" in command(tmp_path, "fedmpi", "data", "list")


def test_a_model_file_in_the_current_folder_is_found_by_the_command(command, tmp_path):
    text = "from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self, num_classes):\n"
    text += "        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))\n"
    (tmp_path / "mymodel.py").write_text(text)
    assert "650" in command(tmp_path, "fedmpi", "train", "--model", "mymodel.Net", *SMALL)


def test_a_job_array_needs_no_clone(command, tmp_path):
    command(tmp_path, "fedmpi", "sweep", "--grid", "seed=0,1", *SMALL, "--emit-slurm", "job.sh")
    assert "#SBATCH --array=0-1" in (tmp_path / "job.sh").read_text()


def test_completion_offers_options_and_choices(command, tmp_path):
    (tmp_path / "completion.bash").write_text(command(tmp_path, "fedmpi", "completion", "bash"))
    script = (
        "source completion.bash; COMP_WORDS=({}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); {}; echo ${{COMPREPLY[@]}}"
    )

    def offered(words):
        return command(tmp_path, "bash", "-c", script.format(words, "_shtab_fedmpi")).split()

    assert offered("fedmpi train --algorithm fafed") == ["fafed", "fafed_code", "fafedzo"]
    assert "--algorithm.step_size" in offered("fedmpi train --algorithm.s")
    assert offered("fedmpi train --weighting s") == ["samples"]
    assert "--target" in offered("fedmpi report --t")


PLUG_IN = """
from fedmpi.algorithms import FedAvg
class Mine(FedAvg):
    "A class of another package."
"""


def test_an_installed_package_adds_an_algorithm(command, tmp_path):
    folder = tmp_path / "installed"
    (folder / "others-1.0.dist-info").mkdir(parents=True)
    (folder / "others-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (folder / "others-1.0.dist-info" / "entry_points.txt").write_text(
        "[fedmpi.algorithms]\nmine = others:Mine\nbroken = others:Missing\n"
    )
    (folder / "others.py").write_text(PLUG_IN)
    words = ("fedmpi", "train", "--algorithm", "Mine", "--algorithm.step_size", "0.2", *SMALL, "--name", "other")
    command(tmp_path, *words, path=[folder])
    settings = yaml.safe_load((tmp_path / "runs" / "other" / "settings.yaml").read_text())
    assert settings["algorithm"]["name"] == "mine"
    assert settings["algorithm"]["step_size"] == 0.2
    variables = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    ended = execute([sys.executable, "-m", "fedmpi.train", "--algorithm", "broken"], env=variables, cwd=tmp_path)
    assert ended.returncode == 2
    assert "algorithm 'others.Missing': cannot be imported" in ended.stderr


def test_one_command_starts_every_program(wheel, command, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert archive.read(name).decode().split("\n")[:2] == ["[console_scripts]", "fedmpi = fedmpi.__main__:main"]
    programs = {pathlib.Path(path).parent.name for path in tracked("fedmpi/cli/*/__main__.py")} | {"data", "train"}
    assert programs == COMMANDS.keys()
    listed = command(tmp_path, "fedmpi", "--help")
    for name in programs:
        assert f"\n  {name} " in listed
        assert re.search(rf"fedmpi[ .]{name}\b", command(tmp_path, "fedmpi", name, "--help"))


def test_the_settings_of_a_named_run_start_another_run(tmp_path):
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "fedmpi.train"]
    first = execute([*words, "--name", "mine", *SMALL], env=variables, cwd=tmp_path)
    again = execute([*words, "--config", "runs/mine/settings.yaml"], env=variables, cwd=tmp_path)
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert "--name chooses another" in again.stderr
    model = (tmp_path / "runs" / "fafed-digits-001" / "model.h5").read_bytes()
    assert model == (tmp_path / "runs" / "mine" / "model.h5").read_bytes()


def test_the_quickstart_installs_what_the_pages_use():
    """The first pages draw figures and make tables of records, in the environment that it creates."""
    text = (ROOT / "launch" / "quickstart.sh").read_text(encoding="utf-8")
    (extras,) = re.findall(r"^set_up (\S+)", text, re.MULTILINE)
    assert set(extras.split(",")) >= {"plot", "pandas"}
