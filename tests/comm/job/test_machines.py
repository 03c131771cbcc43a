"""Machines as users have them: output that goes away, full disks, removed folders, other alphabets, small quotas."""

import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile

import h5py
import numpy as np
import pytest
import torch
from helpers import ROOT, disk_of, execute, launch_words, launchers, train, wait_for
from tensorboard.backend.event_processing import event_accumulator

import fedmpi
from fedmpi.ground.errors import UserError
from fedmpi.runs.folder import outcome, read_run
from fedmpi.runs.model_files import read_state
from fedmpi.runs.recorder import Recorder, make_run_folder
from fedmpi.training.result import _save_elsewhere

JOB = f"{sys.executable} -m fedmpi.train --threads 1 --clients 2 --local-steps 2 --rounds 30 --eval-every 1"


def shell(command, **options):
    return execute(["bash", "-c", f"set -o pipefail; {command}"], cwd=ROOT, **options)


@pytest.mark.rarely
@pytest.mark.parametrize("launcher", ["", "mpirun -np 2 "])
def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path, launcher):
    ended = shell(f"{launcher}{JOB} --out {tmp_path} --name it 2>&1 | head -1")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"fedmpi {fedmpi.__version__} is starting\n"
    assert len(read_run(tmp_path / "it").records) == 30 and outcome(tmp_path / "it") == "complete"


def test_the_first_line_does_not_wait_for_torch(tmp_path):
    """Here torch cannot even be imported; rank 1 prints nothing, and no line stands above a text for programs."""
    (tmp_path / "torch.py").write_text("import sys; sys.exit(7)\n")
    for rank, words, expected in (("0", [], 1), ("1", [], 0), ("0", ["--print_config"], 0)):
        variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PMI_RANK": rank}
        ended = execute([sys.executable, "-m", "fedmpi.train", *words], env=variables, cwd=tmp_path)
        assert ended.returncode == 7
        assert ended.stdout.count("is starting\n") == expected


PRINTS = """
import sys
from fedmpi.comm.job.program import say_starting
from fedmpi.comm.job.ranks import run_program

def program(arguments, link):
    for _ in range(30):
        print("line\\n" * 50, flush=True)
        print("line", file=sys.stderr, flush=True)
    with open(f"{arguments[0]}/{link.rank}", "w") as file:
        print(file.fileno(), file=file)

say_starting([])
run_program(program, sys.argv[1:])
"""


@pytest.mark.parametrize("closed", [">&- 2>&-", "<&- >&- 2>&-", "2>&-"])
@pytest.mark.parametrize("mpi", [None, "openmpi"])
def test_closed_outputs_do_not_end_the_program(tmp_path, mpi, closed):
    """Open MPI's mpirun has files of its own in their place; without a launcher, the program's next files would be."""
    if mpi and mpi not in launchers():
        pytest.skip("FEDMPI_TEST_OPENMPI does not name an environment with Open MPI")
    words, variables = (
        launch_words(2, "-c", PRINTS, tmp_path, mpi=mpi) if mpi else ([sys.executable, "-c", PRINTS, tmp_path], {})
    )
    ended = execute(
        ["bash", "-c", f"{shlex.join(map(str, words))} {closed}"], env={"PYTHONPATH": str(ROOT), **variables}
    )
    assert ended.returncode == 0
    ranks = sorted(tmp_path.iterdir())
    assert len(ranks) == (2 if mpi else 1) and all(int(rank.read_text()) > 2 for rank in ranks)


@pytest.mark.parametrize("program", [".train", " train", " doctor", " bench"])
def test_a_machine_without_mpi(program):
    """mpi4py is installed, and no MPI library; the variable names one that is not there."""
    ended = shell(f"{sys.executable} -m fedmpi{program}", env=os.environ | {"MPI4PY_LIBMPI": "/no/libmpi.so"})
    assert ended.returncode == 2
    assert ended.stderr == (
        "fedmpi: error: mpi4py finds no MPI library: pip install mpich, or load your cluster's module of an MPI "
        "(cannot load MPI library /no/libmpi.so: cannot open shared object file: No such file or directory)\n"
    )


def test_output_to_a_full_disk_does_not_end_the_run(tmp_path):
    assert shell(f"{JOB} --out {tmp_path} --name it > /dev/full 2>&1").returncode == 0
    assert outcome(tmp_path / "it") == "complete"


