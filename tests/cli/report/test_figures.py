"""Figures for papers, and what a report says besides curves: clients, ROC curves, varied settings, who is best."""

import json
import re
import sys

import pytest
from helpers import ROOT, execute
from test_report import FLOOR, Page, accuracy, make_run, report

import fedmpi.cli.report
from fedmpi.cli.comparison import problems
from fedmpi.cli.report.curves import Target, clearly_best
from fedmpi.cli.report.further import varied_settings
from fedmpi.cli.report.style import Style
from fedmpi.cli.report.tables import cases_table, client_table, final_table, silo_table, target_table
from fedmpi.ground.errors import UserError
from fedmpi.runs.folder import find_runs

pytest.importorskip("matplotlib")


def change_last(folder, **values):
    """Set values in the last record of a run."""
    *lines, last = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([*lines, json.dumps({**json.loads(last), **values})]) + "\n")


def the_problem(folder):
    (problem,) = problems(find_runs([folder])[0])
    return problem


def test_best_is_what_leads_in_seed_after_seed(tmp_path):
    """The same noise in both methods of a seed hides no lead; equal values are no lead; one seed says nothing."""
    for seed, noise in enumerate((0.0, 0.3, 0.6)):
        for name, lead in (("fafed", 0.01 + 0.001 * seed), ("fedavg", 0.0)):
            change_last(
                make_run(tmp_path / f"{name}-{seed}", name, seed), accuracy=0.1 + noise + lead, train_loss=noise
            )
    problem = the_problem(tmp_path)
    assert problem.methods[clearly_best(problem.methods, "accuracy")].label == "fafed"
    assert clearly_best(problem.methods, "train_loss") is None
    assert {column for _, column in final_table(problem).best} == {3}
    assert clearly_best(the_problem_of(tmp_path, "*-0").methods, "accuracy") is None
    assert report(tmp_path, "--out", tmp_path / "page.html", "--metric", "accuracy").returncode == 0
    text = (tmp_path / "page.html").read_text()
    assert "lowest training loss (no clear lead)<" in text and "highest test accuracy<" in text


def test_a_lead_smaller_than_its_spread_is_none(tmp_path):
    for seed, lead in enumerate((0.03, -0.02, 0.01)):
        for name, value in (("fafed", 0.5 + lead), ("fedavg", 0.5)):
            change_last(make_run(tmp_path / f"{name}-{seed}", name, seed), accuracy=value)
    assert clearly_best(the_problem(tmp_path).methods, "accuracy") is None


def test_a_method_that_not_all_seeds_bring_to_a_target_is_not_the_cheapest(tmp_path):
    for name, needed in (("fafed", (10, 11)), ("fedavg", (20, 20)), ("scaffold", (5, 90))):  # rounds, of 40
        for seed, rounds in enumerate(needed):
            folder = make_run(tmp_path / f"{name}-{seed}", name, seed)
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            lines = [line | {"accuracy": line["round"] / rounds / 10} for line in lines]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = target_table(the_problem(tmp_path), Target.parse("accuracy=0.1"))
    assert {row[0]: row[1] for row in table.rows} == {"fafed": "2 of 2", "fedavg": "2 of 2", "scaffold": "1 of 2"}
    column = table.header.index("rounds")
    assert [table.rows[row][0] for row, its_column in table.best if its_column == column] == ["fafed"]


def test_what_a_setting_does_is_shown_on_held_out_data(tmp_path):
    for number, step_size in enumerate((0.01, 0.1, 1.0)):
        algorithm = {"name": "fafed", "step_size": step_size}
        change_last(make_run(tmp_path / f"{number}", "fafed", 0, algorithm=algorithm), holdout_accuracy=0.3 + number)
    ((_, metric, lines),) = varied_settings(the_problem(tmp_path))
    assert metric == "holdout_accuracy" and [spread.mean for _, spread in lines["fafed"]] == [0.3, 1.3, 2.3]


def test_a_setting_without_a_value_is_called_none(tmp_path):
    for name, private in (("common", None), ("personal", "bn")):
        make_run(tmp_path / name, "fafed", 0, private=private)
    assert [method.label for method in the_problem(tmp_path).methods] == ["fafed, private none", "fafed, private bn"]


def the_problem_of(folder, pattern):
    (problem,) = problems(find_runs(sorted(folder.glob(pattern)))[0])
    return problem


def test_settings_that_differ_stand_beside_the_name(tmp_path):
    for name, step_size in (("fafed", 0.003), ("fedavg", 0.1)):
        make_run(tmp_path / "runs" / name, name, 0, algorithm={"name": name, "step_size": step_size, "momentum": 0.9})
    table = final_table(the_problem(tmp_path / "runs"))
    assert [row[table.header.index("settings")] for row in table.rows] == ["step_size 0.003", "step_size 0.1"]
    ended = report(tmp_path / "runs", "--out", tmp_path / "page.html", "--format", "svg")
    assert ended.returncode == 0, ended.stderr
    text = (tmp_path / "page.html").read_text()
    assert "fafed<small>step_size 0.003</small>" in text
    assert "Without two common seeds" in text


