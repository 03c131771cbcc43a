"""One figure: a metric against rounds, bytes, gradients or time, a line per method, a band over its seeds.

This module and `further_figures` are the only ones of the report that need matplotlib.
"""

import dataclasses
import functools
import io
import re
import textwrap

from fedmpi.errors import UserError
from fedmpi.own_files import replacing, save_figure
from fedmpi.report.curves import CurvePoint, curve
from fedmpi.report.style import Style
from fedmpi.runs.record import field, less_is_better, title
from fedmpi.text import unit_for

try:
    import matplotlib
    import matplotlib.colors
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
except ImportError:
    raise UserError('figures need matplotlib: pip install "fedmpi[plot]" (or pip install matplotlib)') from None

PROGRAM = "fedmpi.report"  # which the figures' files name
# Okabe and Ito's colours without yellow: the colour-blind can distinguish them, and they are dark enough on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
DASHES = ("solid", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (5, 1.5, 1, 1.5)))
INK, MUTED, GRID = "#1F2328", "#59636E", "#E4E8EC"
BOTTOM, TOP = 37, 16  # points below and above the axes in type of 9.5; on the sides as many as the words need
CLOSE = 0.12  # of the values' whole range: curves that end closer together are zoomed in on
MOST_NAMES = 24  # below the axes: of more methods only the highest and lowest curves are named
LEADING = 2.5  # points between lines of names
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


def color(number):
    """The colour of method `number` of a problem, in all its figures."""
    return COLORS[number % len(COLORS)]


def _text_color(number):
    """A method's colour for text: darkened until its contrast to white is 4.5 (WCAG)."""
    rgb = matplotlib.colors.to_rgb(color(number))
    while 1.05 / (_luminance(rgb) + 0.05) < 4.5:
        rgb = tuple(0.95 * part for part in rgb)
    return rgb


def _luminance(rgb):
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]  # WCAG 2, relative luminance


def draw(methods, axis, metric, target=None, style=None):
    """The figure of a metric against an axis.

    Args:
        methods: list of `fedmpi.runs.comparison.Method`; its order gives the colours.
        axis: one of `fedmpi.runs.record.AXES`. metric: a metric's name. target: a `Target` of this metric, or None.
        style: a `Style`; None: the one of the page.

    Returns:
        a matplotlib `Figure`, or None if nothing was measured.
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
        figure = Figure(layout="none")
        axes = figure.add_axes((0, 0, 1, 1))
        unit = _set_x(axes, axis, curves)
        for number, points in curves.items():
            _draw_curve(axes, number, points, unit)
        how = _set_y(axes, _scale(style, metric, curves), curves, target)
        name = style.labels.get(metric) or ("1 − " if is_error else "") + title(metric)
        _lay_out(figure, axes, _Ends(curves, methods, unit, style), name + how, style)
        if target is not None:
            words = f"- - target {target.value:g}"
            axes.annotate(words, (0, 1), (0, 3), xycoords="axes fraction", textcoords="offset points",
                          color=INK, fontsize=0.9 * style.size)  # fmt: skip
    return figure


class _Ends:
    """Where curves end, and what they are called there."""

    def __init__(self, curves, methods, unit, style):
        self.at = {number: (points[-1].x / unit, points[-1].mean) for number, points in curves.items()}
        self.labels = {number: style.label(methods[number].label) for number in curves}
        self.lines = {number: _wrap(label) for number, label in self.labels.items()}


def _lay_out(figure, axes, ends, y_name, style):
    """Give the axes their place: names at the curves' ends if they fit there, below otherwise."""
    scale = style.size / 9.5
    num_lines, bottom, top = sum(map(len, ends.lines.values())), BOTTOM * scale, TOP * scale
    inner = style.height - bottom - top
    size = style.size if num_lines <= 11 else 7.5 * scale
    fits = num_lines * (size + LEADING) <= inner
    right = 16 + _widest(figure, ends, size) if fits else 12
    height = style.height + (0 if fits else _legend_below(figure, ends, style))
    figure.set_size_inches(style.width / 72, height / 72)
    y_lines = textwrap.wrap(y_name, max(12, int(inner / (0.55 * style.size))))
    axes.set_ylabel("\n".join(y_lines), labelpad=3)
    left = _room_for_numbers(axes, style.size) + len(y_lines) * 1.35 * style.size
    width, bottom = max(style.width - left - right, 0.3 * style.width), height - style.height + bottom
    axes.set_position((left / style.width, bottom / height, width / style.width, inner / height))
    if fits:
        _label_ends(axes, ends, size, (width, inner))


