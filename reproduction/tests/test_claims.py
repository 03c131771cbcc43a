"""Whether a claim is confirmed, on values that the test chooses."""

import dataclasses

import pytest
import yaml

from fedmpi.cli.comparison import Method
from fedmpi.config.presets import preset_names, preset_path
from fedmpi.runs.folder import RunFolder
from reproduction.claims import outcomes
from reproduction.experiment import find_experiments
from reproduction.results import Results

EXPERIMENTS = {one.name: one for one in find_experiments(["all"])}


def run(seed, curve, is_complete=True):
    """A run whose records are round -> {metric: value}."""
    records = [{"round": at} | values for at, values in curve.items()]
    return RunFolder(None, {"seed": seed}, records, is_complete, "" if is_complete else "diverged", {})


def method(name, numbers):
    """A method with an accuracy for each seed: None where it diverged, "none" where it was not run."""
    values = {seed: one for seed, one in enumerate(numbers) if one != "none"}
    return Method(name, [run(seed, {1: {"accuracy": one or 0.1}}, one is not None) for seed, one in values.items()])


def outcome_of(ours, rivals):
    """The `Outcome` of FAFED's claim to be best in Table 2 (b): its accuracies, and rival -> accuracies."""
    methods = [method("FAFED", ours), *(method(name, its) for name, its in rivals.items())]
    return next(outcomes(EXPERIMENTS["fafed_table2_medium"], Results([], {"medium": methods})))


RIVALS = EXPERIMENTS["fafed_table2_medium"].claims[0]["of"]


@pytest.mark.parametrize(
    ("others", "state", "words"),
    [
        ([0.5, 0.6, 0.7], "confirmed", "; ahead of FedAvg 0.6000 ± 0.1000;"),
        ([0.8, 0.7, 0.1], "undecided", "; ahead of FedAvg 0.5333 ± 0.3786 by less than the spread;"),
        ([0.55, 0.8, 0.83], "undecided", "; behind FedAvg 0.7267 ± 0.1537 by less than the spread;"),
        ([0.6, 0.71, 0.8], "undecided", "; level with FedAvg 0.7033 ± 0.1002;"),
        ([0.9, 0.95, 0.97], "contradicted", "; behind FedAvg 0.9400 ± 0.0361;"),
        ([0.5], "one seed: ahead", "; ahead of FedAvg 0.5000;"),
        ([0.7], "one seed: not ahead", "; behind FedAvg 0.7000;"),
    ],
)
def test_a_claim_needs_a_lead_larger_than_its_spread(others, state, words):
    numbers = [0.6, 0.71, 0.8][: len(others)]
    found = outcome_of(numbers, dict.fromkeys(RIVALS, others))
    assert (found.state, words in found.words, found.seeds) == (state, True, len(others)), found
    assert found.words.startswith("test accuracy ↑: FAFED ")


def test_one_rival_that_is_clearly_ahead_decides_a_claim_and_one_that_is_level_leaves_it_open():
    ours, behind, level, ahead = [0.6, 0.71, 0.8], [0.5, 0.6, 0.7], [0.8, 0.7, 0.1], [0.9, 0.95, 0.97]
    others = dict.fromkeys(RIVALS, behind)
    assert outcome_of(ours, others | {"STEM": level}).state == "undecided"
    assert outcome_of(ours, others | {"STEM": level, "FedAMS": ahead}).state == "contradicted"
    del others["FedAMS"]
    found = outcome_of(ours, others)
    assert found.state == "undecided" and found.words.endswith("; not run: FedAMS"), found
    assert outcome_of(ours, others | {"STEM": ahead}).state == "contradicted"
    assert outcome_of([0.6], {name: [0.5] for name in others}).state == "one seed: not ahead"


@pytest.mark.parametrize(
    ("ours", "rival", "state", "words"),
    [
        ([0.6, 0.7, 0.8], [None, None, 0.7], "confirmed", "ahead of FedAvg 0.7000 (2 of 3 diverged)"),
        ([0.6, 0.7, 0.8], [None, 0.5, 0.7], "confirmed", "ahead of FedAvg 0.6000 ± 0.1414 (1 of 3 diverged)"),
        ([0.6, 0.7, 0.8], [None, None, None], "confirmed", "ahead of FedAvg (diverged)"),
        ([0.6, 0.7, 0.8], [None, None, 0.9], "undecided", "(2 of 3 diverged), but not with every seed"),
        ([0.6, 0.7, 0.8], [None, 0.9, 0.9], "undecided", "behind FedAvg 0.9000 ± 0.0000 (1 of 3"),
        ([0.6, 0.7, None], [0.1, 0.1, 0.1], "contradicted", "FAFED 0.6500 ± 0.0707 (1 of 3 diverged); ahead"),
        ([0.6, 0.7, None], [0.1, 0.1, None], "contradicted", "FAFED 0.6500 ± 0.0707 (1 of 3 diverged); ahead"),
        ([None, None, None], [0.1, 0.1, 0.1], "contradicted", "FAFED (diverged); behind FedAvg 0.1000"),
        ([0.6], [None], "one seed: ahead", "ahead of FedAvg (diverged)"),
        ([None], [0.6], "one seed: not ahead", "FAFED (diverged); behind FedAvg 0.6000"),
        ([None], [None], "one seed: not ahead", "FAFED (diverged); level with FedAvg (diverged)"),
    ],
)
def test_who_diverges_with_a_seed_has_lost_this_seed(ours, rival, state, words):
    found = outcome_of(ours, dict.fromkeys(RIVALS, [0.01] * len(ours)) | {"FedAvg": rival})
    assert (found.state, words in found.words, found.seeds) == (state, True, len(ours)), found


