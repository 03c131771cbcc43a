"""The page of an experiment in Markdown, and its figures: what we measured beside what the paper prints."""

import contextlib
import datetime
import decimal
import pathlib
import re

from fedmpi.ground.files.own_files import replacing
from fedmpi.ground.text import Table, as_markdown, format_seconds
from fedmpi.runs.record import less_is_better, title
from reproduction import equal_cost, grids
from reproduction.claims import CONFIRMED, CONTRADICTED, further_seed, num_diverged, ordering, outcomes, spread
from reproduction.experiment import figure_file
from reproduction.length import lengths, nearest, section
from reproduction.results import paths, read_results
from reproduction.running import ON_GPU
from reproduction.strength import graded, ps_of_paper

ARROWS = (
    "↑: larger values are better; ↓: smaller ones. Values are means over the last tenth of the rounds, p is that of a "
    "paired t test, corrected (Holm) for all comparisons of the paper. [What the outcomes mean](../claims.md)."
)

BANDS = (
    "In the figures, lines are means over the seeds, and bands go from the lowest seed to the highest; the tables have "
    "standard deviations."
)
BARS = "Short bars at the right edge are the printed values."
ONE_NETWORK = (
    "All seeds attack the same network, that of the run before them (see the end of the page), so that the spread over "
    "the seeds does not contain what another network would change."
)
OBJECTIVE = (
    "The *training loss* is the objective of the attack: the attack loss plus the weighted distortion of the images."
)
MODEL = "(family"  # in the name of a processor whose model is known
DAY = len("2026-11-28")
CHANGED = 'Where a commit ends in "+", files of fedmpi had been changed since that commit.'


def write_page(folder, experiment, scale):
    """Write the page and figures of an experiment from its CSV files; returns the page's path.

    Raises:
        OSError: if the page cannot be written.
        UserError: if a figure cannot be written, or matplotlib is missing.
    """
    from fedmpi.cli.report.figures import color, draw, save
    from fedmpi.cli.report.style import Style

    results = read_results(folder, experiment, scale)
    path = paths(folder, experiment, scale)[0].with_suffix(".md")
    figures = {}
    axis = experiment.figure.get("axis", "round")
    for panel, methods in results.panels.items():
        for metric in experiment.figure.get("metrics", [experiment.metric]):
            scale_of = {} if less_is_better(metric) else {metric: "linear"}  # never zoomed in: the first rounds count
            figure = draw(methods, axis, metric, style=Style(width=400, height=240, scale=scale_of))
            if figure is not None:
                axes = figure.axes[0]
                for number, value in _printed_values(experiment, panel, metric, methods):
                    bar = {"color": color(number), "linewidth": 3, "solid_capstyle": "butt", "clip_on": False}
                    axes.plot([0.96, 1.0], [value, value], transform=axes.get_yaxis_transform(), **bar)
                if (scale, axis, metric) == ("full", "round", experiment.printed.get("metric")):
                    _mark_nearest(axes, experiment, panel, methods)
                name = figure_file(experiment, panel, metric)
                save(figure, path.with_name(name))
                figures[panel, metric] = name
    with replacing(path, signature(scale)) as part:
        part.write_text(page(folder, experiment, scale, results, figures), encoding="utf-8")
    return path


def _mark_nearest(axes, experiment, panel, methods):
    """Draw a line at the round after which our values are nearest to the printed ones, if that length was fitted."""
    from fedmpi.cli.report.figures import MUTED

    if its := experiment.printed.get("fit_length") and lengths(experiment, panel, methods):
        at = nearest(its).round
        axes.axvline(at, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1.5)
        words = {"color": MUTED, "fontsize": 7.5, "ha": "center", "va": "bottom"}
        axes.text(at, 1.01, "nearest to the printed values", transform=axes.get_xaxis_transform(), **words)


def _printed_values(experiment, panel, metric, methods):
    """[(a method's number, the value of this metric that the paper prints for it)]."""
    if metric != experiment.printed.get("metric"):
        return []
    values = [(number, experiment.printed_value(panel, one.label)) for number, one in enumerate(methods)]
    return [(number, value) for number, value in values if value is not None]


def signature(scale):
    """What is among the first bytes of all pages of a scale."""
    return f"({scale} scale)\n\nScale **{scale}**: ".encode()


