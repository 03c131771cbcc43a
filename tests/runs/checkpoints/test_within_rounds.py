"""Checkpoints within a round: what goes on from them has the bits of an unbroken run; damaged ones are not used."""

import contextlib
import itertools
import os
import re
import signal

import pytest
from dies import outcome
from helpers import PROGRAMS, disk_of, start, wait_for

import fedmpi.algorithms
import fedmpi.runs.checkpoints.writer
import fedmpi.runs.loop.within
from fedmpi.algorithms import Algorithm
from fedmpi.comm.solo import SoloLink
from fedmpi.federation.turns import Turns
from fedmpi.ground.errors import Stopped
from fedmpi.ground.files.run_files import find_checkpoints, find_within
from fedmpi.ground.registry import known
from fedmpi.training.config import read_command_line
from fedmpi.training.loop import train

SHORT = "--clients 3 --local-steps 5 --rounds 3 --eval-every 1 --device cpu"
OFTEN = "--checkpoint-minutes 1e-9"


def go(out, words):
    """Train in this process; returns the run folder."""
    words = f"--threads 1 {words}".split()
    return train(read_command_line([*words, "--out", str(out)]), SoloLink()).folder


@pytest.fixture
def leaves(monkeypatch):
    """Rounds are left from their first step on; returns a function that lets something happen after local steps.

    Its argument: number of a local step, from 1 -> function without arguments.
    """
    monkeypatch.setattr(fedmpi.runs.loop.within, "LONG", 0)
    monkeypatch.setattr(fedmpi.runs.checkpoints.writer, "LONG", 0)
    monkeypatch.setattr(fedmpi.runs.checkpoints.writer, "SHARE_OF_ROUND", 1000)
    usual = Turns.after_step

    def after(actions):
        made = itertools.count(1)

        def after_step(turns, federation, client):
            usual(turns, federation, client)
            actions.get(next(made), lambda: None)()

        monkeypatch.setattr(Turns, "after_step", after_step)

    return after


def die():
    raise KeyboardInterrupt


def check_kills(folder, number, words):
    ended = start(1, PROGRAMS / "dies.py", "within", folder, number, *words.split(), timeout=3000)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{number} kills, {number} with states within a round, all runs equal" in ended.stdout


@pytest.mark.rarely
@pytest.mark.parametrize(
    "words",
    [
        "--algorithm fafed --participation 0.7",
        "--algorithm scaffold --stages norm_bound --stages.norm_bound.bound 0.5 --codec random_k --faulty leave_out",
        "--algorithm fedavg --model mlp --private 3 --aggregation median",
    ],
)
def test_kills_within_rounds_lose_no_bit(tmp_path, words):
    check_kills(tmp_path, 8, f"{SHORT} {words}")


@pytest.mark.slow
@pytest.mark.parametrize("name", known(fedmpi.algorithms, Algorithm))
def test_kills_within_rounds_of_every_algorithm_lose_no_bit(tmp_path, name):
    task = "saddle_quadratic" if name in ("coda", "codasca") else "classification"
    check_kills(tmp_path, 5, f"{SHORT} --participation 0.7 --task {task} --algorithm {name}")


@pytest.mark.parametrize(
    "case",
    ["train fafed SIGUSR1 1 8", "train scaffold SIGKILL 1 45", "average - SIGUSR1 1 9", "join fafed SIGKILL 1 115"],
)
def test_ranks_leave_a_round_together(tmp_path, case):
    """Several clients on one of the ranks, a signal to one of them; own loops with messages of their own."""
    door, algorithm, *left = case.split()
    program = PROGRAMS / "leaves_round.py", door, algorithm
    whole = start(2, *program, tmp_path / "whole")
    assert "ended: " in whole.stdout, whole.stderr
    first = start(2, *program, tmp_path / "parts", *left)
    assert "ended: " not in first.stdout and find_within(tmp_path / "parts"), first.stderr
    assert "SIGKILL" in left or re.search(r"stopped within round \d by SIGUSR1; ", first.stderr)
    again = start(2, *program, tmp_path / "parts")
    assert again.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1], again.stderr
    assert not find_within(tmp_path / "parts")


def test_a_signal_to_a_rank_that_waits_ends_the_round_of_the_other(tmp_path):
    """Rank 0 has client 0, which has made its steps when the signal comes, rank 1 the other two."""
    first = start(2, PROGRAMS / "leaves_round.py", "train", "fedavg", tmp_path / "it", "SIGUSR1", 0, 15, 0.1)
    assert re.search(r"stopped within round 1 by SIGUSR1", first.stderr)
    program = PROGRAMS / "leaves_round.py", "train", "fedavg"
    ends = [start(2, *program, tmp_path / name).stdout.splitlines()[-1] for name in ("it", "whole")]
    assert ends[0] == ends[1]


