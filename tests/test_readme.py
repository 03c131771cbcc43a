"""The README and the pages in docs/ are true: their commands run as written, in order, from an empty folder."""

import importlib.util
import os
import re
import sys

import numpy as np
import pytest
import yaml
from helpers import ROOT, execute, shim

from fedmpi.prepare.writer import write_file

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path.stem: path for path in sorted((ROOT / "docs").glob("*.md"))} | {
    "reproduction": ROOT / "reproduction" / "README.md"
}
BLOCK = re.compile(
    r"(?P<note><!-- not run: [^>]+-->\s*)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
# What installs, downloads or waits, and needs no test here: the suite itself runs in what they make.
ELSEWHERE = re.compile(r"\./launch/|\. \S*activate|pip install|git clone|cd |module load|export ")
# Appended in the test, so that the same command ends sooner.
SMALLER = {
    r"fedmpi[.-]train|train\.sbatch": "--rounds 2",
    r"fedmpi[.-]sweep": "--rounds 2",
    r"fedmpi[.-]bench": "--quick --seconds 0.1",
}
ONLY_PRINTS = re.compile(r"--(list|help|print_config|table)\b")
# Stands in for SLURM: it runs the job script here, with two ranks, or as the first task of an array.
SBATCH = """#!/bin/sh
export SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=n1
export SLURM_SUBMIT_DIR=$PWD SLURM_NTASKS=2 SLURM_JOB_ID=1 SLURM_ARRAY_TASK_ID=0
export SLURM_JOB_NAME=job FEDMPI_VENV=$PWD/environment
mkdir -p environment/bin && : > environment/bin/activate
while [ "${1#--}" != "$1" ]; do shift; done
exec bash "$@"
"""


def blocks(text):
    """(language, text, whether the page says that it is not run) of every block."""
    return [(found["language"], found["text"], bool(found["note"])) for found in BLOCK.finditer(text)]


def block(language, containing, page=README):
    (found,) = [text for its, text, _ in blocks(page) if its == language and containing in text]
    return found


def commands(text):
    """The commands of a block, those over several lines as one; without comments."""
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#") and not ELSEWHERE.match(line)]


def smaller(command):
    """A command as written, followed by settings with which it ends sooner."""
    words = command.split("#")[0].rstrip()
    if ONLY_PRINTS.search(words) and "--grid" not in words:
        return words
    return words + "".join(f" {extra}" for program, extra in SMALLER.items() if re.search(program, words))


def run_page(text, folder, variables=None):
    """Do everything that a page asks for, in a folder; returns what each command printed.

    Args:
        variables: of the environment; None: one thread per process.
    """
    programs = folder.parent / "programs"
    programs.mkdir()
    (programs / "sbatch").write_text(SBATCH)
    (programs / "python").write_text(shim())
    for name in ("sbatch", "python"):
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), os.path.dirname(sys.executable), os.environ["PATH"]])
    environment = {"PATH": path, "PYTHONPATH": str(ROOT), "FEDMPI_DATA": ""}
    environment |= {"OMP_NUM_THREADS": "1"} if variables is None else variables
    printed, imports = {}, []

    def run(words, name):
        ended = execute(words, env=environment, cwd=folder)
        assert ended.returncode == 0, f"{name}\n{ended.stdout}{ended.stderr}"
        printed[name] = ended.stdout

    for language, body, is_not_run in blocks(text):
        file = re.match(r"# ([\w-]+\.\w+)\n", body)
        if file and language in ("python", "yaml", "toml"):
            (folder / file[1]).write_text(body, encoding="utf-8")
        elif is_not_run:
            continue
        elif language == "python" and not body.startswith(">>>"):
            (folder / "block.py").write_text("".join([*imports, body]), encoding="utf-8")
            run(["python", "block.py"], body)
            imports += re.findall(r"^(?:import|from) .*\n", body, re.MULTILINE)
        elif language == "bash":
            for command in commands(body):
                run(["bash", "-euo", "pipefail", "-c", smaller(command)], command)
    return printed


