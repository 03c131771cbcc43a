"""Tables of proved rates: measured, judged by the rule of the benchmark, and shown from their CSV files."""

import dataclasses
import re

import numpy as np
import pytest
from helpers import ROOT

from fedmpi.ground.errors import UserError
from reproduction import grids, orders
from reproduction.experiment import find_experiments
from reproduction.tests.tiny import reproduce

RESULTS = ROOT / "reproduction" / "results"
TABLES = [one for one in find_experiments(["all"]) if one.orders]


def written(folder, exponents, seeds=4):
    """A file of a table whose mean squares fall exactly with these exponents: method -> (all, half)."""
    one = dataclasses.replace(TABLES[0], orders=[*exponents])
    rows = [
        {"method": name, "grows": "R", "size": R, "seed": seed, "proved": -0.5, "from": "here", "cpu_seconds": 1}
        | {"all": 3 * R**of_all * (1 + seed / 100), "half": 2 * R**of_half, "commit": "x", "date": "2026-01-01"}
        for name, (of_all, of_half) in exponents.items()
        for R in (10, 100, 1000)
        for seed in range(seeds)
    ]
    orders.write_tables((orders.file_of(folder, one), orders.COLUMNS, rows))
    return one


def test_the_rule_decides(tmp_path):
    one = written(tmp_path, {"fedavg": (-0.4, -0.5), "stem": (-0.1, -0.2), "fafed": (-0.9, -1.0)})
    of_paper = [its.panel for its in orders.outcomes(tmp_path, one)]
    assert of_paper == ["stem against R", "fafed against R"]  # the paper's claim is not about FedAvg
    one = dataclasses.replace(one, beside=[])
    found = {its.panel: its for its in orders.outcomes(tmp_path, one)}
    states = {panel: its.state for panel, its in found.items()}
    assert states == {
        "fedavg against R": "confirmed",
        "stem against R": "contradicted",
        "fafed against R": "undecided",
    }
    assert found["fedavg against R"].seeds == 4 and "-0.50 ± 0.00 (last half)" in found["fedavg against R"].words
    text = orders.page(tmp_path, one)
    for word in ("**agrees**", "**contradicted**", "**not readable**", "| 10, 100, 1000 |"):
        assert word in text
    assert orders.write_page(tmp_path, one).read_text() == text
    assert ">fedavg<" in orders.file_of(tmp_path, one).with_suffix(".svg").read_text()


def test_lines_are_those_of_the_benchmark():
    lines = orders.chosen_lines(["fafed", "fedavg"])
    assert [(one.method, one.grows) for one in lines] == [("fafed", "R"), ("fafed", "N"), ("fedavg", "R")]
    assert lines[-1].trial(64).algorithm.step_size == pytest.approx(2 * lines[-1].trial(256).algorithm.step_size)
    with pytest.raises(UserError, match="orders: fedprox: expected some of"):
        orders.chosen_lines(["fedprox"])


def test_a_table_is_measured_by_the_command(tmp_path, monkeypatch):
    """With tiny sizes: the file has every size and seed, and the page and the summary are made from it."""
    real = orders.chosen_lines
    monkeypatch.setattr(
        orders, "chosen_lines", lambda names: [dataclasses.replace(o, sizes=(4, 8)) for o in real(names)]
    )
    monkeypatch.setattr(orders, "SEEDS", (0, 1))
    one = dataclasses.replace(TABLES[0], orders=["local_sgda"])
    rows = orders.read_rows(orders.measure(tmp_path, one))
    assert [(row["size"], row["seed"]) for row in rows] == [("4", "0"), ("4", "1"), ("8", "0"), ("8", "1")]
    assert all(np.isfinite(float(row[name])) for row in rows for name in ("all", "half"))
    assert "`local_sgda`" in orders.page(tmp_path, one)


@pytest.mark.rarely
def test_wrong_files_are_one_line(tmp_path):
    one = written(tmp_path, {"fedavg": (-0.4, -0.5)})
    path = orders.file_of(tmp_path, one)
    path.write_text("".join(path.read_text().splitlines(True)[:-1]))
    with pytest.raises(UserError, match="not all sizes have as many seeds"):
        orders.read(tmp_path, one)
    for words, message in ((["--tune"], "has no grids"), (["--emit-slurm", "x"], "has no runs for a job array")):
        done = reproduce(TABLES[0].name, *words, "--results", tmp_path)
        assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("one", TABLES, ids=lambda one: one.name)
def test_a_wrong_order_fails_by_the_rule_of_all_rows(one):
    """FedAvg against -2/3 among them: with a rule or a problem that does not tell it from -1/2, it would agree."""
    found = {its.line.method: its for its in orders.controls(RESULTS, one)}
    assert {*found} == {*one.controls} and found and all(its.says != "agrees" for its in found.values())
    text = orders.page(RESULTS, one).partition("## Control")[2]
    assert all(f"| `{name}` | {its.line.proved:.2f} |" in text and its.says in text for name, its in found.items())
    baseline = {"mom": "fedavg", "fafed": "fedavg", "auc": "local_sgda"}[one.paper]
    assert found[baseline].says == "contradicted" and found[baseline].line.proved < -0.6
    (own,) = [its for its in orders.read(RESULTS, one)[0] if its.line.method == baseline]
    assert own.line.proved == -0.5 and own.says != "contradicted"  # the order that it has


def test_the_baseline_of_the_momentum_paper_runs_on_the_problem_of_its_methods():
    of_momentum = {line.method: line.trial(64) for line in orders.chosen_lines(["fedavg", "fedavg_m"])}
    assert of_momentum["fedavg"].problem.sigma == of_momentum["fedavg_m"].problem.sigma > 4
    moved = of_momentum["fedavg_m"].algorithm.server_step_size
    assert of_momentum["fedavg"].algorithm.step_size * of_momentum["fedavg"].local_steps == pytest.approx(moved)
    (of_fafed,) = [line for line in orders.chosen_lines(["fedavg", "fafed"]) if line.method == "fedavg"]
    assert of_fafed.trial(64).problem.sigma < of_momentum["fedavg"].problem.sigma / 2


@pytest.mark.parametrize("one", TABLES, ids=lambda one: one.name)
def test_committed_pages_are_made_from_the_committed_numbers(one):
    text = orders.file_of(RESULTS, one).with_suffix(".md").read_text(encoding="utf-8")
    assert orders.page(RESULTS, one) == text
    assert {name for name in re.findall(r"^\| `(\w+)`", text, re.M)} == set(one.orders)
    assert all((RESULTS / "orders" / name).is_file() for name in re.findall(r"\]\(([^)]*)\)", text))


def test_the_papers_grids_are_counted():
    experiments = {one.name: one for one in find_experiments(["all"])}

    def rows(name, scale="small"):
        return {row[0]: row[2:] for row in grids.rows_of(experiments[name], scale)}

    assert rows("mom_figures7_8")["`fedavg_m`"] == ["20 of 20", "–"]
    assert rows("mom_figure2")["`scaffold_m`"] == ["3 of 20", "2"]
    assert rows("fafed_table2_low")["`fafed`"] == ["4 of 20", "–"]
    assert rows("fafed_figures2_4_cifar10")["`fedadam`"] == ["3 of 30", "–"]
    assert rows("fafed_figures2_4_cifar10_wider")["`fedadam`"] == ["2 of 30", "2"]
    assert not rows("fafed_figure1") and not rows("zo_figure3") and not rows("lamb_figure5")
