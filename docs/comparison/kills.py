"""Jobs that are killed at random moments and go on, against the same jobs unbroken: python docs/comparison/kills.py

Every job trains on the digits that scikit-learn contains, 3 clients on 2 ranks, with one algorithm after the other. It
is killed by SIGKILL at a random moment between its first round and its end (all its processes at once, as by a power
failure, or one rank, as by the kernel when memory ends), started again with --resume auto, perhaps killed again, until
it comes to its end. Then its rows (parameters, moments, control variates) and its records without clocks must have the
bits of the unbroken job. Prints a line per job and the counts; ends with 1 if a bit differs.
"""

import argparse
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import h5py

ALGORITHMS = ("fafed", "scaffold", "fedadam", "stem", "fedavg")
CLOCKS = ("seconds", "local_seconds", "communication_seconds", "evaluation_seconds")
SETTINGS = "--clients 3 --rounds 100 --eval_every 5 --checkpoint_every 10 --participation 0.7 --resume auto --out"
MARK = "FEDMPI_KILLS_JOB"  # in the environment of a job's processes, by which they are found


def begin(folder, name, algorithm):
    """Start the job `name`; returns mpirun's process."""
    words = ["mpirun", "-np", "2", sys.executable, "-m", "fedmpi.train", "--name", name, "--algorithm", algorithm]
    with open(folder / f"{name}.txt", "a") as text:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: str(folder / name)}
        words += [*SETTINGS.split(), str(folder)]
        return subprocess.Popen(words, stdout=text, stderr=text, env=environment, start_new_session=True)


def processes(job):
    """Numbers of all processes of a job, mpirun and its helpers too -> whether each is a rank."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={job}\0".encode() in (path / "environ").read_bytes():
                found[int(path.name)] = b"fedmpi.train\0" in (
                    path / "cmdline"
                ).read_bytes() and "python" in os.readlink(path / "exe")
        except OSError:
            continue  # it has ended, or is another user's
    return found


def kill(job, mpirun, everything):
    """SIGKILL to all processes of a job or to one rank; the files that its ranks had in /dev/shm are removed."""
    numbers = processes(job)
    ranks = [number for number, is_rank in numbers.items() if is_rank]
    if not ranks:
        return False
    shared = set()
    for number in ranks:
        try:
            shared |= set(
                re.findall(r"(/dev/shm/\S+)$", pathlib.Path(f"/proc/{number}/maps").read_text(), re.MULTILINE)
            )
        except OSError:
            return False  # it has just ended
    for number in numbers if everything else ranks[:1]:
        try:
            os.kill(number, signal.SIGKILL)
        except ProcessLookupError:
            continue
    mpirun.wait(timeout=120)
    while processes(job):
        time.sleep(0.02)
    for path in shared:
        pathlib.Path(path).unlink(missing_ok=True)
    return mpirun.returncode != 0


def outcome(folder):
    """The bytes of the rows, and the records without their clocks."""
    with h5py.File(folder / "model.h5") as file:
        rows = {name: values[()].tobytes() for name, values in file["rows"].items()}
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return rows, [{key: value for key, value in line.items() if key not in CLOCKS} for line in lines]


def wait_for_a_round(folder, name, mpirun):
    """Wait until a job that has begun prints that it has made rounds, or ends."""
    text = folder / f"{name}.txt"
    seen = text.read_text().count("\nround ")
    while mpirun.poll() is None and text.read_text().count("\nround ") == seen:
        time.sleep(0.02)
    return time.monotonic()


def unbroken(folder, algorithm):
    """The outcome of a job that nothing happens to, and the seconds of its rounds and of what follows them."""
    name = f"unbroken-{algorithm}"
    mpirun = begin(folder, name, algorithm)
    began = wait_for_a_round(folder, name, mpirun)
    if mpirun.wait():
        raise SystemExit((folder / f"{name}.txt").read_text())
    return outcome(folder / name), time.monotonic() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="decides the moments of the kills")
    asked = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="fedmpi-kills-"))
    draw, kills, jobs, differ = random.Random(asked.seed), 0, 0, 0
    known = {}
    while kills < asked.kills:
        algorithm = ALGORITHMS[jobs % len(ALGORITHMS)]
        if algorithm not in known:
            known[algorithm] = unbroken(folder, algorithm)
        expected, seconds = known[algorithm]
        name, own = f"{algorithm}-{jobs}", 0
        while True:
            mpirun = begin(folder, name, algorithm)
            if kills == asked.kills:
                break
            wait_for_a_round(folder, name, mpirun)
            time.sleep(seconds * draw.random())
            if not kill(folder / name, mpirun, draw.random() < 0.5):
                break
            kills, own = kills + 1, own + 1
        if mpirun.wait():
            raise SystemExit((folder / f"{name}.txt").read_text())
        jobs += 1
        same = outcome(folder / name) == expected
        differ += not same
        print(
            f"{algorithm}: killed {own} times, {'the bits of the unbroken job' if same else 'OTHER BITS'}", flush=True
        )
        shutil.rmtree(folder / name)
    print(f"{kills} kills of {jobs} jobs, {differ} with other bits than an unbroken one")
    shutil.rmtree(folder)
    return differ > 0


if __name__ == "__main__":
    sys.exit(main())
