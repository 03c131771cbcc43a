"""How figures look: their size, type, labels and scales; needs no matplotlib."""

import dataclasses

from fedmpi.ground.errors import UserError
from fedmpi.runs.record import AXES

SCALES = ("auto", "linear", "log", "zoom", "error")
FORMATS = ("svg", "png", "pdf")


@dataclasses.dataclass(frozen=True)
class Style:
    """The look of a figure.

    Attributes:
        width, height: in points (1/72 inch). Without a height it is 212, or what suits the figure, and grows with the
            names that stand below the axes.
        size: of the type, in points. font: a family that matplotlib finds, or None.
        scale: of every metric, one of `SCALES`; or metric -> one of them. error: 1 minus the value on a log axis;
            zoom: the end of the curves; auto: log for losses that fall far, zoom where curves end close together.

    Raises:
        UserError: one line, if a size or a scale is not allowed.
    """

    width: float = 312  # small, so that text is readable on a phone
    height: float | None = None
    size: float = 9.5
    font: str | None = None
    scale: object = "auto"

    def __post_init__(self):
        for name, least, most in (("width", 120, 2000), ("height", 90, 2000), ("size", 4, 40)):
            value = getattr(self, name)
            if (name, value) != ("height", None) and not (isinstance(value, int | float) and least <= value <= most):
                raise UserError(f"{name} = {value}: expected points (1/72 inch) from {least} to {most}")
        for scale in self.scale.values() if isinstance(self.scale, dict) else [self.scale]:
            if scale not in SCALES:
                raise UserError(f"scale = {scale}: expected one of {', '.join(SCALES)}")

    def size_of(self, height=212):
        """(width, height) of a figure in inches; its own height counts if none was asked for."""
        return self.width / 72, (self.height or height) / 72

    def scale_of(self, metric):
        """The scale of a metric's axis."""
        return self.scale.get(metric, "auto") if isinstance(self.scale, dict) else self.scale


@dataclasses.dataclass(frozen=True)
class Look:
    """What of a comparison is drawn, and how.

    Attributes:
        style: a `Style`. metrics: names; (): all. axes: names. formats: of the single figures.
        labels: a method's label or a metric's name -> what tables and figures call it.
    """

    style: Style = Style()
    metrics: tuple = ()
    axes: tuple = AXES
    formats: tuple = ()
    labels: dict = dataclasses.field(default_factory=dict)


def add_options(parser):
    """Add the options that a `Look` is made of."""
    add = parser.add_argument
    add("--metric", action="append", default=[], metavar="NAME", help="plot only this metric; may be repeated")
    add("--axis", action="append", choices=AXES, help="plot only against this amount; may be repeated")
    words = f"scale of a metric's axis: {', '.join(SCALES)} (error: 1 minus the value, on a log axis); may be repeated"
    add("--scale", action="append", default=[], metavar="METRIC=SCALE", help=words)
    words = 'name of a method or a metric on the page, like "fafed=FAFED (ours)"; may be repeated'
    add("--label", action="append", default=[], metavar="NAME=TEXT", help=words)
    add("--width", type=float, default=Style.width / 72, metavar="INCHES", help="width of a figure; default: 4.33")
    add("--height", type=float, metavar="INCHES", help="height of a figure; default: 2.94, and more for names below it")
    add("--font", metavar="FAMILY", help='font family of the figures, like "Times New Roman"; default: sans-serif')
    add("--font-size", type=float, default=Style.size, metavar="POINTS", help="font size of the figures; default: 9.5")
    words = "also write every figure into a file of this format; may be repeated"
    add("--format", action="append", choices=FORMATS, help=words)


def look_of(options):
    """The `Look` that the options of a command line ask for.

    Raises:
        UserError: one line, if one is not allowed.
    """
    scales, labels = _pairs("--scale", options.scale), _pairs("--label", options.label)
    height = options.height and 72 * options.height
    style = Style(72 * options.width, height, options.font_size, options.font, scales or "auto")
    formats = tuple(dict.fromkeys(options.format or ()))
    return Look(style, tuple(options.metric), tuple(options.axis or AXES), formats, labels)


def _pairs(option, texts):
    pairs = [text.partition("=") for text in texts]
    for text, (name, _, value) in zip(texts, pairs):
        if not name or not value:
            raise UserError(f"{option} {text}: expected NAME=TEXT")
    return {name: value for name, _, value in pairs}
