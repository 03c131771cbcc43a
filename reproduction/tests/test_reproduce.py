"""The papers' tables and figures: their files, a small one from its runs to its page, and the committed results."""

import dataclasses
import itertools
import math
import re
import statistics
import sys

import numpy as np
import pytest
import yaml
from helpers import ROOT, execute
from tiny import TINY, reproduce, rows

from fedmpi.cli.sweep.plan import make_plan
from fedmpi.config.presets import preset_path
from fedmpi.federation.participation import draw_participants
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import check_replaceable
from fedmpi.ground.files.settings_files import read_settings_file
from fedmpi.ground.text import as_markdown, format_metric
from fedmpi.runs.folder import is_run, read_run
from fedmpi.training.config import read_command_line
from reproduction.__main__ import CPU_TIMES, listing
from reproduction.claims import CONFIRMED, CONTRADICTED, UNDECIDED, ordering
from reproduction.csv_files import write_tables
from reproduction.experiment import SCALES, figure_file, find_experiments, read_experiment, read_papers
from reproduction.front import AGAINST, _anchor, _compared, verdict_of
from reproduction.page import page, prose
from reproduction.results import (
    CURVE_AMOUNTS,
    KEYS,
    RUN_COLUMNS,
    Results,
    grid_path,
    paths,
    read_results,
)
from reproduction.running import was_continued
from reproduction.strength import AHEAD
from reproduction.summary import PAGES, Row, _count, _outcomes, _with_ends, texts

pytestmark = pytest.mark.rarely("reproduction", "fedmpi/cli/sweep", "fedmpi/runs", "fedmpi/config/presets")

EXPERIMENTS = find_experiments(["all"])
RUN = [one for one in EXPERIMENTS if one.scales]
RESULTS = ROOT / "reproduction" / "results"


def names(experiments):
    return [one.name for one in experiments]


def test_a_page_says_on_how_many_samples_its_curves_were_computed():
    one = next(one for one in EXPERIMENTS if one.name == "zo_figure6")
    assert "those of at most 2,000 training and test samples" in page(RESULTS, one, "small", Results([], {}), {})
    assert "samples" not in page(RESULTS, one, "full", Results([], {}), {}).partition("##")[0]


def test_methods_with_equal_values_share_their_place():
    assert ordering(["A", "B", "C"], "accuracy", {"A": 0.5, "B": 0.7, "C": 0.5}) == "B > A = C"


@pytest.mark.parametrize("one", RUN, ids=names(RUN))
def test_every_preset_and_setting_in_a_file_exists(one):
    points = [point for scale in one.scales for point in one.points(scale)]
    points += [point for scale in ("small", "full") if one.tuning(scale) for point in one.tuning_points(scale)]
    distinct = {str(point.settings): point for point in points}
    for point in distinct.values():
        assert read_command_line([f"--{key}={text}" for key, text in point.settings.items()]).rounds
    for scale in one.scales:
        words = [f"--{key}={text}" for key, text in one.first_run(scale).items()]
        assert not words or read_command_line(words).rounds


def test_the_data_can_be_dealt_to_the_clients_of_every_scale():
    labels = np.arange(60_000) % 10
    points = {str(point.settings): point for one in RUN for scale in one.scales for point in one.points(scale)}
    cases = set()
    for point in points.values():
        config = read_command_line([f"--{key}={text}" for key, text in point.settings.items()])
        if config.partition is not None:
            active = draw_participants(config.data.clients, config.rounds.participation, seed=0, round_index=0)
            cases.add((config.partition, config.data.clients, tuple(active)))
    assert len(cases) > 10
    for partition, num_clients, active in cases:
        assert len(partition(labels, num_clients, seed=0)) == num_clients
        assert not partition.redeal or len(partition.deal(labels, active, seed=0, round_index=0)) == len(active)


@pytest.mark.parametrize("one", RUN, ids=names(RUN))
def test_printed_numbers_have_a_place_and_are_those_of_the_preset(one):
    for panel, values in one.printed.get("values", {}).items():
        assert one.printed["place"].startswith("Table")
        preset = read_settings_file(preset_path(one.panels[panel]["preset"]), "")["paper"]["printed"]
        algorithms = {one.methods[method]["algorithm"]: value for method, value in values.items()}
        assert algorithms == preset[one.printed["metric"]]


def test_the_claims_are_those_of_their_papers():
    for one in EXPERIMENTS:
        assert one.name.partition("_")[0] == one.paper
        assert {claim["claim"] for claim in one.claims} <= set(read_papers()[one.paper]["claims"])
    tested = {(one.paper, claim["claim"]) for one in EXPERIMENTS for claim in one.claims}
    tested |= {(one.paper, "orders") for one in EXPERIMENTS if one.orders}
    assert tested == {(paper, claim) for paper, its in read_papers().items() for claim in its["claims"]}