def page(folder, experiment, scale, results, figures):
    """The text of the page.

    Args:
        folder: of all results. experiment: an `Experiment`. results: its `Results`.
        figures: (panel, metric) -> file name.
    """
    what = experiment.scales[scale]
    lines = [
        f"# {as_markdown(experiment.title)} ({scale} scale)",
        "",
        f"Scale **{scale}**: {as_markdown(what.get('says', 'as in the paper'))}. {_seeds(results.seeds)}"
        f"{_evaluated(experiment, what)}",
        *_further(results),
        *_attacked(experiment, results),
        "",
        f"{as_markdown(experiment.place)} of the paper. {as_markdown(experiment.question)}".strip(),
        "",
    ]
    for panel, methods in results.panels.items():
        lines += [f"## {as_markdown(panel)}", "", _table(experiment, panel, methods).markdown()]
        lines += _orders(experiment, panel, methods)
        shown = [(metric, name) for (where, metric), name in figures.items() if where == panel]
        for metric, name in shown:
            lines += [f"![{as_markdown(title(metric))} of each method]({name})", ""]
    notes = [BANDS] if figures and len(results.seeds) > 1 else []
    notes += (
        [BARS] if experiment.printed and any(metric == experiment.printed["metric"] for _, metric in figures) else []
    )
    lines += [" ".join(notes), ""] if notes else []
    lines += equal_cost.section(experiment, results)
    lines += section(experiment, results) if scale == "full" else []
    lines += _claims(folder, experiment, scale, results)
    lines += _list("What was found out", experiment.findings.get(scale, []))
    lines += _list("What differs from the paper", experiment.differs)
    lines += _grids(experiment, scale)
    lines += _settings(results, paths(pathlib.Path(), experiment, scale)[1].name)
    lines += _made(experiment, scale, results)
    return "\n".join(lines).rstrip() + "\n"


def _evaluated(experiment, what):
    """A sentence about evaluations on part of the data, unless `says` has one."""
    settings = what.get("settings", {})
    if settings.get("evaluate") != "subset" or "evaluated" in what.get("says", ""):
        return ""
    num = settings.get("evaluate_samples")
    few, most = (f"{num:,}", f"at most {num:,}") if type(num) is int else ["a part of the"] * 2
    if experiment.metric == "auc":  # always on all test data
        return f" Training losses are those of {few} samples."
    return f" Before the last round, values are those of {most} training and test samples, then of all test data."


def _seeds(seeds):
    if len(seeds) == 1:
        return f"One seed, {seeds[0]}."
    return f"Seeds {', '.join(seeds)}; values are mean ± standard deviation over them."


def _further(results):
    """A line about the column "further seed", if there is one."""
    if len(results.seeds) == 1:
        return []
    return [
        "Another seed ends within *further seed* of the mean with a probability of 95 %, if the noise is normal; "
        "with few seeds this is several standard deviations. All methods share what a seed decides, "
        "such as the split of the data, so that an unusual seed can lie outside for several methods at once."
    ]


def _attacked(experiment, results):
    """Lines about an attack, whose runs have a network from another run."""
    if experiment.metric != "attack_loss":
        return []
    return [*([ONE_NETWORK] if len(results.firsts) == 1 and len(results.seeds) > 1 else []), OBJECTIVE]


def _table(experiment, panel, methods):
    """The `Table` of one panel: a row per method, our values, and those that the paper prints."""
    metrics = [name for name in experiment.metrics if any(name in run.metrics for one in methods for run in one.runs)]
    metrics = metrics or [experiment.metric]  # nothing was measured: the table says so
    has_printed = any(experiment.printed_value(panel, one.label) is not None for one in methods)
    has_spread = any(its and its.deviation is not None for its in (spread(one, metrics[0]) for one in methods))
    header = ["method", "runs", *map(title, metrics)]
    header[3:3] = ["further seed"] if has_spread else []
    header += [f"printed ({experiment.printed['place']})", "ours − printed"] if has_printed else []
    rows = []
    for one in methods:
        spreads = [spread(one, name) for name in metrics]
        diverged = num_diverged(one)
        runs = f"{diverged} of {len(one.runs)} diverged" if diverged else str(len(one.runs))
        row = [one.label, runs, *(str(some) if some else "diverged" if diverged else "–" for some in spreads)]
        row[3:3] = ["–" if diverged else further_seed(spreads[0])] if has_spread else []
        if has_printed:
            row += _beside(experiment, panel, one)
        rows.append(row)
    return Table(header, rows)


