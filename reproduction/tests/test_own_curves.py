"""The committed results, judged by the curves that the papers show."""

import collections
import math
import statistics

import pytest
from helpers import ROOT
from test_claims import run

from fedmpi.cli.comparison import Method
from fedmpi.cli.report.figures import COLORS, DASHES, color
from reproduction.claims import CONFIRMED, CONTRADICTED, UNDECIDED, outcomes
from reproduction.experiment import figure_file, find_experiments, read_papers
from reproduction.front import verdict_of
from reproduction.length import lengths, nearest, p_value, section
from reproduction.page import write_page
from reproduction.results import Results, read_results
from reproduction.strength import AHEAD, BEHIND, FAILS, HOLDS, ps_of_paper
from reproduction.summary import _outcomes as outcomes_at_all_scales

RESULTS = ROOT / "reproduction" / "results"
EXPERIMENTS = {one.name: one for one in find_experiments(["all"])}
SHOWN = {  # the metrics of the paper's figure
    "mom_figure1_full": {"test_loss"},
    "mom_figure1_one": {"test_loss"},
    "mom_figure2": {"accuracy", "test_loss"},
    "mom_figure3": {"test_loss"},
    "mom_figure4": {"accuracy"},
    "mom_figures5_6_100_of_100": {"test_loss", "accuracy"},
    "mom_figures5_6_10_of_100": {"test_loss", "accuracy"},
    "mom_figures5_6_5_of_100": {"test_loss", "accuracy"},
    "mom_figures7_8": {"test_loss", "accuracy"},
    "fafed_figure1": {"train_loss", "training_perplexity"},
}


PS = {}


def _outcomes(folder, one):
    if one.paper not in PS:
        PS[one.paper] = ps_of_paper(folder, one.paper)
    return outcomes_at_all_scales(folder, one, PS[one.paper])


def deciding(key, paper, metric=None):
    """How many of each state are among the comparisons that the verdict on a claim takes."""
    its = [one for one in EXPERIMENTS.values() if one.paper == paper]
    rows = [row for one in its for row in _outcomes(RESULTS, one) if row.key == key]
    return collections.Counter(row.state for row in rows if row.decides), verdict_of(rows)


@pytest.mark.parametrize("name", SHOWN)
def test_claims_are_judged_by_the_curves_of_the_figure(name):
    one = EXPERIMENTS[name]
    assert {claim.get("metric", one.metric) for claim in one.claims} == SHOWN[name]
    assert SHOWN[name] <= set(one.figure["metrics"])


def test_no_file_says_that_the_momentum_paper_leaves_the_curve_open():
    said = [sentence for one in EXPERIMENTS.values() if one.paper == "mom" for sentence in one.differs]
    assert not [one for one in said if "does not say by which" in one or "which is our choice" in one]


@pytest.mark.rarely
@pytest.mark.parametrize(
    ("paper", "key", "states", "verdict"),
    [
        ("mom", "fedavg", {CONFIRMED: 4, AHEAD: 3, BEHIND: 1, HOLDS: 4, UNDECIDED: 2}, "in part"),
        ("mom", "scaffold", {AHEAD: 1, BEHIND: 4, CONTRADICTED: 1, FAILS: 5, UNDECIDED: 3}, "in part"),
        ("mom", "reduced", {CONTRADICTED: 2, UNDECIDED: 4}, "against in part"),
        ("mom", "fewer_clients", {AHEAD: 3, BEHIND: 2, UNDECIDED: 7}, "in part"),
        ("lamb", "early", {AHEAD: 3, BEHIND: 3, CONTRADICTED: 1}, "in part"),
        ("lamb", "layers", {CONFIRMED: 1, BEHIND: 6, HOLDS: 1, UNDECIDED: 1}, "in part"),
        ("fafed", "lowest", {CONFIRMED: 2, AHEAD: 1, BEHIND: 3, CONTRADICTED: 2, UNDECIDED: 1, FAILS: 2}, "in part"),
        ("zo", "noniid", {UNDECIDED: 4}, UNDECIDED),
        ("zo", "objective", {CONFIRMED: 5, AHEAD: 7, BEHIND: 2, CONTRADICTED: 3, HOLDS: 3, FAILS: 2}, "in part"),
        ("fafed", "faster", {CONFIRMED: 3, BEHIND: 4, CONTRADICTED: 2}, "in part"),
        ("fafed", "calmer", {BEHIND: 1}, BEHIND),  # at low and medium heterogeneity no curve rises early
        ("fafed", "text", {}, "not tested"),  # no method is as good as the frequencies of the words
    ],
)
def test_the_outcomes_on_the_papers_own_curves(paper, key, states, verdict):
    assert deciding(key, paper) == (states, verdict)


def test_momentum_helps_more_with_fewer_clients_only_where_it_leads_at_all():
    its = [EXPERIMENTS[f"mom_figures5_6_{number}_of_100"] for number in (5, 10)]
    found = [row for one in its for row in _outcomes(RESULTS, one) if (row.key, row.scale) == ("fewer_clients", "full")]
    ahead = [row.words for row in found if row.state in (AHEAD, CONFIRMED)]
    assert len(ahead) == 3 and all("FedAvg-M over FedAvg" in one and "on 100 of 100" in one for one in ahead)


