"""What runs look like: figures, tables, one page (``python -m fedmpi report RUN...``), and figures from Python."""

import pathlib

from fedmpi.ground.errors import UserError


def figure(runs, metric, axis="round", *, target=None, path=None, **style):
    """One figure for a paper: a metric of some runs against rounds, bytes, gradients or seconds.

    Args:
        runs: path of a run folder or of a folder with some, or a list of them.
        metric: a name in the records, like "accuracy". axis: "round", "bytes", "gradients" or "seconds".
        target: a value to draw as a line, or None.
        path: where to save it; the ending is the format: .pdf, .svg or .png. None: it is only returned.
        style: width and height in points (1/72 inch), size of the type in points, font (a family), scale (auto, linear,
            log, zoom, or error: 1 minus the value on a log axis), labels (a method's or metric's name -> words).

    Returns:
        a matplotlib `Figure`.

    >>> import fedmpi
    >>> figure = fedmpi.figure("runs/example", "accuracy", axis="bytes", scale="error")
    >>> figure.axes[0].get_yscale()
    'log'

    Raises:
        UserError: one line, if runs cannot be read, are of several problems, or did not measure the metric.
    """
    from fedmpi.cli.comparison import problems
    from fedmpi.cli.report.curves import Target
    from fedmpi.cli.report.figures import draw, save
    from fedmpi.cli.report.style import Style
    from fedmpi.runs.folder import find_runs
    from fedmpi.runs.record import AXES, less_is_better

    listed, labels = runs if isinstance(runs, list | tuple) else [runs], style.pop("labels", {})
    look = Style(**style)
    found, complaints = find_runs([pathlib.Path(folder) for folder in listed])
    if not found:
        raise UserError("; ".join(complaints))
    comparison = problems(found)
    if len(comparison) > 1:
        labels = "; ".join(problem.label for problem in comparison)
        raise UserError(f"the runs solve different problems: {labels}: expected runs of one")
    problem = comparison[0].renamed(labels)
    if axis not in AXES:
        raise UserError(f"axis = {axis}: expected one of {', '.join(AXES)}")
    goal = None if target is None else Target(metric, target, less_is_better(metric))
    drawn = draw(problem.methods, axis, metric, goal, look, problem.titles.get(metric))
    if drawn is None:
        names = dict.fromkeys(name for run in found for name in run.metrics)
        raise UserError(f"metric = {metric}: no run measured it: expected one of {', '.join(names)}")
    if path is not None:
        save(drawn, pathlib.Path(path), look)
    return drawn
