"""The README is true: its programs and commands run as written."""

import contextlib
import io
import re
import shlex

import pytest
import yaml
from conftest import ROOT, execute

from fedmpi.config.build import read_command_line

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def block(language, containing):
    (found,) = [text for text in blocks(language) if containing in text]
    return found


def in_shell(command, folder, **variables):
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    ended = execute(shlex.split(command), env=variables, cwd=folder)
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


def write_programs(folder):
    """Every Python block whose first line names a file."""
    for text in blocks("python"):
        first, _, rest = text.partition("\n")
        if re.fullmatch(r"# \w+\.py", first):
            (folder / first[2:]).write_text(rest, encoding="utf-8")


def final_accuracy(output):
    """The accuracy in the closing table."""
    return float(re.search(r"^  accuracy +([0-9.]+)", output, re.MULTILINE).group(1))


def test_simulate_prints_what_the_readme_shows():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(block("python", "fedmpi.simulate("), {"__name__": "readme"})
    assert printed.getvalue() in README


def test_your_model_on_your_data(tmp_path):
    write_programs(tmp_path)
    for command in block("bash", "make_data.py").splitlines():
        output = in_shell(command, tmp_path)
    assert final_accuracy(output) > 0.85
    assert (tmp_path / "runs" / "fafed-mine-001" / "model.safetensors").is_file()


def test_your_own_algorithm(tmp_path):
    write_programs(tmp_path)
    assert len((tmp_path / "myalgorithm.py").read_text().splitlines()) < 30
    output = in_shell(block("bash", "myalgorithm").strip(), tmp_path)
    assert final_accuracy(output) > 0.9


def test_the_settings_file_is_one(tmp_path):
    text = block("yaml", "participation")
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    resolved = yaml.safe_load(read_command_line(["--config", str(tmp_path / "run.yaml"), "--print_config"]))
    assert resolved["participation"] == 0.5
    assert resolved["partition"]["name"] == "halves"


def test_the_table_of_algorithms_is_the_programs():
    assert block("text", "naive_adaptive_fedavg  ").strip() == read_command_line(["--list", "algorithms"]).strip()


def test_the_default_job_prints_a_table_of_the_shown_kind(tmp_path):
    output = in_shell("mpirun -np 2 python -m fedmpi.train --clients 4 --rounds 5", tmp_path)
    shown = block("text", "sent per client")
    names = re.findall(r"^  (\w[\w ]+?)  ", shown, re.MULTILINE)
    assert len(names) > 8
    assert names == re.findall(r"^  (\w[\w ]+?)  ", output, re.MULTILINE)


@pytest.mark.parametrize("path", re.findall(r"`(?:\./)?((?:launch|slurm)/[\w./]+)`", README))
def test_files_that_the_readme_names_are_there(path):
    assert (ROOT / path).is_file()
