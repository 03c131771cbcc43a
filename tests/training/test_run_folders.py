"""What fedmpi did not make is there after every run, bit for bit, and what it made is renamed or listed by name."""

import os
import pathlib
import random
import re
import shutil
import signal
import threading
import time

import pytest
import torch
from trees import image, plant, snapshot

from fedmpi.comm.solo import SoloLink
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import make_folder
from fedmpi.ground.files.run_files import find_checkpoints, is_complete
from fedmpi.runs import lock
from fedmpi.runs.checkpoints.files import remove_state, write_state
from fedmpi.runs.folder import read_records
from fedmpi.runs.recorder import Recorder
from fedmpi.training.config import read_command_line
from fedmpi.training.loop import train as train_here

SHORT = "--task quadratic --clients 2 --local-steps 1 --algorithm scaffold --threads 1"
SEEDS = [pytest.param(range(40), id="short"), pytest.param(range(40, 1500), id="long", marks=pytest.mark.slow)]
NAMES = [
    "thesis.txt", "settings.yaml", "metrics.jsonl", "model.safetensors", "model.pt", "kept.h5", "diverged.txt", "notes",
    "checkpoints", "000003", "000099", "server.safetensors", "client-0000.safetensors", "manifest.json",
    "it.old-1", ".fedmpi", ".lock",
    "settings.yaml.part", "models", "tensorboard", "é ü", "a" * 200, "-rf", "old-1", ".hidden", "manifest.json.part",
]  # fmt: skip


def go(words):
    return train_here(read_command_line(f"{SHORT} {words}".split()), SoloLink()).folder


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(lock, "OUTLIVES", 0.05)


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """Folders of runs in every state: name -> path."""
    out = tmp_path_factory.mktemp("states")
    usual, found = Recorder.round, {}

    def killed(recorder, record, metrics):
        usual(recorder, record, metrics)
        if record["round"] == 3:
            raise KeyboardInterrupt

    go(f"--out {out} --name complete --rounds 4 --checkpoint-every 1")
    for name, words in {"begun": "", "resumable": "--checkpoint-every 1"}.items():
        Recorder.round = killed
        try:
            with pytest.raises(KeyboardInterrupt):
                go(f"--out {out} --name {name} --rounds 4 {words}")
        finally:
            Recorder.round = usual
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
    for name in ("complete", "begun", "resumable"):
        shutil.copytree(out / name, out / f"unmarked {name}")
        for path in [*(out / f"unmarked {name}").rglob(".fedmpi"), out / f"unmarked {name}" / ".lock"]:
            path.unlink()
    found = {path.name: path for path in out.iterdir()}
    assert len(found) == 6 and not find_checkpoints(found["begun"])
    return found


# What a run writes or removes in its own folders; files of these names are its own there.
OWN = {
    "settings.yaml": ("model.safetensors", "diverged.txt", "settings.yaml.part"),
    "../../checkpoints": ("manifest.json", "manifest.json.part", "server.safetensors", "client-0000.safetensors"),
}


def is_own(folder, name):
    return any(name in names for beside, names in OWN.items() if (folder / beside).exists())