def _widest(figure, ends, size):
    """Width in points of the widest line of the names at the curves' ends, which are bold."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    font = FontProperties(size=size, weight="bold")
    lines = (line for lines in ends.lines.values() for line in lines)
    widths = (renderer.get_text_width_height_descent(line, font, ismath=False)[0] for line in lines)
    return max(widths) * 72 / figure.dpi


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
            findfont(FontProperties([style.font]), fallback_to_default=False)
        except ValueError:
            raise UserError(f"--font {style.font}: not on this machine: expected a family like DejaVu Sans") from None
        fonts = {"font.family": [style.font, "sans-serif"]}
    return {**STYLE, "font.size": style.size, **fonts}


def save(figure, path, style=None):
    """Write a figure; the ending of the path is the format: svg, pdf or png (220 dots an inch).

    Raises:
        UserError: if it cannot be written, the format is another, or fedmpi did not write the file that is there.
    """
    try:
        with matplotlib.rc_context(figure_settings(style or Style())):
            if path.suffix == ".svg":
                with replacing(path, PROGRAM.encode()) as part:
                    part.write_text(as_svg(figure), encoding="utf-8")
            else:
                save_figure(figure, path, PROGRAM, dpi=220)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be written: {error}") from None


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
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    return factor


def _room_for_numbers(axes, size):
    """Width in points of the numbers of the y axis, with a margin."""
    low, high = axes.get_ylim()
    ticks = [tick for tick in axes.yaxis.get_majorticklocs() if low <= tick <= high]
    return 12 + 0.62 * size * max(map(len, axes.yaxis.get_major_formatter().format_ticks(ticks)), default=0)


def _draw_curve(axes, number, points, unit):
    xs = [point.x / unit for point in points]
    if any(point.high > point.low for point in points):
        axes.fill_between(
            xs, [p.low for p in points], [p.high for p in points], color=color(number), alpha=0.16, linewidth=0
        )
    axes.plot(xs, [p.mean for p in points], marker="o" if len(points) == 1 else None, **line_style(number))


def line_style(number):
    """Colour and dashes of method `number`."""
    return {"color": color(number), "linestyle": DASHES[number // len(COLORS) % len(DASHES)]}


def _set_y(axes, scale, curves, target):
    """Limits from all curves and the target; returns what the axis's name says of it."""
    points = [point for some in curves.values() for point in (_later(some) if scale == "zoom" else some)]
    values = [value for point in points for value in (point.low, point.high)]
    if target is not None:
        axes.axhline(target.value, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5)
        values += [target.value] if scale != "log" or target.value > 0 else []
    low, high, margin = min(values), max(values), 0.05
    if scale == "log" and low > 0:
        high = max(high, low * 1.05)
        axes.set_yscale("log")
        axes.set_ylim(low / (high / low) ** margin, high * (high / low) ** margin)
        _decimal_ticks(axes.yaxis, low, high)
        return ""
    margin *= (high - low) or abs(high) or 20
    axes.set_ylim(low - margin, high + margin)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 2.5, 5, 10)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    return " (zoomed in)" if scale == "zoom" else ""


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


def _label_ends(axes, ends, size, inner):
    """Each curve's name at its end, in its colour; a thin line leads there from a curve that ends early.

    Args:
        ends: the `_Ends`. size: of the type. inner: (width, height) of the axes; all in points.
    """
    to_share = axes.transData + axes.transAxes.inverted()  # of the axes' width and height
    reached = {number: to_share.transform(end) for number, end in ends.at.items()}
    heights = {number: len(lines) * (size + LEADING) / inner[1] for number, lines in ends.lines.items()}
    places = _spread_out({number: y for number, (_, y) in reached.items()}, heights, 0, 1)
    for number, y in places.items():
        x_end, y_end = reached[number]
        style = {"color": color(number), "linewidth": 0.8, "clip_on": False, "transform": axes.transAxes}
        if x_end < 0.99:
            axes.plot([x_end, 1], [y_end, y_end], linestyle=(0, (1, 2)), **style)
        if abs(y - y_end) > 0.01 and 0 <= y_end <= 1:
            axes.plot([1 + 2 / inner[0], 1 + 8 / inner[0]], [y_end, y], alpha=0.7, **style)
        axes.text(
            1 + 10 / inner[0], y, "\n".join(ends.lines[number]), transform=axes.transAxes, va="center",
            color=_text_color(number), fontsize=size, fontweight="bold", linespacing=1.15,
        )  # fmt: skip


def _legend_below(figure, ends, style):
    """Put the names below the axes, if they are too many for the curves' ends; returns their height in points."""
    order = sorted(ends.at, key=lambda number: -ends.at[number][1])  # as the curves end, from above
    order = order if len(order) <= MOST_NAMES else [*order[: MOST_NAMES // 2], *order[-MOST_NAMES // 2 :]]
    names = [textwrap.fill(ends.labels[number], int(style.width / (0.57 * style.size))) for number in order]
    legend = figure.legend(
        [Line2D([], [], **line_style(number)) for number in order], names, loc="lower left",
        fontsize=0.84 * style.size, frameon=False, handlelength=2.6, labelspacing=0.35,
        labelcolor=[_text_color(number) for number in order],
    )  # fmt: skip
    return legend.get_window_extent(FigureCanvasAgg(figure).get_renderer()).height * 72 / figure.dpi


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
    """Heights at which labels do not overlap, as near as possible to the wanted ones, inside [low, high] if they fit.

    Labels that would overlap become one block around the mean of their wanted heights.
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
