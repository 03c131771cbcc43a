"""After how many rounds our values are nearest to those that a paper prints without the length of its runs.

The length is fitted to the printed numbers, after the runs. So it is no verdict on a claim: it says whether there is a
length at which our values are the paper's, and how much the answers depend on the length.
"""

import dataclasses
import statistics

from fedmpi.config.presets import preset_path
from fedmpi.ground.files.settings_files import read_settings_file
from fedmpi.ground.text import Table, as_markdown
from fedmpi.runs.record import less_is_better
from reproduction.claims import _by_seed, ordering
from reproduction.leads import is_decided, leads_of
from reproduction.strength import p_value

NEIGHBOURS = 2  # evaluations that the table shows before and after the best one


@dataclasses.dataclass(frozen=True)
class Length:
    """Our values after some rounds.

    Attributes:
        round: after which they were measured. epochs: how often the data were gone through until then, or None.
        means: method -> mean over the seeds. error: mean over the methods of the distance to the printed value.
        has_order: whether the order of the methods is the printed one.
        leader: the method that is first in the paper. rival: the best of the others here.
        leads: of `leader` over `rival`, one per seed.
        is_ahead: whether `leader` is clearly ahead of each of the others.
    """

    round: int
    epochs: float | None
    means: dict
    error: float
    has_order: bool
    leader: str
    rival: str
    leads: list
    is_ahead: bool


def lengths(experiment, panel, methods, seeds=None):
    """A `Length` for every evaluation that all runs have of the methods that the paper has a number for.

    Args:
        seeds: those to take; default: all that the methods have in common.
    """
    printed = experiment.printed["values"].get(panel, {})
    metric = experiment.printed["metric"]
    chosen = [one for one in methods if one.label in printed and all(run.is_complete for run in one.runs)]
    if len(chosen) < max(2, len(printed)):
        return []
    rounds = [{line["round"] for line in run.records if metric in line} for one in chosen for run in one.runs]
    total = _epochs(experiment, panel)
    last = max(set.intersection(*rounds), default=0)
    leader = ordering([*printed], metric, printed).partition(" ")[0]
    found = []
    for at in sorted(set.intersection(*rounds)):
        values = {one.label: _by_seed(one, metric, at) for one in chosen}
        its = seeds or sorted(set.intersection(*map(set, values.values())))
        means = {name: statistics.fmean(some[seed] for seed in its) for name, some in values.items()}
        leads = {
            name: leads_of(values[leader], values[name], its, less_is_better(metric))
            for name in values
            if name != leader
        }
        rival = min(leads, key=lambda name: statistics.fmean(leads[name]))
        found.append(
            Length(
                at,
                total and total * at / last,
                means,
                statistics.fmean(abs(means[name] - printed[name]) for name in means),
                ordering([*printed], metric, means) == ordering([*printed], metric, printed),
                leader,
                rival,
                leads[rival],
                all(is_decided(some) and statistics.fmean(some) > 0 for some in leads.values()),
            )
        )
    return found


def full_place(experiment):
    """The paper's place of the printed values, with what differs in this experiment: "Table 2 (c), b = 100, q = 5"."""
    return ", ".join(experiment.printed[key] for key in ("place", "variant") if key in experiment.printed)


def nearest(found):
    """The `Length` with the smallest error."""
    return min(found, key=lambda one: one.error)


def _epochs(experiment, panel):
    """The epochs of a run at full scale, or None if its length is not in epochs."""
    settings = experiment.settings | experiment.panels[panel] | experiment.scales["full"].get("settings", {})
    if "epochs" not in settings and "preset" in settings:
        settings = read_settings_file(preset_path(settings["preset"]), "")
    return settings.get("epochs")


def section(experiment, results):
    """Lines of the page with the best length of every panel, or []."""
    if not experiment.printed.get("fit_length"):
        return []
    lines = []
    for panel, methods in results.panels.items():
        found = lengths(experiment, panel, methods)
        if found:
            lines += _of_panel(experiment, panel, methods, found)
    return lines