@pytest.mark.parametrize("seeds", SEEDS)
def test_foreign_files_survive_every_run(states, tmp_path, seeds, capsys):
    ends = {"done": 0, "refused": 0}
    for seed in seeds:
        draw, out = random.Random(seed), tmp_path / str(seed)
        outside = out / "outside"
        outside.mkdir(parents=True)
        (outside / "file").write_text("another user's")
        it, state = out / "it", draw.choice(["missing", "file", "foreign", "link", *states, *states])
        if state in states:
            shutil.copytree(states[state], it)
            places = [it, *(path for path in it.rglob("*") if path.is_dir())]
        elif state == "link":
            shutil.copytree(states[draw.choice([*states])], outside / "run")
            it.symlink_to(outside / "run")
            places = [outside, outside / "run"]
        elif state == "foreign":
            it.mkdir()
            places = [it]
        else:
            places = [out]
            if state == "file":
                it.write_text("a file")
        spoiled = [place for place in places if draw.random() < 0.6]
        planted = [path for place in spoiled for path in plant(draw, place, outside, NAMES, is_own)]
        planted += [
            path
            for path in (out / "it.old-1", out / "it.old-2")
            if not os.path.lexists(path) and draw.random() < 0.3 and make(draw, path)
        ]
        before = {path: image(path) for path in [*planted, outside / "file"]}
        untouched = snapshot(it) if state.startswith("unmarked") or state in ("foreign", "file", "link") else None
        words = draw.choice(["--resume auto", "--resume auto", "", "--resume"])
        words = f"--resume {it}" if words == "--resume" else f"--out {out} --name it {words}"
        holder = lock.RunLock(it) if state in states and draw.random() < 0.15 and "lock" not in str(planted) else None
        try:
            go(f"{words} --rounds {draw.choice([4, 6])} --checkpoint-every {draw.choice([1, 3])}")
            ends["done"] += 1
            assert is_complete(it) and holder is None
        except UserError as error:
            ends["refused"] += 1
            assert 5 < len(str(error)) < 2000 and "\n" not in str(error)
        finally:
            if holder is not None:
                holder.release()
        moved = [aside for aside in out.glob("it.old-*") if (aside / ".lock").exists()]
        for path, was in before.items():
            now = [path, *(aside / path.relative_to(it) for aside in moved if path.is_relative_to(it))]
            assert any(os.path.lexists(one) and image(one) == was for one in now), f"seed {seed}, {state}: {path}"
        if untouched and len(untouched) > 1 and state != "link":
            now = snapshot(it)
            lockfile = pathlib.Path(".lock")
            assert {**now, lockfile: 0} == {**untouched, lockfile: 0}, seed
    assert min(ends.values()) > len(seeds) / 10, ends


def make(draw, path):
    return draw.choice([path.mkdir, path.touch, lambda: path.symlink_to("/nowhere")])() is None


@pytest.mark.parametrize("state", ["complete", "begun", "resumable"])
@pytest.mark.parametrize("words", ["--out {0} --name it --resume auto", "--resume {0}/it"])
def test_a_folder_without_its_mark_is_refused_and_stays(states, tmp_path, state, words):
    shutil.copytree(states[f"unmarked {state}"], tmp_path / "it")
    before = snapshot(tmp_path / "it")
    with pytest.raises(UserError, match="contains no |is not empty, and fedmpi did not make it"):
        go(f"{words.format(tmp_path)} --rounds 6")
    assert snapshot(tmp_path / "it") == before


@pytest.mark.parametrize("harm", ["emptied", "gone", "a file", "a link"])
def test_a_run_whose_checkpoints_cannot_be_seen_is_not_begun_anew(states, tmp_path, harm):
    folder = tmp_path / "it" / "checkpoints"
    shutil.copytree(states["resumable"], tmp_path / "it")
    folder.rename(tmp_path / "elsewhere")
    {"emptied": folder.mkdir, "gone": lambda: 0, "a file": folder.touch,
     "a link": lambda: folder.symlink_to("../elsewhere")}[harm]()  # fmt: skip
    before = snapshot(tmp_path)
    expected = {"a file": "Not a directory", "a link": "is a symbolic link"}.get(harm, "none can be seen now")
    with pytest.raises(UserError, match=expected):
        go(f"--out {tmp_path} --name it --resume auto --rounds 4")
    assert snapshot(tmp_path) == before


def test_runs_may_share_a_folder_for_their_clients_states(tmp_path, capsys):
    words = f"--checkpoint-every 1 --checkpoint-clients {tmp_path}/states/{{client}} --rounds 3 --seed"
    for seed, name in enumerate("ab"):
        go(f"--out {tmp_path} --name {name} {words} {seed}")
    shutil.copytree(tmp_path / "a", tmp_path / "c")  # a copy is a run of its own, and finds the state of the first
    for name in "cab":
        go(f"--resume {tmp_path / name} --rounds 5")
    errors = capsys.readouterr().err
    assert "damaged" not in errors
    for seed, name in enumerate("aba"):
        go(f"--out {tmp_path} --name whole-{name}{seed} --rounds 5 --seed {'ab'.index(name)}")
        ends = [
            read_records(tmp_path / run / "metrics.jsonl")[0][-1]["loss"]
            for run in ("abc"[seed], f"whole-{name}{seed}")
        ]
        assert ends[0] == ends[1]
    assert len(list((tmp_path / "states" / "0").iterdir())) == 3


