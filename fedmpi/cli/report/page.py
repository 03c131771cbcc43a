"""One self-contained HTML page of `page.html`: tables and figures, no scripts, for wide screens and phones."""

import base64
import datetime
import math
import pathlib
import statistics

import jinja2

from fedmpi.cli.comparison import distinguishes_methods, setting_in_words
from fedmpi.cli.report.curves import LEVEL, best_of, clearly_best, final, lead, metrics_of, shown_metrics
from fedmpi.ground.text import Table, format_metric
from fedmpi.ground.version import __version__
from fedmpi.runs.record import less_is_better, title
from fedmpi.training.settings import RunSettings


def page(sections, complaints, refresh=None):
    """The page's text.

    Args:
        sections: list of (label, `section`).
        complaints: lines that say what could not be used.
        refresh: seconds after which a browser loads the page again, or None.
    """
    folder = jinja2.FileSystemLoader(pathlib.Path(__file__).parent)
    pages = jinja2.Environment(
        loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    pages.filters |= {"title": title, "base64": lambda text: base64.b64encode(text.encode()).decode()}
    return pages.get_template("page.html").render(
        heading=sections[0][0] if len(sections) == 1 else f"{len(sections)} comparisons",
        sections=sections,
        complaints=complaints,
        refresh=f"{refresh:g}" if refresh else None,
        version=__version__,
        now=datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
    )


def section(problem, colors, finals, targets, runs, figures, more=()):
    """What the page says about one problem: best methods, tables, figures, settings.

    Args:
        problem: a `fedmpi.cli.comparison.Problem`. colors: one per method.
        finals, runs: `Table`s. targets: list of (`Target`, `Table`).
        figures: axis -> list of (metric, SVG text). more: list of (heading, list of `Table`, SVG text).
    """
    return {
        "common": _common_words(problem),
        "findings": _findings(problem, colors),
        "conclusion": _conclusion(problem),
        "colors": colors,
        "finals": finals,
        "targets": targets,
        "figures": figures,
        "more": more,
        "runs": runs,
        "settings": _settings(problem),
    }


def _common_words(problem):
    """The most important settings that all methods share."""
    settings = [method.settings for method in problem.methods]
    words = []
    for key in ("clients", "participation", "rounds", "epochs", "local_steps", "local_epochs", "batch_size"):
        value = settings[0].get(key)
        if (
            value is not None
            and all(of_method.get(key) == value for of_method in settings)
            and (key, value) != ("participation", 1)
        ):
            words.append(f"{key.replace('_', ' ')} {value}")
    seeds = sorted({run.settings.get("seed", 0) for method in problem.methods for run in method.runs})
    words.append(f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}: {', '.join(map(str, seeds))}")
    return " · ".join(words)


def _findings(problem, colors):
    """The best method by each of the first two evaluated metrics, for large numbers; none for a single method."""
    if len(problem.methods) < 2:
        return []
    findings = []
    for metric in [name for name in shown_metrics(problem.methods) if name != "loss"][:2]:
        best, _ = best_of(problem.methods, metric)
        if best is None:
            continue
        word = "lowest" if less_is_better(metric) else "highest"
        doubt = "" if clearly_best(problem.methods, metric) == best else " (no clear lead)"
        mean, _, deviation = str(final(problem.methods[best], metric)).partition(" ")
        method = problem.methods[best].label
        phrase = f"{word} {problem.title(metric)}{doubt}"
        findings.append({"what": phrase, "mean": mean, "deviation": deviation, "method": method, "color": colors[best]})
    return findings


def _conclusion(problem):
    """What was found by the main metric, in a sentence or two."""
    methods = problem.methods
    names = [name for name in metrics_of(methods) if name != "loss"] or ["loss"]
    metric = next((name for name in names if "loss" not in name), names[0])
    best, number = best_of(methods, metric)
    if number < 2:
        return ""
    means = {n: spread.mean for n, method in enumerate(methods) if (spread := final(method, metric))}
    others = {n: mean for n, mean in means.items() if n != best and math.isfinite(mean)}
    second = (min if less_is_better(metric) else max)(others, key=others.get)
    leads = lead(methods[best], methods[second], metric)
    name = problem.title(metric)
    who = f"{name[0].upper()}{name[1:]}: {methods[best].label}"
    if abs(means[best] - means[second]) < LEVEL:
        return f"{who} and {methods[second].label} are level."
    who += f" is better than {methods[second].label}"
    if len(leads) < 2:
        return (
            f"{who}, by {abs(means[best] - means[second]):.4f}. Without two common seeds it is unknown how much of "
            "that is chance: no value is marked as best."
        )
    lead_in_words = format_metric(statistics.fmean(leads), statistics.stdev(leads))
    found = f"{who}, by {lead_in_words} over {len(leads)} seeds"
    if clearly_best(methods, metric) is None:
        return (
            f"{found}. Its lead over at least one method is not larger than the standard deviation of that lead: no "
            f"{name} is marked as best."
        )
    return f"{found}."


def _settings(problem):
    """A `Table` of all settings: a row per key, or a row per key and method if they differ."""
    settings = [method.settings for method in problem.methods]
    keys = [
        key for key in dict.fromkeys(key for of_method in settings for key in of_method) if distinguishes_methods(key)
    ]
    rows = []
    for key in keys:
        values = [of_method.get(key) for of_method in settings]
        if RunSettings.role(key) == "problem" or all(value == values[0] for value in values):
            rows.append((key, str(values[0])))
        else:
            rows += [
                (f"{key}, {method.label}", setting_in_words("", value).strip())
                for method, value in zip(problem.methods, values)
            ]
    runs = [run for method in problem.methods for run in method.runs]
    for key in [key for key, its_role in RunSettings.roles().items() if its_role == "speed"]:
        values = dict.fromkeys(str(run.settings[key]) for run in runs if key in run.settings)
        if values:
            rows.append((key, ", ".join(values)))
    return Table([], rows)
