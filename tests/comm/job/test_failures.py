"""A job that fails ends: at once, with a non-zero exit code and one line that names rank and client."""

import os
import pathlib
import re
import shutil
import signal
import sys
import time

import pytest
from helpers import ROOT, disk_of, execute, ranks_of, running, train, wait_for

from fedmpi.runs.model_files import read_state

SHORT = ("--rounds", 50, "--model", "faulty.Faulty")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("exception", r"error on rank 1, client 1: RuntimeError: the silo is on fire"),
        ("exit", r"error on rank 1, client 1: sys.exit\(3\) was called"),
        ("exit0", r"error on rank 1, client 1: sys.exit\(0\) was called"),
        ("nan", r"in round 1: the loss of client 1 on rank 1 is nan"),
    ],
)
def test_a_failing_rank_ends_the_job(tmp_path, any_mpi, kind, message):
    began = time.monotonic()
    ended = train(3, tmp_path, *SHORT, "--model.kind", kind, mpi=any_mpi)
    assert ended.returncode != 0
    assert re.search(message, ended.stderr), ended.stderr
    assert ended.stderr.count("fedmpi: error") == 1
    assert "Traceback" not in ended.stderr
    assert not list(tmp_path.glob("*/model.safetensors"))  # no result that looks like success
    _ends_at_once(ended, began)


def test_an_error_of_one_rank_before_training_names_the_rank(tmp_path):
    ended = train(2, tmp_path, *SHORT, "--model.kind", "early")
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[0] == "fedmpi: error: on rank 1: model Faulty: the silo is not there"
    ended = train(2, tmp_path, "--model", "torch.nn.ReLU")
    assert ended.returncode == 2
    assert "fedmpi: error: model ReLU has no trainable parameter" in ended.stderr


@pytest.mark.always
def test_a_killed_rank_ends_the_job(tmp_path, any_mpi):
    began = time.monotonic()
    ended = train(3, tmp_path, *SHORT, "--model.kind", "kill", mpi=any_mpi)
    assert ended.returncode != 0
    _ends_at_once(ended, began)


def _ends_at_once(ended, began):
    """From the failure to the end no longer than from the start to the failure: both take longer on a busy machine."""
    failed = float(re.search(r"fails at (\S+)", ended.stdout)[1])
    assert time.monotonic() - failed < 5 + (failed - began)


def test_a_second_ctrl_c_is_one_line_for_the_job(tmp_path, any_mpi):
    """Both ranks are interrupted twice in a round that takes long."""
    (tmp_path / "slow").touch()
    words = ("--rounds", 50, "--local-steps", 500, "--model", "slow.Slow", "--out", tmp_path, "--name", "it")
    with running(2, "-m", "fedmpi.train", *words, mpi=any_mpi, env={"SLOW_WHILE": str(tmp_path / "slow")}) as job:
        wait_for((tmp_path / "it" / "partition.h5").is_file)
        for _ in range(2):
            for rank in ranks_of(job):
                os.kill(rank, signal.SIGINT)
            time.sleep(1.5)
        output, _ = job.communicate(timeout=100)
    assert job.returncode != 0
    lines = [line for line in output.splitlines() if "fedmpi:" in line]
    assert lines == ["fedmpi: interrupted during the local steps of round 1"], output
    assert "Traceback" not in output


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ctrl_c_while_a_program_is_loaded_is_one_line_for_the_job(tmp_path, rank):
    heard = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # background jobs ignore Ctrl-C
    (tmp_path / "torch.py").write_text(f"import signal\n{heard}\nsignal.raise_signal(signal.SIGINT)\n")
    variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PMI_RANK": rank}
    ended = execute([sys.executable, "-m", "fedmpi.train"], env=variables)
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr == ("" if int(rank) else "fedmpi: interrupted during the start\n")


@pytest.mark.always
def test_traceback_shows_where(tmp_path):
    ended = train(2, tmp_path, *SHORT, "--traceback")
    assert "the silo is on fire" in ended.stderr
    assert "faulty.py" in ended.stderr