def test_the_list_has_a_line_for_every_table_and_figure():
    _, _, *lines = listing(["all"], RESULTS, None).splitlines()
    assert [line.split()[0] for line in lines[2:]] == names(EXPERIMENTS)
    on_gpu = {one.name for one, scale in MADE if "GPU: " in paths(RESULTS, one, scale)[1].read_text(encoding="utf-8")}
    for line in (line for line in lines[2:] if line.split()[0] in names(RUN)):
        is_gpu, is_estimate = "runs at once" in line, re.search(r"  about [\d.,]+ (s|min|h) ", line) is not None
        assert (is_gpu, is_estimate) == (line.split()[0] in on_gpu, line.split()[0] not in on_gpu), line
    assert "zo_figure4" in on_gpu
    measured = [re.findall(r"  ([\d.]+) (s|min|h)", line)[:2] for line in lines if "runs at once" in line]
    seconds = [[float(number) * {"s": 1, "min": 60, "h": 3600}[unit] for number, unit in pair] for pair in measured]
    assert len(seconds) == 5 and 0.99 * CPU_TIMES < min(cpu / gpu for cpu, gpu in seconds) < 1.1 * CPU_TIMES
    (one,) = (line for line in lines if line.startswith("zo_figure8 "))
    assert "54.0 min" in one and one.endswith("non-iid, M of 50 devices in a round, E = 1 (FAFedZO, FedZO)")
    for paper, places in {
        "fafed": ["Table 1", "Table 2 (a)", "Table 2 (b)", "Table 2 (c)", "Tables 3 to 5", "Figure 1", "Theorem 1"],
        "lamb": ["Figure 2", "Figure 3", "Figure 4", "Figure 5", "Table 1"],
        "mom": ["Figure 1", "Figures 2 and 3 (a)", "Figure 3 (b)", "Figure 4", "Figures 5", "Figures 7", "Tables 1"],
        "zo": [f"Figure {number}" for number in range(2, 10)],
        "auc": ["Table 1", "Table 2", "Figure 1", "Figure 2"],
    }.items():
        text = "\n".join(line for line in lines if line.startswith(paper))
        assert all(place in text for place in places), paper


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    """(the experiment's file, what the program printed, folder of runs, folder of results)."""
    folder = tmp_path_factory.mktemp("reproduce")
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY), encoding="utf-8")
    ended = reproduce(file, "--seeds", "0,1", "--out", folder / "runs", "--results", folder / "results")
    assert ended.returncode == 0, ended.stderr
    return file, ended.stdout, folder / "runs", folder / "results"


def test_the_page_shows_what_the_csv_file_contains(reproduced):
    _, output, _, results = reproduced
    assert "6 runs in " in output and "6 of them still to do" in output
    text = (results / "small" / "tiny.md").read_text(encoding="utf-8")
    last = [row for row in rows(results / "small" / "tiny.csv") if row["round"] == "4"]
    for method, printed in (("FedAvg", 0.5), ("FAFED", 0.25)):
        values = [float(row["distance"]) for row in last if row["method"] == method]
        mean, deviation = statistics.fmean(values), statistics.stdev(values)
        further = format_metric(mean, 12.7062047 * math.sqrt(1.5) * deviation).split(" ± ")[1]  # Student's t, 2 seeds
        row = (
            f"| {method} | 2 | {format_metric(mean, deviation)} | ± {further} | {printed:.2f} | {mean - printed:+.4f} |"
        )
        assert row in text
    assert "| too fast | 2 of 2 diverged | diverged | – | – | – |" in text and "; diverged: too fast.  \n" in text
    assert text.startswith("# A quadratic (small scale)\n\nScale **small**: small as it is. Seeds 0, 1;")
    assert text.count("bands go from the lowest seed to the highest") == 1
    assert "in the column `command` of [tiny-runs.csv](tiny-runs.csv)" in text
    assert "| FAFED | step_size 0.01, fresh_weight " in text and "- It is so." in text and "- Not here." not in text
    assert "Order in the paper: FAFED &gt; FedAvg." in text and "Before the last round, values" not in text
    assert "| indicative: holds |" in text and "ahead of too fast (diverged)" in text
    assert (results / "small" / "tiny-quadratic-distance.svg").is_file()


def test_runs_are_written_down_with_what_made_them(reproduced):
    _, _, _, results = reproduced
    runs = rows(results / "small" / "tiny-runs.csv")
    assert [row["state"] for row in runs] == ["complete", "complete", "diverged"] * 2
    for row in runs:
        assert float(row["cpu_seconds"]) > 0 and row["commit"] and row["processor"] and row["date"]
        assert f"--seed={row['seed']}" in row["command"] and str(results.parent) not in str(row)