def job(words):
    """Train in a forked process; returns its number. Exit code 0: done, 2: refused."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        go(words)
        code = 0
    except UserError as error:
        os.write(2, f"refused: {error}\n".encode())
        code = 2
    finally:
        os._exit(code)


@pytest.mark.alone
@pytest.mark.parametrize("number", [pytest.param(12, id="short"), pytest.param(50, id="50", marks=pytest.mark.slow)])
def test_two_jobs_of_one_name(tmp_path, number, capfd):
    draw = random.Random(number)
    for attempt in range(number):
        folder = tmp_path / str(attempt) / "it"
        words = f"--out {folder.parent} --name it --resume auto --rounds 40 --checkpoint-every {draw.choice([7, 1000])}"
        if draw.random() < 0.4:  # a begun run is there already
            begun = job(words)
            time.sleep(draw.uniform(0, 0.3))
            os.kill(begun, signal.SIGKILL)
            os.waitpid(begun, 0)
        first = job(words)
        time.sleep(draw.uniform(0, 0.5))
        second = job(words)
        codes = sorted(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in (first, second))
        errors = capfd.readouterr().err
        assert codes in ([0, 2], [0, 0]), errors  # both: the second came when the first had ended
        assert ("refused: run folder" in errors) == (codes == [0, 2]), errors
        assert is_complete(folder) and [one["round"] for one in read_records(folder / "metrics.jsonl")[0]][-1] == 40
        assert [*range(1, 41)] == [one["round"] for one in read_records(folder / "metrics.jsonl")[0]]
        leftovers = [path.name for path in pathlib.Path(folder.parent).iterdir() if not path.name.startswith("it")]
        assert not [name for name in leftovers if not name.endswith(".new")], leftovers


FILES = (
    ".fedmpi", ".lock", "settings.yaml", "metrics.jsonl", "model.safetensors", "model.h5", "model.h5.part",
    "model.json", "clients.json", "data.json", "partition.h5", "diverged.txt", "kept.h5", "roc.csv", "attack.png",
    "crossed.json",
    "models", "models/client_0.safetensors", "checkpoints/000004/server.safetensors",
    "checkpoints/000004/client-0001.safetensors",
    "checkpoints/000004/manifest.json",
)  # fmt: skip


CHANGED = (".lock", "metrics.jsonl", "data.json", "settings.yaml.part", "model.h5.part")  # where they are


@pytest.mark.parametrize("kind", ["link", "pipe", "device", "hard link"])
def test_a_run_folder_with_links_pipes_or_devices_is_not_resumed(states, tmp_path, kind):
    outside = tmp_path / "outside"
    outside.write_text("another user's")
    for number, name in enumerate(CHANGED if kind == "hard link" else FILES):
        path = tmp_path / str(number) / name
        shutil.copytree(states["complete"], tmp_path / str(number))
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "hard link":
            os.link(outside, path)
        else:
            path.symlink_to(outside if kind == "link" else "/dev/zero")
        with pytest.raises(UserError, match=re.escape(path.name) if name != "settings.yaml" else "settings.yaml"):
            go(f"--resume {tmp_path / str(number)} --rounds 6")
        assert outside.read_text() == "another user's"


def test_a_backup_by_hard_links_keeps_its_checkpoint(tmp_path):
    path, backup = tmp_path / "it" / "client-0001.safetensors", tmp_path / "backup.safetensors"
    make_folder(tmp_path / "it", "checkpoint")
    write_state(path, {"x": torch.zeros(3)})
    os.link(path, backup)
    before = backup.read_bytes()
    write_state(path, {"x": torch.ones(3)})
    assert before == backup.read_bytes() != path.read_bytes()


def test_a_clients_file_goes_with_its_folder(tmp_path):
    folder = tmp_path / "it"
    make_folder(folder, "checkpoint")
    for client in (0, 1):
        (folder / f"client-000{client}.safetensors").touch()
    remove_state(folder / "client-0000.safetensors")
    assert sorted(os.listdir(folder)) == [".fedmpi", "client-0001.safetensors"]
    remove_state(folder / "client-0001.safetensors")
    assert not folder.exists()