def test_a_signal_stops_within_the_round(tmp_path, leaves):
    words = f"{SHORT} --algorithm fafed"
    leaves({22: lambda: signal.raise_signal(signal.SIGUSR1)})
    with pytest.raises(Stopped, match=r"^stopped within round 2 by SIGUSR1; to continue: --resume \S+$"):
        go(tmp_path, f"{words} --name it")
    go(tmp_path, f"{words} --name it --resume auto")
    assert outcome(tmp_path / "it") == outcome(go(tmp_path, f"{words} --name whole"))


def test_a_short_round_ends_before_it_is_left(tmp_path):
    """Without `leaves`: the signal waits for the end of the round, which comes soon."""
    usual = Turns.after_step

    def after_step(turns, federation, client):
        usual(turns, federation, client)
        if federation.round_index == 1 and client.index == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped, match="^stopped after round 2 by SIGUSR1"):
        patch.setattr(Turns, "after_step", after_step)
        go(tmp_path, f"{SHORT} --name it")
    assert find_checkpoints(tmp_path / "it") == [2] and not find_within(tmp_path / "it")


@pytest.fixture
def run(tmp_path, leaves):
    """A run that was killed after the 4th local step of the second client in round 2."""
    leaves({24: die})
    with contextlib.suppress(KeyboardInterrupt):
        go(tmp_path, f"{SHORT} {OFTEN} --checkpoint-every 1 --name it")
    assert len(find_within(tmp_path / "it")) == 2
    leaves({})
    return tmp_path / "it"


def ends_equal(run):
    go(run.parent, f"{SHORT} --checkpoint-every 1 --name it --resume auto")
    return outcome(run) == outcome(go(run.parent, f"{SHORT} --checkpoint-every 1 --name whole"))


@pytest.mark.parametrize("name", ["rank-0000.safetensors", "manifest.json"])
@pytest.mark.parametrize("harm", ["a byte", "shorter", "gone"])
def test_damage_is_named_and_the_older_state_used(run, capsys, name, harm):
    newest = max(find_within(run), key=lambda folder: (folder / "manifest.json").stat().st_mtime_ns)
    content = bytearray((newest / name).read_bytes())
    if harm == "gone":
        (newest / name).unlink()
    else:
        content[-1] ^= 16
        (newest / name).write_bytes(content[:-1] if harm == "shorter" else content)
    capsys.readouterr()
    assert ends_equal(run)
    damaged = f"checkpoint within round 2 is damaged: {newest / name}: " in capsys.readouterr().err
    assert damaged == (name != "manifest.json")


def test_without_a_whole_state_within_the_round_its_beginning_is_used(run, capsys):
    for folder in find_within(run):
        (folder / "rank-0000.safetensors").write_bytes(b"")
    capsys.readouterr()
    assert ends_equal(run)
    assert "it: continuing after round 1\n" in capsys.readouterr().out


def test_another_number_of_ranks_begins_the_round_again(run):
    words = f"{SHORT} --checkpoint-every 1 --name it --threads 1 --out {run.parent} --resume auto"
    ended = start(2, "-m", "fedmpi.train", *words.split())
    assert ended.returncode == 0, ended.stderr
    assert "the checkpoint within round 2 is that of 1 ranks, and this run has 2: it is not used" in ended.stderr
    losses = [record["loss"] for record in outcome(run)[1]]
    whole = [record["loss"] for record in outcome(go(run.parent, f"{SHORT} --name whole"))[1]]
    assert losses == pytest.approx(whole, rel=1e-5)


def test_a_full_disk_loses_no_state(tmp_path, leaves, capsys):
    """The newer of two checkpoints within the round stays while a later one cannot be written."""
    with disk_of(tmp_path / "disk", "8m") as disk:
        filled = disk / "filled"
        leaves({22: lambda: filled.write_bytes(bytes(_free(disk) - 20_000)), 27: die})
        with contextlib.suppress(KeyboardInterrupt):
            go(disk, f"{SHORT} {OFTEN} --name it")
        assert "the checkpoint within round 2 could not be written: " in capsys.readouterr().err
        assert len(find_within(disk / "it")) == 1
        filled.unlink()
        leaves({})
        go(disk, f"{SHORT} --name it --resume auto")
        assert outcome(disk / "it") == outcome(go(tmp_path, f"{SHORT} --name whole"))


def _free(folder):
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def test_a_signal_from_outside_stops_a_long_round(tmp_path, leaves):
    """The signal comes while the process works, from another one."""
    leaves({3: lambda: os.spawnlp(os.P_WAIT, "kill", "kill", "-USR1", str(os.getpid()))})
    with pytest.raises(Stopped, match="^stopped within round 1 by SIGUSR1"):
        go(tmp_path, f"{SHORT} --name it")
    wait_for(lambda: find_within(tmp_path / "it"), 1)