def test_the_page_says_what_the_run_before_the_others_gave(tmp_path):
    content = {
        **TINY,
        "methods": {"FedAvg": {"algorithm": "fedavg", "algorithm.step_size": 0.1, "init": "{first}"}},
        "first": {"task": "quadratic", "clients": 2, "rounds": 2, "local_steps": 1, "eval_every": 2},
        "printed": {},
        "claims": [],
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    words = ("--seeds", "0", "--out", tmp_path / "runs", "--results", tmp_path)
    ended = reproduce(tmp_path / "tiny.yaml", *words)
    assert ended.returncode == 0, ended.stderr
    (row,) = rows(tmp_path / "small" / "tiny-first.csv")
    last = read_run(tmp_path / "runs" / "tiny" / "small" / "first").records[-1]
    assert row["rounds"] == "2" and f"distance to the solution {last['distance']:.4f}" in row["values"]
    (line,) = [
        line
        for line in (tmp_path / "small" / "tiny.md").read_text().splitlines()
        if "run whose model the others use" in line
    ]
    assert row["values"] in line and "after 2 rounds" in line and "`python -m fedmpi.train --" in line
    page_of_one_seed = (tmp_path / "small" / "tiny.md").read_text()
    assert "![" in page_of_one_seed and "bands" not in page_of_one_seed


def test_the_command_of_a_page_has_the_data_the_ranks_and_the_threads_of_its_runs(reproduced):
    file, _, _, results = reproduced
    one, found = read_experiment(file), read_results(results, read_experiment(file), "small")
    command = "python -m reproduction tiny.yaml --scale small --seeds 0,1"

    def page_with(data=(), **columns):
        found.runs[:] = [row | columns for row in found.runs]
        return page(RESULTS, dataclasses.replace(one, data=list(data)), "small", found, {})

    assert f"`{command}`" in page_with(commit="c0ffee", threads="1") and "had been changed" not in page_with()
    assert f"`{command} --data-dir data`" in page_with(["mnist"])
    assert f"`{command} --ranks 2 --threads 4`" in page_with(ranks="2", threads="4")
    found.runs[0]["threads"] = "1"
    assert (
        f"`{command} --ranks 2`" in page_with() and "| threads | 1, 4: the file of the runs says which |" in page_with()
    )
    assert page_with(commit="c0ffee+").count("files of fedmpi had been changed since that commit") == 1


def test_an_order_names_the_methods_that_diverged(reproduced):
    file, _, _, results = reproduced
    one, found = read_experiment(file), read_results(results, read_experiment(file), "small")
    (methods,) = found.panels.values()
    fafed = next(its for its in methods if its.label == "FAFED")
    fafed.runs[0] = dataclasses.replace(fafed.runs[0], is_complete=False)
    text = page(RESULTS, one, "small", found, {})
    assert "; diverged: FAFED with 1 of 2 seeds; too fast.  \n" in text
    assert re.search(r"\| FAFED \| 1 of 2 diverged \| [\d.]+ \| – \|", text), "the mean of the other seed"


def test_the_pages_of_attacks_say_what_the_spread_and_the_training_loss_are():
    one = next(one for one in EXPERIMENTS if one.name == "zo_figure2a")
    text = page(RESULTS, one, "small", read_results(RESULTS, one, "small"), {})
    assert "All seeds attack the same network" in text and "*training loss* is the objective of the attack" in text
    other = next(one for one in EXPERIMENTS if one.name == "fafed_table2_low")
    text = page(RESULTS, other, "small", read_results(RESULTS, other, "small"), {})
    assert "All seeds attack" not in text and "objective of the attack" not in text


def test_code_in_a_sentence_stays_code_and_the_rest_is_shown_as_it_is():
    assert prose("a < b: `--x 1 < [2]` is *one* of") == "a &lt; b: `--x 1 < [2]` is \\*one\\* of"


def test_the_cost_of_a_run_that_had_been_interrupted_is_not_known(reproduced):
    """Its rounds took longer than its last start, which alone is timed."""
    file, _, runs, results = reproduced
    folder = next(path for path in (runs / "tiny" / "small").iterdir() if is_run(path) and read_run(path).records)
    took = read_run(folder).records[-1]["seconds"]
    assert not was_continued(folder, took + 1) and was_continued(folder, took / 2)
    found = read_results(results, read_experiment(file), "small")
    found.runs[0]["cpu_seconds"] = ""
    assert "; the cost of 1 run is not known |" in page(RESULTS, read_experiment(file), "small", found, {})
    found.runs[1]["cpu_seconds"] = ""
    assert "; the cost of 2 runs is not known |" in page(RESULTS, read_experiment(file), "small", found, {})


def test_the_same_command_keeps_what_has_ended_and_repeats_what_has_changed(reproduced):
    file, _, runs, results = reproduced
    words = ("--seeds", "0,1", "--out", runs, "--results", results)
    assert "0 of them still to do" in reproduce(file, *words).stdout
    stopped = next(path for path in (runs / "tiny" / "small").glob("*/model.safetensors") if "seed=1" in str(path))
    stopped.unlink()
    assert "1 of them still to do" in reproduce(file, *words).stdout
    stopped.unlink()  # after round 4; now the file asks for 3
    changed = {**TINY, "panels": {"quadratic": {**TINY["panels"]["quadratic"], "rounds": 3}}}
    file.write_text(yaml.safe_dump(changed), encoding="utf-8")
    ended = reproduce(file, *words)
    assert ended.returncode == 0 and "6 of them still to do" in ended.stdout, ended.stderr
    made = rows(results / "small" / "tiny-runs.csv")
    assert {row["rounds"] for row in made if row["state"] == "complete"} == {"3"}


def test_a_seed_can_be_added_to_results_whose_runs_are_gone(tmp_path):
    file, results = tmp_path / "tiny.yaml", tmp_path / "results"
    file.write_text(yaml.safe_dump(TINY), encoding="utf-8")

    def with_seeds(seeds, out, *words):
        return reproduce(file, "--seeds", seeds, "--out", tmp_path / out, "--results", results, *words)

    def files():
        return {path.name: path.read_text(encoding="utf-8") for path in (results / "small").glob("*.csv")}

    assert with_seeds("0,2", "first runs").returncode == 0
    before = files()
    ended = with_seeds("1", "other runs", "--add")
    assert ended.returncode == 0 and "3 of them still to do" in ended.stdout, ended.stderr
    made = rows(results / "small" / "tiny-runs.csv")
    assert [(row["seed"], row["method"]) for row in made] == list(itertools.product("012", sorted(TINY["methods"])))
    assert all(set(before[name].splitlines()) < set(text.splitlines()) for name, text in files().items())
    assert "| FedAvg | 3 |" in (results / "small" / "tiny.md").read_text(encoding="utf-8")
    before = files()
    assert with_seeds("1", "other runs", "--add").returncode == 0 and files() == before  # not twice
    for method, changed in (
        ("FAFED", {"panels": {"quadratic": TINY["panels"]["quadratic"] | {"rounds": 3}}}),
        ("FedAvg", {"methods": TINY["methods"] | {"FedAvg": {"algorithm": "fedavg", "algorithm.step_size": 0.2}}}),
        (None, {"methods": {"FAFED": TINY["methods"]["FAFED"]}, "claims": [], "printed": {}}),
    ):
        file.write_text(yaml.safe_dump(TINY | changed), encoding="utf-8")
        ended = with_seeds("3", "other runs", "--add")
        message = f"seed 0 of {method} was made with other settings" if method else "has FedAvg on quadratic, which"
        assert ended.returncode == 2 and message in ended.stderr, ended.stderr
        assert len(ended.stderr.splitlines()) == 1 and "still to do" not in ended.stdout and files() == before


def test_only_what_the_results_lack_is_made(tmp_path):
    file, results = tmp_path / "tiny.yaml", tmp_path / "results"
    words = (file, "--seeds", "0,1", "--results", results, "--out")

    def lines(name):
        return (results / "small" / name).read_text(encoding="utf-8").splitlines()

    file.write_text(yaml.safe_dump(TINY), encoding="utf-8")
    assert reproduce(*words, tmp_path / "first runs").returncode == 0
    before = {name: lines(name) for name in ("tiny.csv", "tiny-runs.csv")}
    for name, its in before.items():  # FAFED has lost seed 1
        kept = [line for line in its if not line.startswith("quadratic,FAFED,1,")]
        (results / "small" / name).write_text("\n".join([*kept, ""]), encoding="utf-8")
    other = {"FedAvg": {"algorithm": "fedavg", "algorithm.step_size": 0.2}}
    file.write_text(yaml.safe_dump(TINY | {"methods": TINY["methods"] | other}), encoding="utf-8")
    ended = reproduce(*words, tmp_path / "other runs", "--add")
    assert ended.returncode == 0 and ended.stdout.startswith("3 of 6 runs are kept"), ended.stderr
    assert len(list((tmp_path / "other runs").rglob("metrics.jsonl"))) == 3
    for name, its in before.items():
        pairs = zip(lines(name), its, strict=True)
        changed = {",".join(line.split(",")[:3]) for line, old in pairs if line != old}
        assert changed == {"quadratic,FedAvg,0", "quadratic,FedAvg,1", "quadratic,FAFED,1"}
    after = lines("tiny.csv")
    ended = reproduce(*words, tmp_path / "third runs", "--add")
    assert ended.returncode == 0 and ended.stdout.startswith("6 of 6 runs are kept"), ended.stderr
    assert lines("tiny.csv") == after and not list((tmp_path / "third runs").rglob("metrics.jsonl"))
    ended = reproduce(*words, tmp_path / "third runs", "--add", "--emit-slurm", tmp_path / "job.sh")
    assert ended.returncode == 2 and "has all these runs: nothing is left to be run" in ended.stderr, ended.stderr


def test_a_seed_is_not_added_to_results_of_a_preset_that_has_changed(tmp_path):
    """The command in the file is the same; the values of its settings are not."""
    file, results = tmp_path / "tiny.yaml", tmp_path / "results"
    one = TINY | {"methods": {"FAFED": TINY["methods"]["FAFED"]}, "claims": [], "printed": {}}
    file.write_text(yaml.safe_dump(one), encoding="utf-8")
    words = (file, "--out", tmp_path / "runs", "--results", results)
    assert reproduce(*words, "--seeds", "0").returncode == 0
    path = results / "small" / "tiny-runs.csv"
    changed = re.sub("fresh_weight [^,]*", "fresh_weight 0.123", path.read_text(encoding="utf-8"))
    path.write_text(changed, encoding="utf-8")
    ended = reproduce(*words, "--seeds", "1", "--add")
    assert ended.returncode == 2 and "seed 0 of FAFED was made with other settings" in ended.stderr, ended.stderr


def test_a_job_array_makes_the_same_runs(tmp_path):
    file, script = tmp_path / "tiny.yaml", tmp_path / "job.sh"
    file.write_text(yaml.safe_dump(TINY), encoding="utf-8")
    ended = reproduce(file, "--seeds", "0,1", "--out", tmp_path / "runs", "--emit-slurm", script)
    assert ended.returncode == 0, ended.stderr
    assert "#SBATCH --array=0-5" in script.read_text(encoding="utf-8")
    plan = make_plan(tmp_path / "runs", tmp_path / "runs" / "tiny" / "small" / "plan.yaml", [], [])
    assert len({run.name for run in plan.runs}) == 6
    assert {run.varied["algorithm"] for run in plan.runs} == {"fedavg", "fafed"}
    folder = tmp_path / "runs" / "tiny" / "small"
    words = [sys.executable, "-m", "fedmpi", "sweep", "--out", folder, "--plan", folder / "plan.yaml"]
    execute([*words, "--metric", "train_loss"], cwd=ROOT)  # as the array's tasks
    words = ("--seeds", "0,1", "--out", tmp_path / "runs", "--results", tmp_path / "results")
    ended = reproduce(file, *words)
    assert ended.returncode == 0 and "0 of them still to do" in ended.stdout, ended.stderr
    for row in rows(tmp_path / "results" / "small" / "tiny-runs.csv"):
        assert row["commit"] and row["date"] and "--task=quadratic" in row["command"]
        assert "--emit-slurm" in row["made_by"] and not row["cpu_seconds"]


def test_runs_that_were_evaluated_at_other_rounds_are_made_again(tmp_path):
    file = tmp_path / "tiny.yaml"
    words = (file, "--seeds", "0", "--out", tmp_path / "runs", "--results", tmp_path / "results")
    for every in (2, 1):
        one = TINY | {"panels": {"quadratic": TINY["panels"]["quadratic"] | {"eval_every": every}}}
        file.write_text(yaml.safe_dump(one), encoding="utf-8")
        ended = reproduce(*words)
        assert ended.returncode == 0 and "3 of them still to do" in ended.stdout, ended.stderr
    curves = rows(tmp_path / "results" / "small" / "tiny.csv")
    assert [row["round"] for row in curves if row["method"] == "FedAvg"] == ["1", "2", "3", "4"]


def test_a_scale_can_reduce_one_panel_more_than_another(tmp_path):
    file = tmp_path / "tiny.yaml"
    panels = {"quadratic": {"rounds": 3}, "other": {}}
    both = {name: dict(TINY["panels"]["quadratic"]) for name in panels}
    scales = {"small": {"panels": panels, "settings": {"rounds": 2}}, "full": {"panels": ["other"]}}
    file.write_text(yaml.safe_dump(TINY | {"panels": both, "scales": scales}), encoding="utf-8")
    one = read_experiment(file)
    assert {(point.panel, point.settings["rounds"]) for point in one.points("small")} == {
        ("quadratic", "3"),
        ("other", "2"),
    }
    assert {(point.panel, point.settings["rounds"]) for point in one.points("full")} == {("other", "4")}


def test_a_run_that_breaks_is_named_and_the_page_has_the_others(tmp_path):
    (tmp_path / "breaking.py").write_text(
        "import os, torch\n\nclass Net(torch.nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(64, 10)\n\n    def forward(self, x):\n        os._exit(7)\n"
    )
    digits = {"task": "classification", "clients": 2, "rounds": 1, "local_steps": 2, "algorithm": "fedavg"}
    broken = {"FedAvg": {}, "broken": {"model": "breaking.Net"}}
    one = TINY | {"panels": {"digits": digits}, "methods": broken, "metric": "accuracy", "printed": {}, "claims": []}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(one), encoding="utf-8")
    words = [sys.executable, "-m", "reproduction", "tiny.yaml", "--seeds", "0", "--results", "results"]
    ended = execute(words, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1, ended.stderr
    assert "model=breaking.Net,seed=0 did not end (1 of 2 runs): the page has the others" in ended.stderr
    page_of_one = (tmp_path / "results" / "small" / "tiny.md").read_text(encoding="utf-8")
    assert "| FedAvg | 1 |" in page_of_one and "| broken |" not in page_of_one


def test_the_summary_counts_claims_and_puts_the_scales_of_a_claim_next_to_each_other(tmp_path):
    one = next(one for one in EXPERIMENTS if one.name == "fafed_table2_medium")
    for scale, best in (("small", 0.9), ("full", 0.1)):
        curves, runs = [], []
        for (method, value), seed in itertools.product(
            (("FAFED", best), *((name, 0.5) for name in one.claims[0]["of"])), range(2)
        ):
            key = {"panel": "medium", "method": method, "seed": seed}
            curves.append(key | {"round": 1, "accuracy": value + 0.01 * seed})
            runs.append(key | {"state": "complete", "rounds": 1, "cpu_seconds": 1})
        columns = ([*KEYS, *CURVE_AMOUNTS, "accuracy"], RUN_COLUMNS)
        for path, names_of_columns, lines in zip(paths(tmp_path, one, scale), columns, (curves, runs)):
            write_tables((path, names_of_columns, lines))
    _, text = texts(tmp_path)
    sentence = read_papers()["fafed"]["claims"]["best"]
    untested = sum(len(its.panels) for its in RUN if its.paper == "fafed" and its.claims[0]["claim"] == "best")
    counts = f"0 of 1, 1 behind | 0 of 1, 1 indicative | – | 0 of 1, 1 behind | {untested - 1}"
    assert f"| fafed | {sentence} | behind | {counts} |" in text
    lines = [
        line
        for line in text.splitlines()
        if "/fafed_table2_medium.md), medium, on the paper's grid |" in line and "not tested" not in line
    ]
    assert ["small, 2 seeds" in lines[0], "full, 2 seeds" in lines[1], len(lines)] == [True, True, 2]
    assert "| indicative: holds |" in lines[0] and "| behind |" in lines[1]
    assert "The small scale says the same as a larger one in 0 of 1 comparisons." in text


@pytest.mark.parametrize("one", RUN, ids=names(RUN))
def test_every_experiment_has_a_grid_or_says_where_its_step_sizes_come_from(one):
    assert bool(one.tune) != bool(one.untuned)


def test_chosen_values_at_the_end_of_their_grid_are_marked():
    def point(settings):
        return {"method": "FAFED", "settings": settings}

    grid = [point(f"step_size {size}, matrix {name}") for size in (0.1, 0.02, 1e-05) for name in ("diagonal", "norm")]
    assert _with_ends(grid[0], grid) == "step_size 0.1 (largest), matrix diagonal"
    assert _with_ends(grid[2], grid) == "step_size 0.02, matrix diagonal"
    assert _with_ends(grid[5], grid) == "step_size 1e-05 (smallest), matrix norm"
    assert _with_ends(grid[0], grid[:2]) == "step_size 0.1, matrix diagonal"  # a single size has no ends


def row(state, seeds=3, decides=True, scale="full"):
    return Row("best", "low", scale, seeds, state, "", decides and seeds > 1)


@pytest.mark.parametrize(
    ("rows", "verdict", "count"),
    [
        ([row("confirmed"), row("confirmed", 2)], "confirmed", "2 of 2"),
        ([row("confirmed"), row("one seed: not ahead", 1)], "confirmed", "1 of 1; one seed: ahead in 0 of 1"),
        ([row("confirmed"), row("contradicted", decides=False)], "confirmed", "1 of 2, 1 contradicted"),
        ([row("confirmed"), row("contradicted", 2)], "in part", "1 of 2, 1 contradicted"),
        ([row("confirmed"), row("undecided")], "in part", "1 of 2, 1 undecided"),
        ([row("contradicted"), row("undecided")], "against in part", "0 of 2, 1 undecided, 1 contradicted"),
        ([row("contradicted"), row("behind")], "behind", "0 of 2, 1 behind, 1 contradicted"),
        ([row("undecided")], "undecided", "0 of 1, 1 undecided"),
        ([row("contradicted"), row("not tested", 0)], "contradicted", "0 of 1, 1 contradicted"),
        ([row("confirmed"), row("ahead", 2)], "ahead", "1 of 2, 1 ahead"),
        ([row("confirmed"), row("indicative: does not hold", scale="small")], "confirmed", "1 of 2"),
        ([row("indicative: holds", scale="small")] * 2, "not tested", "0 of 2, 2 indicative"),
        ([row("indicative: holds", scale="small"), row("ahead")], "ahead", "0 of 2, 1 ahead, 1 indicative"),
        (
            [row("indicative: holds", scale="small"), row("indicative: does not hold", scale="small")],
            "not tested",
            "0 of 2, 1 indicative",
        ),
        ([row("indicative: does not hold", scale="small")], "not tested", "0 of 1"),
        ([row("one seed: ahead", 1), row("one seed: reached", 1)], "not tested", "one seed: ahead in 2 of 2"),
        ([], "not tested", "–"),
    ],
)
def test_the_verdict_on_a_claim_takes_the_outcomes_that_decide(rows, verdict, count):
    assert (verdict_of(rows), _count([one for one in rows if one.seeds])) == (verdict, count)


def test_the_front_page_says_how_many_comparisons_are_contradicted():
    long = [row("confirmed"), row("ahead"), row("contradicted"), row("contradicted"), row("undecided")]
    short = [row("indicative: holds", scale="small"), row("indicative: does not hold", scale="small")]
    assert _compared(long + short) == "1 of 5, 1 more ahead, 2 contradicted; indicative: 1 of 2"
    assert _compared(short) == "indicative: 1 of 2" and _compared([row("confirmed")]) == "1 of 1"


def test_a_comparison_counts_at_the_largest_scale_with_several_seeds(tmp_path):
    of_attacks = _outcomes(RESULTS, next(one for one in EXPERIMENTS if one.name == "zo_figure2a"))
    local_steps = [(one.scale, one.decides) for one in of_attacks if one.key == "steps"]
    assert local_steps == [("small", False), ("mlp", True)] * 2 + [("small", True)] * 2  # E = 60 was run at small only

    name = "fafed_figures2_4_mnist_wider"  # with only the first seed at full length, the small scale counts
    for scale, seeds in (("small", "012"), ("full", "0")):
        for file in (f"{scale}/{name}.csv", f"{scale}/{name}-runs.csv"):
            of_seeds = [row for row in rows(RESULTS / file) if row["seed"] in seeds]
            write_tables((tmp_path / file, of_seeds[0].keys(), of_seeds))
    losses = _outcomes(tmp_path, next(one for one in EXPERIMENTS if one.name == name))
    found = [(one.scale, one.seeds, one.decides) for one in losses]
    assert found == [("small", 3, True), ("full", 1, False)] * 2


def test_a_finding_that_holds_at_two_scales_is_in_the_summary_once():
    _, text = texts(RESULTS)
    found = next(one for one in EXPERIMENTS if one.name == "fafed_theorem1").findings
    assert found["small"] == found["full"] and text.count(found["full"][0]) == 1
    links = "[small](small/fafed_theorem1.md), [full](full/fafed_theorem1.md)"
    assert f"- fafed_theorem1, {links}: {found['full'][0]}" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fafed_table9"], "unknown table or figure 'fafed_table9'; did you mean"),
        (["fafed_tables3_5"], "fafed_tables3_5: tests compare the numbers of parameters"),
        ([], "expected the name of a table or figure"),
        (["--list", "fafed_table9"], "unknown table or figure 'fafed_table9'"),
        (["nosuch.yml"], "nosuch.yml: cannot be read: No such file or directory"),
        (["fafed_table2_low", "--data-dir", str(ROOT)], f"data not here: no fashion_mnist.h5 in folder {ROOT}"),
        (["zo", "--data-dir", str(ROOT)], "nothing can be run: zo_figure2a: data not here: no mnist.h5 in folder"),
        (["fafed_table2_low", "--data-dir", "/nowhere"], "--data-dir /nowhere: no such folder"),
        (["fafed_theorem1", "--results", "/proc/results"], "--results /proc/results: cannot be written"),
        (["fafed_theorem1", "--scale", "mlp"], "not run at scale mlp: its scales are small, full"),
        (["--pages", "--results", "/nowhere"], "--results /nowhere: no results of any experiment there"),
        (["fafed", "--emit-slurm", "x"], "expected one table or figure"),
        (["fafed_table2_low", "--pages", "--add"], "--add: has no meaning together with --pages"),
        (["fafed_table2_low", "--tune", "--emit-slurm", "x"], "--emit-slurm: has no meaning together with --tune"),
        (["--pages", "--tune"], "--tune: has no meaning together with --pages"),
        (["--list", "--pages"], "--pages: has no meaning together with --list"),
    ],
)
def test_wrong_words_get_one_line(tmp_path, words, message):
    places = [] if "--results" in words else ["--results", tmp_path / "results"]
    ended = reproduce(*words, *places)
    assert not (tmp_path / "results").exists()
    assert ended.returncode == 2 and message in ended.stderr and len(ended.stderr.splitlines()) == 1


