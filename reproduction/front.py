"""The front page of the results: what holds of the papers' claims and what does not, in a minute."""

import collections
import re
import statistics

from fedmpi.ground.text import as_markdown, format_metric
from reproduction import orders
from reproduction.claims import CONFIRMED, CONTRADICTED, NOT_TESTED, UNDECIDED, late
from reproduction.equal_cost import places
from reproduction.experiment import SCALES, find_experiments, read_papers
from reproduction.length import full_place, lengths, nearest
from reproduction.page import bold, plain_table
from reproduction.results import read_results
from reproduction.strength import AHEAD, BEHIND, HOLDS, agreement

IN_PART, AGAINST = "in part", "against in part"  # some hold; none does, and some do not while others are undecided
ORDER = (CONFIRMED, AHEAD, IN_PART, UNDECIDED, AGAINST, BEHIND, CONTRADICTED, NOT_TESTED)
FEW = 2  # experiments that a command names; of more it names the paper
# The columns of the table of all papers: heading -> state -> what stands beside a claim in it; None: its counts.
COLUMNS = {
    "holds (*ahead*: clear, but not all significant)": {CONFIRMED: "", AHEAD: "ahead"},
    "in part (confirmed comparisons)": {IN_PART: None},
    "not confirmed": {CONTRADICTED: None, BEHIND: None, AGAINST: None, UNDECIDED: "undecided"},
    "not tested (short runs at most)": {NOT_TESTED: ""},
}
# Headings stand without empty lines around them, so that the page has at most 60.
HEAD = "# What the papers' experiments gave"
TABLE = "## FAFED's Table 2 (Fashion-MNIST; a: low, c: high heterogeneity), printed and here"
LENGTHS = (
    "Mean accuracy after so many rounds. The paper gives no length; *the nearest* is the one with the smallest mean "
    "distance from the printed values, found afterwards. The printed values of (b) cannot be read in our copy."
)
FIGURE = ("test accuracy after each round, and as printed", "full/fafed_table2_low-low-accuracy.svg")
PANELS = (
    "* **How much was run.** Of {total} panels (plots of runs, columns of printed results) {full} were repeated at the "
    "paper's size, {mlp} with another network, {small} smaller, {never} never."
)
MORE = (
    "Made by `python -m reproduction --pages` from the CSV files here; [claims.md](claims.md) has all claims with what "
    "the runs say and the command that makes them again, all comparisons, the rules and the findings. *Confirmed* and "
    "*contradicted* need three seeds and p < 0.05 (Holm, over all of a paper's comparisons), *ahead* and *behind* a "
    "lead that is larger than its spread over the seeds; the rest is *undecided*."
)
AGAIN = (
    "Each command makes the runs at the small scale again, where there are any, in the minutes beside it on two cores."
)
OUTCOMES = (
    "A comparison, one method with its rivals in one panel, is *confirmed* at full length (of attacks also on an MLP) "
    "with three seeds and p < 0.05 (Holm, over all of a paper's); *ahead*: better than each rival by more than the "
    "spread over the seeds; *contradicted*, *behind*: the same the other way round; *undecided*: within the spread; "
    "*indicative*: of a few rounds, which decide nothing. A claim holds *in part* if some comparisons hold and others "
    "do not. Experiments that repeat another with step sizes beyond the paper's grid are counted apart and do not "
    "decide."
)
OURS = "Questions of ours, on which the papers claim nothing: "


def front(folder, experiments, found):
    """The text of the front page.

    Args:
        folder: of the results. found: name of an experiment -> its `Row`s (`reproduction.summary`).
    """
    lines = [HEAD, *_minute(folder, experiments, found), _in_short(experiments, found).rstrip()]
    table, _, on_wider = printed(folder, experiments)
    lines += [TABLE, table, f"![{FIGURE[0]}]({FIGURE[1]})<br>{' '.join([LENGTHS, *on_wider])}", ""] if table else []
    return "\n".join([*lines, MORE]).rstrip() + "\n"


