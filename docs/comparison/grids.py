"""Runs on the digits for docs/periods.md and docs/which_method.md, and how their step sizes are chosen.

Step sizes are powers of √10. Chosen are those with the best accuracy on held-out data, a mean over the seeds. The
search begins with the method's defaults, and the grid grows until the best of it has all its neighbours in it.
"""

import itertools
import math
import statistics

import fedmpi
from fedmpi.ground.errors import Diverged

SEEDS = (0, 1, 2)
CONCENTRATION = 0.1  # of the classes on the 10 clients: the smaller, the more unlike
DIM = 15_010  # parameters of the model
WORST = {"holdout_accuracy": 0.0, "holdout_loss": math.inf, "accuracy": math.nan, "round": 0}  # of a run that diverged


class Grid:
    """The runs of one method, with all step sizes that have been asked for.

    Args:
        algorithm: an instance with the settings that stay. names: of its step sizes.
        rounds: of every run. folder: for the run folders.
    """

    def __init__(self, algorithm, names, rounds, folder, **settings):
        self.name, self.names, self.rounds, self.folder, self.settings = algorithm, names, rounds, folder, settings
        self.made = {}  # point, the powers of each step size -> the records of the run of each seed

    def sizes(self, point):
        """Name -> step size."""
        return {name: float(f"{10 ** (power / 2):.3g}") for name, power in zip(self.names, point, strict=True)}

    def records(self, point):
        """The records of the run of each seed."""
        if point not in self.made:
            self.made[point] = [self._train(seed, self.sizes(point)) for seed in SEEDS]
        return self.made[point]

    def _train(self, seed, sizes):
        try:
            return fedmpi.train(
                algorithm={"name": self.name, **self.settings, **sizes},
                clients=10, partition={"name": "dirichlet", "concentration": CONCENTRATION}, holdout=0.2,
                rounds=self.rounds, eval_every=1, seed=seed, threads=1, out=self.folder,
            ).metrics  # fmt: skip
        except Diverged:
            return [WORST]

    def best(self, defaults, last):
        """The point whose accuracy on held-out data is best among it and its neighbours.

        `defaults`: of the step sizes. `last(records)` gives the record that counts. Equal accuracies: by the loss.
        """

        def held_out(point):
            ends = [last(records) for records in self.records(point)]
            return sum(end["holdout_accuracy"] for end in ends), -sum(end["holdout_loss"] for end in ends)

        point = tuple(round(2 * math.log10(size)) for size in defaults)
        while True:
            around = [tuple(map(sum, zip(point, step))) for step in itertools.product((0, -1, 1), repeat=len(point))]
            found = max(around, key=held_out)  # the first of equal ones
            if found == point:
                return point
            point = found


def row(*cells):
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def mean_and_each(values):
    """Two cells, in per cent: the mean, and each."""
    in_percent = [100 * value for value in values]
    return f"{statistics.mean(in_percent):.1f}", ", ".join(f"{value:.1f}" for value in in_percent)
