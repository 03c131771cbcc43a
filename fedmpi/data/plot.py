"""The picture of a split: clients by classes."""

import textwrap

import numpy as np

from fedmpi.errors import UserError

COLOUR = "#2c7fb8"
CELL = 0.32  # inches of the grid per client and per class, where the page allows it
LETTERS = 11  # of the title, per inch
LARGEST = 0.9  # diameter of the largest bubble in a cell


def counts_of(parts, labels, num_classes):
    """[num_clients, num_classes] how many samples of each class each client holds."""
    return np.array([np.bincount(labels[part], minlength=num_classes) for part in parts])


def draw(path, counts, title):
    """Write a PNG (or PDF, SVG): a bubble per client and class, its area the number of samples.

    Args:
        path: of the picture. counts: [num_clients, num_classes]. title: a line above it.

    Raises:
        UserError: if matplotlib is not there, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'fedmpi[plot]'") from None
    num_clients, num_classes = counts.shape
    width, height = np.clip(1.5 + CELL * num_clients, 4, 20), np.clip(2.5 + CELL * num_classes, 4, 20)
    figure = Figure(figsize=(width, height), layout="constrained")
    bars, grid = figure.subplots(2, 1, sharex=True, height_ratios=[1, max(2, num_classes / 3)])
    bars.bar(range(num_clients), counts.sum(1), color=COLOUR, width=0.7)
    bars.set_ylabel("samples")
    bars.set_title(textwrap.fill(title, int(LETTERS * width)), fontsize="medium")
    bars.spines[["top", "right"]].set_visible(False)
    cell = 72 * min((width - 1.5) / num_clients, (height - 2.5) / num_classes, CELL)  # points
    clients, classes = np.nonzero(counts)
    areas = (LARGEST * cell) ** 2 * counts[clients, classes] / counts.max()
    grid.scatter(clients, classes, areas, color=COLOUR, alpha=0.8, linewidth=0)
    grid.set(xlim=(-0.7, num_clients - 0.3), ylim=(-0.7, num_classes - 0.3), xlabel="client", ylabel="class")
    every = -(-num_clients // 40)
    grid.set_xticks(range(0, num_clients, every))
    grid.set_yticks(range(0, num_classes, -(-num_classes // 25)))
    grid.grid(alpha=0.15)
    grid.set_axisbelow(True)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: cannot be written: {error}") from None


def table(counts):
    """The same in text: a line per client."""
    width = max(6, len(str(counts.max())) + 1)
    head = "client".ljust(8) + "samples".rjust(9) + "".join(f"{label:>{width}}" for label in range(counts.shape[1]))
    lines = [
        f"{client:<8}{row.sum():>9}" + "".join(f"{number or '.':>{width}}" for number in row)
        for client, row in enumerate(counts)
    ]
    return "\n".join([head, *lines])
