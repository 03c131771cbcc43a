"""The picture of a split: clients by classes, or how much each client has."""

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
    num_clients, num_classes = counts.shape
    width, height = _width(num_clients), np.clip(2.5 + CELL * num_classes, 4, 20)
    figure = _figure(width, height)
    bars, grid = figure.subplots(2, 1, sharex=True, height_ratios=[1, max(2, num_classes / 3)])
    _draw_sizes(bars, counts.sum(1), "samples", title, width)
    cell = 72 * min((width - 1.5) / num_clients, (height - 2.5) / num_classes, CELL)  # points
    clients, classes = np.nonzero(counts)
    areas = (LARGEST * cell) ** 2 * counts[clients, classes] / counts.max()
    grid.scatter(clients, classes, areas, color=COLOUR, alpha=0.8, linewidth=0)
    grid.set(xlim=(-0.7, num_clients - 0.3), ylim=(-0.7, num_classes - 0.3), xlabel="client", ylabel="class")
    _number_clients(grid, num_clients)
    grid.set_yticks(range(0, num_classes, -(-num_classes // 25)))
    grid.grid(alpha=0.15)
    grid.set_axisbelow(True)
    _save(figure, path)


def draw_sizes(path, sizes, unit, title):
    """Write a PNG (or PDF, SVG): a bar per client.

    Args:
        path: of the picture. sizes: [num_clients] how much each has. unit: of what. title: a line above it.

    Raises:
        UserError: if matplotlib is not there, or the file cannot be written.
    """
    width = _width(len(sizes))
    figure = _figure(width, 3)
    bars = figure.subplots()
    _draw_sizes(bars, sizes, unit, title, width)
    bars.set(xlim=(-0.7, len(sizes) - 0.3), xlabel="client")
    _number_clients(bars, len(sizes))
    _save(figure, path)


def _width(num_clients):
    """Of a picture, in inches."""
    return np.clip(1.5 + CELL * num_clients, 4, 20)


def _figure(width, height):
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'fedmpi[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def _draw_sizes(bars, sizes, unit, title, width):
    """A bar per client, and the title above."""
    bars.bar(range(len(sizes)), sizes, color=COLOUR, width=0.7)
    bars.set_ylabel(unit)
    bars.yaxis.set_major_formatter("{x:,.0f}")
    bars.set_title(textwrap.fill(title, int(LETTERS * width)), fontsize="medium")
    bars.spines[["top", "right"]].set_visible(False)


def _number_clients(axes, num_clients):
    axes.set_xticks(range(0, num_clients, -(-num_clients // 40)))


def _save(figure, path):
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