MADE = [(one, scale) for one in RUN for scale in SCALES if read_results(RESULTS, one, scale)]


@pytest.mark.parametrize(("one", "scale"), MADE, ids=[f"{one.name}-{scale}" for one, scale in MADE])
def test_committed_pages_are_made_from_the_committed_numbers(one, scale):
    path = paths(RESULTS, one, scale)[0].with_suffix(".md")
    text = path.read_text(encoding="utf-8")
    shown = re.findall(r"!\[.*\]\((.*)\)", text)
    assert all((path.parent / name).is_file() for name in shown)
    figures = {}
    for name in shown:
        pairs = itertools.product(one.panels, one.figure["metrics"])
        (found,) = [pair for pair in pairs if figure_file(one, *pair) == name]
        figures[found] = name
    assert page(RESULTS, one, scale, read_results(RESULTS, one, scale), figures) == text


GRIDS = [(one, scale) for one in RUN for scale in ("small", "full") if grid_path(RESULTS, one.name, scale).is_file()]


@pytest.mark.parametrize("one, length", GRIDS, ids=lambda value: getattr(value, "name", value))
def test_presets_or_the_small_scale_contain_what_tuning_chose(one, length):
    scale = length if "tuned" in one.scales.get("small", {}) else "full"
    chosen = [row for row in rows(grid_path(RESULTS, one.name, length)) if row["chosen"]]
    assert {row["method"] for row in chosen} == set(one.tuning(length)["grids"])
    for row in chosen:
        (point,) = [p for p in one.points(scale) if (p.panel, p.method) == (row["panel"], row["method"])]
        used = read_command_line([f"--{key}={text}" for key, text in point.settings.items()]).resolved["algorithm"]
        for setting in row["settings"].split(", "):
            name, value = setting.split()
            assert float(value) == pytest.approx(used[name], rel=1e-3), (row["method"], name)


