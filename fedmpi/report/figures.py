"""One figure: a metric against rounds, bytes, gradients or time, a line per method, a band over its seeds.

The only module that needs matplotlib.
"""

import io
import re

from fedmpi.errors import UserError
from fedmpi.report.curves import AXES, curve, less_is_better, title
from fedmpi.report.units import scale

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
except ImportError:
    raise UserError('figures need matplotlib: pip install "fedmpi[plot]" (or pip install matplotlib)') from None

# Okabe and Ito's colours without yellow: told apart by the colour-blind, and dark enough on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
DASHES = ("solid", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (5, 1.5, 1, 1.5)))
INK, MUTED, GRID = "#1F2328", "#59636E", "#E4E8EC"
WIDTH, HEIGHT = 324, 216  # points; small, so that text stays readable on a phone
LEFT, BOTTOM, TOP = 36, 35, 30  # points around the axes; what the names need is kept free on the right
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedmpi",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.labelcolor": MUTED,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}
FONTS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", Arial, sans-serif'


def color(number):
    """The colour of method `number` of a problem; the same in all its figures."""
    return COLORS[number % len(COLORS)]


def draw(methods, axis, metric, target=None):
    """The figure of a metric against an axis.

    Args:
        methods: list of `fedmpi.runs.Method`; its order gives the colours.
        axis: one of `AXES`. metric: a metric's name. target: a `Target` of this metric, or None.

    Returns:
        a matplotlib `Figure`, or None if nothing was measured.
    """
    curves = {number: points for number, method in enumerate(methods) if (points := curve(method, axis, metric))}
    if not curves:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="none")
        names = {number: _wrap(methods[number].label) for number in curves}
        size = 9 if sum(map(len, names.values())) <= 12 else 7
        width = WIDTH - LEFT - 16 - 0.68 * size * max(len(line) for lines in names.values() for line in lines)
        place = (LEFT / WIDTH, BOTTOM / HEIGHT, width / WIDTH, (HEIGHT - BOTTOM - TOP) / HEIGHT)
        axes = figure.add_axes(place)
        unit = _set_x(axes, axis, curves)
        for number, points in curves.items():
            _draw_curve(axes, number, points, unit)
        _set_y(axes, metric, curves, target)
        figure.text(0.02, 0.93, title(metric), color=INK, fontsize=10, fontweight="bold")
        ends = {number: (points[-1].x / unit, points[-1].mean) for number, points in curves.items()}
        _label_ends(axes, ends, names, size, width)
    return figure


def as_svg(figure):
    """A figure as the text of an SVG file, in the reader's own sans-serif type."""
    with matplotlib.rc_context(STYLE):
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": "fedmpi.report"}, transparent=True)
    return re.sub(r"(font: [^;\"']*?px )[^;\"]*", lambda found: found[1] + FONTS.replace('"', "'"), text.getvalue())


