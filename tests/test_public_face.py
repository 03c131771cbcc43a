"""What an outsider finds by `import fedmpi`: every name, its example, its types, and no import that is not needed."""

import json
import runpy
import shutil
import subprocess
import sys
import textwrap

import pytest
from helpers import PROGRAMS, ROOT, execute, start

import fedmpi


def python(program, folder):
    """The output of a Python program, run with this source in `folder`."""
    words = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{textwrap.dedent(program)}"]
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_import_alone_loads_neither_torch_nor_mpi(tmp_path):
    program = """
        import fedmpi, fedmpi.runs.folder
        dir(fedmpi), fedmpi.UserError, fedmpi.setting, fedmpi.Algorithm, fedmpi.Exchange, fedmpi.load_run
        print(sorted({"torch", "mpi4py", "h5py"} & set(sys.modules)))
    """
    assert python(program, tmp_path).strip() == "[]"


@pytest.mark.parametrize(("begin", "left"), [("from multiprocessing.spawn import os", []), ("import os", [0, 1, 2])])
def test_a_worker_of_a_program_is_no_rank(tmp_path, begin, left):
    """A worker of spawn or forkserver imports the program anew; another Python that a rank starts may begin MPI."""
    names = ["PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"]
    program = f"{begin}; import fedmpi; print([number for number, name in enumerate({names}) if name in os.environ])"
    variables = {"PYTHONPATH": str(ROOT)} | dict.fromkeys(names, "1")
    ended = execute([sys.executable, "-c", program], cwd=tmp_path, env=variables)
    assert ended.stdout == f"{left}\n", ended.stderr


@pytest.mark.parametrize(
    ("words", "comes_first"),
    [
        (["-m", "fedmpi.train", "--rounds", "3"], False),
        (["-u", "-m", "mpi4py", "-m", "fedmpi", "doctor"], False),
        (["-m", "mine"], True),
        (["mine.py", "fedmpi.train", "-m"], True),
        (["-m", "pytest", "fedmpi.train"], True),
    ],
)
def test_where_a_users_own_modules_are_found(monkeypatch, tmp_path, words, comes_first):
    """A program of fedmpi finds Python's before those of the folder that it is started in."""
    monkeypatch.chdir(tmp_path)
    for own in ("", str(tmp_path)):
        monkeypatch.setattr(sys, "orig_argv", ["python", *words])
        monkeypatch.setattr(sys, "path", [own, "/of/python"])
        runpy.run_path(fedmpi.__file__)
        assert sys.path == ([own, "/of/python"] if comes_first else ["/of/python", own])
    monkeypatch.setattr(sys, "path", ["/of/a/script", own])
    runpy.run_path(fedmpi.__file__)
    assert sys.path == ["/of/a/script", own]


def test_dir_lists_what_there_is_and_nothing_else():
    needed = {"Algorithm", "Exchange", "setting", "simulate", "train", "Federation", "load", "load_run", "UserError"}
    needed |= {"__version__", "algorithms", "average", "figure", "join", "Task", "Sending", "Recording", "Part"}
    assert needed == set(dir(fedmpi)) == set(fedmpi.__all__)
    for name in dir(fedmpi):
        assert getattr(fedmpi, name) is not None
    with pytest.raises(AttributeError, match="module 'fedmpi' has no attribute 'simulation'"):
        _ = fedmpi.simulation


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """Name -> (how many examples, how many failed), and the whole output."""
    ended = start(1, PROGRAMS / "examples.py", tmp_path_factory.mktemp("examples"))
    assert ended.returncode == 0, ended.stderr
    lines = [line.split() for line in ended.stdout.splitlines()]
    return {line[0]: line[1:] for line in lines if line and line[0] in fedmpi.__all__}, ended.stdout


@pytest.mark.parametrize("name", sorted(set(fedmpi.__all__) - {"__version__"}))
def test_every_name_has_an_example_that_is_true(examples, name):
    counts, output = examples
    tries, failures = map(int, counts[name])
    assert tries >= 2 and failures == 0, output


