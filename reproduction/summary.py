"""The page of all comparisons: for each claim of each paper whether it was confirmed, every table and figure."""

import dataclasses

from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import replacing
from fedmpi.ground.text import as_markdown, format_seconds
from reproduction import grids, manifest, orders
from reproduction.claims import (
    CONFIRMED,
    CONTRADICTED,
    NOT_TESTED,
    ONCE_AHEAD,
    ONCE_REACHED,
    UNDECIDED,
    outcomes,
)
from reproduction.csv_files import signature
from reproduction.experiment import SCALES, find_experiments, read_papers
from reproduction.front import beside, claims_table, front, printed, verdict_of
from reproduction.length import summary_rows
from reproduction.page import bold, plain_table, prose
from reproduction.results import grid_path, read_results
from reproduction.strength import AHEAD, BEHIND, HOLDS, agreement, graded, ps_of_paper
from reproduction.tuning import read_grid

# The pages of all results, with words by which they are known as ours.
PAGES = {
    "README.md": b"# What the papers' experiments gave\n* **",
    "claims.md": b"# All claims and comparisons\n\nMade by `python -m reproduction --pages`.",
    manifest.NAME: signature(manifest.COLUMNS),
}
HEAD = """\
# All claims and comparisons

Made by `python -m reproduction --pages`. All measured numbers in the tables come from the CSV files in this
folder. The papers' numbers and the findings were written by hand.

A claim says that a method is ahead of others. Compared are means over the last tenth of the rounds. The method is
clearly ahead of another if its mean lead over the seeds is larger than the standard deviation of that lead. This is a
mild rule: of two methods that do not differ, it would find the named one ahead in one of nine comparisons with three
seeds. So clearly ahead of each of the others is called, by what it rests on,

- *confirmed* at `full` and `mlp`, with three seeds or more and p below 0.05: p is the largest of the paired t tests
  against the others, two-sided, and corrected (Holm) for all comparisons of the paper at these scales;
- *ahead* at `full` and `mlp` otherwise;
- *indicative: holds* at `small`, whose runs have a few of the rounds, or smaller networks. Such an outcome says what
  these runs did; a claim with no other is not tested.

The same bar stands on the other side. If one of the others is clearly ahead, or if the method diverged, the comparison
is *contradicted* with three seeds or more and p below 0.05 (the smallest p of those that are ahead, times the number of
the others, corrected in the same family), *behind* otherwise, and *indicative: does not hold* at `small`. In all other
cases it is *undecided*: nobody is clearly ahead of the method, and it is not clearly ahead of all, or one of them was
not run. A seed with which a method diverged is lost, and a comparison with such a seed has no p; if another method
diverged with some seeds, the named one is clearly ahead if it wins all seeds. A claim is *not tested* if its methods
were not run, or if the best method is near guessing: an accuracy below 0.15 of ten classes, an AUC below 0.55, a
perplexity near that of the words' frequencies. Where seeds were added to those that the experiment's file plans, an
outcome that they changed says what it was without them.

A claim that two methods are level has a margin in the experiment's file. It is confirmed if two one-sided t tests show
that the mean lead is smaller than the margin (p below 0.05, in the same family), contradicted or behind if the lead is
clear and larger, and undecided otherwise. A claim that a method
leads by more in one place than in another is confirmed if it leads and the difference is larger than its own standard
deviation, and contradicted if the difference is as large in the other direction, or the method clearly behind. A claim
that a method reaches a value is confirmed if every seed reaches it. Two problems have no chance in them (Theorem 1 of
FAFED and Figure 1 of FMGDA): all seeds give the same numbers, so that any lead counts and p says nothing there.

A claim that a method is *faster*, or saves a share of the rounds, compares with each seed the rounds until a value
that both reach: the best one of the slower method, less 1 % of what it gained since its first evaluation. Between
evaluations the curves are interpolated. The lead is the share of the rounds that is saved, less the claimed one, and is
judged as any other lead. "About half" is read as at least 40 %.

A claim that a curve fluctuates less at the beginning compares the sums of all its steps in the wrong direction in the
first third of the rounds, a share that we set after we had seen the curves. It is not tested where no method has an
evaluation there that is worse than the one before; such a comparison counts in Holm's correction all the same.

Orders of proved rates are confirmed, undecided (*not readable*) or contradicted by the rule on the pages in
[orders](orders).

A claim that a method ends worse in one place than in another is confirmed if it is clearly worse there.

Claims are judged by what the paper's figure or table shows: those of Cheng et al. by the test loss (Figures 1, 3,
5 and 7) and the test accuracy (2, 4, 6 and 8). Until commit bf9c264c most of them were judged by the training loss.
One panel of Figure 2 shows the best accuracy so far, and its claims are judged by it.
FAFedZO's whole objective, which has a verdict here, is no curve of its paper.

One seed has no deviation and decides nothing; the outcome then says whether the method is ahead. *Seeds* are those that
all methods of the claim have.

Numbers are mean ± standard deviation over the seeds; a further seed often lies outside of that, and the pages say
within which distance of the mean it is expected. After the name of what was measured, ↑ means that larger values are
better, ↓ that smaller ones are.
`small` is a reduced version of the paper's experiment, which its page describes; the outcome holds for that version.
`mlp` is the paper's attack on an MLP instead of a CNN, in some figures without the largest number of local steps.
`full` has the paper's size.
"""
VERDICTS = """\
The verdict on each claim. Every comparison of an experiment counts once (a figure that shows the same runs as
another is a further one), at the largest scale (`full`, then `mlp`, then `small`) at which it was
made with several seeds; those at `small` decide nothing (*not tested*). The papers' claims are decided on the
papers' grids of step sizes; comparisons with values beyond them are counted apart (*wider grid*). *In part* means that
some hold and others do not, and *against in part* that none holds, and some are behind or contradicted while others are
undecided. Where all hold, or all are against, the verdict is as strong as the weakest. *Not tested* means that none was
made beyond `small` with several seeds. Beside the verdict is how many are confirmed, and then how
many at each scale, wider grids included:
"""
FITTED = """\
FAFED's paper prints accuracies and not the length of its runs. These are the lengths at which the values of our runs at
full scale are nearest to the printed ones, beside the end of the same runs. The lengths were fitted afterwards to the
printed values, so they confirm no claim, and the verdicts above are from the end. The pages show every method.
"""
TUNED = """\
Chosen on held-out training data; each method had as many points, unless a reason stands here. Where the best value is
the smallest or largest one that was tried, a better one may lie beyond it. For most methods the paper's grid ends
there, too; FAFED's goes on to 0.1.
"""
UNTUNED = "No grid was run for these:\n"
ESTIMATE = "The estimates at full are the number of gradients times the measured CPU time of one."


