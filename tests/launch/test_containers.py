"""The files for containers, and a run in a container where a tool for them is."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, execute

LAUNCH = ROOT / "launch"
RUN = ["mpirun", "-np", "2", "python", "-m", "fedmpi.train", "--rounds", "2", "--name", "it", "--out", "/work"]
CHECK = ["python", "-m", "reproduction", "--check"]


def copied(name):
    """What a file for containers copies into the image: [(path in the repository, folder there)]."""
    lines = (LAUNCH / name).read_text().splitlines()
    if name == "fedmpi.def":
        lines = [line for line in lines[lines.index("%files") : lines.index("%post")] if line.startswith(" ")]
    else:
        lines = [line.removeprefix("COPY ") for line in lines if line.startswith("COPY ")]
    return [(path, target) for *paths, target in map(str.split, lines) for path in paths]


@pytest.mark.rarely
@pytest.mark.parametrize("name", ["Dockerfile", "fedmpi.def"])
def test_an_image_has_all_that_the_installation_needs(tmp_path, name):
    for path, target in copied(name):
        folder = tmp_path / target.strip("/")
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, folder, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder)
    words = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--target", tmp_path / "installed"]
    installed = execute([sys.executable, "-m", "pip", *words, tmp_path / "fedmpi"])
    assert installed.returncode == 0, installed.stderr
    code = "import fedmpi.config.presets, fedmpi; print(fedmpi.__file__)"
    ended = execute([sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path / "installed")}, cwd=tmp_path)
    assert ended.stdout.strip() == str(tmp_path / "installed/fedmpi/__init__.py"), ended.stderr
    (tmp_path / "work").mkdir()
    env = {"PYTHONPATH": str(tmp_path / "fedmpi")}
    listed = execute([sys.executable, "-m", "reproduction", "--list"], env=env, cwd=tmp_path / "work")
    assert listed.returncode == 0 and "fafed_table2_low" in listed.stdout, listed.stderr


@pytest.mark.parametrize("name", ["Dockerfile", "fedmpi.def"])
def test_an_image_has_the_environment_of_the_results(name):
    text = (LAUNCH / name).read_text()
    lock = (ROOT / "reproduction" / "environment.txt").read_text()
    (python,) = re.findall(r"with Python (3\.\d+)", lock.splitlines()[0])
    (index,) = re.findall(r"--extra-index-url (\S+)", lock)
    assert f"python:{python}-slim" in text and "/fedmpi/reproduction" in text
    assert f"-r reproduction/environment.txt --extra-index-url {index}" in text and "--no-deps -e ." in text


@pytest.mark.parametrize("tool", ["docker", "podman"])
def test_two_ranks_in_a_container(tmp_path, tool):
    if not shutil.which(tool) or subprocess.run([tool, "info"], capture_output=True).returncode:
        pytest.skip(f"{tool} does not run here")
    built = execute([tool, "build", "-q", "-t", "fedmpi-test", "-f", LAUNCH / "Dockerfile", ROOT], timeout=900)
    if built.returncode:
        pytest.skip(f"{tool} build failed, perhaps without a network: {built.stderr[-200:]}")
    user = f"{os.getuid()}:{os.getgid()}"
    options = ["--rm", "--shm-size=64m", "--user", user, "-v", f"{tmp_path}:/work"]
    ended = execute([tool, "run", *options, "fedmpi-test", *RUN])
    assert ended.returncode == 0 and (tmp_path / "it/model.safetensors").is_file(), ended.stderr
    ended = execute([tool, "run", *options, "fedmpi-test", *CHECK], timeout=900)
    assert ended.returncode == 0 and "PASS" in ended.stdout, ended.stderr


def test_two_ranks_in_apptainer(tmp_path):
    if not shutil.which("apptainer"):
        pytest.skip("apptainer is not here")
    built = execute(["apptainer", "build", tmp_path / "it.sif", LAUNCH / "fedmpi.def"], cwd=ROOT, timeout=900)
    if built.returncode:
        pytest.skip(f"apptainer build failed, perhaps without a network: {built.stderr[-200:]}")
    ended = execute(["apptainer", "exec", "--bind", f"{tmp_path}:/work", tmp_path / "it.sif", *RUN])
    assert ended.returncode == 0 and (tmp_path / "it/model.safetensors").is_file(), ended.stderr
    ended = execute(["apptainer", "exec", "--pwd", "/tmp", tmp_path / "it.sif", *CHECK], timeout=900)
    assert ended.returncode == 0 and "PASS" in ended.stdout, ended.stderr