def test_a_figure_for_a_paper(tmp_path):
    for name in FLOOR:
        make_run(tmp_path / "runs" / name, name, 0)
    style = {
        "width": 245,
        "height": 170,
        "size": 8,
        "labels": {"fafed": "FAFED (ours)", "accuracy": "accuracy on tests"},
    }
    path = tmp_path / "figure.pdf"
    figure = fedmpi.cli.report.figure(tmp_path / "runs", "accuracy", "bytes", target=0.7, path=path, **style)
    assert path.read_bytes()[:5] == b"%PDF-"
    assert tuple(72 * figure.get_size_inches()) == pytest.approx((245, 170))
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "- - target 0.7"
    assert any("FAFED" in text.get_text() for legend in figure.legends for text in legend.get_texts())
    assert axes.get_ylabel() == "accuracy on tests"
    drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert drawn.x0 >= 0 and drawn.y0 >= 0 and drawn.x1 <= width and drawn.y1 <= height
    wide = fedmpi.cli.report.figure(tmp_path / "runs", "accuracy", "bytes", labels={"fafed": "Momentum SGDA"})
    assert wide.get_tightbbox().x1 <= wide.get_size_inches()[0]
    for wrong in ({"metric": "acuracy"}, {"axis": "rounds"}, {"scale": "cubic"}, {"width": 3}):
        with pytest.raises(UserError):
            fedmpi.cli.report.figure(tmp_path / "runs", **{"metric": "accuracy", **wrong})


def test_a_figure_has_the_size_asked_for_also_with_long_names(tmp_path):
    for number in range(9):
        make_run(tmp_path / "runs" / str(number), "fafed", 0, algorithm={"name": "fafed", "step_size": 0.1 + number})
    figure = fedmpi.cli.report.figure(tmp_path / "runs", "accuracy", width=245, height=170, size=8)
    assert tuple(72 * figure.get_size_inches()) == pytest.approx((245, 170))
    (axes,) = figure.axes
    assert axes.get_window_extent().height * 72 / figure.dpi > 50
    assert figure._repr_svg_().lstrip().startswith("<?xml")  # which a notebook shows
    assert len({str(line._unscaled_dash_pattern) for line in axes.lines[:7]}) == 7  # also without colour


def test_accuracy_as_error_on_a_log_axis_and_zoomed_in(tmp_path):
    make_run(tmp_path / "runs" / "a", "fafed", 0)
    (axes,) = fedmpi.cli.report.figure(tmp_path / "runs", "accuracy", scale="error").axes
    assert axes.get_yscale() == "log" and "1 − " in axes.get_ylabel()
    assert axes.lines[0].get_ydata()[-1] == pytest.approx(1 - accuracy("fafed", 0, 40))
    figures = [fedmpi.cli.report.figure(tmp_path / "runs", "accuracy", scale=scale) for scale in ("linear", "zoom")]
    whole, zoomed = (figure.axes[0] for figure in figures)
    assert zoomed.get_ylim()[0] > whole.get_ylim()[0]
    assert "zoomed in" in zoomed.get_ylabel()


