"""Figures of a split: samples by client and class, or how much each client has."""

import textwrap

import numpy as np

from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.own_files import check_figure, save_figure

PROGRAM = "fedmpi data"  # which the figures' files name
COLOUR = "#2c7fb8"
CELL = 0.32  # inches of the grid per client and per class, unless the figure would be too large
MIN_SIDE, MAX_SIDE = 4, 20  # inches
LETTERS = 11  # of the title, per inch
LARGEST = 0.9  # diameter of the largest bubble, as a share of its cell
MAX_CLIENT_TICKS, MAX_CLASS_TICKS = 40, 25


def check_plot(path):
    """Check, before any work, that a figure can be drawn and written.

    Raises:
        UserError: if matplotlib is not installed, or something else is at the path.
    """
    _figure(MIN_SIDE, MIN_SIDE)
    check_figure(path, PROGRAM)


def draw_class_counts(path, counts, title, names=None):
    """Write a figure with a bubble per client and class, whose area is the number of samples.

    Args:
        path: of the figure; its ending is the format: .png, .pdf or .svg. counts: [num_clients, num_classes].
        title: a line above it. names: of the clients, or None.

    Raises:
        UserError: if matplotlib is not installed, or the file cannot be written.
    """
    num_clients, num_classes = counts.shape
    width, height = _width(num_clients), np.clip(2.5 + CELL * num_classes, MIN_SIDE, MAX_SIDE)
    figure = _figure(width, height)
    bars, grid = figure.subplots(2, 1, sharex=True, height_ratios=[1, max(2, num_classes / 3)])
    _draw_bars(bars, counts.sum(1), "samples", title, width)
    cell = 72 * min((width - 1.5) / num_clients, (height - 2.5) / num_classes, CELL)  # points
    clients, classes = np.nonzero(counts)
    areas = (LARGEST * cell) ** 2 * counts[clients, classes] / counts.max()
    bubbles = grid.scatter(clients, classes, areas, color=COLOUR, alpha=0.8, linewidth=0)
    grid.set(xlim=(-0.7, num_clients - 0.3), ylim=(-0.7, num_classes - 0.3), xlabel="client", ylabel="class")
    _number_clients(grid, num_clients, names)
    grid.set_yticks(range(0, num_classes, -(-num_classes // MAX_CLASS_TICKS)))
    grid.grid(alpha=0.15)
    grid.set_axisbelow(True)
    numbers = {"num": 3, "color": COLOUR, "alpha": 0.8, "fmt": "{x:,.0f}"}  # of samples, by the area
    sizes = bubbles.legend_elements("sizes", func=lambda area: area * counts.max() / (LARGEST * cell) ** 2, **numbers)
    grid.legend(*sizes, title="samples", loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, labelspacing=0.9)
    _save(figure, path)


def draw_sizes(path, sizes, unit, title):
    """Write a figure with a bar per client: [num_clients] `sizes` in `unit`.

    Raises:
        UserError: if matplotlib is not installed, or the file cannot be written.
    """
    width = _width(len(sizes))
    figure = _figure(width, 3)
    bars = figure.subplots()
    _draw_bars(bars, sizes, unit, title, width)
    bars.set(xlim=(-0.7, len(sizes) - 0.3), xlabel="client")
    _number_clients(bars, len(sizes))
    _save(figure, path)


def _width(num_clients):
    """Width of a figure in inches."""
    return np.clip(1.5 + CELL * num_clients, MIN_SIDE, MAX_SIDE)


def _figure(width, height):
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'fedmpi[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def _draw_bars(bars, sizes, unit, title, width):
    """A bar per client, and the title above."""
    bars.bar(range(len(sizes)), sizes, color=COLOUR, width=0.7)
    bars.set_ylabel(unit)
    bars.yaxis.set_major_formatter("{x:,.0f}")
    bars.set_title(textwrap.fill(title, int(LETTERS * width)), fontsize="medium")
    bars.spines[["top", "right"]].set_visible(False)


def _number_clients(axes, num_clients, names=None):
    ticks = range(0, num_clients, -(-num_clients // MAX_CLIENT_TICKS))
    axes.set_xticks(ticks)
    if names:
        words = [textwrap.shorten(f"{client} {names[client]}", 24, placeholder="…") for client in ticks]
        axes.set_xticklabels(words, rotation=40, ha="right", rotation_mode="anchor")


def _save(figure, path):
    with attempt("write", f"--plot {path}", OSError, ValueError):
        save_figure(figure, path, PROGRAM, dpi=130)
