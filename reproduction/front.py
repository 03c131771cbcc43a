"""The front page of the results: what holds of the papers' claims and what does not, in a minute."""

import collections
import re

from fedmpi.text import as_markdown
from reproduction import orders
from reproduction.claims import CONFIRMED, NOT_CONFIRMED, NOT_TESTED, UNDECIDED
from reproduction.equal_cost import places
from reproduction.experiment import read_papers
from reproduction.length import full_place, lengths, nearest
from reproduction.page import bold, plain_table
from reproduction.results import read_results
from reproduction.strength import AHEAD, FAILS, HOLDS, agreement

IN_PART = "in part"
FEW_IN_PART = "indicative: in part"
ORDER = (CONFIRMED, AHEAD, HOLDS, IN_PART, FEW_IN_PART, UNDECIDED, NOT_CONFIRMED, FAILS, NOT_TESTED)
FEW = 2  # experiments that a command names; of more it names the paper
# Headings and the list stand without empty lines around them, so that the page has at most 60.
HEAD = (
    "# What the papers' experiments gave\n\n"
    "Made by `python -m reproduction --pages` from the CSV files here; [claims.md](claims.md) has all comparisons, the "
    "rules and the findings. In short:"
)
TABLE = "## Table 2, printed and here"
LENGTHS = (
    "Mean accuracy over the seeds after so many rounds; verdicts take the mean over the last tenth of the rounds. The "
    "paper gives no length; the nearest was found afterwards."
)
CLAIMS = "## The claims"
AGAIN = (
    "Each command makes the runs at the small scale again, where there are any, in the minutes beside it on two cores."
)
OUTCOMES = (
    "A comparison is one method with all others of a figure. It is *confirmed* at full length (of attacks also on an "
    "MLP instead of a CNN), with three seeds and p < 0.05 (Holm; problems without chance and rates have rules of their "
    "own); *ahead*: of each other by more than the spread, which chance gives in one of nine comparisons of equal "
    "methods with three seeds; *contradicted*: behind one of them by more than that (where a lead should be larger "
    "than elsewhere, also if there is none); *indicative*: of a few rounds; *undecided*: within the spread. Counts are "
    "of confirmed comparisons. A claim is as strong as the weakest comparison that holds; it holds *in part* if others "
    "do not, and is *not confirmed* if none holds."
)
OURS = "Questions of ours, on which the papers claim nothing: "


def front(folder, experiments, found):
    """The text of the front page.

    Args:
        folder: of the results. found: name of an experiment -> its `Row`s (`reproduction.summary`).
    """
    lines = [HEAD, _in_short(experiments, found), *_printed(folder, experiments)]
    return "\n".join([*lines, *_claims(folder, experiments, found)]).rstrip() + "\n"


def _in_short(experiments, found):
    """A list with the sentences `in_short` of all papers; a claim in braces becomes its verdict and its counts."""
    lines = []
    for key, paper in read_papers().items():
        of_paper = [one for one in experiments if one.paper == key]
        verdicts = {}
        for claim, sentence in paper["claims"].items():
            rows = _rows(of_paper, found, claim)
            verdicts[claim] = f"[{verdict_of(rows)}](claims.md#{_anchor(sentence)}) ({_compared(rows)})"
        lines.append(f"- {paper['in_short'].format(**verdicts)}")
    return "\n".join(lines)


def _rows(experiments, found, claim):
    """All `Row`s of a claim; experiments: those of its paper."""
    return [row for one in experiments for row in found[one.name] if row.key == claim]


def _printed(folder, experiments):
    """Lines with the printed values beside ours, of every table whose length was fitted; or []."""
    rows, words, methods = [], [], {}
    for one in sorted(experiments, key=lambda one: (one.printed.get("place", ""), "variant" in one.printed)):
        results = read_results(folder, one, "full") if one.printed.get("fit_length") else None
        for panel, some in results.panels.items() if results else ():
            its = lengths(one, panel, some)
            if not its:
                continue
            printed, variant = one.printed["values"][panel], one.printed.get("variant")
            methods |= dict.fromkeys(printed)
            if not variant:
                rows.append([one.printed["place"], "printed", *(f"{value:.4f}" for value in printed.values())])
            wider = [other for other in experiments if other.widens == one.name]
            on_wider = [(other, found) for other in wider if (found := _on_wider_grid(folder, other, one, panel))]
            best, last = nearest(its).round, its[-1].round
            rounds = {best} if variant else {best, last, *(found[-1].round for _, found in on_wider)}
            shown = [(variant or "here", one, length) for length in its if length.round in rounds]
            shown += [("on a wider grid", other, found[-1]) for other, found in on_wider]
            for what, source, length in shown:
                near = " (the nearest)" * (source is one and length.round == best)
                what = f"[{what}](full/{source.name}.md), {length.round} rounds{near}, {len(length.leads)} seeds"
                rows.append(["", what, *(f"{length.means[name]:.4f}" for name in printed)])
            wins = "".join(f" (on a wider grid at {_wins(found)})" for _, found in on_wider)
            order = sum(length.has_order for length in its)
            at_cost = places([method for method in some if method.label in printed], one.metric, its[0].leader)
            cheap = " and ".join(f"place {nth} of {num} at equal {cost}" for cost, nth, num in at_cost)
            words.append(
                f"{full_place(one)}: {its[0].leader} is first at {_wins(its)} evaluated lengths{wins}"
                f"{cheap and f', on {cheap} ({last} rounds of the cheapest method)'}. "
                f"The printed order is ours at {order or 'none'}."
            )
            words += [f"**{sentence}**" for other in wider for sentence in other.findings.get("full", [])[:1]]
    return [TABLE, plain_table(["", "", *methods], rows), " ".join([LENGTHS, *words]), ""] if rows else []