def write_summary(folder):
    """Write the front page, that of all comparisons, and the manifest; returns the path of the first.

    Raises:
        UserError: if one cannot be written.
    """
    for (name, beginning), text in zip(PAGES.items(), texts(folder)):
        path = folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(path, beginning) as part:
                part.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    manifest.write(folder)
    return folder / next(iter(PAGES))


def texts(folder):
    """(text of the front page, text of the page of all comparisons)."""
    experiments = find_experiments(["all"])
    ps = {paper: ps_of_paper(folder, paper) for paper in read_papers()}
    found = {one.name: _outcomes(folder, one, ps[one.paper]) for one in experiments}
    return front(folder, experiments, found), _comparisons(folder, experiments, found)


def _comparisons(folder, experiments, found):
    lines = [
        HEAD,
        *claims_table(folder, experiments, found),
        *_counts(experiments, found),
        *_fitted(folder, experiments),
        " ".join(printed(folder, experiments)[1]),
        "",
    ]
    for key, paper in read_papers().items():
        of_paper = [one for one in experiments if one.paper == key]
        lines += [f"## {as_markdown(paper['title'])}", "", beside(paper, of_paper, found), ""]
        for claim, sentence in paper["claims"].items():
            rows = [row for one in of_paper for row in _claim_rows(one, found[one.name], claim)]
            lines += [f"### {as_markdown(sentence)}", ""]
            lines += [plain_table(["where", "outcome", "scale, seeds", "numbers", "lead, 95 %"], rows)]
        lines += _findings(folder, of_paper)
    lines += ["## Every table and figure", ""]
    rows = [
        [
            one.name,
            one.title,
            one.place,
            state(folder, one, ""),
            _spent(folder, [one], "small"),
            cost(one),
        ]
        for one in experiments
    ]
    header = [
        "name",
        "what",
        "in the paper",
        "state",
        "CPU time at small, all seeds",
        "CPU time at full, one seed (estimate)",
    ]
    lines += [plain_table(header, rows)]
    spent = _cpu_seconds(folder, experiments, "small")
    words = f"{format_seconds(spent)} of CPU time, so at least {format_seconds(spent / 2)} on two cores"
    lines += [f"All runs at small together: {words}. {ESTIMATE}", ""]
    lines += _tuned(folder)
    return "\n".join(lines).rstrip() + "\n"