def write_data(folder):
    """Small data sets in the place of the official ones, which are downloaded."""
    draw = np.random.default_rng(0)
    patterns = draw.integers(0, 256, (10, 28, 28))
    for name in ("mnist", "fashion_mnist"):
        splits = {}
        for split, n in (("train", 2000), ("test", 300)):
            labels = np.sort(draw.integers(0, 10, n)) if split == "train" else draw.integers(0, 10, n)
            images = 0.8 * patterns[labels] + 0.2 * draw.integers(0, 256, (n, 28, 28))
            splits |= {f"{split}/images": images.astype(np.uint8), f"{split}/labels": labels}
        write_file(folder / f"{name}.h5", splits, {"dataset": name})
    text = " ".join(draw.choice(["one", "two", "three", "four", "five"], 6000))
    words = {f"{split}/text": np.frombuffer(text.encode(), dtype=np.uint8) for split in ("train", "test")}
    write_file(folder / "wikitext2.h5", words, {"dataset": "wikitext2"})


def in_empty_folder(text, tmp_path, variables=None):
    folder = tmp_path / "empty"
    folder.mkdir(exist_ok=True)
    if "--data-dir data" in text:
        write_data(folder / "data")
    for name in (
        "slurm",
        "launch",
        "examples",
    ):  # commands with these are run in a clone, or copy them from the package
        if f"{name}/" in text and f"/{name} ." not in text:
            (folder / name).symlink_to(ROOT / name)
    return run_page(text, folder, variables)