def test_load_run_takes_a_string_or_a_path_and_says_what_is_wrong(tmp_path):
    for folder in (tmp_path / "nothing", str(tmp_path / "nothing")):
        with pytest.raises(fedmpi.UserError, match="nothing: no such folder"):
            fedmpi.load_run(folder)


PROGRAM = """
    import dataclasses
    import pathlib
    import fedmpi, torch
    from fedmpi.algorithms import FAFED

    @dataclasses.dataclass(frozen=True)
    class Mine(fedmpi.Algorithm):
        step_size: float = fedmpi.setting(0.1, "η", above=0)

    fedmpi.simulate(Mine(step_size=0.2), x0=[1.0], rounds=3)
    fedmpi.simulate(FAFED(), lambda client, x, sample: x, [1.0])
    fedmpi.load_run("runs/example").final("accuracy")
    fedmpi.train.main(["--help"])
    fedmpi.simulate(Mine(), x0=[1.0], rounds="3")
    fedmpi.train(algorithm=Mine(), rounds=3, on_round=lambda record: record["round"] > 2).model
    fedmpi.train(rounds="3")
    fedmpi.train(out=pathlib.Path("runs"), data=[[]], seed=1).folder.name
    fedmpi.train(roundss=3)
    fedmpi.train(3)
    fedmpi.join(torch.nn.ReLU()).finnish()
    fedmpi.average(torch.nn.ReLU(), record=fedmpi.Recording("runs/mine", evaluate=3)).finish()
    fedmpi.average(torch.nn.ReLU()).rank.finnish
    fedmpi.train(checkpoint_every=3, verbose="yes")
    fedmpi.train(device=0, private="head.*", init=pathlib.Path("a.h5"))
    print(fedmpi.train(baselines="local").basselines)
"""
WRONG = [
    'program.py:15: error: Argument "rounds"', 'program.py:17: error: Argument "rounds"',
    'program.py:19: error: Unexpected keyword argument "roundss"', "program.py:20: error: Too many positional",
    'program.py:21: error: "Joined" has no attribute "finnish"', 'program.py:22: error: Argument "evaluate"',
    'program.py:23: error: "int" has no attribute "finnish"', 'program.py:24: error: Argument "verbose"',
    'program.py:25: error: Argument "device"', 'program.py:26: error: "Run" has no attribute "basselines"',
]  # fmt: skip


def test_a_program_is_checked_against_our_types(tmp_path):
    """As for a user who installed fedmpi: with `py.typed` a type checker reads our annotations."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")  # it takes most of the time
    words = [sys.executable, "-m", "mypy", "program.py"]
    ended = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=240, env={"PYTHONPATH": str(ROOT)}
    )
    errors = [line for line in ended.stdout.splitlines() if "error:" in line]
    assert len(errors) == len(WRONG) and all(map(str.startswith, errors, WRONG)), ended.stdout + ended.stderr


@pytest.mark.rarely("fedmpi/own_loop", "fedmpi/train.py", "fedmpi/__init__.py", "fedmpi/federation/simulate.py")
def test_pyright_finds_the_same_errors(tmp_path):
    """`pip install basedpyright` is pyright with all that it needs."""
    tool = shutil.which("basedpyright") or shutil.which("pyright")
    if tool is None:
        pytest.skip("needs pyright or basedpyright")
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"extraPaths": [str(ROOT)], "typeCheckingMode": "standard"})
    )
    words = [tool, "--outputjson", "--pythonpath", sys.executable, "program.py"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    found = json.loads(ended.stdout)["generalDiagnostics"]
    lines = {one["range"]["start"]["line"] + 1 for one in found if one["severity"] == "error"}
    assert lines == {int(text.split(":")[1]) for text in WRONG}, ended.stdout


def test_py_typed_is_installed(tmp_path):
    words = ["setup.py", "-q", "egg_info", "--egg-base", tmp_path, "build_py", "--build-lib", tmp_path / "lib"]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True, timeout=240)
    assert (tmp_path / "lib" / "fedmpi" / "py.typed").is_file()
    assert list((tmp_path / "lib" / "fedmpi" / "config" / "presets").rglob("*.yaml"))
