"""Seconds of one job in fedmpi, in a loop written by hand, and in Flower: python docs/comparison/whole_job.py DATA

FedAvg on Fashion-MNIST: 4 clients, 100 rounds of 10 local steps with batch 50, 20 tests on all 10,000 test images, from
the start of the processes to their end. The jobs take turns, so that all of them meet the same machine. Flower needs an
environment of its own (see `flower_job.py`); without --flower it is left out. One thread per process.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent


def jobs(asked, data):
    """Name -> words of its command."""
    fedmpi = ["-m", "fedmpi.train", "--algorithm", "fedavg", "--algorithm.step_size", "0.1", "--data", data]
    fedmpi += ["--model", "fashion_cnn", "--local_steps", "10", "--batch_size", "50", "--rounds", str(asked.rounds)]
    fedmpi += ["--eval_every", str(max(1, asked.rounds // 20)), "--evaluate_samples", "10000"]
    ranks = ["mpirun", "-np", "4", sys.executable]
    found = {
        "fedmpi": [*ranks, *fedmpi],
        "by hand": [*ranks, HERE / "hand_written_job.py", data, "--rounds", str(asked.rounds)],
    }
    if asked.flower:
        found["Flower"] = [asked.flower, HERE / "flower_job.py", data, "--rounds", str(asked.rounds)]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="Fashion-MNIST in HDF5, as `fedmpi data prepare fashion_mnist` writes it")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--flower", metavar="PYTHON", help="the Python of an environment with Flower")
    asked = parser.parse_args()
    seconds = {}
    with tempfile.TemporaryDirectory(prefix="fedmpi-jobs-") as folder:
        for turn in range(asked.turns):
            for name, words in jobs(asked, os.path.abspath(asked.data)).items():
                began = time.perf_counter()
                variables = {**os.environ, "OMP_NUM_THREADS": "1"}
                ended = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True)
                if ended.returncode:
                    raise SystemExit(f"{name}\n{ended.stdout}{ended.stderr}")
                seconds.setdefault(name, []).append(time.perf_counter() - began)
                print(f"turn {turn + 1}: {name} {seconds[name][-1]:.1f} s", flush=True)
    for name, values in seconds.items():
        ratios = [own / other for own, other in zip(seconds["fedmpi"], values)]
        if name != "fedmpi":
            low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
            print(f"fedmpi takes {middle:.2f} of the time of {name} ({low:.2f} to {high:.2f} in {len(ratios)} turns)")


if __name__ == "__main__":
    main()
