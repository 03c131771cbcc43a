"""The table of docs/periods.md: python docs/comparison/periods.py [local_adam fafed_code] (an hour on two cores).

Accuracy on the digits at equal bytes, 10 clients with unlike shares of the classes, three seeds: m is averaged in every
round or in every third one, v in every round, third, sixth or twelfth. Each setting sends about what BUDGET rounds of
three vectors are. The step size is chosen by the accuracy on held-out data, with periods of 1, and serves all settings.
"""

import json
import pathlib
import statistics
import sys
import tempfile

import fedmpi

BUDGET, SEEDS, CHOOSING = 30, (0, 1, 2), 100  # rounds; seeds of the table, and that of the step sizes
STEP_SIZES = {"local_adam": (0.003, 0.01, 0.03), "fafed_code": (0.003, 0.01, 0.03)}
M_EVERY, V_EVERY = (1, 3), (1, 3, 6, 12)


def vectors(rounds, m_every, v_every):
    """How many vectors a client sends in so many rounds."""
    return rounds + rounds // m_every + rounds // v_every


def train(name, folder, seed, rounds, **settings):
    """The last record of a run."""
    run = fedmpi.train(
        algorithm={"name": name, **settings}, clients=10, partition={"name": "dirichlet", "concentration": 0.3},
        rounds=rounds, eval_every=rounds, holdout=0.2, result="best", seed=seed, threads=1, out=folder,
    )  # fmt: skip
    return run.metrics[-1]


def study(name, folder):
    """Print the rows of one method."""
    tried = {size: train(name, folder, CHOOSING, BUDGET, step_size=size) for size in STEP_SIZES[name]}
    chosen = max(tried, key=lambda size: tried[size]["holdout_accuracy"])
    found = {size: round(100 * tried[size]["holdout_accuracy"], 1) for size in tried}
    print(f"{name}: step size {chosen}; on held-out data {json.dumps(found)}", flush=True)
    for m_every in M_EVERY:
        for v_every in V_EVERY:
            rounds = max(r for r in range(4 * BUDGET) if vectors(r, m_every, v_every) <= 3 * BUDGET)
            settings = {"step_size": chosen, "m_every": m_every, "v_every": v_every}
            made = [train(name, folder, seed, rounds, **settings) for seed in SEEDS]
            values = [100 * record["accuracy"] for record in made]
            sent = made[0]["bytes"] / 1e6
            words = [m_every, v_every, rounds, f"{sent:.2f}", f"{statistics.mean(values):.1f}"]
            spread = ", ".join(f"{value:.1f}" for value in values)
            print(f"| {' | '.join(map(str, words))} | {spread} |", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or STEP_SIZES:
            study(name, pathlib.Path(folder) / name)
