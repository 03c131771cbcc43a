"""What fedmpi did not make is there after each program, bit for bit, whatever is at the paths that it writes."""

import json
import os
import random
import re
import shutil

import h5py
import numpy as np
import pytest
import yaml
from safetensors.torch import save_file
from test_predict import IMAGES, TENSORS, description
from test_report import make_run
from tiny import TINY
from trees import image, plant, put, snapshot

from fedmpi.cli.bench.results import BenchResults
from fedmpi.cli.predict.__main__ import main as predict
from fedmpi.cli.report.__main__ import main as report
from fedmpi.cli.sweep.__main__ import main as sweep
from fedmpi.comm.job.single import run_single
from fedmpi.prepare.__main__ import main as data
from reproduction import __main__ as reproduce_program

KINDS = ["file", "file", "read-only file", "folder", "link", "link", "hard link", "device", "pipe"]
BESIDE = ["notes.txt", "best.yaml", ".fedmpi.1", "page", "old-1", "é ü", "-rf", ".hidden.png", "x.part", "seed=9"]


def bench(words):
    """What `fedmpi bench` does before and after it measures."""
    run_single(_write_results, words)


def _write_results(words):
    results = BenchResults({"date": "today"}, False)
    results.record("part/name", 1.5)
    results.check_writable(words[1])
    results.write(words[1])


def reproduce(words):
    run_single(reproduce_program._run, words)  # without its signal handlers


GRID = "--grid seed=0,1 --task quadratic --clients 2 --rounds 2 --holdout 0 --metric loss --threads 1 --out sweep"
# Program -> (its function, commands in a folder beside `given`, the first of which makes most of its files).
PROGRAMS = {
    "report": (report, [
        "../given/runs --axis round --metric accuracy --out page.html",
        "../given/runs --axis round --out page --format pdf",
        "../given/runs --axis round --metric accuracy --out page.html --watch 0.1",
    ]),
    "sweep": (sweep, [GRID, f"{GRID} --emit-slurm job.sh", f"{GRID} --table", f"{GRID} --todo"]),
    "search": (sweep, [f"{GRID} --search random --range local_steps=1:9 --trials 2".replace("--grid seed=0,1", "")]),
    "partition": (data, [
        "partition digits --clients 2 --plot plot.png --write silo_{client}.h5",
        "partition digits --clients 2 --plot plot --write silo_{client}.h5",
        "partition digits --clients 2 --plot plot.svg",
        "partition ../given/text.h5 --task language --clients 2 --plot plot.png --write silo_{client}.h5",
    ]),
    "prepare": (data, [
        "prepare it --from ../given/it.csv --data-dir data --columns columns.json --force",
        "prepare it --from ../given/it.csv --data-dir data --columns columns.json",
        "prepare it --from ../given/it.npz --data-dir data --force",
    ]),
    "bench": (bench, ["--json b.json"]),
    "predict": (predict, ["../given/model ../given/samples.npz --out out.csv"]),
    "reproduce": (reproduce, [
        "../given/tiny.yaml --seeds 0 --out runs --results results", "../given/tiny.yaml --pages --results results",
        "../given/tiny.yaml --seeds 1 --out runs --results results --add",
        "../given/tiny.yaml --seeds 0 --out runs --results results --emit-slurm job.sh",
        "../given/tiny.yaml --seeds 0 --out runs --results results --tune",
    ]),
}  # fmt: skip
NUMBERS = {"report": 12, "sweep": 25, "search": 12, "reproduce": 4, "partition": 20, "bench": 60, "prepare": 40}
CASES = [
    pytest.param(name, range(number), id=f"{name}-short") for name in PROGRAMS for number in [NUMBERS.get(name, 25)]
] + [
    pytest.param(name, range(100, 400 if name == "reproduce" else 1000), id=f"{name}-long", marks=pytest.mark.slow)
    for name in PROGRAMS
]


