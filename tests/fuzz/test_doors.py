"""Foreign files and folders through every door: nothing that a terminal obeys is printed or written, no forged line,
and no code that only the folder names is run."""

import json
import random
import shutil
import sys

import h5py
import numpy as np
import pytest
import yaml
from helpers import execute

import fedmpi
from fedmpi.cli.evaluate.__main__ import _run as evaluate
from fedmpi.cli.predict.__main__ import main as predict
from fedmpi.cli.report.__main__ import main as report
from fedmpi.cli.sweep.__main__ import main as sweep
from fedmpi.comm.solo import SoloLink
from fedmpi.ground.errors import Diverged, UserError
from fedmpi.prepare.__main__ import main as data
from fedmpi.training.config import read_command_line
from fedmpi.training.loop import train

FEW_SEEDS = [pytest.param(range(4), id="short"), pytest.param(range(4, 200), id="long", marks=pytest.mark.slow)]
FORGED = "FORGED"
ODD = f"\x1b]0;x\x07\x9b31m\u202e\u2028\n{FORGED}"  # renames the window, colours, turns the text, begins a line
SILOS = "--data silo_{client}.h5 --clients 2 --threads 1"
GRID = f"--grid seed=0 --out sweep {SILOS} --rounds 2 --holdout 0.2 --task.metrics f1,confusion"


# Door -> (its function, what it is given: the run folder "it" that a stranger has made, or data of strangers).
READING = {
    "evaluate": (lambda words: evaluate(words, SoloLink()), "it --threads 1"),
    "predict": (predict, "it x.npz --probabilities --out out.csv"),
    "report": (report, "it --out page.html"),
    "load": (lambda words: fedmpi.load(*words), "it"),
    "load_run": (lambda words: fedmpi.load_run(*words), "it"),
    "--init": (lambda words: train(read_command_line(words), SoloLink()), f"{SILOS} --init it --rounds 1 --out runs"),
    "sweep --table": (sweep, f"{GRID} --table"),
}
DOORS = READING | {
    "report --watch": (report, "it --watch 0.1"),
    "train": (READING["--init"][0], f"{SILOS} --rounds 1 --out runs --task.metrics f1,confusion"),
    "--resume": (READING["--init"][0], "--resume it --threads 1 --rounds 3"),
    "--config": (READING["--init"][0], "--config it/settings.yaml --rounds 1 --out runs --name new"),
    "--print_config": (lambda words: print(read_command_line(words)), "--config it/settings.yaml --print_config"),
    "prepare": (data, "prepare t --from t.csv --data-dir data"),
    "prepare --json": (data, "prepare t --from t.csv --data-dir data --json"),
    "prepare images": (data, "prepare im --from im --data-dir data"),
    "prepare npz": (data, "prepare n --from n.npz --data-dir data"),
    "prepare LEAF": (data, "prepare leaf --from leaf --data-dir data"),
    "show": (data, "show silo_0.h5"),
    "list": (data, "list --data-dir ."),
    "partition": (data, "partition silo_0.h5 --clients 2"),
}
WRITTEN = (
    "out.csv",
    "page.html",
    "page/*.md",
    "page/*.csv",
    "sweep/*.csv",
    "sweep/*.yaml",
    "runs/*/*.jsonl",
    "runs/*/*.yaml",
)