@pytest.mark.skipif(not MADE, reason="nothing was run yet")
def test_the_summary_is_made_from_the_committed_numbers():
    front, comparisons = texts(RESULTS)
    assert (RESULTS / "README.md").read_text(encoding="utf-8") == front
    assert (RESULTS / "claims.md").read_text(encoding="utf-8") == comparisons
    assert front.count("\n") <= 60 and "| printed | 0.8451 |" in front
    anchors = {_anchor(line.removeprefix("### ")) for line in comparisons.splitlines() if line.startswith("### ")}
    assert {*re.findall(r"\(#([^)]*)[)]", comparisons)} == anchors >= {*re.findall(r"claims\.md#([^)]*)[)]", front)}


@pytest.mark.skipif(not MADE, reason="nothing was run yet")
def test_the_table_of_the_papers_has_each_claim_where_its_outcome_puts_it():
    front, comparisons = texts(RESULTS)
    rows_of_papers = [line for line in front.split("## FAFED's Table 2")[0].splitlines() if "(`" in line]
    found = []
    for line in rows_of_papers:
        name, *columns = (cell.strip() for cell in line.split("|")[1:-1])
        for column, cell in zip(("holds", "in part", "against", "not tested"), columns, strict=True):
            found += [
                (name.split("`")[1], column, *one) for one in re.findall(r"\(claims\.md#([^)]*)\)( \(.*?\))?", cell)
            ]
    expected = []
    for row in re.findall(
        r"^\| (\w+) \| \[.*?\]\(#([^)]*)\) \| ([^|]*) \| ([^|]*) \|", comparisons.split("## Printed")[0], re.MULTILINE
    ):
        paper, anchor, verdict, counts = row
        verdict = verdict.strip("*")
        parts = {"confirmed": "holds", "ahead": "holds", "in part": "in part", "not tested": "not tested"}
        words = {"confirmed": "", "not tested": "", "ahead": "ahead", "undecided": "undecided"}.get(verdict)
        words = re.split("; (?:indicative|wider)", counts)[0] if words is None else words
        expected.append((paper, parts.get(verdict, "against"), anchor, words and f" ({words})"))
    assert sorted(found) == sorted(expected) and len(found) > 25
    assert [line.split("(`")[0] for line in rows_of_papers] == [
        "| FAFED ",
        "| Fed-LAMB ",
        "| Momentum ",
        "| FAFedZO ",
        "| FMGDA ",
    ]