def _minute(folder, experiments, found):
    """A line for each paper: numbers, and how many comparisons hold; and one on how much of the papers was run."""
    lines = []
    for key, paper in read_papers().items():
        rows = [row for one in experiments if one.paper == key for row in found[one.name]]
        rows = [
            row for row in rows if row.key not in paper.get("ours", ()) and not row.is_wider and row.scale != "orders"
        ]
        words = re.sub("{value:(.*?)}", lambda its: _value(folder, its[1]), paper["minute"])
        lines.append(f"* **{paper['name']}.** {words} Comparisons confirmed: {_counts(rows)}.")
    sizes = dict.fromkeys([*SCALES, ""], 0)
    for one in experiments:
        made = [scale for scale in SCALES if one.shows and read_results(folder, one, scale)]
        sizes[made[-1] if made else ""] += one.shows
    total = sum(paper["panels"] for paper in read_papers().values())
    total, made = sum(paper["panels"] for paper in read_papers().values()), sum(sizes[scale] for scale in SCALES)
    return [*lines, PANELS.format(total=total, never=total - made, **sizes)]


def _value(folder, place):
    """The mean over the seeds that {value:...} in papers.yaml means, as text."""
    name, scale, panel, method = place.split("/")
    (one,) = find_experiments([name])
    its = read_results(folder, one, scale)
    runs = its.method(panel, method).runs if its else []
    values = [late(run, one.metric) for run in runs if run.is_complete]
    return format_metric(statistics.fmean(values)) if values else "–"


def _in_short(experiments, found):
    """A table with a row for each paper: its claims in a few words by outcome."""
    table = []
    for key, paper in read_papers().items():
        of_paper = [one for one in experiments if one.paper == key]
        cells = {heading: [] for heading in COLUMNS}
        for claim, sentence in paper["claims"].items():
            rows, address = _rows(of_paper, found, claim), f"claims.md#{_anchor(sentence)}"
            verdict = verdict_of(rows)
            if claim in paper.get("ours", ()):
                continue
            heading = next(heading for heading, states in COLUMNS.items() if verdict in states)
            mark = COLUMNS[heading][verdict]
            mark = _counts([row for row in rows if not row.is_wider]) if mark is None else mark
            cells[heading].append(f"• [{paper['in_short'][claim]}]({address}){mark and f' ({mark})'}")
        table.append([f"{paper['name']} (`{key}`)", *("<br>".join(some) or "–" for some in cells.values())])
    return plain_table(["paper", *COLUMNS], table)


def beside(paper, of_paper, found):
    """What to know beside the outcomes of a paper: a claim of `ours` in braces becomes its verdict and counts."""
    rows = {claim: _rows(of_paper, found, claim) for claim in paper.get("ours", ())}
    ours = {
        claim: f"[{verdict_of(its)}](#{_anchor(paper['claims'][claim])}) ({_compared(its)})"
        for claim, its in rows.items()
    }
    return paper["beside"].format(**ours)


def _rows(experiments, found, claim):
    """All `Row`s of a claim; experiments: those of its paper."""
    return [row for one in experiments for row in found[one.name] if row.key == claim]


def printed(folder, experiments):
    """The printed values beside ours, of every table whose length was fitted.

    Returns:
        (the table or "", sentences on each, one sentence on wider grids or none).
    """
    rows, words, on_all, methods = [], [], [], {}
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
            closest, leader = nearest(its), its[0].leader
            first = max(closest.means, key=closest.means.get)
            at_cost = places([method for method in some if method.label in printed], one.metric, leader)
            ranks = [f"number {nth} of {num} at equal {cost}" for cost, nth, num in at_cost]
            ranks += [f"on a wider grid first at {_wins(found)}" for _, found in on_wider]
            words.append(
                f"{full_place(one)}: at the nearest {closest.error:.4f} away on average, {first} first; "
                f"{', '.join([f'{leader} is first at {_wins(its)} lengths', *ranks])}."
            )
            on_all += [sentence for other in wider for sentence in other.findings.get("full", [])[:1]]
    table = plain_table(["", "", *methods], rows) if rows else ""
    return table.rstrip(), words, [f"**{one}**" for one in on_all[:1]]