def write_silos(folder):
    draw = np.random.default_rng(0)
    for client in range(2):
        with h5py.File(folder / f"silo_{client}.h5", "w") as file:
            for split, number in (("train", 40), ("test", 12)):
                file[f"{split}/images"] = draw.standard_normal((number, 3)).astype("f4")
                file[f"{split}/labels"] = np.arange(number) % 3
            file.attrs["class_names"] = [f"kind {k}{ODD}" for k in range(3)]
            file.attrs["feature_names"] = [f"column {k}{ODD}" for k in range(3)]
            file.attrs["silo"], file.attrs["dataset"] = f"Bonn {client}{ODD}", f"set{ODD}"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with two silos, a run of them called "it" and a sweep, and samples; all names are odd."""
    folder = tmp_path_factory.mktemp("base")
    write_silos(folder)
    np.savez(folder / "x.npz", x=np.zeros((4, 3)), y=np.arange(4) % 3)
    lines = "".join(f'{n},{n % 3},"{n % 2}{ODD}"\n' for n in range(40))
    (folder / "t.csv").write_text(f'"a{ODD}",b,"label{ODD}"\n{lines}')
    np.savez(folder / "n.npz", **{"x": np.zeros((20, 3)), "y": np.array([f"{n % 2}{ODD}" for n in range(20)])})
    users = {"users": [f"u{ODD}"], "user_data": {f"u{ODD}": {"x": [[1, 2], [3, 4]], "y": [0, 1]}}}
    for split in ("train", "test"):
        (folder / "leaf" / split).mkdir(parents=True)
        (folder / "leaf" / split / f"a{ODD}.json").write_text(json.dumps(users) if split == "test" else "{")
    for name in "ab":
        (folder / "im" / f"{name}{ODD}").mkdir(parents=True)
        (folder / "im" / f"{name}{ODD}" / f"0{ODD}.png").write_bytes(b"not an image")
    (folder / f"odd{ODD}.h5").write_bytes(b"")
    with pytest.MonkeyPatch.context() as context:
        context.chdir(folder)
        DOORS["train"][0](f"{SILOS} --rounds 2 --out . --name it --holdout 0.2 --task.metrics f1,confusion".split())
    ended = execute([sys.executable, "-m", "fedmpi", "sweep", *GRID.split()], cwd=folder)  # it forks
    assert ended.returncode == 0, ended.stderr
    check_harmless(ended.stdout + ended.stderr, "sweep")
    return folder


def change(path, **values):
    """Give entries of a file of JSON or YAML other values."""
    read, write = (json.loads, json.dumps) if path.suffix == ".json" else (yaml.safe_load, yaml.safe_dump)
    path.write_text(write(read(path.read_text(encoding="utf-8")) | values), encoding="utf-8")


def write_odd_names(folder):
    """Put odd names wherever a run folder has one."""
    numbers = {"mean": 0.5, "worst": 0.5, "step_size": 1.0, "samples": 1, "bytes": 1, "seconds": 1.0}
    rows = [{"method": method, "clients": [0.5, 0.6], **numbers} for method in ("federated", "local")]
    words = {"metric": f"accuracy{ODD}", "tests": ODD, "names": [ODD, ODD], "notes": [[ODD, ODD]]}
    baselines = {"pending": False, "runs": {}, "rows": rows, **words}
    (folder / "baselines.json").write_text(json.dumps(baselines))
    (folder / "diverged.txt").write_text(ODD)
    change(folder / "clients.json", names=[ODD, ODD])
    change(folder / "model.json", task=ODD)
    paper = {"source": ODD, "printed": {"accuracy": {"fafed": ODD}}, "methods": {"fafed": {"momentum": ODD}}}
    change(folder / "settings.yaml", paper=paper, track=ODD)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    more = {"round": 3, f"accuracy{ODD}": 1.0, "tables": {"confusion": {"classes": [ODD] * 3, "values": [[1] * 3] * 3}}}
    more |= {"cases": {"classes": [ODD] * 3, "values": [[1, 2, 0]] * 2}, "clients": {f"f1{ODD}": [0.5, 0.6]}}
    (folder / "metrics.jsonl").write_text("\n".join([*lines, json.dumps({**json.loads(lines[-1]), **more})]) + "\n")


def through(door):
    """Whether a door let something through; not if it refused it in a line."""
    function, words = DOORS[door]
    try:
        function(words.split())
    except (UserError, Diverged) as error:
        print(error)
        return False
    except SystemExit as error:
        assert error.code in (0, 2)
        return not error.code
    return True


def check_harmless(text, place):
    found = sorted({letter for letter in text if not letter.isprintable() and letter not in "\n\r"})
    assert not found, f"{place}: {found}"
    forged = [line for line in text.replace("\r", "\n").split("\n") if line.lstrip(" |-:").startswith(FORGED)]
    assert not forged, f"{place}: {forged}"


@pytest.mark.rarely
@pytest.mark.parametrize("names", ["plain", "odd"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.filterwarnings("ignore")
def test_what_a_terminal_obeys_comes_through_no_door(base, tmp_path, monkeypatch, capfd, door, names):
    """`names`: of the run folder besides those that it has from its data."""
    if names == "odd" and door.partition(" ")[0] in ("train", "prepare", "show", "list", "partition"):
        pytest.skip("reads no run folder")
    folder = tmp_path / "place"
    shutil.copytree(base, folder)
    monkeypatch.chdir(folder)
    for run_folder in (folder / "it", *(folder / "sweep").glob("*/")) if names == "odd" else ():
        if (run_folder / "metrics.jsonl").is_file():
            write_odd_names(run_folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    capfd.readouterr()
    is_through = through(door)
    printed = "".join(capfd.readouterr())
    check_harmless(printed, door)
    refused = ("prepare images", "prepare LEAF") if names == "plain" else ("--resume", "--config")
    assert is_through == (door not in refused), printed
    for path in (path for pattern in WRITTEN for path in folder.glob(pattern)):
        if before.get(path) != path.stat().st_mtime_ns:
            check_harmless(path.read_text(encoding="utf-8"), path.name)


CODE = ["payload.Net", "payload:Net", "payload", "it.payload.Net", "it/payload.py", "it/payload.py:Net"]
PLACES = [
    "model", "model.name", "Model", "model.hidden", "task", "task.name", "task.metrics", "Task.Metrics",
    "task.transform", "task.data", "algorithm", "algorithm.schedule", "oracle", "partition", "aggregation", "stages",
    "stages.clip.name", "track", "init", "paper", "data",
]  # fmt: skip
PAYLOAD = """
import pathlib
pathlib.Path(__file__).with_name("ran").touch()
from torch import nn
class Net(nn.Linear):
    pass