@pytest.mark.skipif(not MADE, reason="nothing was run yet")
def test_the_front_page_is_short():
    front, comparisons = texts(RESULTS)
    seen = re.sub(r"\]\([^)]*\)", "]", front)
    assert len(re.findall(r"[^\s|•]+", seen)) <= 900 and front.count("\n") <= 60
    for paper in read_papers().values():
        assert f"* **{paper['name']}.**" in "\n".join(front.splitlines()[1:6]) and "{" not in front
        assert len(paper["beside"].split()) <= 45
        for key, sentence in paper["said"].items():
            assert len(sentence.split()) <= 26 and f"| {as_markdown(sentence)} |" in comparisons, key
        assert {*paper["said"]} == {*paper["claims"]} - {*paper.get("ours", ())}


@pytest.mark.skipif(not MADE, reason="nothing was run yet")
def test_the_front_page_says_how_many_panels_of_the_papers_were_run():
    front, _ = texts(RESULTS)
    line = next(line for line in front.splitlines() if "panels" in line)
    total, *parts = map(int, re.findall(r"\d+", line))
    assert total == sum(paper["panels"] for paper in read_papers().values()) == sum(parts)
    for key, paper in read_papers().items():
        assert sum(one.shows for one in EXPERIMENTS if one.paper == key) <= paper["panels"]
    assert f"{parts[0]} of {total} panels" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.skipif(not MADE, reason="nothing was run yet")
