"""How much of a paper's grid was tried: the grids that the papers print, and the points of them that were run here."""

import math

from fedmpi.ground.text import as_markdown
from reproduction.experiment import SCALES, find_experiments, read_papers

HEADER = ["method", "the paper's grid", "tried", "tried beside it"]
TEXT = """\
The paper chose the settings from these values and does not print which. Counted are the points that were tried here; a
setting that was not varied has its preset's value. Batch sizes and local steps,
for which there are grids, too, were not tuned.
"""


def rows_of(experiment, scale):
    """A row for each method, see `HEADER`: how many points of the paper's grid were tried; [] if there is no grid."""
    its = read_papers()[experiment.paper].get("grids", {})
    if not experiment.tune or experiment.name in its.get("not_of", []):
        return []
    points = [
        point
        for length in (("small",) if scale == "small" else SCALES)
        if experiment.tuning(length)
        for point in experiment.tuning_points(length)
        if "algorithm" in point.settings
    ]
    rows = []
    for algorithm in dict.fromkeys(point.settings["algorithm"] for point in points):
        grid = its.get("of", {}).get(algorithm)
        if grid is None:
            continue
        tried = {
            tuple(_number(point.settings.get(f"algorithm.{name}")) for name in grid)
            for point in points
            if point.settings["algorithm"] == algorithm
        }
        inside = sum(all(map(_is_in, one, grid.values())) for one in tried)
        values = "; ".join(f"{name} {', '.join(map(str, some))}" for name, some in grid.items())
        total = math.prod(map(len, grid.values()))
        others = str(len(tried) - inside or "–")
        rows.append([f"`{algorithm}`", as_markdown(values), f"{inside} of {total}", others])
    return rows


def reach(experiment, scale):
    """ "on the paper's grid" or "on a wider grid": where the compared settings were chosen; "" if nothing was tuned.

    Where at most half of the methods have values beside the paper's, they are named.
    """
    (tuned,) = find_experiments([experiment.grid_of]) if experiment.grid_of else (experiment,)
    rows = rows_of(tuned, scale)
    wider = [row[0].strip("`") for row in rows if row[-1] != "–"]
    if not wider:
        return "on the paper's grid" if rows else ""
    return "on a wider grid" + f" for {', '.join(wider)} only" * (2 * len(wider) <= len(rows))


def _is_in(value, values):
    """Whether a value is one of a grid, of which roots of ten are printed with three digits; None is not varied."""
    return value is None or any(math.isclose(value, one, rel_tol=0.01) for one in values)


def _number(value):
    """A setting as a number; None if it is not varied, or is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
