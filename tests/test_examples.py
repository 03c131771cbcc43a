"""The programs and the notebook in examples/ run, each in an empty folder, with the command that it names."""

import importlib.util
import os
import re
import shutil
import sys

import pytest
from helpers import ROOT, execute

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.rarely("examples", "fedmpi/train.py", "fedmpi/algorithms/base.py", "fedmpi/tasks/custom.py")
SHOWS = {  # what an example prints
    "counterexample": r"NaiveAdaptiveFedAvg +ends at x =  43\.\d+\nFAFED +ends at x =   0\.\d+",
    "hospital_tables": r"200 patients each",
    "hospitals": r"common \{'Aachen': [\d.]+, 'Bonn': [\d.]+, 'Celle': [\d.]+\}",
    "instructions": r"federated (0\.\d+), pooled (0\.\d+), rank 0 alone \d",
    "own_algorithm": r"ServerMomentum 0\.\d+",
    "own_task": r"accuracy",
    "paper_figure": r"figure\.pdf",
}


def in_folder(words, folder):
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": path}
    ended = execute(words, env=variables, cwd=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


NEEDED = {"instructions": ("transformers", "peft")}


def as_case(name):
    missing = [package for package in NEEDED.get(name, ()) if importlib.util.find_spec(package) is None]
    return pytest.param(name, marks=[pytest.mark.skip(reason=f"needs {', '.join(missing)}")] if missing else [])


@pytest.mark.parametrize("name", [as_case(path.stem) for path in sorted(EXAMPLES.glob("*.py"))])
def test_an_example_runs_with_the_command_that_it_names(name, tmp_path):
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    shutil.copy(EXAMPLES / f"{name}.py", tmp_path)
    command = re.search(r"^((?:mpirun|python) .+)$", text, re.MULTILINE)[1]
    command = command.replace("--rounds 50", "--rounds 3")
    output = in_folder(command.split(), tmp_path)
    shown = re.search(SHOWS[name], output)
    assert shown, output
    if name == "instructions":
        federated, pooled = map(float, shown.groups())
        assert federated < 1.05 * pooled
    if name == "paper_figure":
        assert (tmp_path / "figure.pdf").read_bytes()[:5] == b"%PDF-"


def test_the_notebook_runs(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    program = (
        "import sys, nbformat, nbclient\n"
        "book = nbformat.read(sys.argv[1], as_version=4)\n"
        "nbclient.NotebookClient(book, timeout=600).execute()\n"
        "print([cell.outputs[-1].data.get('text/plain') for cell in book.cells if cell.get('outputs')][0])\n"
        "assert any('image/svg+xml' in out.get('data', ()) for cell in book.cells for out in cell.get('outputs', ()))\n"
    )
    output = in_folder([sys.executable, "-c", program, EXAMPLES / "first_steps.ipynb"], tmp_path)
    assert 0.5 < float(output) <= 1
    assert nbclient and nbformat


def programs_on_pages():
    """Text of each program with a name in README.md and docs/: the blocks that begin with "# name.py"."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        yield from re.findall(
            r"^```python\n(# \w+\.py\n.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        )


def test_a_worker_that_imports_an_example_begins_no_mpi(tmp_path):
    """As spawn and forkserver do, the default from Python 3.14 on."""
    for name in ("hospitals", "own_algorithm", "own_task"):
        shutil.copy(EXAMPLES / f"{name}.py", tmp_path)
    extras = r"fedmpi\.huggingface|transformers|peft|accelerate|lightning|torchdata|from silos import"
    pages = [text for text in programs_on_pages() if not re.search(extras, text)]
    for number, text in enumerate(pages):
        (tmp_path / f"page_{number}.py").write_text(text)
    assert len(pages) > 4
    code = (
        "import glob, runpy, sys\n"
        "for path in sorted(glob.glob('*.py')):\n"
        "    runpy.run_path(path, run_name='__mp_main__')\n"
        "    assert 'mpi4py.MPI' not in sys.modules, open(path).read()\n"
    )
    in_folder([sys.executable, "-c", code], tmp_path)
