"""One figure: a metric against rounds, bytes, gradients or time, a line per method, a band over its seeds.

This module and `further_figures` are the only ones of the report that need matplotlib.
"""

import dataclasses
import functools
import io
import re
import textwrap

from fedmpi.cli.report.curves import CurvePoint, curve
from fedmpi.cli.report.style import Style
from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.own_files import replacing, save_figure
from fedmpi.ground.text import unit_for
from fedmpi.runs.record import field, less_is_better, title

try:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
except ImportError:
    raise UserError('figures need matplotlib: pip install "fedmpi[plot]" (or pip install matplotlib)') from None

PROGRAM = "fedmpi report"  # which the figures' files name
# Okabe and Ito's colours without yellow, and three of Tol's: the colour-blind can distinguish them, and they are dark
# enough on white.
COLORS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D", "#882255", "#332288", "#999933",
)  # fmt: skip
# As many as colours, so that in print without colour no two of the first ten lines look the same.
DASHES = (
    "solid", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (9, 2)), (0, (5, 1.2, 1, 1.2, 1, 1.2)),
    (0, (2.5, 2.5)), (0, (9, 1.5, 1.2, 1.5)), (0, (1.2, 3)), (0, (9, 2, 1.2, 2, 1.2, 2)),
)  # fmt: skip
INK, MUTED, GRID = "#1F2328", "#59636E", "#E4E8EC"
CLOSE = 0.12  # of the values' whole range: curves that end closer together are zoomed in on
MOST_NAMES = 24  # below the axes: of more methods only the highest and lowest curves are named
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "text.parse_math": False,  # a $ in a name is a $
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


class Picture(Figure):
    """A figure that a notebook shows as the value of a cell."""

    def _repr_svg_(self):
        return as_svg(self)


def color(number):
    """The colour of method `number` of a problem, in all its figures."""
    return COLORS[number % len(COLORS)]


def draw(methods, axis, metric, target=None, style=None, called=None):
    """The figure of a metric against an axis, a matplotlib `Figure`; None if nothing was measured.

    Args:
        methods: list of `fedmpi.cli.comparison.Method`; its order gives the colours, and is that of the names.
        axis: one of `fedmpi.runs.record.AXES`. metric: a metric's name. target: a `Target` of this metric, or None.
        style: a `Style`; None: the one of the page. called: the metric in words, if not its title.
    """
    style = style or Style()
    curves = {number: points for number, method in enumerate(methods) if (points := curve(method, axis, metric))}
    if not curves:
        return None
    is_error = style.scale_of(metric) == "error"
    if is_error:
        curves = {number: [_as_error(point) for point in points] for number, points in curves.items()}
        target = target and dataclasses.replace(target, value=1 - target.value)
    with matplotlib.rc_context(figure_settings(style)):
        figure = Picture(figsize=style.size_of(), layout="constrained")
        axes = figure.add_subplot()
        unit = _set_x(axes, axis, curves)
        for number, points in curves.items():
            _draw_curve(axes, number, points, unit)
        how = _set_y(axes, _scale(style, metric, curves), curves, target)
        name = called or ("1 − " if is_error else "") + title(metric)
        axes.set_ylabel(textwrap.fill(name + how, max(12, int(72 * style.size_of()[1] / (0.8 * style.size)))))
        if target is not None:
            axes.set_title(f"- - target {target.value:g}", loc="left", color=INK, fontsize=0.9 * style.size, pad=3)
        _add_legend(figure, axes, curves, {number: methods[number].label for number in curves}, style)
        figure.draw_without_rendering()  # lays it out
    return figure