def _on_wider_grid(folder, other, one, panel):
    """The `Length`s of an experiment that repeats a panel of another with step sizes beyond the paper's grid; or []."""
    results = read_results(folder, other, "full")
    return lengths(one, panel, results.panels.get(panel, [])) if results else []


def _wins(found):
    """At how many of some `Length`s the paper's best method is ours."""
    return f"{sum(max(length.means, key=length.means.get) == length.leader for length in found)} of {len(found)}"


def _claims(folder, experiments, found):
    """Lines with all claims, those that hold first, and one line with the questions of ours."""
    rows, ours = [], []
    for key, paper in read_papers().items():
        of_paper = [one for one in experiments if one.paper == key]
        for claim, sentence in paper["claims"].items():
            made = [one for one in of_paper if _rows([one], found, claim)]
            its = _rows(made, found, claim)
            verdict = verdict_of(its)
            link = f"[{as_markdown(sentence)}](claims.md#{_anchor(sentence)})"
            if claim in paper.get("ours", ()):
                ours.append(f"{link} ({verdict}: {_compared(its)})")
                continue
            rows.append(
                (ORDER.index(verdict), [key, link, bold(verdict), _compared(its), *_again(folder, made, of_paper, key)])
            )
    header = [
        "paper",
        "claim",
        "outcome",
        "confirmed comparisons",
        "its small version: `python -m reproduction`",
        "minutes",
    ]
    words = [f"{OUTCOMES} {AGAIN} {agreement(found)}".rstrip() + (f" {OURS}{'; '.join(ours)}." if ours else "")]
    rows = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    return [CLAIMS, *words, "", plain_table(header, rows)]


def verdict_of(rows):
    """One of the states, or "in part": what the `Row`s of a claim that decide say together.

    Those of the small scale count only if there is no other; of the states that hold the weakest is the verdict.
    """
    decisive = [row for row in rows if row.decides]
    long = {row.state for row in decisive if row.scale != "small"}
    states = long or {row.state for row in decisive}
    if not states:
        return NOT_TESTED
    if weak := [state for state in (HOLDS, AHEAD, CONFIRMED) if state in states]:
        return weak[0] if states <= {HOLDS, AHEAD, CONFIRMED} else IN_PART if long else FEW_IN_PART
    return next(state for state in (NOT_CONFIRMED, FAILS, UNDECIDED) if state in states)


def _compared(rows):
    """ "5 of 9, 2 more ahead, 1 contradicted; indicative: 5 of 6"."""
    decisive = [row for row in rows if row.decides]
    long, short = ([row for row in decisive if (row.scale == "small") == is_small] for is_small in (False, True))
    count = collections.Counter(row.state for row in long)
    words = [f"{count[CONFIRMED]} of {len(long)}"]
    words[0] += f", {count[AHEAD]} more ahead" * (count[AHEAD] > 0)
    words[0] += f", {count[NOT_CONFIRMED]} contradicted" * (count[NOT_CONFIRMED] > 0)
    words = words if long else []
    words += [f"indicative: {sum(row.state == HOLDS for row in short)} of {len(short)}"] if short else []
    return "; ".join(words) or "–"


def _again(folder, experiments, of_paper, paper):
    """(the words after the command, minutes on two cores) with which a claim's runs are made again.

    Args:
        experiments: those of the claim. of_paper: all of its paper.
    """
    named = [one for one in experiments if one.scales or one.orders]
    if not named:
        return ["–", "–"]
    words, made = (" ".join(one.name for one in named), named) if len(named) <= FEW else (paper, of_paper)
    runs = [row for one in made if (its := read_results(folder, one, "small")) for row in its.runs]
    runs += [row for one in made if one.orders for row in orders.read(folder, one)[1]]
    seconds = sum(float(row["cpu_seconds"]) for row in runs if row["cpu_seconds"]) / 2
    return [f"`{words}`", f"{max(1, round(seconds / 60))}"]


def _anchor(heading):
    """The address within a page that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