def _on_wider_grid(folder, other, one, panel):
    """The `Length`s of an experiment that repeats a panel of another with step sizes beyond the paper's grid; or []."""
    results = read_results(folder, other, "full")
    return lengths(one, panel, results.panels.get(panel, [])) if results else []


def _wins(found):
    """At how many of some `Length`s the paper's best method is ours."""
    return f"{sum(max(length.means, key=length.means.get) == length.leader for length in found)} of {len(found)}"


def claims_table(folder, experiments, found):
    """Lines with all claims, those that hold first, and one line with the questions of ours."""
    rows, ours = [], []
    for key, paper in read_papers().items():
        of_paper = [one for one in experiments if one.paper == key]
        for claim, sentence in paper["claims"].items():
            made = [one for one in of_paper if _rows([one], found, claim)]
            its = _rows(made, found, claim)
            verdict = verdict_of(its)
            link = f"[{as_markdown(paper['in_short'][claim])}](#{_anchor(sentence)})"
            if claim in paper.get("ours", ()):
                ours.append(f"{link} ({verdict}: {_compared(its)})")
                continue
            cells = [key, link, bold(verdict), _compared(its), as_markdown(paper["said"][claim])]
            rows.append((ORDER.index(verdict), [*cells, *_again(folder, made, of_paper, key)]))
    header = [
        "paper",
        "claim",
        "outcome",
        "confirmed comparisons",
        "what the runs say",
        "its small version: `python -m reproduction`",
        "minutes",
    ]
    words = [f"{OUTCOMES} {AGAIN} {agreement(found)}".rstrip() + (f" {OURS}{'; '.join(ours)}." if ours else "")]
    rows = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    return [*words, "", plain_table(header, rows)]


def verdict_of(rows):
    """One of the states, or `IN_PART`, or `AGAINST`: what the `Row`s of a claim that decide say together.

    Those on a wider grid than the paper's count only if there is no other, and those of the small scale never. If all
    hold, the weakest is the verdict; if all are against, likewise.
    """
    decisive = [row for row in rows if row.decides and row.scale != "small"]
    states = {row.state for row in decisive if not row.is_wider} or {row.state for row in decisive}
    if weak := [state for state in (AHEAD, CONFIRMED) if state in states]:
        return weak[0] if states <= {AHEAD, CONFIRMED} else IN_PART
    if weak := [state for state in (BEHIND, CONTRADICTED) if state in states]:
        return weak[0] if states <= {BEHIND, CONTRADICTED} else AGAINST
    return UNDECIDED if UNDECIDED in states else NOT_TESTED


def _compared(rows):
    """ "5 of 9, 2 more ahead, 1 contradicted; indicative: 5 of 6; wider grid: 0 of 2"."""
    words = []
    for name, some in (
        ("", [row for row in rows if not row.is_wider]),
        ("wider grid: ", [row for row in rows if row.is_wider]),
    ):
        short = [row for row in some if row.decides and row.scale == "small"]
        short = f"indicative: {sum(row.state == HOLDS for row in short)} of {len(short)}" if short else ""
        if its := "; ".join(filter(None, [_counts(some), short])):
            words.append(name + its)
    return "; ".join(words) or "–"


def _counts(rows):
    """ "5 of 9, 2 more ahead, 1 contradicted", of the comparisons beyond the small scale; "" if there is none."""
    long = [row for row in rows if row.decides and row.scale != "small"]
    count = collections.Counter(row.state for row in long)
    words = f"{count[CONFIRMED]} of {len(long)}" if long else ""
    words += f", {count[AHEAD]} more ahead" * (count[AHEAD] > 0)
    words += f", {count[BEHIND]} behind" * (count[BEHIND] > 0)
    return words + f", {count[CONTRADICTED]} contradicted" * (count[CONTRADICTED] > 0)


def _again(folder, experiments, of_paper, paper):
    """(the words after the command, minutes on two cores) with which a claim's runs are made again.

    Args:
        experiments: those of the claim. of_paper: all of its paper.
    """
    named = [one for one in experiments if "small" in one.scales or one.orders]
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
