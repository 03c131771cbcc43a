"""--on_loss continue: the ranks that are left go on, as if the lost clients had been absent by plan."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time

import h5py
import pytest
from helpers import execute, launch_words, launchers, start, wait_for
from test_lost_and_stuck import processes

SETTINGS = ("--clients", 5, "--rounds", 6, "--threads", 1, "--eval-every", 2, "--aggregation", "reproducible")


@pytest.fixture
def openmpi():
    """Skip where there is no Open MPI."""
    if "openmpi" not in launchers():
        pytest.skip("FEDMPI_TEST_OPENMPI does not name an environment with Open MPI")


def words_of(ranks, out, *settings):
    """The command of a run that goes on without lost ranks, and its variables."""
    program = ("-m", "loses", "--out", out, *SETTINGS, "--on_loss", "continue", *settings)
    return launch_words(ranks, *program, mpi="openmpi", options=("--with-ft", "ulfm"))


def found(out):
    """(the bytes of all rows, the losses, the records) of the only run under `out`."""
    (folder,) = out.iterdir()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with h5py.File(folder / "model.h5") as file:
        rows = {name: file["rows"][name][:].tobytes() for name in file["rows"]}
    return rows, [record["loss"] for record in records], records


def check_against_plan(tmp_path, *settings, output=""):
    """Check that the run under `tmp_path`/lost has the rows and losses of one whose clients were absent by plan.

    Args:
        output: of the run; clients that it says are lost before round 1 are absent at the start, too.
    """
    early = " ".join(re.findall(r"[(]clients? ([^)]*)[)] was lost during (?!.* round )", output))
    early = {int(number) for number in re.findall(r"\d+", early)}  # no rank has more than two clients
    rows, losses, records = found(tmp_path / "lost")
    assert [record["round"] for record in records] == list(range(1, len(records) + 1))  # none is lost, none is twice
    left = [(client, record["round"] - 1) for record in records for client in record.get("lost", ())]
    absent = [f"{client}@{-1 if client in early else since}" for client, since in left]
    assert (rows, losses) == planned(tmp_path, [f"{one}:{len(records)}" for one in absent], *settings), output
    return absent


def planned(tmp_path, absent, *settings):
    """(rows, losses) of a run in which clients are absent by plan."""
    done = start(1, "-m", "loses", "--out", tmp_path / "plan", *SETTINGS, *settings, env={"ABSENT": " ".join(absent)})
    assert done.returncode == 0, done.stderr
    return found(tmp_path / "plan")[:2]


@pytest.mark.rarely
@pytest.mark.parametrize(
    ("ranks", "deaths", "absent", "settings"),
    [
        (4, "0@record:3 2@turn:5", ["2@2", "0@3"], ()),
        pytest.param(
            4,
            "1@losses:4 2@losses:4",
            ["1@3", "2@3"],
            ("--algorithm", "scaffold", "--participation", 0.8),
            marks=pytest.mark.slow,
        ),
        # Only before a first loss is the number of agreements the same in every run.
        (4, "2@agree:17 1@shrink:1 0@record:2", ["1@1", "2@1", "0@2"], ()),
        (3, "0@save:1", [], ()),
    ],
    ids=["rank_0", "two_at_once", "all_but_one", "at_the_end"],
)
def test_the_survivors_go_on_as_if_it_had_been_planned(tmp_path, openmpi, ranks, deaths, absent, settings):
    words, variables = words_of(ranks, tmp_path / "lost", *settings, "--track", "records_rounds.RecordsRounds")
    done = execute(words, env={**variables, "DIE": deaths})
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"fedmpi: rank \d on \S+ .* was lost during", done.stderr)) >= 1
    assert re.search(r"^  lost +rank \d", done.stdout, re.MULTILINE)
    assert check_against_plan(tmp_path, *settings) == absent
    (recorded,) = tmp_path.glob("lost/*/rounds.txt")
    assert recorded.read_text().split() == ["1", "2", "3", "4", "5", "6"]


def test_rows_of_a_plain_sum_are_summed_again(tmp_path, openmpi):
    words, variables = words_of(3, tmp_path / "lost", "--aggregation", "mean")
    done = execute(words, env={**variables, "DIE": "1@sum:4"})
    assert done.returncode == 0, done.stderr
    _, losses, records = found(tmp_path / "lost")
    assert [record.get("lost") for record in records] == [None, None, [1, 2], None, None, None]
    assert losses[-1] < losses[0]


FEDNOVA = ("--algorithm", "fednova")  # rows and numbers: two sums that are opened together
FAFED = ("--algorithm", "fafed")  # its start has an exchange
KILLS = [
    ("1@masks:3", ()),
    ("2@words:5 0@masks:9", ()),
    ("1@open:3", FEDNOVA),
    ("1@inside:3", FEDNOVA),
    ("3@agree:19 1@words:9", (*FEDNOVA, "--participation", 0.8)),
]
LATER = [
    ("0@masks:2", ()),
    ("0@inside:4", ()),
    ("3@open:2", ()),
    ("2@masks:1", FAFED),
    ("2@words:1", FAFED),
    ("0@inside:1", FAFED),
    ("1@open:1", FAFED),
    ("1@masks:1 2@masks:1", FAFED),
    ("1@inside:4 2@inside:4", ()),
    ("0@masks:4 3@words:4", FEDNOVA),
    ("0@open:3 1@open:3", ()),
    ("1@evaluation:1", ()),
    ("0@evaluation:2 2@inside:8", ()),
    ("3@inside:3", ("--eval-every", 1)),
    ("1@turn:4 2@open:3 0@inside:9", ()),
]


@pytest.mark.parametrize(
    ("deaths", "settings"), [*KILLS, *(pytest.param(*one, marks=pytest.mark.slow) for one in LATER)]
)
def test_masked_sums_are_made_again_without_the_lost(tmp_path, openmpi, deaths, settings):
    """Before masks, between masks and sum, inside the sum, before keys are opened; some rank may have the sum.

    They die in the start's exchange, in rounds, in evaluations; two at once, and rank 0. No key has a nonce twice.
    """
    masked = ("--algorithm", "fedavg", "--aggregation", "masked", "--aggregation.least_ranks", 1, *settings)
    words, variables = words_of(4, tmp_path / "lost", *masked)
    (tmp_path / "used").mkdir()
    done = execute(words, env={**variables, "DIE": deaths, "USED": tmp_path / "used"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(check_against_plan(tmp_path, *masked, output=done.stderr)) >= 1
    assert len(list((tmp_path / "used").iterdir())) >= 2  # some die before they make masks


def test_no_key_has_a_nonce_twice_if_a_run_goes_on_with_other_ranks(tmp_path, openmpi):
    masked = ("--aggregation", "masked", "--aggregation.least_ranks", 1, "--name", "it", "--resume", "auto")
    (tmp_path / "used").mkdir()
    number = 0
    for ranks, rounds, deaths in ((4, 2, "2@inside:3"), (3, 4, ""), (4, 6, "0@open:2")):
        words, variables = words_of(ranks, tmp_path / "lost", *masked, "--rounds", rounds)
        done = execute(words, env={**variables, "DIE": deaths, "USED": tmp_path / "used"})
        assert done.returncode == 0, done.stdout + done.stderr
        files = list((tmp_path / "used").iterdir())
        before, number = number, sum(len(file.read_text().split()) for file in files)
        assert number > before
    _, losses, _ = found(tmp_path / "lost")
    assert len(losses) == 6


@pytest.mark.parametrize("aggregation", ["mean", "reproducible"])
def test_a_round_that_loses_all_its_participants_is_made_by_the_others(tmp_path, openmpi, aggregation):
    """In round 4 only client 2 takes part, and its rank dies in the sum, to which the other ranks add zeros."""
    settings = ("--algorithm", "fedavg", "--clients", 3, "--participation", 0.34, "--aggregation", aggregation)
    words, variables = words_of(3, tmp_path / "lost", *settings)
    done = execute(words, env={**variables, "DIE": "2@sum:4"})
    assert done.returncode == 0, done.stderr
    assert check_against_plan(tmp_path, *settings) == ["2@3"]


def test_the_survivors_checkpoints_bring_lost_silos_back(tmp_path, openmpi):
    """One is lost before there was a checkpoint, one after a checkpoint that has its state."""
    scaffold = ("--algorithm", "scaffold", "--name", "it")
    for rounds, dying in ((2, "2@losses:1"), (4, "1@losses:1")):
        resumed = ("--resume", "auto", "--rounds", rounds)
        words, variables = words_of(3, tmp_path / "lost", *scaffold, *resumed)
        done = execute(words, env={**variables, "DIE": dying})
        assert done.returncode == 0, done.stderr
    assert "fedmpi: client 4 was lost and takes part again, without a state" in done.stderr
    folder = tmp_path / "lost" / "it"
    done = start(1, "-m", "loses", "--resume", folder, "--on_loss", "end", "--rounds", 6)
    assert done.returncode == 0, done.stderr
    assert "fedmpi: client 2 was lost and takes part again, with its state after round 2" in done.stderr
    absent = ["3@0:2", "4@0:2", "1@2:4", "2@2:4"]
    assert found(tmp_path / "lost")[:2] == planned(tmp_path, absent, "--algorithm", "scaffold")
    left = sorted(path.name for path in (folder / "checkpoints" / "000002").iterdir())
    assert left == [
        ".fedmpi",
        "client-0001.safetensors",
        "client-0002.safetensors",
    ]  # the checkpoint after round 4 needs them


def test_a_loss_before_the_run_begins_is_worth_another_attempt(tmp_path, openmpi):
    words, variables = words_of(2, tmp_path / "lost")
    done = execute(words, env={**variables, "DIE": "1@model:1"})
    assert done.returncode == 75, done.stderr
    assert "fedmpi: error on rank 0: another rank was lost in " in done.stderr


@pytest.mark.parametrize(
    ("stuck", "absent"), [("1@turn:4", ["1@1"]), pytest.param("0@agree:20", None, marks=pytest.mark.slow)]
)
def test_a_rank_that_is_stuck_is_lost(tmp_path, openmpi, stuck, absent):
    words, variables = words_of(3, tmp_path / "lost", "--clients", 3, "--timeout", 3)
    done = execute(words, env={**variables, "STOP": stuck})
    assert done.returncode == 0, done.stderr
    who = f"rank {stuck[0]} on [^ ]+ [(]client {stuck[0]}[)]"
    assert re.search(rf"fedmpi: no sign of {who} for 3 s during .*; killed, and the others continue", done.stderr)
    assert check_against_plan(tmp_path, "--clients", 3) == absent or absent is None
    assert not processes(tmp_path)


def test_a_rank_that_has_gone_on_is_not_missing(tmp_path, openmpi):
    """Rank 2 has just killed the stopped rank and does not yet wait again when rank 0, which looks late, counts."""
    words, variables = words_of(3, tmp_path / "lost", "--clients", 3, "--timeout", 3)
    done = execute(words, env={**variables, "STOP": "1@turn:4", "LATE": "0:4.12"})
    assert done.returncode == 0, done.stderr
    assert len(re.findall("fedmpi: no sign of rank 1 on [^ ]+ [(]client 1[)] for 3 s", done.stderr)) == 1, done.stderr
    assert check_against_plan(tmp_path, "--clients", 3) == ["1@1"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_kills_at_random_times(tmp_path, openmpi, seed):
    draw = random.Random(seed)
    busy = ("--eval-every", 1, "--checkpoint-every", 1) if seed % 2 else ()
    words, variables = words_of(4, tmp_path / "lost", "--rounds", 60, *busy)
    job = subprocess.Popen(
        words, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for(lambda: list((tmp_path / "lost").glob("*/metrics.jsonl")), 400)
        ranks = sorted(pid for pid in processes(tmp_path) if pid != job.pid)
        for pid in draw.sample(ranks, 3):
            time.sleep(draw.random())
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        output, _ = job.communicate(timeout=300)
    finally:
        for pid in processes(tmp_path):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    assert job.returncode == 0, output
    check_against_plan(tmp_path, "--rounds", 60, output=output)


def test_it_is_refused_where_mpi_cannot(tmp_path, any_mpi):
    done = start(2, "-m", "fedmpi.train", "--out", tmp_path, "--on_loss", "continue", mpi=any_mpi)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("fedmpi: error: ")]
    assert len(lines) == 1 and "on_loss = continue: " in lines[0]
    assert "mpirun --with-ft ulfm" in lines[0]


def test_inside_mpi_stopped_ranks_are_killed_before_the_job_ends():
    done = start(1, "-m", "stuck_inside_mpi")
    assert done.returncode == 75, done.stderr
    assert done.stdout.split() == ["ended", "by", "signal", "9"]
    assert "no sign of rank 1 for 0.1 s during a test: stopped, stuck, or slower" in done.stderr
    assert "killed, and the others continue\nfedmpi: error: no sign of one or more ranks" in done.stderr


@pytest.mark.parametrize(("ranks", "dying"), [(2, "1@turn:2"), (3, "2@turn:1")])
def test_an_error_after_a_loss_ends_the_job(tmp_path, openmpi, ranks, dying):
    """Open MPI's mpirun would make 0 of the exit code if the last rank aborted, or if the others went on."""
    broken = ("--model", "faulty.Faulty", "--model.rank", 0, "--rounds", 50)
    words, variables = words_of(ranks, tmp_path / "lost", "--clients", ranks, *broken)
    done = execute(words, env={**variables, "DIE": dying})
    assert done.returncode == 1, done.stderr
    assert "fedmpi: error on rank 0, client 0: RuntimeError: the silo is on fire" in done.stderr
    assert not list(tmp_path.glob("lost/*/model.safetensors"))
