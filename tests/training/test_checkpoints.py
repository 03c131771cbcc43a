"""Checkpoints: what goes on from files has the bits of an unbroken run; damage, full disks and signals lose nothing."""

import contextlib
import errno
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import time
import types

import final_rows
import h5py
import numpy as np
import pytest
import torch
from dies import check_checkpoints, outcome
from helpers import PROGRAMS, disk_of, launchers, ranks_of, running, start, train, wait_for
from safetensors import safe_open

import fedmpi.algorithms
import fedmpi.runs.checkpoints.writer
import fedmpi.tasks
from fedmpi.algorithms import Algorithm
from fedmpi.comm.job.signals import StopSignals, stopping_signal
from fedmpi.comm.solo import SoloLink
from fedmpi.federation.rounds import Federation
from fedmpi.federation.rows import RowStore
from fedmpi.ground.errors import Diverged, Stopped, UserError
from fedmpi.ground.files.run_files import find_checkpoints
from fedmpi.ground.registry import known
from fedmpi.ground.settings import roles
from fedmpi.runs import lock
from fedmpi.runs.checkpoints.files import read_manifest, remove_checkpoints, write_manifest
from fedmpi.runs.folder import outcome as state_of_run
from fedmpi.runs.folder import read_records
from fedmpi.runs.recorder import Recorder
from fedmpi.tasks.auc import LoadedAUC
from fedmpi.tasks.base import BaseTask
from fedmpi.tasks.classification import LoadedClassification
from fedmpi.training import parts
from fedmpi.training.build import prepare
from fedmpi.training.config import read_command_line
from fedmpi.training.evaluation import Evaluation
from fedmpi.training.loop import _stop as stop_run
from fedmpi.training.loop import train as train_here

SHORT = "--clients 4 --local-steps 3 --rounds 5 --eval-every 1 --device cpu"
TOY = "--task quadratic --clients 2 --local-steps 1 --algorithm scaffold --dtype float64"


def go(out, words):
    """Train in this process; returns the run folder."""
    words = f"--threads 1 {words}".split()
    words = words if "--resume" in words else [*words, "--out", str(out)]
    return train_here(read_command_line(words), SoloLink()).folder


def stop(monkeypatch, out, words, number):
    """Train until a signal stops the run after round `number`."""
    usual = Recorder.round

    def with_signal(recorder, record, metrics):
        usual(recorder, record, metrics)
        if record["round"] == number - 1:
            signal.raise_signal(signal.SIGUSR1)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "round", with_signal)
        with pytest.raises(Stopped, match=rf"^stopped after round {number} by SIGUSR1; to continue: --resume \S+$"):
            go(out, words)


def kill(monkeypatch, out, words, number):
    """Train until the process ends, as far as one process can show it, after the record of round `number`."""
    usual = Recorder.round

    def killed(recorder, record, metrics):
        usual(recorder, record, metrics)
        if record["round"] == number:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Recorder, "round", killed)
        go(out, words)


def check_resumes(monkeypatch, out, settings):
    go(out, f"{settings} --name whole")
    stop(monkeypatch, out, f"{settings} --name parts", 3)
    assert not (out / "parts" / "model.safetensors").exists()
    go(out, f"--resume {out / 'parts'}")
    assert outcome(out / "parts") == outcome(out / "whole")


@pytest.mark.rarely
@pytest.mark.parametrize("name", known(fedmpi.algorithms, Algorithm))
def test_every_algorithm_resumes_to_the_same_bits(tmp_path, monkeypatch, name):
    task = "saddle_quadratic" if name in ("coda", "codasca") else "classification"
    check_resumes(monkeypatch, tmp_path, f"{SHORT} --participation 0.75 --task {task} --algorithm {name}")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "runs").mkdir()
    final_rows.make_files(folder)
    shutil.copy(folder / "images.h5", folder / "masks.h5")
    with h5py.File(folder / "masks.h5", "a") as file:
        for split in ("train", "test"):
            file[f"{split}/masks"] = np.zeros(file[f"{split}/images"].shape[:3], np.uint8)
    go(folder / "runs", f"{SHORT} --name classifier --algorithm fedavg --data {folder}/images.h5 --model mlp")
    return folder


def test_private_and_frozen_layers_resume_to_the_same_bits(tmp_path, monkeypatch, files):
    common = f"{SHORT} --data {files}/images.h5 --algorithm fafed --model mlp --init {files}/runs/classifier"
    check_resumes(monkeypatch, tmp_path, f"{common} --freeze 1.bias --private 3")


