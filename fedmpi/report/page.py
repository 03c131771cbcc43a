"""One self-contained HTML page: tables and figures, no scripts, for wide screens and phones."""

import base64
import dataclasses
import datetime
import html
import math
import statistics

from fedmpi import __version__
from fedmpi.config.run import role, roles
from fedmpi.report.curves import best_of, clearly_best, final, lead, metrics_of
from fedmpi.runs.comparison import distinguishes_methods, setting_in_words
from fedmpi.runs.record import less_is_better, title
from fedmpi.text import format_metric

STYLE = """
:root { color-scheme: light; --ink: #1f2328; --muted: #59636e; --line: #d9dee3; --faint: #f6f8fa; --best: #0b5cad; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 72rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.25rem; margin: 3rem 0 .3rem; padding-top: 1.2rem; border-top: 2px solid var(--ink); }
h3 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; }
p { margin: .3rem 0; max-width: 46rem; }
.muted, summary, footer { color: var(--muted); font-size: .9rem; }
.findings { padding: 0; margin: 1.2rem 0; list-style: none; display: flex; flex-wrap: wrap; gap: .8rem; }
.findings li { flex: 1 1 9.5rem; background: var(--faint); border-left: 4px solid var(--c); padding: .6rem .9rem;
  border-radius: 0 6px 6px 0; }
.findings b { display: block; font-size: 1.25rem; line-height: 1.3; }
.findings small { font-size: .9rem; font-weight: 400; color: var(--muted); white-space: nowrap; }
.scroll { overflow-x: auto; margin: .6rem 0 1rem; background: linear-gradient(to left, #fff 1.5rem, #fff0 3rem) right,
  linear-gradient(to left, #c4ccd4, #fff0) right / .6rem 100%; background-repeat: no-repeat;
  background-attachment: local, scroll; }  /* a shade at the right as long as there is more to see */
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .42rem .9rem .42rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th { color: var(--muted); font-weight: 600; vertical-align: bottom; white-space: normal; line-height: 1.25; }
th span { display: inline-block; width: max-content; max-width: 9em; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; padding-right: 1.2rem; }
td:first-child { font-weight: 600; }
.name { display: inline-block; width: max-content; max-width: min(40vw, 24rem); white-space: normal;
  overflow-wrap: anywhere; padding-left: 1.2em; text-indent: -1.2em; }
table.plain :is(th, td) { text-align: left; position: static; } table.plain td { font-weight: 400; }
table.plain td { white-space: normal; overflow-wrap: anywhere; min-width: 2.5rem; }
table.data :is(th, td) { white-space: nowrap; min-width: 0; }
.name small { display: block; font-weight: 400; color: var(--muted); text-indent: 0; }
td.best { color: var(--best); font-weight: 700; }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .5em; text-indent: 0;
  background: var(--c); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.2rem 1.6rem; }
figure { margin: 0; min-width: 0; max-width: 34rem; } figure img { display: block; width: 100%; height: auto; }
details { margin: 1rem 0; border-top: 1px solid var(--line); padding-top: .6rem; }
summary { cursor: pointer; font-weight: 600; } details > :nth-child(2) { margin-top: .8rem; }
footer { margin-top: 3.5rem; border-top: 1px solid var(--line); padding-top: .8rem; overflow-wrap: anywhere; }
@media (max-width: 40rem) { main { padding: 1.2rem 1rem 3rem; } h1 { font-size: 1.4rem; } h2 { margin-top: 2.2rem; } }
@media print { main { max-width: none; } figure { break-inside: avoid; } }
"""
READING = (
    "A line is the mean over the runs of a method, which differ only in their seed or in settings of speed; "
    "the shaded band reaches from the lowest to the highest of them. "
    "If some runs of a method are complete, its unfinished runs are left out. "
    "Tables show the mean ± the sample standard deviation over the runs, and their number. "
    "A value is marked as best if its lead over each other method is larger than the standard deviation of that lead "
    "over at least two common seeds. The spread of clients is the standard deviation over the clients. "
    "A dotted line connects the end of a shorter curve with its name. Bytes are those that one client passes to "
    "Allreduce; gradient evaluations are summed over all clients. Wall time includes evaluation."
)


def page(sections, complaints, refresh=None):
    """The page's text.

    Args:
        sections: list of `section`s' texts with their headings, as (label, text).
        complaints: lines that say what could not be used.
        refresh: seconds after which a browser loads the page again, or None.
    """
    heading = sections[0][0] if len(sections) == 1 else f"{len(sections)} comparisons"
    again = f'<meta http-equiv="refresh" content="{refresh:g}">' if refresh else ""
    parts = [text if len(sections) == 1 else f"<h2>{html.escape(label)}</h2>{text}" for label, text in sections]
    left_out = "".join(f"<p class=muted>Left out: {html.escape(line)}</p>" for line in complaints)
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{again}'
        f"<title>{html.escape(heading)}</title><style>{STYLE}</style></head><body><main>"
        f"<h1>{html.escape(heading)}</h1>{''.join(parts)}{left_out}"
        f"<footer><p>{READING}</p><p>Made by fedmpi {__version__} on {now}.</p></footer></main></body></html>\n"
    )


