"""The methods at equal gradients and equal bytes."""

import math

import pytest
from helpers import ROOT
from test_claims import run

from fedmpi.cli.comparison import Method
from reproduction import grids
from reproduction.equal_cost import SAME, at_equal_cost, places, section
from reproduction.experiment import experiment_names, find_experiments
from reproduction.results import Results, read_results

RESULTS = ROOT / "reproduction" / "results"


def of_table(name):
    (experiment,) = find_experiments([name])
    return experiment, read_results(RESULTS, experiment, "full")


@pytest.mark.parametrize(
    ("name", "at_gradients", "at_bytes", "nth"),
    [  # computed apart from the CSV files with numpy.interp, at about round 150 and round 100 of FAFED
        ("fafed_table2_low", {"FAFED": 0.8834, "FedAdam": 0.8888}, {"FAFED": 0.8761, "FedAdam": 0.8888}, [3, 3]),
        ("fafed_table2_high", {"FAFED": 0.8560, "FedAMS": 0.8703}, {"FAFED": 0.8426, "FedAMS": 0.8703}, [3, 4]),
    ],
)
def test_fafed_is_behind_the_adaptive_servers_at_equal_cost(name, at_gradients, at_bytes, nth):
    _, results = of_table(name)
    (methods,) = results.panels.values()
    for cost, known in (("gradients", at_gradients), ("bytes", at_bytes)):
        amount, values = at_equal_cost(methods, "accuracy", cost)
        assert amount == {"gradients": 60000, "bytes": 31944000}[cost]
        # FAFED's start sends rows, too, so that its round 100 is a little later by bytes.
        assert {name: values[name].mean for name in known} == pytest.approx(known, abs=3e-4)
    assert [place for _, place, _ in places(methods, "accuracy", "FAFED")] == nth


def curve(label, seeds, cost, values):
    """A `Method` whose runs spend `cost` gradients and bytes a round."""
    return Method(
        label,
        [
            run(
                seed,
                {
                    r: {"gradients": cost * r, "bytes": cost * r, "accuracy": value + seed}
                    for r, value in enumerate(values, 1)
                },
            )
            for seed in seeds
        ],
    )


def test_values_are_interpolated_at_what_the_cheapest_spends():
    cheap, dear = curve("cheap", (0, 1), 2, (0.1, 0.2, 0.3)), curve("dear", (0, 1), 5, (0.2, 0.7))
    amount, values = at_equal_cost([cheap, dear], "accuracy", "gradients")
    assert amount == 6 and values["cheap"].values == pytest.approx((0.3, 1.3))
    assert values["dear"].values == pytest.approx((0.3, 1.3))  # a fifth of the way from 5 to 10
    later = curve("later", (0,), 7, (0.9, 0.9))
    assert at_equal_cost([cheap, later], "accuracy", "bytes")[1]["later"] is None
    assert places([cheap, dear], "accuracy", "later") == [] and math.isfinite(values["dear"].mean)


def test_methods_of_equal_cost_have_a_line_and_no_table():
    experiment, _ = of_table("fafed_table2_low")
    methods = [curve("FedAvg", (0,), 2, (0.1, 0.2)), curve("STEM", (0,), 2, (0.3, 0.4))]
    assert section(experiment, Results([], {"low": methods})) == ["## At equal cost", "", SAME, ""]
    assert section(experiment, Results([], {"low": methods[:1]})) == []


def test_every_page_of_a_comparison_has_the_lines():
    for path in sorted(RESULTS.glob("*/*.md")):
        if path.parent.name in ("small", "mlp", "full"):
            assert "## At equal cost" in path.read_text(encoding="utf-8"), path


def test_each_metric_of_the_figure_has_a_table():
    """FAFED's claims on Table 2's experiment are judged by accuracy and by training loss."""
    experiment, results = of_table("fafed_table2_low")
    tables = "\n".join(section(experiment, results)).split("| where ")[1:]
    for table, metric, name in zip(tables, ("accuracy", "train_loss"), ("test accuracy", "training loss"), strict=True):
        _, known = at_equal_cost(results.panels["low"], metric, "gradients")
        assert table.startswith(f"| {name} after | {' | '.join(known)} |\n")
        assert f"gradients | {' | '.join(map(str, known.values()))} |\n" in table


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fafed_table2_low", "on the paper's grid"),
        ("fafed_figures2_4_cifar10", "on the paper's grid"),
        ("fafed_figures2_4_cifar10_wider", "on a wider grid"),
        ("fafed_theorem1", None),
    ],
)
def test_verdicts_say_whose_grid_was_tried(name, words):
    """Of a claim, beside its panel."""
    lines = (RESULTS / "claims.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split(" | ")[0] for line in lines if line.startswith(f"| [{name}](")]
    assert rows and all(words is None or words in row for row in rows if "(full" in row or "(small" in row)
    assert words is not None or not any("grid" in row for row in rows)


def test_one_rule_decides_whose_grid_is_tried():
    """As the folder's README says, with its exceptions."""
    exceptions = {"mom_figure2", "mom_figure3"}
    for one in find_experiments(experiment_names()):
        for scale in one.scales if one.name not in exceptions else ():
            rule = "on a wider grid" if one.name.endswith("_wider") else "on the paper's grid"
            rule += " for fafed only" * ((one.name, scale) == ("fafed_figures2_4_mnist_wider", "small"))
            assert grids.reach(one, scale) in ("", rule), one.name