def summary_rows(experiment, results):
    """Rows of a table of all fitted lengths: where, the length, the errors there and at the end, order, lead and p."""
    rows = []
    for panel, methods in results.panels.items() if experiment.printed.get("fit_length") else ():
        if found := lengths(experiment, panel, methods):
            for one in (nearest(found), found[-1]):
                p = p_value(one.leads)
                rows.append(
                    [
                        f"[{full_place(experiment)}](full/{experiment.name}.md)",
                        _words(one) + (", fitted" if one is nearest(found) else ", our end"),
                        f"{one.error:.4f}",
                        "as printed" if one.has_order else "another",
                        f"{statistics.fmean(one.leads):.4f} over {one.rival}",
                        "–" if p is None else f"{p:.3f}",
                    ]
                )
    return rows


def _of_panel(experiment, panel, methods, found):
    """The lines of one panel; `found` are its `Length`s."""
    printed, place = experiment.printed["values"][panel], experiment.printed["place"]
    best, last = nearest(found), found[-1]
    number = found.index(best)
    shown = dict.fromkeys(one.round for one in found[max(0, number - NEIGHBOURS) : number + NEIGHBOURS + 1])
    shown[last.round] = None
    header = ["rounds", *(["epochs"] if best.epochs else []), *printed, "mean error", "order", "lead", "p"]
    names = ordering([*printed], experiment.printed["metric"], printed).replace(" ", "").split(">")
    first = _lead(printed[names[0]], printed[names[1]], experiment.printed["metric"])
    rows = [
        [place, *(["–"] if best.epochs else []), *map(_number, printed.values()), "–", "–", f"{first:.4f}", "–"],
        *(_row(one, printed, best) for one in found if one.round in shown),
    ]
    lines = [
        "## The length that fits the printed numbers best",
        "",
        "**This length was fitted afterwards.** The paper does not give the length of its runs. Ours is "
        f"{_words(last)}, and the outcomes on this page are from its end. The table shows after how many rounds the "
        f"values of these same runs are nearest to those of {as_markdown(place)}: after {_words(best)}. One number, "
        f"the length, was chosen to fit {len(printed)} others; so this is no test of a claim. *Mean error* is the mean "
        f"over the methods of the distance between ours and the printed value; *lead* is that of {best.leader} over "
        "the best of the others, with the p of a paired t test over the seeds (two-sided, not corrected for the number "
        "of lengths).",
        "",
        Table(header, rows).markdown(),
    ]
    return [*lines, _robust(experiment, panel, methods, found), ""]


def _robust(experiment, panel, methods, found):
    """Sentences on how much depends on the length."""
    best = nearest(found)
    words = []
    own = [nearest(lengths(experiment, panel, methods, [seed])) for seed in _seeds(methods)]
    if len(own) > 1:
        words.append(f"Fitted to each seed alone the length is {', '.join(str(one.round) for one in own)} rounds.")
    same = [str(one.round) for one in found if one.has_order]
    words.append(
        f"The methods are in the printed order after {', '.join(same)} rounds, {len(same)} of {len(found)} evaluations."
        if same
        else f"The methods are in the printed order at none of the {len(found)} evaluations."
    )
    ahead = [one.is_ahead for one in found]
    until = ahead.index(False) if False in ahead else len(found)
    words.append(
        f"{best.leader} is clearly ahead of all others at every evaluation up to round {found[until - 1].round}."
        if until
        else f"{best.leader} is not clearly ahead of all others at the first evaluation."
    )
    return as_markdown(" ".join(words))


def _seeds(methods):
    return sorted({run.settings["seed"] for one in methods for run in one.runs})


def _row(one, printed, best):
    values = [f"{one.means[name]:.4f}" for name in printed]
    p = p_value(one.leads)
    return [
        f"{one.round}{' (nearest)' if one is best else ''}",
        *([f"{one.epochs:.1f}"] if best.epochs else []),
        *values,
        f"{one.error:.4f}",
        "as printed" if one.has_order else "another",
        f"{statistics.fmean(one.leads):.4f}",
        "–" if p is None else f"{p:.3f}",
    ]


def _number(value):
    return f"{value:.4f}"


def _lead(one, other, metric):
    return (other - one) if less_is_better(metric) else one - other


def _words(one):
    """ "120 rounds (20.0 epochs)"."""
    return f"{one.round} rounds" + (f" ({one.epochs:.1f} epochs)" if one.epochs else "")