def test_rank_and_client_differ_where_a_rank_has_several(tmp_path):
    ended = train(2, tmp_path, *SHORT, "--clients", 5, "--model.kind", "nan")
    assert "the loss of client 2 on rank 1 is nan" in ended.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            ["--algorithm", "fafedd"],
            "unknown algorithm 'fafedd'; did you mean 'fafed'?; known: ",
            marks=pytest.mark.always,
        ),
        (["--task.data", "nonsense"], "task.data = nonsense: unknown data set: expected digits"),
        (["--task.data", "nonsense", "--data-dir", "."], "no file nonsense.h5"),
        (["--task.data", "missing.h5"], "no file missing.h5"),
        (["--algorithm.stepsize", "1"], "unknown setting algorithm.stepsize: algorithm fafed has "),
        (["--algorithm.stepsize", "1"], "did you mean 'step_size'?"),
        (["--round", "1"], "unknown setting round; did you mean 'rounds'?"),
        (["--local-steps", "0"], "local_steps = 0: expected a number >= 1"),
        (["--rounds", "many"], "rounds = many: expected a whole number"),
        (["--algorithm.step_size", "-0.1"], "algorithm.step_size = -0.1: expected a number > 0"),
        (["--algorithm.step_size", ".nan"], "algorithm.step_size = nan: expected a number > 0"),
        (["--clients", "2000"], "clients = 2000: expected at most one per training sample"),
        (["--clients", "1"], "clients = 1: expected at least one client per rank, and 2 ranks were started"),
        pytest.param(["--ranks", "3"], "ranks = 3: but 2 ranks found each other", marks=pytest.mark.always),
        (["--device", "tpu"], "device = tpu: "),
        (["--config", "none.yaml"], "--config none.yaml: cannot be read"),
        (["--partition", "halves", "--clients", "3"], "clients = 3: expected an even number for partition halves"),
        (["--task", "counterexample"], "clients = 2: task counterexample has 3 clients"),
        (["--model", "fashion_cnn"], "model fashion_cnn takes images of at least 10x10 pixels"),
        (["--resume", "9" * 300], "resume = 999"),
        (["--data", "9" * 300 + ".h5"], "File name too long"),
        (["--name", "9" * 300], "cannot be created: File name too long"),
        (["--algorithm", "a\nb"], "unknown algorithm 'a b'"),
        (["--dtype", "float16"], "dtype = float16: expected one of float32, float64"),
    ],
)
def test_wrong_input_gives_one_line(tmp_path, settings, message):
    ended = train(2, tmp_path, *settings)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("fedmpi: error: ")]
    assert len(lines) == 1, ended.stderr
    assert message in lines[0]
    assert ended.returncode == 2
    assert not list(tmp_path.iterdir())  # before any work starts


def test_run_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    ended = train(2, tmp_path / "file", "--rounds", 1)
    assert ended.returncode == 2
    assert re.search(r"fedmpi: error: run folder .*file.*: ", ended.stderr), ended.stderr


def test_run_folder_that_exists(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    ended = train(2, tmp_path, "--name", "mine")
    assert ended.returncode == 2
    assert "mine: is not empty, and fedmpi did not make it" in ended.stderr


@pytest.fixture
def small_disk(tmp_path):
    """A folder with room for the records of a run but not for its model."""
    with disk_of(tmp_path / "small", "48k") as folder:
        yield folder


def test_a_full_disk_ends_all_ranks_with_one_line(small_disk):
    """And the model is where there is room."""
    ended = train(2, small_disk, "--rounds", 2, "--name", "it")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    where = re.search(r"it/model.h5: cannot be written: No space left on device; the model is in (.*)", ended.stderr)[1]
    try:
        assert pathlib.Path(where).name.startswith("it-result-")
        assert sum(value.numel() for value in read_state(pathlib.Path(where)).values()) == 65 * 200 + 201 * 10
    finally:
        shutil.rmtree(where)
    assert (small_disk / "it" / "metrics.jsonl").exists()
    assert not list((small_disk / "it").glob("model*"))