@pytest.mark.parametrize(
    ("ours", "rival", "seeds", "state", "words"),
    [
        ([0.6, 0.7, 0.8], [0.1, 0.2, "none"], 2, "confirmed", "FAFED 0.6500 ± 0.0707; ahead of FedAvg 0.1500"),
        ([0.6, 0.7, "none"], ["none", 0.2, 0.3], 1, "one seed: ahead", "FAFED 0.7000; ahead of FedAvg 0.2000;"),
        ([0.6, 0.7, 0.8], ["none", "none", None], 1, "one seed: ahead", "FAFED 0.8000; ahead of FedAvg (diverged)"),
        ([0.6, "none", "none"], ["none", 0.2, None], 0, "not tested", "no seed in common"),
    ],
)
def test_only_seeds_that_all_methods_of_a_claim_have_count(ours, rival, seeds, state, words):
    found = outcome_of(ours, dict.fromkeys(RIVALS, [0.01, 0.01, 0.01]) | {"FedAvg": rival})
    assert (found.seeds, found.state, words in found.words) == (seeds, state, True), found


def test_a_claim_that_was_not_tested_names_its_methods():
    found = outcome_of([0.6], {})
    assert (found.state, found.words) == ("not tested", f"FAFED against {', '.join(RIVALS)}: not run")
    methods = [method(name, [0.6, 0.7]) for name in ("FAFED", *RIVALS)]
    _, by_loss, *_ = outcomes(EXPERIMENTS["fafed_table2_medium"], Results([], {"medium": methods}))
    assert (by_loss.key, by_loss.state) == ("lowest", "not tested") and "training loss was not" in by_loss.words


def test_a_method_with_more_queries_a_round_is_measured_after_a_share_of_the_rounds():
    """FAFedZO asks twice where FedZO asks once: after 20 of 100 rounds it asked less often than FedZO at the end."""
    curves = {"FAFedZO, M = 10": {20: 2.0, 24: 9.0, 100: 9.0}, "FedZO, M = 10": {20: 1.0, 100: 3.0}}
    methods = [Method(name, [run(seed, losses(curve, seed)) for seed in range(2)]) for name, curve in curves.items()]
    its = outcomes(EXPERIMENTS["zo_figure4"], Results([], {"iid": methods}))
    found = next(one for one in its if one.key == "queries")
    assert found.state == "confirmed" and "FAFedZO, M = 10 2" in found.words, found
    assert "at round 20; ahead of FedZO, M = 10 3" in found.words and found.words.endswith("at round 100"), found


def losses(curve, seed=0):
    return {at: {"attack_loss": number + 0.001 * seed} for at, number in curve.items()}