def save_png(figure, path):
    """Write a figure as a PNG for slides and papers: 220 dots an inch."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=220)


def _set_x(axes, axis, curves):
    """Scale and name the x axis; returns what values are divided by."""
    ends = [points[-1].x for points in curves.values()]
    factor, unit = scale(axis, max(ends))
    axes.set_xlabel(f"{AXES[axis]} ({unit})" if unit else AXES[axis], labelpad=5)
    starts = [points[0].x for points in curves.values()]
    if max(ends) > 12 * min(ends) and min(starts) > 0:
        axes.set_xscale("log")
        axes.set_xlim(min(starts) / factor, max(ends) / factor)
        _decimal_ticks(axes.xaxis, min(starts) / factor, max(ends) / factor)
    else:
        axes.set_xlim(0, max(ends) / factor)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 2.5, 5, 10), integer=axis == "round" and factor == 1))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    return factor


def _draw_curve(axes, number, points, unit):
    xs = [point.x / unit for point in points]
    if any(point.high > point.low for point in points):
        axes.fill_between(
            xs, [p.low for p in points], [p.high for p in points], color=color(number), alpha=0.16, linewidth=0
        )
    style = {"color": color(number), "linestyle": DASHES[number // len(COLORS) % len(DASHES)]}
    axes.plot(xs, [point.mean for point in points], marker="o" if len(points) == 1 else None, **style)


def _set_y(axes, metric, curves, target):
    """Limits from all curves and the target; a log axis for a positive loss that falls by more than 3."""
    values = [value for points in curves.values() for p in points for value in (p.low, p.high)]
    if target is not None:
        values.append(target.value)
        axes.axhline(target.value, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5)
        axes.annotate(
            f"target {target.value:g}", (1, target.value), (0, 4), xycoords=("axes fraction", "data"), ha="right",
            textcoords="offset points", color=INK, fontsize=8, bbox={"color": "white", "alpha": 0.7, "pad": 0.8},
        )  # fmt: skip
    low, high = min(values), max(values)
    if less_is_better(metric) and low > 0 and high > 3 * low:
        axes.set_yscale("log")
        axes.set_ylim(low / (high / low) ** 0.05, high * (high / low) ** 0.05)
        _decimal_ticks(axes.yaxis, low, high)
    else:
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1
        axes.set_ylim(low - margin, high + margin)
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 2.5, 5, 10)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def _decimal_ticks(axis, low, high):
    """Ticks of a log axis as plain numbers, as many as are read at a glance."""
    decades = high / low
    subs = (1, 1.5, 2, 3, 5, 7) if decades < 10 else (1, 2, 5) if decades < 200 else (1,)
    axis.set_major_locator(LogLocator(10, subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}" if 1e-4 < value < 1e6 else f"{value:.0e}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _label_ends(axes, ends, names, size, width):
    """Each curve's name at its end, in its colour; a thin line leads there from a curve that ends early.

    Args:
        ends: number of the method -> (x, y) of its curve's end. names: number -> lines of text.
        size: of the type. width: of the axes; both in points.
    """
    to_share = axes.transData + axes.transAxes.inverted()  # of the axes' width and height
    reached = {number: to_share.transform(end) for number, end in ends.items()}
    heights = {number: len(lines) * (size + 2.5) / (HEIGHT - BOTTOM - TOP) for number, lines in names.items()}
    places = _spread_out({number: y for number, (_, y) in reached.items()}, heights, 0, 1)
    for number, y in places.items():
        x_end, y_end = reached[number]
        style = {"color": color(number), "linewidth": 0.8, "clip_on": False, "transform": axes.transAxes}
        if x_end < 0.99:
            axes.plot([x_end, 1], [y_end, y_end], linestyle=(0, (1, 2)), **style)
        if abs(y - y_end) > 0.01:
            axes.plot([1 + 2 / width, 1 + 8 / width], [y_end, y], alpha=0.7, **style)
        axes.text(
            1 + 10 / width, y, "\n".join(names[number]), transform=axes.transAxes, va="center", color=color(number),
            fontsize=size, fontweight="bold", linespacing=1.15,
        )  # fmt: skip


def _wrap(label, width=15):
    """A label's parts as lines of at most about `width` letters, broken between words and after underscores."""
    lines = []
    for part in label.split(", "):
        lines.append("")
        for piece in re.findall(r"[^ _]*[ _]?", part):
            if lines[-1] and len((lines[-1] + piece).rstrip()) > width:
                lines.append("")
            lines[-1] += piece
    return [line.rstrip() for line in lines]


def _spread_out(wanted, heights, low, high):
    """Heights at which labels do not overlap, as near as may be to those wanted, inside [low, high] if they fit.

    Labels that would overlap become one block around the mean of what its members want.
    """
    blocks = []  # [members from below, centre, height]
    for number in sorted(wanted, key=wanted.get):
        blocks.append([[number], wanted[number], heights[number]])
        _keep_inside(blocks[-1], low, high)
        while len(blocks) > 1 and blocks[-1][1] - blocks[-1][2] / 2 < blocks[-2][1] + blocks[-2][2] / 2:
            (upper, _, upper_height), (lower, _, lower_height) = blocks.pop(), blocks.pop()
            members = lower + upper
            centre = sum(wanted[member] for member in members) / len(members)
            blocks.append([members, centre, lower_height + upper_height])
            _keep_inside(blocks[-1], low, high)
    places = {}
    for members, centre, height in blocks:
        bottom = centre - height / 2
        for member in members:
            places[member] = bottom + heights[member] / 2
            bottom += heights[member]
    return places


def _keep_inside(block, low, high):
    _, centre, height = block
    block[1] = max(min(centre, high - height / 2), low + height / 2)