def test_a_log_on_a_full_disk_does_not_end_the_run(tmp_path):
    """MPICH's launcher dies of it, so the ranks write behind what it has written."""
    with disk_of(tmp_path / "small", "4k") as folder:
        job = f"mpirun -np 2 {JOB} --local-steps 1 --rounds 80 --out {tmp_path} --name it"
        ended = shell(f"{job} > {folder}/log 2>&1")
        lines = (folder / "log").read_text().splitlines()[:-1]
    assert ended.returncode == 0 and outcome(tmp_path / "it") == "complete"
    assert lines[0].endswith("is starting") and len(lines) > 40
    rounds = [line.split("/")[0] for line in lines[1:] if not re.match(r"  \d+ s: ", line)]
    assert rounds == [f"round {number}" for number in range(1, len(rounds) + 1)]


def test_a_text_for_a_full_disk_is_one_line_instead(any_mpi):
    command, variables = launch_words(2, "-m", "fedmpi.train", "--print_config", mpi=any_mpi)
    ended = shell(f"{shlex.join(command)} > /dev/full", env=variables)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[0] == (
        "fedmpi: error: standard output: cannot be written: No space left on device"
    )


@pytest.mark.parametrize("words", ["data show --help", "sweep --help", "evaluate --help"])
def test_a_help_text_for_a_full_disk_is_one_line_instead(words):
    job = f"{sys.executable} -m fedmpi {words}"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = shell(f"{job} > /dev/null; echo $?; {job} > /dev/full; echo $?", env=buffered)
    assert ended.stdout.split() == ["0", "2"] and len(ended.stderr.splitlines()) == 1, ended.stderr