@pytest.mark.parametrize("task", final_rows.TASKS)
def test_every_task_resumes_to_the_same_bits(tmp_path, monkeypatch, files, task):
    settings = final_rows.TASKS[task].replace("FOLDER", str(files))
    usual = SHORT.replace("--clients 4 ", "") if "--clients 3" in settings else SHORT
    check_resumes(monkeypatch, tmp_path, f"{usual} {settings}")


# task -> its settings, the files that it reads
DATA_FILES = {
    "classification": (final_rows.TASKS["classification-images"], ["images.h5"]),
    "auc": ("--task auc --data FOLDER/images.h5 --model mlp", ["images.h5"]),
    "attack": (final_rows.TASKS["attack"], ["images.h5", "runs/classifier/model.h5"]),
    "language": (final_rows.TASKS["language"], ["text.h5"]),
    "segmentation": (
        "--task segmentation --data FOLDER/masks.h5 --model torch.nn.Conv2d --model.in_channels 1 "
        "--model.out_channels 10 --model.kernel_size 1",
        ["masks.h5"],
    ),
}


@pytest.mark.parametrize("task", DATA_FILES)
def test_every_data_file_is_accounted_for(files, task):
    settings, names = DATA_FILES[task]
    words = f"--clients 2 --threads 1 {settings}".replace("FOLDER", str(files)).split()
    job = prepare(read_command_line(words), SoloLink())
    assert job.task.data_files() == [files / name for name in names]