def test_the_whole_objective_of_the_attack_has_a_verdict_of_its_own():
    zo = [one for one in EXPERIMENTS.values() if one.paper == "zo"]
    at_mlp = [
        row.state for one in zo for row in _outcomes(RESULTS, one) if (row.key, row.scale) == ("objective", "mlp")
    ]
    counts = [at_mlp.count(state) for state in (CONFIRMED, AHEAD, BEHIND, CONTRADICTED)]
    assert counts == [10, 2, 2, 3] and len(at_mlp) == 17
    rows = [row for row in _outcomes(RESULTS, EXPERIMENTS["zo_figure5"]) if row.key == "objective" and row.scale]
    assert [row.state for row in rows] == [FAILS] * 2 and "245.2 ± 31.8; behind FedZO" in rows[1].words


def test_a_claim_that_the_momentum_paper_does_not_make_is_gone():
    assert "unbounded" not in read_papers()["mom"]["claims"]


def test_the_training_perplexity_is_the_exponential_of_the_training_loss():
    found = read_results(RESULTS, EXPERIMENTS["fafed_figure1"], "small").panels["wikitext2"]
    records = [line for one in found for run_of in one.runs for line in run_of.records]
    assert records and all(line["training_perplexity"] == math.exp(line["train_loss"]) for line in records)


def test_all_methods_are_measured_after_the_same_share_of_the_rounds():
    """Who leads after a tenth of the rounds may be last at the end."""
    values = {"Fed-LAMB": (0.5, 0.1), "Fed-AMS": (0.4, 0.9), "Fed-SGD": (0.3, 0.8)}
    methods = [
        Method(name, [run(seed, {10: {"accuracy": early}, 100: {"accuracy": late}}) for seed in range(2)])
        for name, (early, late) in values.items()
    ]
    one = EXPERIMENTS["lamb_figure5"]
    found = {its.key: its for its in outcomes(one, Results([], {"1 local epoch": methods})) if its.seeds}
    assert found["early"].state == "confirmed" and found["layers"].state == "contradicted"
    assert "at round 10; ahead of" in found["early"].words and "round 100" not in found["early"].words
    for method in methods:
        for one_run in method.runs:
            del one_run.records[0]
    (early,) = [its for its in outcomes(one, Results([], {"1 local epoch": methods})) if "up to round 10" in its.words]
    assert early.state == "not tested"


@pytest.mark.parametrize(
    ("here", "there", "state", "words"),
    [
        ([0.1, 0.2], [0.3, 0.41], "confirmed", "; worse than iid: FedZO, E = 3"),
        ([0.3, 0.41], [0.1, 0.2], "contradicted", "; better than iid"),
        ([0.1, 0.3], [0.3, 0.2], "undecided", "by less than the spread"),
        ([0.1, 0.3], [0.1, 0.3], "undecided", "; level with iid"),
        ([0.1, None], [0.3, 0.4], "confirmed", "(1 of 2 diverged); worse than iid"),
        ([0.1], [0.3], "one seed: ahead", "; worse than iid"),
        ([0.1, 0.2], None, "not tested", "iid was not run"),
    ],
)
def test_a_claim_that_a_method_ends_worse_looks_into_the_other_experiment(here, there, state, words):
    def method(numbers):
        runs = [run(seed, {1: {"attack_accuracy": one or 0.5}}, one is not None) for seed, one in enumerate(numbers)]
        return Method("FedZO, E = 3", runs)

    elsewhere = {"zo_figure2a": there and Results([], {"iid": [method(there)]})}
    results = Results([], {"non-iid": [method(here)]}, elsewhere=elsewhere)
    (found,) = [
        one
        for one in outcomes(EXPERIMENTS["zo_figure7"], results)
        if one.key == "noniid" and (one.seeds or "iid was" in one.words)
    ]
    assert found.state == state and words in found.words, found


def of_table_2(name):
    one = EXPERIMENTS[name]
    results = read_results(RESULTS, one, "full")
    ((panel, methods),) = results.panels.items()
    return one, results, lengths(one, panel, methods)


def test_table_2_a_is_met_at_20_epochs_and_not_at_the_end():
    one, results, found = of_table_2("fafed_table2_low")
    best, last = nearest(found), found[-1]
    assert (best.round, best.epochs, last.round) == (120, 20, 300)
    assert round(best.error, 4) == 0.0035 and last.error > 5 * best.error
    (at_130,) = [its for its in found if its.round == 130]
    assert at_130.has_order and at_130.leader == "FAFED" and not last.has_order
    assert (round(statistics.fmean(at_130.leads), 3), round(p_value(at_130.leads), 3)) == (0.011, 0.003)
    text = "\n".join(section(one, results))
    assert "**This length was fitted afterwards.**" in text and "Ours is 300 rounds (50.0 epochs)" in text
    assert "no test of a claim" in text and "up to round 300" in text


