"""Numbers as people read them."""

import math

from fedmpi.text import format_bytes

SCALES = {  # smallest number for which the unit is used, its size, its name
    "bytes": (  # as `format_bytes` has them, for the axis of a figure
        (0, 1, "B"), (2**10, 2**10, "KiB"), (2**20, 2**20, "MiB"), (2**30, 2**30, "GiB"), (2**40, 2**40, "TiB"),
    ),
    "gradients": ((0, 1, ""), (1e4, 1e3, "thousands"), (2e6, 1e6, "millions"), (2e9, 1e9, "billions")),
    "seconds": ((0, 1, "s"), (120, 60, "min"), (7200, 3600, "h")),
    "round": ((0, 1, ""), (1e5, 1e3, "thousands")),
}  # fmt: skip


def scale(axis, largest):
    """(size, name) of the unit in which numbers up to `largest` of an axis are best read."""
    return [unit for smallest, *unit in SCALES[axis] if largest >= smallest][-1]


def count(axis, spread, with_range=False):
    """Mean of a `Spread` of an axis with its unit, like "12.3 min"; with its range like "12.3 (11.9–13.0) min"."""
    values = (spread.mean, min(spread.values), max(spread.values))
    if axis == "bytes":
        return _with_range(*map(format_bytes, values), with_range)
    factor, unit = scale(axis, spread.mean)
    digits = 0 if unit == "" else max(0, 2 - int(math.log10(max(spread.mean / factor, 1))))
    return f"{_with_range(*(f'{x / factor:,.{digits}f}' for x in values), with_range)} {unit}".rstrip()


def _with_range(mean, low, high, with_range):
    return f"{mean} ({low}–{high})" if with_range and low != high else mean


def metric(spread):
    """Mean ± standard deviation of a `Spread` of a metric, with as many digits as are worth reading."""
    mean, deviation = spread.mean, spread.deviation
    styles = ((1e7, ".4g"), (1e4, ",.0f"), (100, ",.1f"), (1e-2, ".4f"))
    style = next((style for least, style in styles if abs(mean) >= least), ".4g" if mean else ".4f")
    return f"{mean:{style}}" + ("" if deviation is None else f" ± {deviation:{style}}")