def test_all_tasks_with_data_files_are_here():
    reading = {name for name, cls in known(fedmpi.tasks, BaseTask).items() if {"data", "classifier"} & {*roles(cls)}}
    assert reading == {*DATA_FILES}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A finished run of 6 rounds with checkpoints after 2, 4 and 6, of which two are kept; no test changes it."""
    out = tmp_path_factory.mktemp("toy")
    go(out, f"{TOY} --rounds 6 --checkpoint-every 2 --name it")
    return out / "it"


@pytest.fixture
def run(toy, tmp_path):
    """A copy of it to go on with."""
    shutil.copytree(toy, tmp_path / "it")
    return tmp_path / "it"


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    """The outcome of an unbroken run of 8 rounds."""
    return outcome(go(tmp_path_factory.mktemp("longer"), f"{TOY} --rounds 8 --eval-every 1"))


@pytest.mark.always
def test_what_a_checkpoint_consists_of(toy):
    assert find_checkpoints(toy) == [6, 4]
    folder = toy / "checkpoints" / "000006"
    assert sorted(path.name for path in folder.iterdir()) == [
        ".fedmpi", "client-0000.safetensors", "client-0001.safetensors", "manifest.json", "server.safetensors",
    ]  # fmt: skip
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["round"], [*manifest["clients"]]) == (6, ["0", "1"])
    assert manifest["settings"]["algorithm"]["name"] == "scaffold" and manifest["versions"]["torch"]
    with safe_open(folder / "client-0001.safetensors", "pt") as file:
        assert file.keys() == ["clients/1/rows/c_i"]
        assert json.loads(file.metadata()["numbers"])["clients/1/num_draws"] == 6
    with safe_open(folder / "server.safetensors", "pt") as file:
        names = {*file.keys(), *json.loads(file.metadata()["numbers"])}
    assert {"server/x", "server/c", "federation/round_index"} <= names
    assert not [name for name in names if name.startswith("clients/")]  # private rows stay with their client


@pytest.mark.always
def test_a_finished_run_is_complete_and_takes_more_rounds(run, longer, capsys):
    before = (run / "metrics.jsonl").read_bytes()
    go(None, f"--resume {run}")
    assert capsys.readouterr().out == f"{run}: the run is complete after 6 rounds; a larger --rounds continues it\n"
    assert (run / "metrics.jsonl").read_bytes() == before
    go(None, f"--resume {run} --rounds 8 --eval-every 1")
    rows, records = outcome(run)
    assert rows == longer[0] and [record["round"] for record in records] == list(range(1, 9))
    assert (run / "metrics.jsonl").read_bytes().startswith(before)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for clock in ("seconds", "local_seconds", "communication_seconds", "evaluation_seconds"):
        times = [record[clock] for record in records]
        assert times == sorted(times) and times[0] < times[-1], clock
    assert "rounds: 8" in (run / "settings.yaml").read_text() and "resume: null" in (run / "settings.yaml").read_text()


def test_patience_counts_across_a_stop(tmp_path, monkeypatch):
    """Steps that change no accuracy: the first evaluation is the best, and the third worse one ends the run."""
    settings = "--algorithm fedavg --algorithm.step_size 1e-9 --clients 2 --rounds 9 --eval-every 1 --patience 3"
    stop(monkeypatch, tmp_path, f"{settings} --name it", 2)
    go(tmp_path, f"--resume {tmp_path / 'it'}")
    assert len((tmp_path / "it" / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_run_that_ended_early_is_complete(tmp_path, capsys):
    folder = go(tmp_path, f"{TOY} --rounds 9 --eval-every 1 --stop round>=5")
    before = (folder / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    go(None, f"--resume {folder}")
    assert capsys.readouterr().out == f"{folder}: the run is complete after 5 rounds; a larger --rounds continues it\n"
    assert (folder / "metrics.jsonl").read_bytes() == before and (folder / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("owner", "name", "settings", "last"),
    [
        (parts, "save_clients", "--algorithm fedavg --model mlp --private 3", "models/client_3.safetensors"),
        (LoadedAUC, "write_result", "--algorithm coda --task auc", "roc.csv"),
    ],
)
def test_a_run_that_is_killed_while_it_saves_is_not_complete(tmp_path, monkeypatch, owner, name, settings, last):
    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, killed)
        go(tmp_path, f"{SHORT} {settings} --checkpoint-every 2 --name it")
    go(None, f"--resume {tmp_path / 'it'}")
    assert (tmp_path / "it" / last).is_file() and (tmp_path / "it" / "model.safetensors").is_file()


def test_evaluations_that_choose_the_result_must_agree(tmp_path):
    folder = go(tmp_path, f"{TOY} --rounds 2 --eval-every 1 --result best")
    with pytest.raises(UserError, match="the run has other settings: eval_every was 1, now 2; give"):
        go(None, f"--resume {folder} --rounds 4 --eval-every 2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--algorithm.step_size 0.3 --seed 1",
            "the run has other settings: algorithm.step_size was 0.1, now 0.3, seed was 0, now 1",
        ),
        ("--clients 3", "clients was 2, now 3"),
        ("--rounds 4", "rounds = 4, but the run has already completed 6 rounds"),
        ("--name other", "the run continues in that folder; leave --out and --name out"),
    ],
)
def test_settings_that_do_not_fit_give_one_line(run, words, message):
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=re.escape(message)) as error:
        go(None, f"--resume {run} {words}")
    assert "\n" not in str(error.value) and str(error.value).startswith(f"resume = {run}: ")
    assert (run / "metrics.jsonl").read_bytes() == before and (run / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [(Federation, "start", 1), (RowStore, "begin_turn", 7), (Evaluation, "__call__", 1)],
    ids=["at the start", "within a round", "in an evaluation"],
)
def test_a_signal_at_any_time_stops_the_run_in_order(tmp_path, monkeypatch, longer, owner, name, number):
    words, calls, usual = f"{TOY} --rounds 8 --eval-every 1 --name it", itertools.count(1), getattr(owner, name)

    def with_signal(*arguments, **options):
        if next(calls) == number:
            signal.raise_signal(signal.SIGTERM)
        return usual(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, with_signal)
        with pytest.raises(Stopped, match=r"^stopped after round \d by SIGTERM; to continue: --resume \S+$"):
            go(tmp_path, words)
    go(None, f"--resume {tmp_path / 'it'}")
    assert outcome(tmp_path / "it") == longer


@pytest.mark.parametrize("recorder", [None, object()])
def test_all_ranks_say_how_a_run_continues(recorder):
    parts = {"federation": types.SimpleNamespace(round_index=6), "recorder": lambda: recorder, "folder": "FOLDER"}
    with pytest.raises(Stopped, match=r"^stopped after round 6 by SIGTERM; to continue: --resume FOLDER$"):
        stop_run(types.SimpleNamespace(**parts), types.SimpleNamespace(write_now=lambda: True), "SIGTERM")


def test_a_signal_while_the_program_loads_is_remembered(tmp_path):
    words = ("-m", "fedmpi.train", *TOY.split(), "--rounds", 8, "--out", tmp_path, "--name", "it")
    with running(1, *words) as job:
        wait_for(lambda: any(b"libtorch" in maps_of(pid) for pid in ranks_of(job)))
        os.kill(ranks_of(job)[0], signal.SIGUSR1)
        output, _ = job.communicate(timeout=100)
    assert job.returncode == 75 and "fedmpi: stopped after round 1 by SIGUSR1; to continue: " in output, output


def maps_of(pid):
    """What a process has mapped into its memory, as Linux lists it."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        return file.read()
    return b""