def test_the_page_of_all_claims_has_the_distances_to_table_2():
    said = (RESULTS / "claims.md").read_text(encoding="utf-8")
    found = [nearest(of_table_2(f"fafed_table2_{name}")[2]) for name in ("low", "high", "high_rule")]
    first = [max(its.means, key=its.means.get) for its in found]
    assert first == ["FAFED", "FedAMS", "FAFED"]
    places = ("Table 2 (a)", "Table 2 (c)", "Table 2 (c), b = 100, q = 5")
    for place, its, leader in zip(places, found, first, strict=True):
        assert f"{place}: at the nearest {its.error:.4f} away on average, {leader} first;" in said


def test_the_front_page_has_the_outcomes_of_the_columns_of_table_2():
    rows = [row for one in EXPERIMENTS.values() for row in _outcomes(RESULTS, one) if row.key == "best" and row.decides]
    columns = [_outcomes(RESULTS, EXPERIMENTS[f"fafed_table2_{level}"]) for level in ("low", "medium", "high")]
    states = [row.state for its in columns for row in its if row.key == "best" and row.decides]
    assert states == [AHEAD, AHEAD, UNDECIDED]
    assert len([row for row in rows if row.panel in ("low", "medium", "high")]) == 6
    said = "by accuracy Table 2 (a) and (b) are *ahead*, (c) is *undecided*"
    assert said in (RESULTS / "claims.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "scale", "marked"), [("low", "full", True), ("low", "small", False)])
def test_a_figure_marks_the_round_that_is_nearest_to_the_printed_values(tmp_path, name, scale, marked):
    one = EXPERIMENTS[f"fafed_table2_{name}"]
    (tmp_path / scale).mkdir()
    for source in (RESULTS / scale).glob(f"{one.name}*.csv"):
        (tmp_path / scale / source.name).write_bytes(source.read_bytes())
    folder = write_page(tmp_path, one, scale).parent
    drawn = [(folder / figure_file(one, name, metric)).read_text(encoding="utf-8") for metric in one.figure["metrics"]]
    marks = ["nearest to the printed values" in text for text in drawn]
    assert marks == [marked and metric == "accuracy" for metric in one.figure["metrics"]]


def test_the_methods_of_a_figure_have_distinct_colours_and_dashes():
    most = max(len(one.methods) for one in EXPERIMENTS.values())
    assert len({color(number) for number in range(most)}) == most >= 10
    assert len({*DASHES}) == len(COLORS)


def test_the_page_of_papers_shows_table_2_as_printed_and_as_measured():
    lines = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    start = next(
        k for k, row in enumerate(rows) if row[1:] == ["FedAvg", "SCAFFOLD", "STEM", "FedAdam", "FedAMS", "FAFED"]
    )
    printed, ours, wider = rows[start + 2 : start + 5]
    one, _, found = of_table_2("fafed_table2_low")
    assert printed[1:] == [f"{value:.4f}" for value in one.printed["values"]["low"].values()]
    on_wider = read_results(RESULTS, EXPERIMENTS["fafed_table2_low_wider"], "full").panels["low"]
    (at_its_end,) = [its for its in lengths(one, "low", on_wider) if its.round == nearest(found).round]
    expected = {"fafed_table2_low": nearest(found).means, "fafed_table2_low_wider": at_its_end.means}
    for row, (name, means) in zip((ours, wider), expected.items(), strict=True):
        assert f"full/{name}.md" in row[0] and "120 rounds" in row[0] and nearest(found).round == 120
        assert row[1:] == [f"{means[method]:.4f}" for method in rows[start][1:]]


def test_the_front_page_has_a_second_reading_of_table_2_beside_the_first():
    lines = (RESULTS / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "fafed_table2_high" in line]
    (row,) = [one for one in rows if one[1].startswith("[b = 100, q = 5](full/fafed_table2_high_rule.md)")]
    *_, found = of_table_2("fafed_table2_high_rule")
    assert row[1].endswith("70 rounds (the nearest), 3 seeds") and nearest(found).round == 70
    assert row[2:] == [f"{value:.4f}" for value in nearest(found).means.values()]


def test_table_2_c_is_in_the_printed_order_at_no_length():
    one, results, found = of_table_2("fafed_table2_high")
    assert not any(its.has_order for its in found) and nearest(found).error > 0.015
    assert set(found[0].means) == set(one.printed["values"]["high"])  # FAFED's further step size is not printed
    assert "at none of the 30 evaluations" in "\n".join(section(one, results))


@pytest.mark.parametrize(
    ("leads", "p"),
    [
        ([1, 2], 0.2048328),
        ([1, 2, 4], 0.1180829),
        ([0.1, 0.3, 0.2, 0.7], 0.0899427),
        ([1, -2, 3, 4, 5, 2.5], 0.0773333),
        ([1], None),
        ([1, 1], None),
    ],
)
def test_p_values_are_those_of_students_t(leads, p):
    """From scipy.stats.ttest_1samp."""
    assert p_value(leads) == (p if p is None else pytest.approx(p, abs=1e-6))