def _beside(experiment, panel, method):
    """[the number in the paper, ours minus it], as text."""
    printed, ours = experiment.printed_value(panel, method.label), spread(method, experiment.printed["metric"])
    if printed is None:
        return ["–", "–"]
    in_panel = experiment.printed["values"][panel].values()
    # YAML drops a zero at the end of a number; the number with the most digits has the paper's.
    decimals = max(0, *(-decimal.Decimal(str(one)).as_tuple().exponent for one in in_panel))
    return [f"{printed:.{decimals}f}", f"{ours.mean - printed:+.4f}" if ours else "–"]


def _orders(experiment, panel, methods):
    """The order of the methods in our results and in the paper, and which of them diverged."""
    metric = experiment.printed.get("metric", experiment.metric)
    names = [one.label for one in methods]
    ours = {one.label: its.mean for one in methods if (its := spread(one, metric))}
    diverged = [(one.label, num_diverged(one), len(one.runs)) for one in methods if num_diverged(one)]
    diverged = [name if num == runs else f"{name} with {num} of {runs} seeds" for name, num, runs in diverged]
    words = [ordering(names, metric, ours), f"diverged: {'; '.join(diverged)}" if diverged else ""]
    words = "; ".join(filter(None, words))
    lines = [f"Order by {title(metric)}, best first: {as_markdown(words)}."]
    printed = {name: its for name in names if (its := experiment.printed_value(panel, name)) is not None}
    if not experiment.printed and experiment.place.startswith("Figure"):
        lines.append("The paper shows curves here, and no numbers.")
    if len(printed) > 1:
        lines.append(f"Order in the paper: {as_markdown(ordering(names, metric, printed))}.")
    return ["  \n".join(lines), ""]


def _claims(folder, experiment, scale, results):
    """Lines with the outcome of each claim."""
    from reproduction.experiment import read_papers

    of_paper = ps_of_paper(folder, experiment.paper)
    found = graded(experiment, list(outcomes(experiment, results)), scale, results, of_paper)
    if not found:
        return []
    sentences = read_papers()[experiment.paper]["claims"]
    reach = grids.reach(experiment, scale)
    rows = [
        [
            sentences[one.key],
            ", ".join(filter(None, [one.panel, reach])),
            bold(one.state),
            one.words,
            one.numbers or "–",
        ]
        for one in found
    ]
    header = ["claim", "where", "outcome", "numbers", "lead with its 95 % interval"]
    rows = [[cell if number == 2 else as_markdown(cell) for number, cell in enumerate(row)] for row in rows]
    return ["## The paper's claims", "", plain_table(header, rows), ARROWS, ""]


def bold(state):
    """A claim's state, bold if several seeds decided it."""
    return f"**{state}**" if state in (CONFIRMED, CONTRADICTED) else state


def plain_table(header, rows):
    """A table of cells that are Markdown already."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]) + "\n"


def _list(heading, sentences):
    return [f"## {heading}", "", *(f"- {prose(one)}" for one in sentences), ""] if sentences else []


def prose(text):
    """A sentence as Markdown shows it, with what stands between backticks as code."""
    parts = re.split("(`[^`]+`)", text)
    return "".join(part if number % 2 else as_markdown(part) for number, part in enumerate(parts))


def _grids(experiment, scale):
    """Lines with the number of points of the paper's grid that were tried, or []."""
    rows = grids.rows_of(experiment, scale)
    return ["## The paper's grid", "", grids.TEXT, plain_table(grids.HEADER, rows)] if rows else []


def _settings(results, runs_file):
    """Lines with the settings of every method; [] of results without them."""
    names = {}  # (method, settings) -> panels
    for row in results.runs:
        if row["settings"]:
            names.setdefault((row["method"], row["settings"]), {})[row["panel"]] = None
    if not names:
        return []
    panels = len(results.panels)
    rows = [
        [as_markdown(method if len(its) == panels else f"{method} ({', '.join(its)})"), as_markdown(settings)]
        for (method, settings), its in names.items()
    ]
    others = f"All other settings are in the column `command` of [{runs_file}]({runs_file})."
    return ["## Settings of the methods", "", plain_table(["method", "settings"], rows), others, ""]