@dataclasses.dataclass(frozen=True)
class Row:
    """A claim's outcome on one panel at one scale; `scale` is "" if it was tested at none.

    Attributes:
        decides: whether the verdict counts it: at no larger scale were there several seeds.
        numbers: the leads with their intervals. number: of the claim and panel within the experiment.
        is_wider: whether the experiment repeats another with step sizes beyond the paper's grid.
    """

    key: str
    panel: str
    scale: str
    seeds: int
    state: str
    words: str
    decides: bool = False
    numbers: str = ""
    number: int = 0
    is_wider: bool = False


def _outcomes(folder, experiment, of_paper=None):
    """A list of `Row`s of an experiment: the scales at which a claim was tested on a panel, next to each other.

    `of_paper`: see `reproduction.strength.graded`; None: it is computed.
    """
    of_paper = ps_of_paper(folder, experiment.paper) if of_paper is None else of_paper
    if experiment.orders:
        its = [
            (one.key, one.panel, "orders", one.seeds, one.state, one.words, True)
            for one in orders.outcomes(folder, experiment)
        ]
        return [Row(*one) for one in its or [("orders", "", "", 0, NOT_TESTED, "not run")]]
    made = {scale: results for scale in SCALES if (results := read_results(folder, experiment, scale))}
    by_scale = {
        scale: graded(experiment, list(outcomes(experiment, its)), scale, its, of_paper) for scale, its in made.items()
    }
    rows = []
    for number, untested in enumerate(outcomes(experiment, None)):
        tested = {scale: its[number] for scale, its in by_scale.items() if its[number].state != NOT_TESTED}
        largest = [scale for scale, its in tested.items() if its.seeds > 1][-1:]
        for scale, its in tested.items():
            decides = scale in largest
            where = (decides, its.numbers, number, bool(experiment.widens))
            rows.append(Row(its.key, its.panel, scale, its.seeds, its.state, its.words, *where))
        if not tested:
            words = [its[number].words for its in by_scale.values()]
            rows.append(Row(untested.key, untested.panel, "", 0, NOT_TESTED, [untested.words, *words][-1]))
    return rows


def _claim_rows(experiment, found, claim):
    """The rows of one claim and experiment in the table.

    Args:
        found: `Row`s of the experiment. claim: key in papers.yaml.
    """
    rows = []
    for one in [row for row in found if row.key == claim]:
        name = f"[{experiment.name}]({one.scale}/{experiment.name}.md)" if one.scale else experiment.name
        scale = f"{one.scale}, {_seeds(one.seeds)}" if one.scale else "–"
        where = ", ".join(
            filter(None, [name, as_markdown(one.panel), one.scale and grids.reach(experiment, one.scale)])
        )
        rows.append([where, bold(one.state), scale, as_markdown(one.words) or "–", as_markdown(one.numbers) or "–"])
    return rows


def _counts(experiments, found):
    """Lines with the verdict on every claim, and the number of outcomes at each scale."""
    rows = []
    for key, paper in read_papers().items():
        for claim, sentence in paper["claims"].items():
            its = [row for one in experiments if one.paper == key for row in found[one.name] if row.key == claim]
            decisive = _count([row for row in its if row.decides and not row.is_wider])
            if wider := [row for row in its if row.decides and row.is_wider]:
                decisive += f"; wider grid: {_count(wider)}"
            counts = [_count([row for row in its if row.scale == scale]) for scale in SCALES]
            untested = str(sum(row.state == NOT_TESTED for row in its))
            rows.append([key, as_markdown(sentence), bold(verdict_of(its)), decisive, *counts, untested])
    header = ["paper", "claim", "verdict", "confirmed", *(f"at {scale}" for scale in SCALES), "not tested"]
    return [VERDICTS, plain_table(header, rows), agreement(found), ""]


def _fitted(folder, experiments):
    """Lines about the lengths at which our values are nearest to the printed ones; [] if none was fitted."""
    made = [(one, its) for one in experiments if "full" in one.scales and (its := read_results(folder, one, "full"))]
    rows = [row for one, its in made for row in summary_rows(one, its)]
    header = ["where", "length", "mean distance to the printed values", "order of the methods", "lead of FAFED", "p"]
    return ["## Printed values at a fitted length", "", FITTED, plain_table(header, rows)] if rows else []