def _add_legend(figure, axes, curves, labels, style):
    """Name the curves, in the order of the methods: on the right if the names fit there, below otherwise."""
    order = list(curves)
    names = [textwrap.fill(labels[number], 16, break_long_words=False) for number in order]
    options = {"fontsize": 0.9 * style.size, "frameon": False, "handlelength": 1.8, "labelcolor": INK, "borderpad": 0}
    where = "outside right upper"
    lines = 72 * style.size_of()[1] / (1.6 * style.size)
    if sum(name.count("\n") + 1 for name in names) > lines:
        most = max(2, int(lines / 2)) if style.height else MOST_NAMES  # of a fixed height the axes need half
        ends = sorted(curves, key=lambda number: -curves[number][-1].mean)
        named = ends if len(ends) <= most else [*ends[: most // 2], *ends[len(ends) - most // 2 :]]
        order = [number for number in curves if number in named]
        names = [textwrap.fill(labels[number], int(style.width / (0.57 * style.size))) for number in order]
        where = "outside lower left"
    legend = figure.legend([axes.lines[list(curves).index(number)] for number in order], names, loc=where, **options)
    if where == "outside lower left" and not style.height:
        height = legend.get_window_extent(FigureCanvasAgg(figure).get_renderer()).height * 72 / figure.dpi
        figure.set_figheight(style.size_of()[1] + height / 72)


def _as_error(point):
    """A point of a share, like the accuracy, as the point of 1 minus the share."""
    return CurvePoint(point.x, 1 - point.mean, 1 - point.high, 1 - point.low)


def _scale(style, metric, curves):
    """ "linear", "log" or "zoom": as asked for, or what suits the values."""
    chosen = style.scale_of(metric)
    values = [value for points in curves.values() for point in points for value in (point.low, point.high)]
    low, high = min(values), max(values)
    if chosen in ("log", "error"):
        return "log" if low > 0 else "linear"
    if chosen != "auto":
        return chosen
    if less_is_better(metric):
        return "log" if low > 0 and high > 3 * low else "linear"
    ends = [points[-1].mean for points in curves.values()]
    are_close = len(ends) > 1 and max(ends) - min(ends) < CLOSE * (high - low)
    return "zoom" if are_close and min(map(len, curves.values())) > 7 else "linear"


def figure_settings(style):
    """Matplotlib's settings in this style."""
    fonts = {}
    if style.font:
        try:
            findfont(FontProperties(family=[style.font]), fallback_to_default=False)
        except ValueError:
            raise UserError(f"--font {style.font}: not on this machine: expected a family like DejaVu Sans") from None
        fonts = {"font.family": [style.font, "sans-serif"]}
    return {**STYLE, "font.size": style.size, **fonts}


def save(figure, path, style=None):
    """Write a figure; the ending of the path is the format: svg, pdf or png (220 dots an inch).

    Raises:
        UserError: if it cannot be written, the format is another, or fedmpi did not write the file that is there.
    """
    with attempt("write", path, OSError, ValueError), matplotlib.rc_context(figure_settings(style or Style())):
        if path.suffix == ".svg":
            with replacing(path, PROGRAM.encode()) as part:
                part.write_text(as_svg(figure), encoding="utf-8")
        else:
            save_figure(figure, path, PROGRAM, dpi=220)


@functools.lru_cache(maxsize=1000)  # it is drawn into the page and into a file
def as_svg(figure):
    """A figure as the text of an SVG file, in the reader's own sans-serif type."""
    with matplotlib.rc_context(STYLE):
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": PROGRAM}, transparent=True)
    return re.sub(r"(font: [^;\"']*?px )[^;\"]*", lambda found: found[1] + FONTS.replace('"', "'"), text.getvalue())


def _set_x(axes, axis, curves):
    """Scale and name the x axis; returns what values are divided by."""
    ends = [points[-1].x for points in curves.values()]
    factor, unit = unit_for(field(axis).unit, max(ends))
    axes.set_xlabel(f"{title(axis)} ({unit})" if unit else title(axis), labelpad=5)
    starts = [points[0].x for points in curves.values()]
    if max(ends) > 12 * min(ends) and min(starts) > 0:
        axes.set_xscale("log")
        axes.set_xlim(min(starts) / factor, max(ends) / factor)
        _decimal_ticks(axes.xaxis, min(starts) / factor, max(ends) / factor)
    else:
        axes.set_xlim(0, max(ends) / factor)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 2.5, 5, 10), integer=axis == "round" and factor == 1))
        axes.xaxis.set_major_formatter("{x:,.6g}")
    return factor


def _draw_curve(axes, number, points, unit):
    xs = [point.x / unit for point in points]
    if any(point.high > point.low for point in points):
        axes.fill_between(
            xs, [p.low for p in points], [p.high for p in points], color=color(number), alpha=0.16, linewidth=0
        )
    axes.plot(xs, [p.mean for p in points], marker="o" if len(points) == 1 else None, **line_style(number))


def line_style(number):
    """Colour and dashes of method `number`."""
    return {"color": color(number), "linestyle": DASHES[(number + number // len(COLORS)) % len(DASHES)]}


def _set_y(axes, scale, curves, target):
    """Scale and ticks of the y axis; returns what the axis's name says of it."""
    if target is not None and (scale != "log" or target.value > 0):
        axes.axhline(target.value, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5)
    if scale == "log":
        axes.set_yscale("log")
        _decimal_ticks(axes.yaxis, *axes.get_ylim())
        return ""
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 2.5, 5, 10)))
    axes.yaxis.set_major_formatter("{x:,.6g}")
    if scale != "zoom":
        return ""
    values = [value for points in curves.values() for point in _later(points) for value in (point.low, point.high)]
    values += [target.value] if target is not None else []
    margin = 0.05 * (max(values) - min(values) or abs(max(values)) or 20)
    axes.set_ylim(min(values) - margin, max(values) + margin)
    return " (zoomed in)"


def _later(points):
    """The part of a curve that is shown zoomed in: from the point where it has made 85 % of its way."""
    first, last = points[0].mean, points[-1].mean
    begin = next(n for n, point in enumerate(points) if abs(point.mean - last) <= 0.15 * abs(first - last) + 1e-12)
    return points[min(begin, len(points) - 1) :]


def _decimal_ticks(axis, low, high):
    """Ticks of a log axis as plain numbers, as many as are read at a glance."""
    decades = high / low
    subs = (1, 1.5, 2, 3, 5, 7) if decades < 10 else (1, 2, 5) if decades < 200 else (1,)
    axis.set_major_locator(LogLocator(10, subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}" if 1e-4 < value < 1e6 else f"{value:.0e}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