@pytest.mark.parametrize(
    "alphabet", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"},
                 {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=lambda alphabet: next(iter(alphabet.values())),
)  # fmt: skip
def test_any_alphabet_will_do(alphabet):
    words = [sys.executable, "-m", "fedmpi.train", "--help"]
    ended = subprocess.run(words, env={**os.environ, **alphabet}, cwd=ROOT, capture_output=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert rb"\u03b7" in ended.stdout


def test_a_file_system_without_locks(tmp_path):
    """Calls for locks fail as on NFS without lockd. A silo's file is a view of another one."""
    library, source = (
        tmp_path / "locks.so",
        "#include <errno.h>\nint {}(int file, int what) {{ errno = ENOLCK; return -1; }}",
    )
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    (tmp_path / "locks.c").write_text(source.format("flock"))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "locks.c"], check=True)
    with h5py.File(tmp_path / "data.h5", "w") as data, h5py.File(tmp_path / "silo_0.h5", "w") as silo:
        for split in ("train", "test"):
            data[f"{split}/images"] = np.zeros((20, 4), "float32")
            silo[f"{split}/labels"] = np.arange(20) % 2
            layout = h5py.VirtualLayout((20, 4), "float32")
            layout[:] = h5py.VirtualSource("data.h5", f"{split}/images", (20, 4))
            silo.create_virtual_dataset(f"{split}/images", layout)
        silo.attrs["num_classes"] = 2
    job = f"{JOB.replace('30', '2')} --clients 1 --data 'silo_{{client}}.h5' --model mlp --name it --resume auto"
    job = f"{job} && {job} --rounds 4"
    ended = execute(["bash", "-c", job], cwd=tmp_path, env={"LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0 and len(read_run(tmp_path / "runs/it").records) == 4, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if "no locks" in line]
    assert lines == ["fedmpi: runs: this file system has no locks: two jobs notice each other within 40 s"] * 2


@pytest.fixture
def small_disk(tmp_path):
    with disk_of(tmp_path / "small", "16k") as folder:
        yield folder


def test_records_wait_for_room(small_disk, capsys):
    recorder = Recorder(make_run_folder(small_disk, "it", ""), 400)
    recorder.begin({"seed": 0})
    filler = small_disk / "filler"
    for number in range(1, 401):
        if number == 100:
            with pytest.raises(OSError), open(filler, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(512))
        if number == 300:
            filler.unlink()
        recorder.round({"round": number, "loss": 1.0}, {})
        text = (small_disk / "it" / "metrics.jsonl").read_bytes()
        assert not text or text.endswith(b"\n")  # no half line, whenever the disk fills
    recorder.close()
    text = (small_disk / "it" / "metrics.jsonl").read_text()
    assert [json.loads(line)["round"] for line in text.splitlines()] == list(range(1, len(text.splitlines()) + 1))
    said = capsys.readouterr().err
    assert said.count("metrics.jsonl: cannot be written: No space left on device; the run continues") >= 1


def test_a_disk_without_room_for_the_settings_is_one_line_with_the_file(small_disk):
    with contextlib.closing(Recorder(make_run_folder(small_disk, "it", ""), 400)) as recorder:
        with pytest.raises(OSError), open(small_disk / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
        with pytest.raises(UserError, match="it/settings.yaml: cannot be written: No space left on device$"):
            recorder.begin({"seed": 0})


def test_a_model_goes_home_if_no_other_folder_has_room(tmp_path, small_disk, monkeypatch):
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    monkeypatch.chdir(small_disk)
    model = {"weight": torch.ones(5000)}
    said = _save_elsewhere("it", model, {"x": torch.ones(5000)}, {"model": None})
    folder = pathlib.Path(said.removeprefix("the model is in "))
    assert folder.parent == tmp_path / "home" and torch.equal(read_state(folder)["weight"], model["weight"])
    monkeypatch.setenv("HOME", str(small_disk))
    assert _save_elsewhere("it", model, {}, {}) == "no other folder has room for the model: it is lost"
    assert not list(small_disk.iterdir())
    monkeypatch.chdir(tmp_path)  # the disk is removed now


def test_a_removed_run_folder_is_made_again(tmp_path):
    words = f"{JOB} --rounds 2000 --out {tmp_path} --name it"
    job = subprocess.Popen(["bash", "-c", f"exec {words}"], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    records = tmp_path / "it" / "metrics.jsonl"
    wait_for(lambda: records.is_file() and records.read_bytes().count(b"\n") > 3, 120)
    os.kill(job.pid, signal.SIGSTOP)  # so that nothing is written while it is removed
    shutil.rmtree(tmp_path / "it")
    os.kill(job.pid, signal.SIGCONT)
    errors = job.communicate(timeout=300)[1].decode()
    assert job.returncode == 0, errors
    assert f"fedmpi: {tmp_path}/it was removed; it is created again" in errors
    run = read_run(tmp_path / "it")
    assert run.is_complete and [record["round"] for record in run.records] == list(range(1, 2001))


def test_a_folder_that_is_made_again_has_all_that_it_had(tmp_path, capsys):
    settings = {"rounds": 6, "clients": 2, "local_steps": 1, "eval_every": 2, "threads": 1}
    settings |= {"out": str(tmp_path), "track": "tensorboard", "checkpoint_every": 4, "checkpoint_keep": 1}
    plain = fedmpi.train(**settings, name="plain")

    def remove(record):
        if record["round"] == 3:
            shutil.rmtree(tmp_path / "removed")

    removed = fedmpi.train(**settings, name="removed", on_round=remove)
    assert f"{tmp_path}/removed was removed; it is created again" in capsys.readouterr().err
    names = [
        {re.sub(r"events.*", "events", str(path.relative_to(run.folder))) for path in run.folder.rglob("*")}
        for run in (plain, removed)
    ]
    assert names[0] == names[1] >= {"clients.json", "data.json", "partition.h5", "tensorboard/events"}
    for name in ("clients.json", "partition.h5", "model.safetensors"):
        assert (plain.folder / name).read_bytes() == (removed.folder / name).read_bytes()
    events = [event_accumulator.EventAccumulator(str(run.folder / "tensorboard")).Reload() for run in (plain, removed)]
    assert [[one.step for one in run.Scalars("loss")] for run in events] == [[1, 2, 3, 4, 5, 6]] * 2


def test_a_rank_that_leaves_at_once_does_not_look_like_a_good_end(tmp_path):
    words = ("--rounds", 50, "--model", "faulty.Faulty", "--model.kind", "exit_at_once", "--name", "it")
    ended = train(2, tmp_path, *words, timeout=200)
    assert ended.returncode != 0
    assert "fedmpi: error on rank 1: os._exit(0) was called" in ended.stderr
    assert outcome(tmp_path / "it") == "broken"


@pytest.mark.parametrize("options", ["size=64k", "ro,size=64m"])
def test_shared_memory_that_is_too_small_for_mpi_is_one_line(options):
    command = f"mount -t tmpfs -o {options} tmpfs /dev/shm && exec mpirun -np 2 {JOB} --out /nowhere"
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    ended = execute(["unshare", "-m", "bash", "-c", command], cwd=ROOT)
    assert ended.returncode == 2
    assert [line for line in ended.stderr.splitlines() if "fedmpi" in line] == ended.stderr.splitlines()[:1]
    assert "fedmpi: error: /dev/shm" in ended.stderr
