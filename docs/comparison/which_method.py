"""The table of docs/which_method.md: python docs/comparison/which_method.py [NAMES] (10 minutes on one core).

Twelve methods on the embedded digits, 10 clients with unlike classes, three seeds, at equal rounds, equal gradients and
equal bytes. Step sizes are chosen for each of the three by the rule of `grids`; other settings are the defaults.
"""

import sys
import tempfile

from grids import DIM, Grid, mean_and_each, row

from fedmpi import algorithms
from fedmpi.ground.registry import known

ROUNDS, LOCAL_STEPS, NUM_CLIENTS = 20, 10, 10
METHODS = (
    "fedavg", "fedavg_m", "scaffnew", "feddyn", "fedexp", "fedadam", "fedadamw", "local_adam", "desloc", "fedmuon",
    "stem", "fafed",
)  # fmt: skip
# What a record counts -> how much of it FedAvg spends in ROUNDS rounds (FedExP sends a number of 8 bytes in addition).
BUDGETS = {"round": ROUNDS, "gradients": ROUNDS * LOCAL_STEPS * NUM_CLIENTS, "bytes": ROUNDS * (4 * DIM + 8)}


def ends(amount):
    """`last(records)`: the last record of a run that has spent no more than the budget of an amount."""
    return lambda records: [record for record in records if record.get(amount, 0) <= BUDGETS[amount]][-1]


def study(name, folder):
    """Print the lines of one method."""
    defaults = known(algorithms, algorithms.Algorithm)[name]()
    names = ("step_size", "server_step_size") if name == "fedadam" else ("step_size",)
    grid = Grid(name, names, ROUNDS, folder)
    for amount in BUDGETS:
        last = ends(amount)
        point = grid.best([getattr(defaults, each) for each in names], last)
        made = [last(records) for records in grid.records(point)]
        sizes = " and ".join(f"{size:g}" for size in grid.sizes(point).values())
        values = mean_and_each(record["accuracy"] for record in made)
        print(row(amount.rstrip("s") + "s", name, made[0]["round"], sizes, *values), flush=True)


if __name__ == "__main__":
    heads = ("equal", "method", "rounds", "step size", "accuracy", "of each seed")
    print(row(*heads), row(*["---"] * len(heads)), sep="\n")
    for name in sys.argv[1:] or METHODS:
        with tempfile.TemporaryDirectory() as folder:
            study(name, folder)