def test_the_readme_runs_in_order_from_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # a reader has not chosen any
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "train.py").write_text(added(block("diff", "import fedmpi")))
    (folder / "mine.py").write_text(MINE)
    printed = in_empty_folder(README, tmp_path, {})
    assert (folder / "runs" / "fafed-digits-002" / "model.safetensors").is_file()
    recorded = (folder / "runs" / "fafed-digits-001" / "settings.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(recorded)["clients"] == 4  # one per rank: the reports need the number
    accuracy = [float(found[1]) for text in printed.values() if (found := re.search(r"  accuracy +([\d.]+)", text))]
    assert len(accuracy) == 5
    (default,) = [text for command, text in printed.items() if command.endswith("-m fedmpi.train")]
    shown, lines = shape_of(block("text", "sent per client")), shape_of(default)
    assert len(shown) > 5 and [line for line in lines if line in shown][-len(shown) :] == shown
    (answer,) = [text for command, text in printed.items() if "--baselines" in command]
    assert "taking part " in answer


# What the loop on the first screen imports.
MINE = """
import torch

model = torch.nn.Linear(4, 2)
samples = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
batches = torch.utils.data.DataLoader(samples, batch_size=32)


def loss_of(model, batch):
    inputs, labels = batch
    return torch.nn.functional.cross_entropy(model(inputs), labels)
"""


def added(text):
    """A program as a diff leaves it."""
    return "".join(line[1:] or "\n" for line in text.splitlines(keepends=True) if not line.startswith("-"))


@pytest.mark.rarely("README.md", "examples", "fedmpi")
def test_the_first_loop_without_the_added_lines_is_a_plain_one(tmp_path):
    text = block("diff", "import fedmpi")
    assert len(re.findall(r"^\+", text, re.MULTILINE)) == 4
    plain = re.sub(r"^\+.*\n", "", text, flags=re.MULTILINE)
    (tmp_path / "train.py").write_text(added(plain))
    (tmp_path / "mine.py").write_text(MINE)
    assert execute([sys.executable, "train.py"], cwd=tmp_path).returncode == 0


@pytest.mark.rarely("README.md", "examples", "fedmpi")
def test_the_first_answer_comes_from_its_commands(tmp_path):
    """The line of the first screen, to its digits: one thread per rank."""
    (text,) = [body for language, body, _ in blocks(README) if language == "bash" and "--baselines" in body]
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    variables = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FEDMPI_DATA": ""}
    ended = execute(["bash", "-euo", "pipefail", "-c", text], env=variables, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (answer,) = re.findall("^> (taking part .*)", README, re.MULTILINE)
    assert answer in ended.stdout


def shape_of(output):
    """The lines of an output with every number, and the kinds of bytes and counts, as #."""
    return [re.sub(r"[\d.,]+|\b[KM]iB\b|Allreduces?", "#", line) for line in output.splitlines() if line.strip()]


@pytest.mark.parametrize("name", ["README", "CONTRIBUTING", "SECURITY", *PAGES])
def test_no_link_between_files_is_dead(name):
    path = PAGES.get(name, ROOT / f"{name}.md")
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


LONG = ("objectives", "papers", "reports", "speed")  # two minutes together


def places(path):
    """A page, and the files of the package's modules that it names: it is run again when one of them changes."""
    names = set(re.findall(r"fedmpi[./](\w+)", path.read_text(encoding="utf-8")))
    modules = [f"fedmpi/{name}{end}" for name in sorted(names) for end in ("", ".py")]
    return [str(path.relative_to(ROOT)), *modules]


# Page -> packages that its programs use, which the tests' own environment lacks.
NEEDED = {"fine_tuning": ("transformers", "peft", "accelerate")}


def as_case(name):
    marks = [pytest.mark.rarely(*places(PAGES[name])), *[pytest.mark.slow] * (name in LONG)]
    missing = [package for package in NEEDED.get(name, ()) if importlib.util.find_spec(package) is None]
    marks += [pytest.mark.skip(reason=f"needs {', '.join(missing)}")] if missing else []
    return pytest.param(name, marks=marks)


# tests/own_loop/test_recipes.py runs the recipes one by one.
@pytest.mark.parametrize("name", [as_case(name) for name in PAGES if name != "recipes"])
def test_a_page_runs_in_order_from_an_empty_folder(name, tmp_path):
    in_empty_folder(PAGES[name].read_text(encoding="utf-8"), tmp_path)


@pytest.mark.parametrize("name", ["README", *PAGES])
def test_commands_are_in_blocks_that_are_run_or_say_why_not(name):
    text = README if name == "README" else PAGES[name].read_text(encoding="utf-8")
    command = re.compile(r"(mpirun|python3?|pip|sbatch|srun|launch/|\./|fedmpi-|mkdir|cp|export|tensorboard) ?[\w./-]")
    others = [body for language, body, _ in blocks(text) if language not in ("bash", "python", "yaml", "toml")]
    assert [line for body in others for line in body.splitlines() if command.match(line)] == []


def test_simulate_prints_what_the_page_shows(tmp_path):
    page = PAGES["algorithms"].read_text(encoding="utf-8")
    program = block("python", "fedmpi.simulate(algorithm", page)
    assert run_page(f"```python\n{program}```\n", tmp_path)[program] in page
    assert len(block("python", "# myalgorithm.py", page).splitlines()) < 30


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 110


def test_files_that_the_readme_names_are_there():
    paths = set(re.findall(r"(?:launch|slurm|examples|reproduction)/[\w./]*\w", README))
    assert "slurm/train.sbatch" in paths
    assert [path for path in paths if not (ROOT / path).is_file()] == []


@pytest.mark.slow
@pytest.mark.rarely("docs/comparison", "fedmpi/runs")
def test_the_scripts_of_the_first_screen_run(tmp_path):
    """Few kills, and short jobs; the numbers of the first screen come from the defaults."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    variables = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    write_data(tmp_path / "data")
    for words, expected in (
        (["kills.py", "--kills", "2"], r"2 kills of \d jobs, 0 with other bits than an unbroken one"),
        (
            ["whole_job.py", tmp_path / "data" / "fashion_mnist.h5", "--rounds", "4", "--turns", "1"],
            r"fedmpi takes [\d.]+ of the time of by hand",
        ),
    ):
        ended = execute([sys.executable, ROOT / "docs" / "comparison" / words[0], *words[1:]], env=variables)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert re.search(expected, ended.stdout), ended.stdout
    assert [name for name in set(re.findall(r"docs/comparison/\w+\.py", README)) if not (ROOT / name).is_file()] == []
