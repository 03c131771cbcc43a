"""The table of docs/periods.md: python docs/comparison/periods.py [NAMES] (10 minutes on one core).

Accuracy on the digits at equal bytes, 10 clients with unlike classes, three seeds: m is averaged in every round or in
every third one, v in every round, third, sixth or twelfth. Each setting sends what a given number of rounds of three
vectors are. The step size is chosen for each setting, at the larger number of bytes, by the rule of `grids`.
"""

import sys
import tempfile

from grids import DIM, Grid, mean_and_each, row

from fedmpi import algorithms
from fedmpi.ground.registry import known

METHODS = ("local_adam", "fafed_code")
M_EVERY, V_EVERY = (1, 3), (1, 3, 6, 12)
FEW, MANY = 4, 12  # rounds with three vectors


def vectors(rounds, m_every, v_every):
    """How many a client sends in so many rounds."""
    return rounds + rounds // m_every + rounds // v_every


def sent_until(num_rounds, at_start):
    """`last(records)`: the last record of a run that has sent no more than three vectors in so many rounds."""
    most = (3 * num_rounds + at_start) * 4 * DIM
    return lambda records: [record for record in records if record.get("bytes", 0) <= most][-1]


def study(name, folder):
    """Print the lines of one method."""
    defaults = known(algorithms, algorithms.Algorithm)[name]()
    few, many = (sent_until(number, len(defaults.exchanged_at_start)) for number in (FEW, MANY))
    for m_every in M_EVERY:
        for v_every in V_EVERY:
            rounds = max(r for r in range(3 * MANY + 1) if vectors(r, m_every, v_every) <= 3 * MANY)
            grid = Grid(name, ("step_size",), rounds, folder, m_every=m_every, v_every=v_every)
            point = grid.best([defaults.step_size], many)
            for last in (few, many):
                made = [last(records) for records in grid.records(point)]
                megabytes, values = made[0]["bytes"] / 1e6, mean_and_each(record["accuracy"] for record in made)
                size = grid.sizes(point)["step_size"]
                print(
                    row(name, m_every, v_every, f"{megabytes:.2f}", made[0]["round"], f"{size:g}", *values), flush=True
                )


if __name__ == "__main__":
    heads = ("method", "m every", "v every", "MB", "rounds", "step size", "accuracy", "of each seed")
    print(row(*heads), row(*["---"] * len(heads)), sep="\n")
    for name in sys.argv[1:] or METHODS:
        with tempfile.TemporaryDirectory() as folder:
            study(name, folder)