def test_a_signal_while_the_result_is_saved_is_too_late(tmp_path, monkeypatch, longer):
    usual = parts.save

    def with_signal(*arguments):
        signal.raise_signal(signal.SIGTERM)
        usual(*arguments)

    monkeypatch.setattr(parts, "save", with_signal)
    assert outcome(go(tmp_path, f"{TOY} --rounds 8 --eval-every 1")) == longer


@pytest.mark.parametrize("last", ["save_clients", "complete_run"])
def test_a_run_that_fails_at_its_very_end_is_not_complete(tmp_path, monkeypatch, longer, last):
    """The model is written, but some rank has not said that all is well."""

    def fail(*arguments):
        raise UserError("the disk is full")

    words = f"{TOY} --rounds 8 --eval-every 1 --name it"
    with monkeypatch.context() as patch, pytest.raises(UserError, match="the disk is full"):
        patch.setattr(parts, last, fail)
        go(tmp_path, words)
    assert state_of_run(tmp_path / "it") == "broken" and (tmp_path / "it" / "model.h5").exists()
    go(None, f"{words} --resume auto --out {tmp_path}")
    assert state_of_run(tmp_path / "it") == "complete" and outcome(tmp_path / "it") == longer


def test_settings_of_speed_and_place_may_change(run, longer):
    go(None, f"--resume {run} --rounds 8 --checkpoint-keep 1 --data-dir {run} --transport shared")
    assert outcome(run)[0] == longer[0]
    assert find_checkpoints(run) == [8]


def test_a_run_with_one_client_per_rank_keeps_their_number(run, longer):
    """Here with 2 clients, continued on one rank."""
    settings = run / "settings.yaml"
    settings.write_text(settings.read_text().replace("\nclients: 2\n", "\nclients: null\n"))
    assert "clients: null" in settings.read_text()
    go(None, f"--resume {run} --rounds 8")
    assert outcome(run)[0] == longer[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--resume {0}/nothing", "resume = {0}/nothing: not a run folder"),
        ("--resume auto", "resume = auto: expected --name"),
    ],
)
def test_folders_that_cannot_be_resumed(tmp_path, words, message):
    with pytest.raises(UserError, match=re.escape(message.format(tmp_path))):
        go(tmp_path, words.format(tmp_path))


def test_resume_auto_begins_goes_on_and_ends(tmp_path, monkeypatch, capsys, longer):
    words = f"--out {tmp_path} --name it {TOY} --rounds 8 --eval-every 1 --resume auto"
    (tmp_path / "it").mkdir()  # an empty folder is taken
    kill(monkeypatch, tmp_path, words, 2)  # before the first checkpoint
    stop(monkeypatch, tmp_path, words, 4)
    assert "it: a run ended there before its first checkpoint; it is" in capsys.readouterr().err
    assert len((tmp_path / "it.old-1" / "metrics.jsonl").read_text().splitlines()) == 2
    go(tmp_path, words)
    assert outcome(tmp_path / "it") == longer
    go(tmp_path, words)  # a job that is put back into the queue after its end
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it", "it.old-1"]


@pytest.mark.always
@pytest.mark.parametrize(
    "name", ["server.safetensors", "client-0000.safetensors", "client-0001.safetensors", "manifest.json"]
)
@pytest.mark.parametrize("harm", ["first byte", "last byte", "some byte", "shorter", "gone"])
def test_damage_is_named_and_the_older_checkpoint_used(run, longer, capsys, name, harm):
    path = run / "checkpoints" / "000006" / name
    content = bytearray(path.read_bytes())
    if harm == "gone":
        path.unlink()
    elif harm == "shorter":
        path.write_bytes(content[:-1])
    else:
        at = {"first": 0, "last": -1, "some": random.Random(name).randrange(len(content))}[harm.split()[0]]
        content[at] ^= 16
        path.write_bytes(content)
    go(None, f"--resume {run} --rounds 8 --eval-every 1")
    output, errors = capsys.readouterr()
    assert "continuing after round 4" in output
    assert f"checkpoint of round 6 is damaged: {path}: " in errors or (name, harm) == ("manifest.json", "gone")
    assert outcome(run)[0] == longer[0]