def go(program, words, folder, monkeypatch):
    """The exit code of a program, run in a folder of this process."""
    monkeypatch.chdir(folder)
    try:
        program(words.split())
    except SystemExit as error:
        return error.code
    return 0


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """What the programs read."""
    folder = tmp_path_factory.mktemp("foreign") / "given"
    for seed in (0, 1):
        make_run(folder / "runs" / f"fedavg-{seed}", "fedavg", seed, rounds=4)
    grid = {"grids": {"FedAvg": {"algorithm.step_size": [0.1]}, "FAFED": {"algorithm.step_size": [0.1]}}}
    tune = grid | {"panel": "quadratic", "metric": "train_loss", "full": {}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY | {"tune": tune}))
    (folder / "it.csv").write_text("a,b,label\n" + "1,2,0\n3,4,1\n" * 10)
    with h5py.File(folder / "text.h5", "w") as file:
        file["train/text"] = file["test/text"] = np.frombuffer(b"a few words, and some more " * 20, np.uint8)
    (folder / "model").mkdir()
    save_file(TENSORS, folder / "model" / "model.safetensors")
    (folder / "model" / "model.json").write_text(json.dumps(description()))
    np.savez(folder / "samples.npz", x=IMAGES)
    np.savez(folder / "it.npz", x=np.arange(64.0).reshape(16, 4), y=np.arange(16) % 2)
    return folder


@pytest.fixture(scope="module")
def make(given):
    """A function: the folder beside `given` with what a program's first command makes there."""

    def made(name):
        folder, (program, commands) = given.parent / name, PROGRAMS[name]
        if not folder.exists():
            folder.mkdir()
            with pytest.MonkeyPatch.context() as monkeypatch:
                assert go(program, commands[0], folder, monkeypatch) == 0, name
        return folder

    return made


def spoil(draw, folder, outside, outputs):
    """Put foreign things at some of the paths that a program writes, and beside them; returns their paths."""
    planted = []
    for path in draw.sample(outputs, min(len(outputs), draw.choice([0, 1, 1, 2]))):
        kind = draw.choice(KINDS)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif os.path.lexists(path):
            path.unlink()
        if path.parent.is_dir() and not any(parent.is_symlink() for parent in (path.parent, path.parent.parent)):
            put(draw, path, kind, outside)
            if kind == "folder":
                planted += plant(draw, path, outside, BESIDE)
            planted.append(path)
    for place in [folder, *(path for path in outputs if path.is_dir() and not path.is_symlink())]:
        if draw.random() < 0.3:
            planted += plant(draw, place, outside, BESIDE)
    return planted


def check_ended(code, errors, words):
    """Check that a program ended well, or with one line."""
    # A sweep's forked run prints its line here, and not into its log, because pytest has replaced sys.stderr.
    aside = "fedmpi: (left out|error: in round|error: run .*: it printed nothing)"
    lines = [line for line in errors.splitlines() if not re.match(aside, line)]
    assert code in (0, 2) and all(line.startswith("fedmpi: ") for line in lines), f"{words}\n{errors}"
    assert sum(line.startswith("fedmpi: error: ") for line in lines) == (code == 2), f"{words}\n{errors}"


@pytest.mark.rarely("fedmpi", "reproduction", "slurm")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "seeds"), CASES)
def test_foreign_files_survive_every_program(given, make, tmp_path, monkeypatch, capfd, name, seeds):
    (program, commands), made = PROGRAMS[name], make(name)
    names = sorted(path.relative_to(made) for path in made.rglob("*"))
    ends = []
    for seed in seeds:
        draw, place, outside = random.Random(f"{name} {seed}"), tmp_path / f"{seed}", tmp_path / f"{seed}" / "outside"
        folder = place / "it"
        outside.mkdir(parents=True)
        (place / "given").symlink_to(given)
        (outside / "file").write_text("another user's")
        if draw.random() < 0.7:
            shutil.copytree(made, folder)
        else:
            folder.mkdir()
            for path in names:
                if draw.random() < 0.3 and (made / path).is_dir():
                    (folder / path).mkdir(parents=True, exist_ok=True)
        planted = spoil(draw, folder, outside, [folder / path for path in names])
        before = {path: image(path) for path in [*planted, outside / "file"] if os.path.lexists(path)}
        untouched = snapshot(given)
        words = draw.choice(commands)
        ends.append(go(program, words, folder, monkeypatch))
        check_ended(ends[-1], capfd.readouterr().err, f"seed {seed}: {name} {words}")
        for path, was in before.items():
            aside = [one / path.relative_to(one.with_suffix("")) for one in folder.rglob("*.old-*")
                     if path.is_relative_to(one.with_suffix(""))]  # fmt: skip
            now = [one for one in (path, *aside) if os.path.lexists(one)]
            assert any(image(one) == was for one in now), f"seed {seed}: {name} {words}: {path}"
        assert snapshot(given) == untouched
        left = [path.name for path in folder.rglob(".*") if re.match(r"\.[0-9a-f]{16}", path.name)]
        assert not left, f"seed {seed}: {name} {words}: {left}"
        shutil.rmtree(place)
    assert {0, 2} == {*ends} or len(ends) < 10, ends
