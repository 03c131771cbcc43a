"""Further figures of a comparison: results of each client, ROC curves, what a setting does."""

import itertools
import statistics
import textwrap

import matplotlib
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedmpi.cli.report.figures import INK, MUTED, Picture, color, figure_settings, line_style
from fedmpi.cli.report.style import Style
from fedmpi.runs.record import title

MOST_TICKS = 6  # of the values of a setting; if there are more, matplotlib chooses the ticks


def _plain_axes(style, *height):
    """(figure, axes) of a figure whose text matplotlib lays out; a height in points counts if none was asked for."""
    figure = Picture(figsize=style.size_of(*height), layout="constrained")
    return figure, figure.add_subplot()


def draw_silos(methods, metric, values, style=None, called=None):
    """The figure of each client's value of a metric: a row of dots per method, its mean as a line.

    `values`: number of the `Method` -> list of numbers, one per client. `called`: the metric in words.
    """
    style = style or Style()
    with matplotlib.rc_context({**figure_settings(style), "axes.grid.axis": "x"}):
        figure, axes = _plain_axes(style, 64 + 24 * len(values))
        for row, (number, of_clients) in enumerate(values.items()):
            known = [value for value in of_clients if value == value]
            axes.scatter(known, [row] * len(known), s=26, color=color(number), alpha=0.6, linewidth=0)
            axes.plot([statistics.fmean(known)] * 2, [row - 0.3, row + 0.3], color=INK, linewidth=1.4)
        names = [_short(methods[number].label) for number in values]
        letters = style.width / (0.6 * style.size) - max(map(len, names))  # below the axes
        words = textwrap.fill(f"{called or title(metric)} of each client (line: mean)", max(12, int(letters)))
        axes.set(ylim=(len(values) - 0.4, -0.6), xlabel=words)
        axes.set_yticks(range(len(values)), names)
        axes.xaxis.set_major_locator(MaxNLocator(4))
    return figure


def draw_roc(methods, points, style=None):
    """The figure of ROC curves: number of a `Method` -> list of (false positives, true positives)."""
    style = style or Style()
    with matplotlib.rc_context(figure_settings(style)):
        figure, axes = _plain_axes(style, style.width * 0.86)
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        for number, curve_points in points.items():
            label = _short(methods[number].label)
            axes.plot(*zip(*curve_points), label=label, **line_style(number))
        axes.set(xlim=(0, 1), ylim=(0, 1.01), xlabel="share of false positives", ylabel="share of true positives")
        words = {"title": "first run of each method", "alignment": "left", "title_fontsize": 0.9 * style.size}
        axes.legend(loc="lower right", frameon=False, fontsize=0.9 * style.size, **words)
    return figure


def draw_setting(key, metric, lines, style=None):
    """The figure of a metric at the end against a setting; `lines`: name -> list of (setting, `Spread`), ascending."""
    style = style or Style()
    with matplotlib.rc_context(figure_settings(style)):
        figure, axes = _plain_axes(style)
        for number, (name, points) in enumerate(lines.items()):
            xs, means = [x for x, _ in points], [spread.mean for _, spread in points]
            ranges = [[m - min(s.values) for m, (_, s) in zip(means, points)],
                      [max(s.values) - m for m, (_, s) in zip(means, points)]]  # fmt: skip
            axes.errorbar(xs, means, ranges, marker="o", markersize=4, capsize=2, label=name, **line_style(number))
        values = [x for points in lines.values() for x, _ in points]
        if min(values) > 0 and max(values) >= 8 * min(values):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        if len(set(values)) <= MOST_TICKS:
            axes.set_xticks(sorted(set(values)))
            axes.minorticks_off()
        axes.set(xlabel=key.rpartition(".")[2].replace("_", " "), ylabel=title(metric))
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=0.9 * style.size)
    return figure


def draw_heat(names, rows, style=None, labels=("column", "row")):
    """The figure of a vector (one row) or matrix: a coloured cell with its number for each pair of classes.

    `labels` are those of the columns and of the rows of a matrix.
    """
    style = style or Style()
    with matplotlib.rc_context({**figure_settings(style), "axes.grid": False}):
        figure, axes = _plain_axes(style, max(90, min(style.width, 60 + 26 * len(rows))))
        axes.imshow(rows, cmap="Blues", aspect="auto")
        axes.set_xticks(range(len(names)), map(_short, names), rotation=90 if len(names) > MOST_TICKS else 0)
        axes.set_yticks(range(len(rows)), map(_short, names) if len(rows) == len(names) else [""] * len(rows))
        known = [value for row in rows for value in row if value == value]
        middle = (min(known, default=0) + max(known, default=0)) / 2
        for (row, of_row), column in itertools.product(enumerate(rows), range(len(names) if len(names) < 16 else 0)):
            shade = "white" if of_row[column] > middle else INK
            axes.text(column, row, f"{of_row[column]:.4g}", ha="center", va="center", color=shade)
        if len(rows) > 1:
            axes.set(xlabel=labels[0], ylabel=labels[1])
    return figure


def _short(label):
    return textwrap.shorten(label, 28, placeholder="…")