def test_a_checkpoint_of_a_newer_version_names_that_version(run, capsys):
    folder = run / "checkpoints" / "000006"
    write_manifest(folder, {**read_manifest(folder), "format": 2, "versions": {"fedmpi": "9.1"}})
    go(None, f"--resume {run} --rounds 8")
    output, errors = capsys.readouterr()
    assert "manifest.json: fedmpi 9.1 wrote it; continue with that version" in errors
    assert "continuing after round 4" in output


def test_a_run_without_a_whole_checkpoint_says_so(run):
    for path in run.glob("checkpoints/*/server.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="none of its checkpoints can be used"):
        go(None, f"--resume {run} --rounds 8")
    assert (run / "model.safetensors").exists()


@pytest.mark.parametrize("harm", ["torn", "gone", "half of it", "another file"])
def test_a_model_outranks_its_log(run, longer, capsys, harm):
    path = run / "metrics.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    left = {"torn": whole[:-5], "gone": None, "half of it": b"".join(lines[:3]), "another file": b"thesis\n" * 900}[
        harm
    ]
    path.unlink() if left is None else path.write_bytes(left)
    go(None, f"--resume {run} --rounds 8 --eval-every 1")
    output, errors = capsys.readouterr()
    assert "continuing after round 6" in output and "metrics.jsonl: not all records up to round 6 are there" in errors
    rounds = [record["round"] for record in read_records(path)[0]]
    assert rounds == {"torn": [1, 2, 3, 4, 5], "half of it": [1, 2, 3]}.get(harm, []) + [7, 8]
    assert outcome(run)[0] == longer[0]
    if harm in ("torn", "another file"):
        assert (run / "metrics.jsonl.old-1").read_bytes() == left


def test_without_memory_for_a_copy_it_is_written_at_once(tmp_path, monkeypatch, longer):
    monkeypatch.setattr(fedmpi.runs.checkpoints.writer, "available_memory", lambda *arguments: 0)
    stop(monkeypatch, tmp_path, f"{TOY} --rounds 8 --eval-every 1 --checkpoint-every 2 --name it", 5)
    assert find_checkpoints(tmp_path / "it") == [5, 4]
    go(None, f"--resume {tmp_path / 'it'}")
    assert outcome(tmp_path / "it") == longer


def test_checkpoints_by_time(tmp_path):
    words = f"{TOY} --rounds 30 --checkpoint-keep 100"
    found = find_checkpoints(go(tmp_path, f"{words} --checkpoint-minutes 1e-9"))
    assert found[0] == 30 and found[-1] == 1  # how many between depends on how long a thread writes each of them
    assert find_checkpoints(go(tmp_path, f"{words} --checkpoint-minutes 0")) == [30]
    assert find_checkpoints(go(tmp_path, words)) == [30]  # short runs write none but the last