def _made(experiment, scale, results):
    """Lines that say how the results were made: command, cost, machine, commit, date."""
    cpu = [float(row["cpu_seconds"]) for row in results.runs if row["cpu_seconds"]]
    commits, machines, dates, versions = (_distinct(results, key) for key in ("commit", "processor", "date", "torch"))
    cores = _distinct(results, "cores")
    command = f"python -m reproduction {experiment.argument} --scale {scale} --seeds {','.join(results.seeds)}"
    command += " --data-dir data" if experiment.data else ""
    parallel = {name: its for name in ("ranks", "threads") if (its := _distinct(results, name)) not in ([], ["1"])}
    command += "".join(f" --{name} {its[0]}" for name, its in parallel.items() if len(its) == 1)
    compiled = {" ".join(re.findall(r" --compile[= ](\S+)", row["command"])) for row in results.runs}
    command += "".join(f" --compile {mode}" for mode in compiled if mode and len(compiled) == 1)
    spent = f"{format_seconds(sum(cpu))} of CPU time, {format_seconds(sum(cpu) / len(cpu))} a run" if cpu else "–"
    if 0 < len(cpu) < len(results.runs):
        missing = len(results.runs) - len(cpu)
        spent += f"; the cost of {missing} run{'s' * (missing > 1)} is not known"
    changed = last_changed(experiment, dates)
    rows = [
        ["command", f"`{command}`"],
        ["runs", str(len(results.runs))],
        *([name, f"{', '.join(its)}: the file of the runs says which"] for name, its in parallel.items() if its[1:]),
        ["cost", spent],
        *(["run whose model the others use", _first(row)] for row in results.firsts),
        ["machine", as_markdown(", ".join(machines)) + (f", {', '.join(cores)} cores" if cores else "")],
        ["PyTorch", ", ".join(versions) or "–"],
        ["commit", ", ".join(commits) or "–"],
        ["date", " to ".join(sorted({date[:10] for date in dates})) or "–"],
        *([["last changed, at any scale (UTC)", changed]] if changed else []),
    ]
    files = " and ".join(f"[{path.name}]({path.name})" for path in paths(pathlib.Path(), experiment, scale)[:2])
    return [
        "## How it was made",
        "",
        plain_table(["", ""], rows),
        f"Every number in the tables is from {files}. {_repeated(results, commits)}"
        + (f" {CHANGED}" if any(commit.endswith("+") for commit in commits) else ""),
    ]


def _repeated(results, commits):
    """Whether the command repeats the numbers to the last digit, as text."""
    which = "this commit" if len(commits) == 1 else "the commit of each run"
    if any(row["processor"].startswith(ON_GPU) for row in results.runs):
        return "The runs on a GPU differ by rounding each time, which grows during training."
    if unknown := sum(MODEL not in row["processor"] for row in results.runs):
        return (
            f"For {unknown} of the {len(results.runs)} runs the model of the processor is not known, only a name that "
            f"several models have. So it cannot be said whether, with {which}, your numbers repeat those of these runs "
            "to the last digit or differ by rounding, which grows during training."
        )
    return (
        f"With {which}, this version of PyTorch, the same number of ranks and the same model of processor (there are "
        "several of one name), the command repeats these numbers to the last digit; otherwise they differ by rounding, "
        "which grows during training."
    )


def last_changed(experiment, dates):
    """When claims, lengths and the others of `fixed` were last changed, each compared with the first run; "" if none.

    Args:
        dates: when the runs ended, as text: days, or times in the format of ISO 8601.
    """
    first = min(map(_in_utc, dates), default="")
    return ", ".join(f"{what} {at}{_after(at, first)}" for what, at in experiment.fixed.items())


def _in_utc(date):
    """A time like "2026-11-28T09:15:00+01:00" as "2026-11-28 08:15:00"; a day stays as it is."""
    if len(date) != DAY:
        with contextlib.suppress(ValueError):  # of a file that was changed by hand
            date = datetime.datetime.fromisoformat(date).astimezone(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    return date


def _after(at, first):
    """What a change at a day or time was in relation to the first run, as text; "" if it was before.

    Both are compared in the unit of the coarser one. In the same minute counts as after: nothing says that it was not.
    """
    unit = min(len(at), len(first))
    if not first or at[:unit] < first[:unit]:
        return ""
    return " (on the day of the first run)" if unit == DAY and at[:unit] == first[:unit] else " (after the first run)"


def _first(row):
    """What the run before all others measured, and how it was made."""
    cost = f"; {format_seconds(float(row['cpu_seconds']))} of CPU time" if row["cpu_seconds"] else ""
    return as_markdown(f"{row['values']} after {row['rounds']} rounds{cost}; ") + f"`{row['command']}`"


def _distinct(results, key):
    """The different values of a column of the runs, in the order of their first."""
    return list(dict.fromkeys(row[key] for row in results.runs if row[key]))