def test_a_command_of_the_claims_names_experiments_that_have_a_small_scale():
    """Of the six experiments on *half of the rounds saved* two have one, and of the three on *variance reduction*."""
    _, comparisons = texts(RESULTS)
    rows = [line for line in comparisons.splitlines() if line.startswith("| ") and "| `" in line]
    named = {row.split("[")[1].split("]")[0]: row.split(" | ")[-2] for row in rows if "](#" in row}
    assert named["half of the rounds saved"] == "`lamb_figure3_mlp lamb_figure5`"
    assert named["variance reduction is ahead of MB-STORM and CE-LSGD"] == "`mom_figure1_full mom_figure4`"
    names = {name for words in named.values() for name in words.strip("`").split()} - {*read_papers()}
    assert all("small" in one.scales or one.orders for one in find_experiments(sorted(names)))


def test_comparisons_on_a_wider_grid_are_counted_apart_and_do_not_decide():
    states = [(CONFIRMED, False), (AHEAD, False), (CONTRADICTED, True), (UNDECIDED, True)]
    rows = [Row("a", "p", "full", 3, state, "", True, is_wider=wider) for state, wider in states]
    assert verdict_of(rows) == AHEAD and verdict_of(rows[2:]) == AGAINST
    assert _compared(rows) == "1 of 2, 1 more ahead; wider grid: 0 of 2, 1 contradicted"
    wider = {one.name for one in EXPERIMENTS for row in _outcomes(RESULTS, one) if row.is_wider}
    assert wider == {one.name for one in EXPERIMENTS if one.widens} and len(wider) >= 4


@pytest.mark.skipif(not MADE, reason="nothing was run yet")
def test_the_pages_of_all_results_may_be_written_again_and_those_of_others_not(tmp_path):
    for name, signature in PAGES.items():
        check_replaceable(RESULTS / name, signature)
        path = tmp_path / name
        path.write_text("# What the papers' experiments gave\n\nNotes of ours.\n", encoding="utf-8")
        with pytest.raises(UserError, match="fedmpi did not write it"):
            check_replaceable(path, signature)


@pytest.mark.skipif(not MADE, reason="nothing was run yet")
def test_what_stands_beside_the_outcomes_has_the_verdicts_on_our_questions():
    _, comparisons = texts(RESULTS)
    questions = next(line for line in comparisons.splitlines() if "Questions of ours" in line)
    said = re.findall(r"(?:: |; )\[(\w[\w ]*)\]\(#([^)]*)\) \(([^)]*)\)", comparisons.replace(questions, ""))
    assert len(said) == 2
    for verdict, anchor, counts in said:
        assert f"(#{anchor}) ({verdict}: {counts})" in questions
