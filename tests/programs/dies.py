"""Runs of one process that are killed and go on, many in a short time: forked from a process that has all imports.

    dies.py kills FOLDER NUMBER [SETTINGS]     SIGKILL at NUMBER random times, each followed by --resume auto
    dies.py steps FOLDER STRIDE [SETTINGS]     SIGKILL at every STRIDEth step of writing the second checkpoint
    dies.py within FOLDER NUMBER [SETTINGS]    SIGKILL at NUMBER random local steps, each with a checkpoint

Prints how often the run was killed; ends with an error if its rows or records differ from those of an unbroken run.
"""

import contextlib
import itertools
import json
import math
import os
import pathlib
import random
import signal
import sys
import time
import zlib

import h5py

import fedmpi.runs.checkpoints.writer
import fedmpi.runs.loop.within
from fedmpi.comm.solo import SoloLink
from fedmpi.federation.turns import Turns
from fedmpi.ground.files.run_files import SERVER_STATE, find_checkpoints, find_within, is_complete
from fedmpi.runs.checkpoints.files import check_file, checkpoint_folder, client_file, read_manifest
from fedmpi.runs.checkpoints.writer import Checkpoints
from fedmpi.training.config import read_command_line
from fedmpi.training.loop import train

CLOCKS = ("seconds", "local_seconds", "communication_seconds", "evaluation_seconds")
STEPS = ("write", "fsync", "replace", "posix_fallocate", "mkdir", "unlink", "rmdir", "open")


def child(out, name, settings, prepare=lambda: None):
    """Start a process that trains; returns its number."""
    number = os.fork()
    if number:
        return number
    with contextlib.suppress(BaseException), open(out / f"{name}.txt", "a") as text:
        os.dup2(text.fileno(), 1)
        os.dup2(text.fileno(), 2)
        prepare()
        words = ["--out", str(out), "--name", name, "--threads", "1", *settings]
        train(read_command_line(words), SoloLink())
        os._exit(0)
    os._exit(1)


def outcome(folder):
    """The bytes of the rows, and the records without their times."""
    with h5py.File(folder / "model.h5") as file:
        rows = {name: values[()].tobytes() for name, values in file["rows"].items()}
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return rows, [{key: value for key, value in line.items() if key not in CLOCKS} for line in lines]


def check_checkpoints(folder):
    """Check that no file of a run's checkpoints is missing or damaged, and that there are two."""
    found = find_checkpoints(folder)
    assert len(found) == 2, found
    for number in found:
        manifest = read_manifest(checkpoint_folder(folder, number))
        check_file(checkpoint_folder(folder, number) / SERVER_STATE, *manifest["server"])
        for client, (written, *sizes) in manifest["clients"].items():
            check_file(client_file(None, folder, written, int(client), 0, ""), *sizes)


def unbroken(out, settings):
    """The outcome of a run that nothing happens to, and its duration."""
    began = time.monotonic()
    assert os.waitpid(child(out, "unbroken", settings), 0)[1] == 0, (out / "unbroken.txt").read_text()
    return outcome(out / "unbroken"), time.monotonic() - began


def kill_at_random_times(out, number, settings):
    """Kill runs at random times until `number` have been killed, and compare those that come to their end."""
    expected, seconds = unbroken(out, settings)
    draw, killed, ended, run = random.Random(number), 0, 0, 0
    while killed < number or not is_complete(out / f"run-{run}"):
        rank = child(out, f"run-{run}", [*settings, "--resume", "auto"])
        if killed < number:
            time.sleep(draw.uniform(0, 0.7 * seconds))
            os.kill(rank, signal.SIGKILL)
        status = os.waitpid(rank, 0)[1]
        killed += os.WIFSIGNALED(status)
        assert os.WIFSIGNALED(status) or status == 0, (out / f"run-{run}.txt").read_text()
        if is_complete(out / f"run-{run}") and not os.WIFSIGNALED(status):
            assert outcome(out / f"run-{run}") == expected, f"run-{run}"
            ended, run = ended + 1, run + (killed < number)
            print(f"{killed} kills, {ended} equal ends", flush=True)


def kill_within_rounds(out, number, settings):
    """Kill a run at random local steps, one after the other, until it comes to its end; `number` times in all runs."""
    seconds = "--checkpoint-minutes", "1e-9"
    expected, _ = unbroken(out, settings)
    draw, killed, within, run = random.Random(number), 0, 0, 0
    while killed < number:
        status, name = 1, f"run-{run}"
        while status:
            step = draw.randrange(1, 30) if killed < number else 0
            words = [*settings, *seconds, "--resume", "auto"]
            status = os.waitpid(child(out, name, words, lambda: leave_rounds(step)), 0)[1]  # noqa: B023
            assert os.WIFSIGNALED(status) or status == 0, (out / f"{name}.txt").read_text()
            killed += os.WIFSIGNALED(status)
            within += os.WIFSIGNALED(status) and any(find_within(out / name))
        assert outcome(out / name) == expected, name
        assert not find_within(out / name)
        run += 1
    print(f"{killed} kills, {within} with states within a round, all runs equal")


def leave_rounds(step):
    """Let every local step of rounds be one after which states are written; this process kills itself after `step`."""
    fedmpi.runs.loop.within.LONG = fedmpi.runs.checkpoints.writer.LONG = 0
    usual, calls = Turns.after_step, itertools.count(1)

    def after_step(turns, federation, client):
        usual(turns, federation, client)
        if next(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    Turns.after_step = after_step


def die_at(step):
    """Make this process kill itself before the `step`th call that writes, counted from its second checkpoint on."""
    calls, usual = [-math.inf], Checkpoints.begin

    def begin(checkpoints):
        calls[0] = max(calls[0], 0) if checkpoints.done else calls[0]
        usual(checkpoints)

    def counted(function):
        def call(*arguments, **options):
            calls[0] += 1
            if calls[0] > step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    Checkpoints.begin = begin
    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))
    zlib.crc32 = counted(zlib.crc32)  # once for every piece of a file that is written


def kill_at_steps(out, stride, settings):
    """Kill a run at calls that write, from its second checkpoint to its third, and let it go on."""
    expected, _ = unbroken(out, settings)
    for number in itertools.count():
        name = f"step-{number * stride}"
        status = os.waitpid(child(out, name, settings, lambda: die_at(number * stride)), 0)[1]  # noqa: B023
        assert os.WIFSIGNALED(status), (out / f"{name}.txt").read_text()
        newest = find_checkpoints(out / name)[0]
        status = os.waitpid(child(out, name, [*settings, "--resume", "auto"]), 0)[1]
        assert status == 0, (out / f"{name}.txt").read_text()
        assert f"continuing after round {newest}\n" in (out / f"{name}.txt").read_text()
        assert outcome(out / name) == expected, name
        if newest > 2:
            break
    print(f"{number + 1} kills, each in another step, all runs equal")


if __name__ == "__main__":
    what, folder, *rest = sys.argv[1:]
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    if what == "kills":
        kill_at_random_times(pathlib.Path(folder), int(rest[0]), rest[1:])
    elif what == "within":
        kill_within_rounds(pathlib.Path(folder), int(rest[0]), rest[1:])
    else:
        kill_at_steps(pathlib.Path(folder), int(rest[0]), rest[1:])