def test_a_minute_between_checkpoints_has_60_seconds(tmp_path, monkeypatch):
    clock, usual = types.SimpleNamespace(seconds=0), Recorder.round

    def after_25_seconds(*arguments):
        clock.seconds += 25
        usual(*arguments)

    monkeypatch.setattr(Recorder, "round", after_25_seconds)
    time = types.SimpleNamespace(monotonic=lambda: clock.seconds)
    monkeypatch.setattr(fedmpi.runs.checkpoints.writer, "time", time)
    assert find_checkpoints(go(tmp_path, f"{TOY} --rounds 5 --checkpoint-keep 100 --checkpoint-minutes 1"))[-1] == 4


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk with room for one checkpoint and a half."""
    with disk_of(tmp_path / "small", "400k") as folder:
        yield folder


def test_a_full_disk_keeps_the_older_checkpoint_and_training_goes_on(tmp_path, small_disk, capsys):
    settings = f"{SHORT} --checkpoint-every 2 --algorithm scaffold"
    go(tmp_path, f"{settings} --name it --checkpoint-clients {small_disk}")
    errors = capsys.readouterr().err
    assert re.search(
        rf"^fedmpi: the checkpoint of round 4 could not be written: {small_disk}/it-\w+/000004/client-000\d"
        r".safetensors: No space left on device; the last one is that of round 2$", errors, re.MULTILINE,
    )  # fmt: skip
    assert find_checkpoints(tmp_path / "it") == [2]
    assert [path.name for path in small_disk.glob("it-*/*")] == ["000002"]
    (tmp_path / "it" / "model.safetensors").unlink()  # as if the run had been killed at its end
    go(None, f"--resume {tmp_path / 'it'} --checkpoint-keep 1")
    assert "continuing after round 2" in capsys.readouterr().out
    go(tmp_path, f"{settings} --name whole")
    assert outcome(tmp_path / "it") == outcome(tmp_path / "whole")


def test_a_folder_that_cannot_be_written_any_more(tmp_path, monkeypatch, capsys):
    """Training goes on, and the older checkpoint stays what a resumed run goes on from."""
    usual, home = Recorder.round, tmp_path / "it" / "checkpoints"
    monkeypatch.setattr(fedmpi.runs.checkpoints.writer, "available_memory", lambda *arguments: 0)

    def without_folder(recorder, record, metrics):
        if record["round"] == 4:
            home.rename(tmp_path / "older")
            home.touch()
        usual(recorder, record, metrics)

    monkeypatch.setattr(Recorder, "round", without_folder)
    go(tmp_path, f"{TOY} --rounds 5 --checkpoint-every 2 --name it")
    errors = capsys.readouterr().err
    assert (
        f"checkpoint of round 4 could not be written: {home}/000004/client-0000.safetensors: File exists; the last"
        in errors
    )
    home.unlink()
    (tmp_path / "older").rename(home)
    (tmp_path / "it" / "model.safetensors").unlink()
    go(None, f"--resume {tmp_path / 'it'}")
    assert "after round 2" in capsys.readouterr().out


def test_two_jobs_do_not_write_to_one_run_folder(toy, tmp_path, monkeypatch):
    shutil.copytree(toy, tmp_path / "it")
    monkeypatch.setattr(lock, "OUTLIVES", 0.2)
    first = lock.RunLock(tmp_path / "it")
    message = (
        rf"^run folder \S+/it: another job \(process {os.getpid()} on \S+, since [-\d: ]+\) is still writing to it;"
    )
    with pytest.raises(UserError, match=message):
        go(None, f"--resume {tmp_path / 'it'} --rounds 8")
    with pytest.raises(UserError, match=message):
        go(None, f"--out {tmp_path} --name it {TOY} --resume auto --rounds 8")
    first.release()
    go(None, f"--resume {tmp_path / 'it'} --rounds 8")


def test_a_stop_without_room_says_which_checkpoint_there_is(tmp_path, small_disk, monkeypatch):
    (small_disk / "full").write_bytes(bytes(390 << 10))
    words = f"{SHORT} --algorithm scaffold --checkpoint-clients {small_disk}"
    with pytest.raises(UserError, match=r"^stopped after round 3 by SIGUSR1; there is no checkpoint$"):
        stop(monkeypatch, tmp_path, words, 3)


def test_a_folder_for_clients_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^checkpoint_clients: \S+/file: cannot be created: File exists$"):
        go(tmp_path, f"{TOY} --checkpoint-clients {tmp_path}/file/{{client}}")


def test_clients_files_may_lie_at_home(tmp_path, monkeypatch, longer):
    words = f"{TOY} --rounds 8 --eval-every 1 --name it --checkpoint-clients {tmp_path}/silo-{{client}}"
    stop(monkeypatch, tmp_path, words, 3)
    (folder,) = (tmp_path / "silo-1").iterdir()  # named after the run and its identity
    assert folder.name.startswith("it-") and (folder / "000003" / "client-0001.safetensors").is_file()
    assert not list((tmp_path / "it").rglob("client*"))
    go(None, f"--resume {tmp_path / 'it'}")
    assert outcome(tmp_path / "it") == longer
    assert sorted(path.name for path in (tmp_path / "silo-0" / folder.name).iterdir()) == ["000003", "000008"]
    go(None, f"--resume {tmp_path / 'it'} --rounds 9 --checkpoint-clients {tmp_path}/moved")  # reads where they were
    assert [path.name for path in (tmp_path / "moved" / folder.name).iterdir()] == ["000009"]


def test_a_run_that_diverges_keeps_its_best_model(tmp_path, monkeypatch):
    words = f"{SHORT} --result best --checkpoint-every 1 --algorithm fedavg --name it"
    folder, is_infinite = go(tmp_path, f"{words} --rounds 3"), []
    usual, begin = LoadedClassification.loss, Recorder.begin

    def with_infinity(recorder, *arguments):
        begin(recorder, *arguments)
        is_infinite.append(True)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "begin", with_infinity)
        patch.setattr(LoadedClassification, "loss", lambda *given: usual(*given) * (math.inf if is_infinite else 1))
        with pytest.raises(
            Diverged, match=r"it/kept.h5 is the best model so far; the last checkpoint is that of round 3"
        ):
            go(None, f"--resume {folder} --rounds 9")
    assert (folder / "diverged.txt").is_file() and not (folder / "model.safetensors").exists()
    go(tmp_path, f"{SHORT} --init {folder}/kept.h5 --algorithm fedavg --name next --rounds 1")
    go(None, f"--resume {folder} --rounds 9")  # the last good state
    assert not (folder / "diverged.txt").exists()


@pytest.mark.parametrize("file", ["", "model.safetensors", "model.h5", "saved.pt", "checkpoints/000005"])
def test_a_new_run_begins_from_a_trained_model(tmp_path, files, file):
    settings = f"{SHORT} --data {files}/images.h5 --algorithm fedavg --rounds 1"
    folder = files / "runs" / "classifier"
    if file == "saved.pt":
        from safetensors.torch import load_file

        torch.save(load_file(folder / "model.safetensors"), folder / file)
    found = go(tmp_path, f"{settings} --init {folder / file} --model mlp --algorithm.step_size 1e-30 --name it")
    with h5py.File(found / "model.h5") as begun, h5py.File(folder / "model.h5") as trained:
        assert begun["rows/x"][()].tobytes() == trained["rows/x"][()].tobytes()
    (folder / "saved.pt").unlink(missing_ok=True)
    with pytest.raises(UserError, match="^init = [^\n]+$"):
        go(tmp_path, f"{settings} --init {folder / file} --model mlp --model.hidden 7")


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "it.h5").write_text("nothing")
    with pytest.raises(UserError, match=r"^init = \S+it.h5: cannot be read: [^\n]+$"):
        go(tmp_path, f"{SHORT} --init {tmp_path / 'it.h5'}")
    with pytest.raises(UserError, match=r"none.pt: no such file; expected model.safetensors "):
        go(tmp_path, f"{SHORT} --init {tmp_path / 'none.pt'}")


def test_removing_an_old_checkpoint_leaves_the_next_one_alone(tmp_path):
    """Which the other ranks would begin to write before rank 0 has looked what there is to remove."""
    ended = start(2, "-m", "prunes_slowly", *TOY.split(), "--rounds", 4, "--checkpoint-every", 1, "--out", tmp_path)
    assert ended.returncode == 0, ended.stderr
    (run,) = tmp_path.iterdir()
    assert find_checkpoints(run) == [4, 3]
    check_checkpoints(run)


def test_what_is_removed_in_part_is_no_checkpoint_any_more(tmp_path, monkeypatch):
    """Its manifest is removed first: whatever ends the removal, no checkpoint lists a file that is gone."""
    run, unlink, calls = go(tmp_path, f"{TOY} --rounds 4 --checkpoint-every 2"), os.unlink, []

    def fails_after_one(path, **options):
        calls.append(path)
        if len(calls) > 1:
            raise OSError(errno.EIO, "Input/output error")
        unlink(path, **options)

    assert find_checkpoints(run) == [4, 2]
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fails_after_one)
        remove_checkpoints(run, keep=[4])
    assert len(calls) == 2 and find_checkpoints(run) == [4]


def test_kills_at_steps_of_writing(tmp_path):
    ended = start(1, PROGRAMS / "dies.py", "steps", tmp_path, 9, *TOY.split(), "--rounds", 4, "--checkpoint-every", 1)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert int(re.search(r"(\d+) kills, each in another step", ended.stdout)[1]) >= 4


@pytest.mark.slow
def test_kills_at_every_step_of_writing(tmp_path):
    ended = start(1, PROGRAMS / "dies.py", "steps", tmp_path, 1, *TOY.split(), "--rounds", 4, "--checkpoint-every", 1)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
def test_200_kills_at_random_times(tmp_path):
    words = (*SHORT.split(), "--rounds", 30, "--algorithm", "fafed", "--checkpoint-every", 1)
    ended = start(1, PROGRAMS / "dies.py", "kills", tmp_path, 200, *words, timeout=3000)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "\n200 kills, " in ended.stdout


def test_a_second_ctrl_c_ends_at_once(monkeypatch):
    monkeypatch.setattr("fedmpi.comm.job.signals.SAME_KEY_PRESS", 0.3)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
    with StopSignals() as signals:
        with pytest.raises(KeyboardInterrupt):  # nothing has begun
            signal.raise_signal(signal.SIGINT)
        signals.begin_rounds()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # the same one, from the terminal and from the launcher
        signal.raise_signal(signal.SIGTERM)
        assert stopping_signal(signals.bits) == "SIGINT"
        time.sleep(0.4)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR2", "SIGXCPU"])
@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN, lambda *_: None], ids=["default", "ignored", "own"])
def test_other_signals_stop_a_run_unless_the_user_decides_otherwise(name, before):
    number, taken = getattr(signal, name), before == signal.SIG_DFL
    usual = signal.signal(number, before)
    try:
        with StopSignals() as signals:
            assert name != "SIGHUP" or signal.getsignal(number) == before
            signals.begin_rounds()
            signal.raise_signal(number)
        assert stopping_signal(signals.bits) == (name if taken else None)
        assert signal.getsignal(number) == before
    finally:
        signal.signal(number, usual)


LONG = ("--clients", 4, "--local-steps", 3, "--rounds", 60, "--eval-every", 20, "--transport", "shared", "--threads", 1)


def test_killed_ranks_and_other_numbers_of_ranks(tmp_path):
    """kill -9 of a rank at three times, going on with 2, 4, 1 and 2 ranks: the bits of an unbroken run."""
    words = ("-m", "fedmpi.train", *LONG, "--model", "slow.Slow", "--out", tmp_path, "--checkpoint-every", 1)
    assert start(2, *words, "--name", "whole").returncode == 0
    records, draw, slow = tmp_path / "it" / "metrics.jsonl", random.Random(0), tmp_path / "slow"
    slow.touch()  # a round takes 0.3 s at least: no run ends before it is killed
    for kill, ranks in enumerate((2, 4, 1)):
        with running(ranks, *words, "--name", "it", "--resume", "auto", env={"SLOW_WHILE": str(slow)}) as job:
            wait_for(lambda least=4 * (kill + 1): records.is_file() and records.read_text().count("\n") >= least)
            time.sleep(draw.uniform(0, 0.3))
            os.kill(draw.choice(ranks_of(job)), signal.SIGKILL)
            assert job.wait(60) != 0
    ended = start(2, *words, "--name", "it", "--resume", "auto")
    assert ended.returncode == 0 and "continuing after round" in ended.stdout, ended.stderr
    assert outcome(tmp_path / "it") == outcome(tmp_path / "whole")
    check_checkpoints(tmp_path / "it")


@pytest.mark.parametrize(
    ("mpi", "name", "to"),
    [
        ("default", "SIGTERM", "a rank"),
        pytest.param("default", "SIGTERM", "mpirun", marks=pytest.mark.slow),
        ("default", "SIGINT", "mpirun"),
        ("default", "SIGUSR1", "mpirun"),
        pytest.param("openmpi", "SIGTERM", "a rank", marks=pytest.mark.rarely("fedmpi/comm", "fedmpi/comm/job")),
        pytest.param("openmpi", "SIGUSR1", "mpirun", marks=pytest.mark.rarely("fedmpi/comm", "fedmpi/comm/job")),
    ],
)
def test_a_signal_stops_all_ranks_in_order(tmp_path, mpi, name, to):
    if mpi not in launchers():
        pytest.skip("FEDMPI_TEST_OPENMPI does not name an environment with Open MPI")
    words = ("-m", "fedmpi.train", *LONG, "--rounds", 100000, "--out", tmp_path, "--name", "it")
    with running(2, *words, mpi=mpi) as job:
        wait_for(lambda: (tmp_path / "it" / "metrics.jsonl").is_file() or job.poll() is not None)
        assert job.poll() is None, job.communicate()[0]
        os.kill(job.pid if to == "mpirun" else max(ranks_of(job)), getattr(signal, name))
        output, _ = job.communicate(timeout=100)
    assert job.returncode == 75, output
    assert re.search(
        rf"^fedmpi: stopped after round \d+ by {name}; to continue: --resume \S+/it$", output, re.MULTILINE
    )
    number = find_checkpoints(tmp_path / "it")[0]
    assert (tmp_path / "it" / "metrics.jsonl").read_text().count("\n") == number
    if to == "mpirun":
        return
    ended = train(1, tmp_path, "--name", "it", "--resume", "auto", "--rounds", number + 1)
    assert ended.returncode == 0 and f"continuing after round {number}" in ended.stdout, ended.stderr