"""


def name_code(folder, draw):
    """Name code of the folder in one to three places of its settings and its description of the model."""
    settings = yaml.safe_load((folder / "settings.yaml").read_text(encoding="utf-8"))
    for place in draw.sample(PLACES, draw.randint(0, 2)):
        group, _, name = place.partition(".")
        code = draw.choice([draw.choice(CODE), [draw.choice(CODE)], f"f1, {CODE[0]}", {"name": CODE[0]}])
        if name:
            inner = settings.get(group)
            settings[group] = {**(inner if isinstance(inner, dict) else {"name": inner}), name: code}
        else:
            settings[group] = code
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    net = {"class": draw.choice(CODE), "arguments": {"in_features": 3, "out_features": 3}}
    about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    about["model"] = draw.choice([net, about["model"], {**about["model"], "arguments": {"shape": net}}])
    about |= draw.choice(
        [{}, {"task": CODE[0]}, {"architecture": {"": [CODE[0], {}, "0"]}}, {"columns": {"columns": CODE[0]}}]
    )
    (folder / "model.json").write_text(json.dumps(about), encoding="utf-8")


@pytest.mark.parametrize("door", READING)
@pytest.mark.parametrize("seeds", FEW_SEEDS)
@pytest.mark.filterwarnings("ignore")
def test_code_that_only_a_folder_names_is_run_through_no_door(base, tmp_path, monkeypatch, seeds, door):
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path, tmp_path / "it"):
        monkeypatch.syspath_prepend(place)  # what `python -m` does in the folder itself
    for seed in seeds:
        draw = random.Random(f"{door} {seed}")
        shutil.copytree(base, tmp_path, dirs_exist_ok=True)
        for folder in [tmp_path / "it", *(path.parent for path in (tmp_path / "sweep").glob("*/model.json"))]:
            (folder / "payload.py").write_text(PAYLOAD)
            name_code(folder, draw)
        through(door)
        assert not [*tmp_path.rglob("ran")], (seed, (tmp_path / "it" / "settings.yaml").read_text())


def test_code_of_a_folder_is_run_if_the_user_trusts_it(base, tmp_path, monkeypatch):
    """Else the test above would pass whatever the doors do."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "it")
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    (tmp_path / "it" / "payload.py").write_text(PAYLOAD)
    change(tmp_path / "it" / "settings.yaml", model="payload.Net")
    assert not through("evaluate") and not (tmp_path / "it" / "ran").exists()
    with pytest.raises(UserError):
        evaluate(["it", "--threads", "1", "--import", "payload"], SoloLink())
    assert (tmp_path / "it" / "ran").exists()
    sys.modules.pop("payload")