def _count(rows):
    """ "2 of 3, 1 undecided; one seed: ahead in 0 of 1"; "–" of no rows. One seed is counted apart."""
    several, once = [row for row in rows if row.seeds > 1], [row for row in rows if row.seeds == 1]
    states = (CONFIRMED, AHEAD, HOLDS, UNDECIDED, BEHIND, CONTRADICTED)
    counts = {state: sum(row.state == state for row in several) for state in states}
    words = [f"{counts.pop(CONFIRMED)} of {len(several)}"] if several else []
    named = {state: state for state in states} | {HOLDS: "indicative"}
    words = (
        [", ".join(words + [f"{number} {named[state]}" for state, number in counts.items() if number])] if words else []
    )
    ahead = sum(row.state in (ONCE_AHEAD, ONCE_REACHED) for row in once)
    words += [f"one seed: ahead in {ahead} of {len(once)}"] if once else []
    return "; ".join(words) or "–"


def _findings(folder, experiments):
    """What was found out in those experiments that were run; a sentence that holds at several scales, once."""
    lines = []
    for one in experiments:
        found = {}  # sentence -> the scales
        for scale in SCALES:
            for words in one.findings.get(scale, []) if read_results(folder, one, scale) else []:
                found.setdefault(words, []).append(scale)
        for words, scales in found.items():
            links = ", ".join(f"[{scale}]({scale}/{one.name}.md)" for scale in scales)
            lines.append(f"- {one.name}, {links}: {prose(words)}")
    return ["What was found out:", "", *lines, ""] if lines else []


def state(folder, experiment, lacking):
    """What was run of an experiment, as text.

    Args:
        lacking: names of the data files that are missing, as text; or "".
    """
    made = [f"{len(its)} orders"] if experiment.orders and (its := orders.read(folder, experiment)[0]) else []
    for scale in SCALES:
        results = read_results(folder, experiment, scale)
        if results:
            made.append(f"{scale} ({_seeds(len(results.seeds))})")
    words = f"run: {', '.join(made)}" if made else "not run"
    reason = experiment.not_run or (f"data not here: {lacking}" if lacking and not made else "")
    return f"{words}: {reason}" if reason else words


def _spent(folder, experiments, scale):
    """CPU time of the runs of some experiments, as text."""
    seconds = _cpu_seconds(folder, experiments, scale)
    return format_seconds(seconds) if seconds else "–"


def _cpu_seconds(folder, experiments, scale):
    found = filter(None, (read_results(folder, one, scale) for one in experiments))
    return sum(float(row["cpu_seconds"]) for results in found for row in results.runs if row["cpu_seconds"])


def cost(experiment):
    """CPU time of the full scale, as text."""
    if experiment.cpu_hours is None:
        return "–"
    hours = experiment.cpu_hours
    if hours < 1:
        return format_seconds(3600 * hours)
    return f"{hours:.1f} h" if hours < 10 else f"{hours:,.0f} h"


def _tuned(folder):
    """Lines about the settings that were tuned, and about the experiments without a grid; [] if none was tuned."""
    rows, others = [], []
    for one in (one for one in find_experiments(["all"]) if one.scales):
        found = {scale: path for scale in SCALES if (path := grid_path(folder, one.name, scale)).is_file()}
        others += [] if found else [[one.name, as_markdown(one.untuned or "no grid was run yet")]]
        for scale, path in found.items():
            grid, reason = read_grid(path), one.tuning(scale).get("unequal", "")
            chosen = [f"{row['method']}: {_with_ends(row, grid)}" for row in grid if row["chosen"]]
            points = f"{len(grid)}, not as many for each: {prose(reason)}" if reason else str(len(grid))
            rows.append([f"[{path.stem}](tuning/{path.name})", points, as_markdown("; ".join(chosen))])
    if not rows:
        return []
    table = plain_table(["experiment", "points", "chosen"], rows)
    without = [UNTUNED, plain_table(["experiment", "where its step sizes come from"], others)] if others else []
    return ["## Tuned settings", "", TUNED, table, *without]


def _with_ends(chosen, grid):
    """The settings of a chosen point, with a note at each value that is the smallest or largest one of its grid.

    Args:
        chosen: a row of `grid`, the rows of an experiment's grid.
    """
    words = []
    of_method = [row["settings"].split(", ") for row in grid if row["method"] == chosen["method"]]
    for number, setting in enumerate(chosen["settings"].split(", ")):
        values = {_number(one[number]) for one in of_method if number < len(one)}
        is_scale = None not in values and len(values) > 1  # a grid may also consist of words
        ends = {min(values): " (smallest)", max(values): " (largest)"} if is_scale else {}
        words.append(setting + ends.get(_number(setting), ""))
    return ", ".join(words)


def _number(setting):
    """The value of a setting like "step_size 0.1", or None if it is no number."""
    try:
        return float(setting.rpartition(" ")[2])
    except ValueError:
        return None


def _seeds(number):
    return "1 seed" if number == 1 else f"{number} seeds"