def test_a_loss_that_falls_far_has_a_log_axis(tmp_path):
    """From 1.2 to 0.25; a third of the range shows as well on a linear one."""
    folder = make_run(tmp_path / "runs" / "a", "fafed", 0)
    (axes,) = fedmpi.cli.report.figure(tmp_path / "runs", "train_loss").axes
    shown = [tick for tick in axes.get_yticks() if 0.25 <= tick <= 1.2]
    assert axes.get_yscale() == "log" and shown == pytest.approx([0.3, 0.5, 0.7, 1.0])
    assert [axes.yaxis.get_major_formatter()(tick, None) for tick in (0.3, 12000.0, 2e7)] == ["0.3", "12,000", "2e+07"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line | {"train_loss": 0.5 + 0.5 / line["round"]} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert fedmpi.cli.report.figure(tmp_path / "runs", "train_loss").axes[0].get_yscale() == "linear"


def test_an_svg_has_no_background_and_no_date(tmp_path):
    """It lies on pages of any colour, and the same runs give the same file."""
    make_run(tmp_path / "runs" / "a", "fafed", 0)
    from fedmpi.cli.report.figures import as_svg  # needs matplotlib

    text = as_svg(fedmpi.cli.report.figure(tmp_path / "runs", "train_loss"))
    assert re.search(r'<g id="patch_1">\s*<path [^>]*style="fill: none', text) and "fill: #ffffff" not in text
    assert "<dc:date>" not in text and "fedmpi" in text


def test_names_of_ones_own_stand_in_tables_and_cards_too(tmp_path):
    for name in ("fafed", "fedavg"):
        make_run(tmp_path / "runs" / name, name, 0)
    words = ("--label", "fafed=FAFED (ours)", "--label", "accuracy=hit rate", "--target", "accuracy=0.5")
    ended = report(tmp_path / "runs", "--out", tmp_path / "page.html", *words)
    text = (tmp_path / "page.html").read_text()
    assert ended.returncode == 0 and "FAFED (ours)" in ended.stdout and "until hit rate ≥ 0.5" in ended.stdout
    assert "highest hit rate" in text and "Hit rate: FAFED (ours) is better than" in text
    assert "FAFED (ours)" in (tmp_path / "page/finals.csv").read_text()


def test_methods_that_end_alike_are_level(tmp_path):
    for name, value in (("fafed", 0.81234), ("fedavg", 0.81237)):
        change_last(make_run(tmp_path / "runs" / name, name, 0), accuracy=value)
    assert report(tmp_path / "runs", "--out", tmp_path / "page.html").returncode == 0
    text = (tmp_path / "page.html").read_text()
    assert "Test accuracy: fedavg and fafed are level." in text and "better" not in text


@pytest.mark.parametrize(("apart", "shown"), [(0.001, False), (0.1, True)])
def test_the_other_average_of_a_metric_is_shown_if_it_is_apart(tmp_path, apart, shown):
    for seed, noise in enumerate((0.0, 0.02)):
        folder = make_run(tmp_path / "runs" / str(seed), "fafed", seed)
        change_last(folder, accuracy=0.8 + noise, accuracy_samples=0.8 + noise + apart)
    assert report(tmp_path / "runs", "--out", tmp_path / "page.html", "--axis", "round").returncode == 0
    assert ("accuracy samples" in (tmp_path / "page.html").read_text()) == shown
    assert "accuracy_samples" in (tmp_path / "page/finals.csv").read_text()


def test_legends_name_the_methods_in_one_order(tmp_path):
    for name in FLOOR:
        make_run(tmp_path / name, name, 0)
    drawn = [fedmpi.cli.report.figure(tmp_path, metric) for metric in ("accuracy", "train_loss")]
    names = [[text.get_text() for text in figure.legends[0].get_texts()] for figure in drawn]
    assert names[0] == names[1] == [method.label for method in the_problem(tmp_path).methods]


def test_options_choose_what_is_drawn(tmp_path):
    make_run(tmp_path / "runs" / "a", "fafed", 0)
    words = (
        "--metric",
        "accuracy",
        "--axis",
        "bytes",
        "--format",
        "pdf",
        "--scale",
        "accuracy=error",
        "--width",
        "3.4",
    )
    ended = report(tmp_path / "runs", "--out", tmp_path / "page.html", *words)
    assert ended.returncode == 0, ended.stderr
    assert sorted(path.name for path in (tmp_path / "page").glob("*.*f")) == ["accuracy-bytes.pdf"]
    assert len([tag for tag, _ in Page((tmp_path / "page.html").read_text()).tags if tag == "img"]) == 1
    for wrong, message in (
        (("--metric", "acuracy"), "no run measured it"), (("--scale", "accuracy=cubic"), "expected one of auto"),
        (("--width", "0.1"), "expected points"), (("--label", "x"), "expected NAME=TEXT"),
    ):  # fmt: skip
        ended = report(tmp_path / "runs", *wrong)
        assert ended.returncode == 2 and message in ended.stderr


def test_clients_roc_and_settings_are_shown(tmp_path):
    for number, step_size in enumerate((0.01, 0.1, 1.0)):
        folder = make_run(
            tmp_path / "runs" / f"{number}", "fafed", 0, algorithm={"name": "fafed", "step_size": step_size}
        )
        change_last(folder, clients={"accuracy": [0.5, 0.9, float("nan"), 0.7]})
        (folder / "clients.json").write_text(json.dumps({"names": ["Aachen", "Bonn", "Celle", "Essen"]}))
        (folder / "roc.csv").write_text("false positives,true positives\n0,0\n0.2,0.8\n1,1\n")
    problem = the_problem(tmp_path / "runs")
    rows = silo_table(problem).rows
    assert rows[0][1:] == ["test accuracy", "3", "0.7000", "0.5000", "0.9000", "0.1633", "client 0, Aachen"]
    each = client_table(problem)
    assert each.header[0] == "test accuracy of client" and len(each.header) == 4
    assert [row[:2] for row in each.rows[:3]] == [["0 Aachen", "0.5000"], ["1 Bonn", "0.9000"], ["2 Celle", "–"]]
    ((key, metric, lines),) = varied_settings(problem)
    assert (key, metric, [value for value, _ in lines["fafed"]]) == (
        "algorithm.step_size",
        "accuracy",
        [0.01, 0.1, 1.0],
    )
    ended = report(tmp_path / "runs", "--out", tmp_path / "page.html", "--format", "svg", "--format", "png")
    assert ended.returncode == 0, ended.stderr
    made = {path.name for path in (tmp_path / "page").iterdir()}
    assert {"clients.svg", "roc-curve-on-the-test-set.png", "what-step-size-does.svg"} <= made
    assert "client 0, Aachen" in ended.stdout and "3 Essen" in ended.stdout
    assert "3 Essen" in (tmp_path / "page.html").read_text()


def test_cases_of_each_class_are_shown_beside_the_scores_of_silos(tmp_path):
    """A silo whose tests lack a class has a mean over the others, and the page did not say so."""
    folder = make_run(tmp_path / "runs" / "it", "fafed", 0)
    cases = {"classes": ["<b>ill", "well\x1b[31m"], "values": [[4, 1200], [0, 7], [2, 0]]}
    change_last(folder, clients={"accuracy": [0.5, 0.9, 0.7]}, cases=cases)
    (folder / "clients.json").write_text(json.dumps({"names": ["Aachen", "Bonn", "Celle"]}))
    rows = [["0 Aachen", "4", "1,200"], ["1 Bonn", "none", "7"], ["2 Celle", "2", "none"]]
    shown = cases_table(the_problem(tmp_path / "runs"))
    assert (shown.header, shown.rows) == (["test cases of client", "<b>ill", "well [31m"], rows)
    ended = report(tmp_path / "runs", "--out", tmp_path / "page.html")
    assert ended.returncode == 0, ended.stderr
    page = re.sub(r"\s+", " ", (tmp_path / "page.html").read_text())
    of_silos, of_cases = page.index("test accuracy of client"), page.index("test cases of client")
    assert of_silos < of_cases < page.index("Every run")
    assert "<span>&lt;b&gt;ill</span>" in page and "<td>1 Bonn</td><td>none</td><td>7</td>" in page
    assert re.search(r"1 Bonn +none +7\n", ended.stdout) and "\x1b" not in ended.stdout + page


def test_of_many_classes_the_silos_that_lack_some_are_shown(tmp_path):
    folder = make_run(tmp_path / "it", "fafed", 0)
    cases = {"classes": [f"kind {k}" for k in range(30)], "values": [[1] * 30, [0] * 7 + [2] * 23]}
    change_last(folder, clients={"accuracy": [0.5, 0.9]}, cases=cases)
    shown = cases_table(the_problem(tmp_path))
    assert shown.header == ["client", "test cases", "classes without", "which"]
    assert shown.rows == [["1", "46", "7", "kind 0, kind 1, kind 2, kind 3, kind 4, ..."]]


@pytest.mark.parametrize(
    "odd",
    [
        {},
        [],
        {"classes": ["a"]},
        {"classes": ["a"], "values": [[-1]]},
        {"classes": 3},
        {"classes": ["a", "b"], "values": [[1]]},
        {"classes": ["a"], "values": [[1e300]]},
        {"classes": ["a"], "values": "x"},
    ],
)
def test_odd_numbers_of_cases_are_left_out(tmp_path, odd):
    change_last(make_run(tmp_path / "it", "fafed", 0), clients={"accuracy": [0.5, 0.9]}, cases=odd)
    assert cases_table(the_problem(tmp_path)) is None


def test_of_losses_the_largest_is_the_worst(tmp_path):
    change_last(make_run(tmp_path / "run", "fafed", 0), clients={"test_loss": [0.3, 0.2, 0.4]})
    (row,) = silo_table(the_problem(tmp_path)).rows
    assert row[1:] == ["test loss", "3", "0.3000", "0.4000", "0.2000", "0.0816", "client 2"]


def test_the_figure_of_a_split_explains_its_sizes(tmp_path):
    words = ("digits", "--clients", "4", "--partition", "dirichlet", "--plot", tmp_path / "split.svg")
    ended = execute([sys.executable, "-m", "fedmpi", "data", "partition", *words], env={"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0, ended.stderr
    assert "<!-- samples -->" in (tmp_path / "split.svg").read_text()


def test_a_font_that_is_not_here_is_one_line():
    """Matplotlib said so in hundreds of lines."""
    pytest.importorskip("matplotlib")
    from fedmpi.cli.report.figures import figure_settings

    with pytest.raises(UserError, match="--font No Such Font: not on this machine"):
        figure_settings(Style(font="No Such Font"))
    assert figure_settings(Style(font="DejaVu Sans"))["font.family"][0] == "DejaVu Sans"