def section(problem, colors, finals, targets, runs, figures, more=()):
    """The HTML of one problem: best methods, tables, figures, settings.

    Args:
        problem: a `fedmpi.runs.comparison.Problem`. colors: one per method.
        finals, runs: `Table`s. targets: list of (`Target`, `Table`).
        figures: axis -> list of (metric, SVG text). more: list of (heading, `Table` or None, SVG text).
    """
    parts = [f"<p class=muted>{html.escape(_common_words(problem))}</p>", _findings(problem, colors)]
    parts += ["<h3>At the end</h3>", _table(finals, colors)]
    for target, table in targets:
        parts += [f"<h3>Until {html.escape(str(target))}</h3>", _table(table, colors)]
    for number, (axis, drawn) in enumerate(figures.items()):
        words = "".join(_figure(svg, f"{title(metric)} against {title(axis)}") for metric, svg in drawn)
        heading = f"Against {title(axis)}"
        if number == 0:
            parts.append(f"<h3>{heading}</h3><div class=figures>{words}</div>")
        else:
            parts.append(f"<details><summary>{heading}</summary><div class=figures>{words}</div></details>")
    for heading, table, svg in more:
        words = f"<div class=figures>{_figure(svg, heading)}</div>{_table(table, None, 'plain data') if table else ''}"
        parts.append(f"<details open><summary>{html.escape(heading)}</summary>{words}</details>")
    parts.append(f"<details><summary>Every run</summary>{_table(runs, None)}</details>")
    parts.append(f"<details><summary>Settings</summary>{_settings(problem)}</details>")
    return "".join(parts)


def _common_words(problem):
    """The most important settings that all methods share."""
    settings = [method.settings for method in problem.methods]
    words = []
    for key in ("clients", "participation", "rounds", "epochs", "local_steps", "local_epochs", "batch_size"):
        value = settings[0].get(key)
        if (
            value is not None
            and all(one.get(key) == value for one in settings)
            and (key, value) != ("participation", 1)
        ):
            words.append(f"{key.replace('_', ' ')} {value}")
    seeds = sorted({run.settings.get("seed", 0) for method in problem.methods for run in method.runs})
    words.append(f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}: {', '.join(map(str, seeds))}")
    return " · ".join(words)


def _findings(problem, colors):
    """The best method by each of the first two evaluated metrics, in large numbers; "" for a single method."""
    if len(problem.methods) < 2:
        return ""
    items = []
    for metric in [name for name in metrics_of(problem.methods) if name != "loss"][:2]:
        best, _ = best_of(problem.methods, metric)
        if best is None:
            continue
        word = "lowest" if less_is_better(metric) else "highest"
        doubt = "" if clearly_best(problem.methods, metric) == best else " (no clear lead)"
        mean, _, deviation = str(final(problem.methods[best], metric)).partition(" ")
        items.append(
            f'<li style="--c:{colors[best]}"><span class=muted>{word} {html.escape(title(metric))}{doubt}</span>'
            f"<b>{mean} <small>{deviation}</small></b>{html.escape(problem.methods[best].label)}</li>"
        )
    return f"<ul class=findings>{''.join(items)}</ul><p>{html.escape(_conclusion(problem))}</p>"


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
    name = title(metric)
    who = f"{name[0].upper()}{name[1:]}: {methods[best].label} is better than {methods[second].label}"
    if len(leads) < 2:
        return (
            f"{who}, by {abs(means[best] - means[second]):.4f}. Without two common seeds it is unknown how much of "
            "that is chance: no value is marked as best."
        )
    lead_in_words = format_metric(statistics.fmean(leads), statistics.stdev(leads))
    found = f"{who}, by {lead_in_words} over {len(leads)} seeds"
    if clearly_best(methods, metric) is None:
        return f"{found}. A lead is not larger than its standard deviation: no value is marked as best."
    return f"{found}."


def _table(table, colors, kind="plain"):
    """A table; with colours, a dot before each name, and what a last column "settings" says beneath it."""
    beneath = [""] * len(table.rows)
    if colors and table.header[-1:] == ["settings"]:
        beneath = [row[-1] for row in table.rows]
        table = dataclasses.replace(table, header=table.header[:-1], rows=[row[:-1] for row in table.rows])
    head = "".join(f"<th><span>{html.escape(cell)}</span></th>" for cell in table.header)
    body = []
    for r, row in enumerate(table.rows):
        cells = [
            f"<td{' class=best' if (r, c) in table.best else ''}>{html.escape(cell)}</td>" for c, cell in enumerate(row)
        ]
        if colors:
            dot = f'<span class=dot style="--c:{colors[r]}"></span>'
            small = f"<small>{html.escape(beneath[r])}</small>" if beneath[r] else ""
            cells[0] = f"<td><span class=name>{dot}{html.escape(row[0])}{small}</span></td>"
        body.append(f"<tr>{''.join(cells)}</tr>")
    plain = "" if colors else f' class="{kind}"'
    return f"<div class=scroll><table{plain}><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"


def _figure(svg, words):
    data = base64.b64encode(svg.encode()).decode()
    return f'<figure><img src="data:image/svg+xml;base64,{data}" alt="{html.escape(words)}"></figure>'


def _settings(problem):
    """All settings: a row per key, or a row per key and method if they differ."""
    settings = [method.settings for method in problem.methods]
    keys = [key for key in dict.fromkeys(key for one in settings for key in one) if distinguishes_methods(key)]
    rows = []
    for key in keys:
        values = [one.get(key) for one in settings]
        if role(key) == "problem" or all(value == values[0] for value in values):
            rows.append((key, str(values[0])))
        else:
            rows += [
                (f"{key}, {method.label}", setting_in_words("", value).strip())
                for method, value in zip(problem.methods, values)
            ]
    runs = [run for method in problem.methods for run in method.runs]
    for key in [key for key, its_role in roles().items() if its_role == "speed"]:
        values = dict.fromkeys(str(run.settings[key]) for run in runs if key in run.settings)
        if values:
            rows.append((key, ", ".join(values)))
    cells = "".join(f"<tr><td>{html.escape(key)}</td><td>{html.escape(value)}</td></tr>" for key, value in rows)
    return f"<div class=scroll><table class=plain><tbody>{cells}</tbody></table></div>"