@pytest.mark.parametrize(
    ("here", "there", "state", "words"),
    [
        ([[3.0, 3.1], [2.0, 2.0]], [[3.0, 3.0], [2.5, 2.6]], "confirmed", "0.4500 ± 0.0707"),
        ([[3.0, 3.1], [2.0, 2.0]], [[3.0, 3.0], [1.5, 1.6]], "contradicted", "1.4500 ± 0.0707"),
        (
            [[3.0, 3.0], [3.1, 3.1]],
            [[3.0, 3.0], [3.5, 3.6]],
            "contradicted",
            "-0.5500 ± 0.0707; it is clearly behind, so",
        ),
        ([[3.0, 3.0], [2.9, 3.3]], [[3.0, 3.0], [3.9, 4.3]], "undecided", "; no lead on either"),
        ([[3.0, 3.0], [3.1, 3.1]], [[3.0, 3.0], [3.0, 3.3]], "contradicted", "; it is clearly behind, so"),
        ([[3.0, 3.0], [3.1, 3.1]], [[3.0, 3.0], [2.9, 2.8]], "contradicted", "0.1500 ± 0.0707; it is clearly behind"),
        ([[3.0, 3.9], [2.0, 2.0]], [[3.0, 3.0], [2.0, 2.1]], "undecided", "less than its spread"),
        ([[3.0, 3.1], [2.0, None]], [[3.0, 3.0], [2.5, 2.6]], "contradicted", "FedAvg-M diverged"),
        ([[3.0, 3.1], [2.0, 2.0]], [[3.0, None], [2.5, 2.6]], "undecided", "FedAvg diverged"),
        ([[3.0], [2.0]], [[3.0], [2.5]], "one seed: ahead", ": 0.5000"),
        ([[3.0], [2.0]], [[3.0], [1.5]], "one seed: not ahead", ": 1.5000"),
        ([[3.0], [3.1]], [[3.0], [3.5]], "one seed: not ahead", "; no lead on either"),
        ([[3.0], [None]], [[3.0], [3.5]], "one seed: not ahead", "FedAvg-M diverged"),
    ],
)
def test_a_claim_of_a_larger_lead_takes_the_last_tenth_of_the_rounds_that_both_panels_have(here, there, state, words):
    one = dataclasses.replace(EXPERIMENTS["mom_figure2"], metric="train_loss")
    claim = next(claim for claim in one.claims if claim["claim"] == "more_heterogeneous")

    def curve(value, end):  # the last tenth until round 20, and another order before and after it
        curve = {9: -value, 18: -value, 19: 0.5 * value, 20: 1.5 * value, 30: -value}
        return {at: {"train_loss": number} for at, number in curve.items() if at <= end}

    panels = {
        panel: [
            Method(name, [run(s, curve(its or 1.0, end), its is not None) for s, its in enumerate(numbers)])
            for name, numbers in zip(("FedAvg", "FedAvg-M"), values)
        ]
        for panel, values, end in ((claim["panel"], here, 30), (claim["than"], there, 20))
    }

    def found():
        rows = [its for its in outcomes(one, Results([], panels)) if its.key == "more_heterogeneous"]
        return [its for its in rows if its.panel == claim["panel"]]

    first, second = found()
    assert (first.state, first.seeds) == (state, len(here[0])), first
    assert "diverged" in words or "FedAvg-M over FedAvg at the end of 20 rounds: " in first.words, first
    assert words in first.words and ("behind" in words) == ("behind" in first.words), first
    assert second.state == "not tested"  # SCAFFOLD has no runs here
    panels[claim["than"]][0].runs.reverse()  # FedAvg's
    assert found()[0] == first  # seed by seed, in whatever order the runs were read
    panels[claim["than"]][0].runs[:] = [run(7, curve(1.0, 20))]
    assert found()[0].state == "not tested"
    for its in panels[claim["than"]]:  # all of them diverged before the first evaluation
        its.runs[:] = [run(seed, {}, is_complete=False) for seed in range(2)]
    assert "FedAvg diverged" in found()[0].words or "FedAvg-M diverged" in found()[0].words


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ([[1.0, 1.3], [1.1, 1.2]], "confirmed"),
        ([[1.0, 1.1], [2.0, 2.2]], "contradicted"),
        ([[3.0, 3.1], [2.0, 2.2]], "contradicted"),
        ([[1.0, 1.3], [0.9, None]], "contradicted"),
        ([[1.0], [1.0]], "one seed: undecided"),
    ],
    ids=["within the spread", "ahead", "behind", "diverged", "one seed"],
)
def test_a_claim_that_methods_are_level_fails_if_one_leads_by_more_than_the_spread(values, state):
    methods = [
        Method(name, [run(seed, losses({1: its or 1.0}), its is not None) for seed, its in enumerate(some)])
        for name, some in zip(("FAFedZO, E = 60", "FedZO, E = 60"), values)
    ]
    its = outcomes(EXPERIMENTS["zo_figure7"], Results([], {"non-iid": methods}))
    (found,) = [one for one in its if one.key == "comparable"]
    assert found.state == state, found


@pytest.mark.parametrize(
    ("gaps", "state"),
    [
        ([1.0e-12, 1.0e-11], "confirmed"),
        ([1.0e-12, 1.0e-5], "contradicted"),
        ([1.0e-12, None], "contradicted"),
        ([1.0e-12], "one seed: reached"),
        ([1.0e-5], "one seed: not reached"),
        ([], "not tested"),
    ],
)
def test_a_claim_to_reach_a_value_holds_if_every_seed_reaches_it(gaps, state):
    runs = [run(seed, {1: {"gap": gap or 0.0}}, gap is not None) for seed, gap in enumerate(gaps)]
    (found,) = outcomes(EXPERIMENTS["auc_figure1"], Results([], {"two weights": [Method("FMGDA", runs)]}))
    assert (found.state, found.seeds) == (state, len(gaps)), found
    assert not gaps or (found.words.startswith("gap ↓: FMGDA ") and "; expected <= 1e-10" in found.words), found


def preset_content(name):
    return yaml.safe_load(preset_path(name).read_text())


@pytest.mark.parametrize("name", [name for name in preset_names() if preset_content(name)["paper"]["printed"]])
def test_what_a_preset_calls_printed_stands_in_a_table_or_figure_of_its_paper(name):
    """0.9948 and 0.823, of public code, were once called the paper's."""
    known = [
        (one.printed["metric"], {one.methods[method]["algorithm"]: value for method, value in values.items()})
        for one in find_experiments([name.partition("/")[0]])
        for values in one.printed.get("values", {}).values()
        if one.printed["place"]
    ]
    for printed in preset_content(name)["paper"]["printed"].items():
        assert printed in known
