"""The report: means and bands over seeds, tables, one page that needs nothing else, the live view."""

import base64
import contextlib
import csv
import html.parser
import json
import math
import os
import pty
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree

import pytest
import yaml
from helpers import LIMIT, ROOT, execute, hear_ctrl_c, train, wait_for

from fedmpi.cli.comparison import Spread, problems
from fedmpi.cli.report.__main__ import _folder as files_folder
from fedmpi.cli.report.curves import Target, curve, final
from fedmpi.cli.report.live import RESTART, is_running, may_go_on, watch
from fedmpi.cli.report.page import page, section
from fedmpi.cli.report.tables import final_table, target_table
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import make_folder
from fedmpi.ground.text import Table
from fedmpi.runs.folder import find_runs, read_run

PNG = b"\x89PNG\r\n\x1a\n"
WIDTHS = (1280, 390)  # a screen, a phone
ROUNDS = 40
FLOOR = {"fafed": 0.2, "fedavg": 0.35, "scaffold": 0.3}  # of the loss
BYTES = {"fafed": 3_000_000, "fedavg": 1_000_000, "scaffold": 2_000_000}  # a round


def loss(name, seed, number):
    return FLOOR[name] + 2 / number + 0.01 * seed


def accuracy(name, seed, number):
    return 1 - FLOOR[name] - 0.5 / number + 0.01 * seed


def make_run(folder, name, seed, rounds=ROUNDS, ended=True, **settings):
    """A run folder as fedmpi.train leaves it, with a course known in advance."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    make_folder(folder, "run")
    written = {
        "rounds": ROUNDS, "seed": seed, "out": str(folder.parent), "name": folder.name, "clients": 4,
        "algorithm": {"name": name, "step_size": 0.1}, "task": {"name": "classification", "data": "digits"},
        "partition": {"name": "even"}, **settings,
    }  # fmt: skip
    (folder / "settings.yaml").write_text(yaml.safe_dump(written))
    with open(folder / "metrics.jsonl", "w") as file:
        for number in range(1, rounds + 1):
            record = {
                "round": number, "iteration": 10 * number, "loss": loss(name, seed, number), "seconds": 0.5 * number,
                "local_seconds": 0.4 * number, "communication_seconds": 0.1 * number, "evaluation_seconds": 0.0,
                "bytes": BYTES[name] * number, "gradients": 40 * number,
            }  # fmt: skip
            if number % 2 == 0:
                record |= {"train_loss": loss(name, seed, number), "accuracy": accuracy(name, seed, number)}
            file.write(json.dumps(record) + "\n")
    if ended:
        (folder / "model.safetensors").touch()
    return folder


def report(*words, **variables):
    return execute([sys.executable, "-m", "fedmpi", "report", *words], env={"PYTHONPATH": str(ROOT), **variables})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three algorithms with three seeds each, reported: (folder with the page, what was printed)."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("report")
    for name in FLOOR:
        for seed in range(3):
            make_run(folder / "runs" / f"{name}-{seed}", name, seed)
    ended = report(
        folder / "runs", "--out", folder / "page.html", "--target", "accuracy=0.6", "--format", "svg", "--format", "png"
    )
    assert ended.returncode == 0, ended.stderr
    return folder, ended.stdout


class Page(html.parser.HTMLParser):
    """The tags of a page, and the rows of its tables."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.rows = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, text):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += text


@pytest.mark.rarely
def test_the_page_holds_everything_and_needs_nothing(made):
    text = (made[0] / "page.html").read_text()
    page = Page(text)
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}
    sources = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert len(sources) == 3 * 4  # training loss, accuracy, loss of the local steps against four things
    for source in sources:
        kind, _, data = source.partition(";base64,")
        assert kind == "data:image/svg+xml"
        svg = base64.b64decode(data).decode()
        root = xml.etree.ElementTree.fromstring(svg)
        words = "".join(root.itertext())
        assert all(name in words for name in FLOOR)
        assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"|<metadata>.*?</metadata>|<!DOCTYPE.*?>', "", svg, flags=re.S)
    assert not re.search(r"url\(|@import|https?:", text)


def test_final_values_are_means_and_deviations(made):
    expected = [accuracy("fafed", seed, ROUNDS) for seed in range(3)]
    words = f"{statistics.fmean(expected):.4f} ± {statistics.stdev(expected):.4f}"
    rows = Page((made[0] / "page.html").read_text()).rows
    header = rows[0]
    (row,) = [row for row in rows[1:4] if row[0] == "fafed"]
    assert row[header.index("test accuracy")] == words
    assert row[header.index("sent per client")] == "114.4 MiB"  # as format_bytes has it
    assert words in made[1]
    assert f"**{words}**" in (made[0] / "page" / "tables.md").read_text()
    with open(made[0] / "page" / "finals.csv") as file:
        (line,) = [line for line in csv.DictReader(file) if (line["method"], line["quantity"]) == ("fafed", "accuracy")]
    assert float(line["mean"]) == pytest.approx(statistics.fmean(expected))
    assert float(line["standard deviation"]) == pytest.approx(statistics.stdev(expected))


def test_rounds_and_bytes_to_a_target(made):
    """FedAvg's accuracy is 0.65 - 0.5 / round + 0.01 seed, evaluated every other round: straight lines between."""
    costs = []
    for seed, before, after in ((0, 8, 10), (1, 8, 10), (2, 6, 8)):
        low, high = (accuracy("fedavg", seed, n) for n in (before, after))
        costs.append(before + 2 * (0.6 - low) / (high - low))
    mean, least, most = statistics.fmean(costs), min(costs), max(costs)
    (row,) = [row for row in Page((made[0] / "page.html").read_text()).rows[4:] if row[0] == "fedavg"][:1]
    assert row[1:4] == ["3 of 3", "2", f"{mean:.0f} ({least:.0f}–{most:.0f})"]
    (exact,) = [m for p in problems(find_runs([made[0] / "runs"])[0]) for m in p.methods if m.label == "fedavg"]
    assert sorted(Target.parse("accuracy=0.6").cost(exact)[1]["round"].values) == pytest.approx(sorted(costs))


def test_a_target_does_not_depend_on_how_often_the_model_is_evaluated(tmp_path):
    """A straight course: evaluated every 2nd or only every 20th round, 30 rounds are needed."""
    found = []
    for every in (2, 20):
        folder = make_run(tmp_path / str(every) / "run", "fafed", 0)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = [{k: v for k, v in line.items() if k != "accuracy"} for line in lines]
        for line in lines:
            line |= {} if line["round"] % every else {"accuracy": line["round"] / 100}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (problem,) = problems([read_run(folder)])
        table = target_table(problem, Target.parse("accuracy=0.3"))
        found.append(table.rows[0][2:5])
    assert [row[1:] for row in found] == [["30", "85.8 MiB"]] * 2
    assert [row[0] for row in found] == ["2", "20"]


def test_the_same_seed_twice_is_one_run(tmp_path):
    for name in "ab":
        make_run(tmp_path / name, "fafed", 0, ended=name == "b")
    (problem,) = problems(find_runs([tmp_path])[0])
    row = dict(zip(final_table(problem).header, final_table(problem).rows[0]))
    assert (row["runs"], row["test accuracy"]) == ("1", f"{accuracy('fafed', 0, ROUNDS):.4f}")
    assert target_table(problem, Target.parse("accuracy=0.6")).rows[0][1] == "1 of 1"


def test_files_of_figures_are_written_only_if_a_format_is_chosen(tmp_path):
    make_run(tmp_path / "run", "fafed", 0)
    ended = report(tmp_path / "run", "--out", tmp_path / "page.html")
    assert ended.returncode == 0, ended.stderr
    assert {path.suffix for path in (tmp_path / "page").iterdir() if path.suffix} == {".csv", ".md"}


def test_figures_lie_beside_the_page(made):
    names = sorted(path.name for path in (made[0] / "page").iterdir())
    for metric in ("accuracy", "train_loss", "loss"):
        for axis in ("round", "bytes", "gradients", "seconds"):
            assert f"{metric}-{axis}.svg" in names
            assert (made[0] / "page" / f"{metric}-{axis}.png").read_bytes()[:8] == PNG
    with open(made[0] / "page" / "curves.csv") as file:
        lines = [line for line in csv.DictReader(file) if line["metric"] == "train_loss" and line["against"] == "bytes"]
    (line,) = [line for line in lines if line["method"] == "scaffold" and float(line["at"]) == 10 * BYTES["scaffold"]]
    values = [loss("scaffold", seed, 10) for seed in range(3)]
    found = [float(line[key]) for key in ("mean", "lowest", "highest")]
    assert found == pytest.approx([statistics.fmean(values), min(values), max(values)])


@pytest.mark.parametrize("num_methods", [1, 3, 12])
def test_no_words_leave_a_figure(tmp_path, num_methods):
    """Many methods with long names have them below the axes; numbers with many digits take their room on the left."""
    figures = pytest.importorskip("fedmpi.cli.report.figures", exc_type=UserError)
    for number in range(num_methods):
        settings = {"name": "local_amsgrad", "momentum": number / 20, "second_moment_decay": 0.9 + number / 200}
        folder = make_run(tmp_path / f"{number}", "fafed", number, algorithm=settings)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = [
            json.dumps({**one, "auc": 0.96125 + 1e-6 * one["round"], "steps": 1e5 * one["round"]}) for one in records
        ]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (problem,) = problems(find_runs([tmp_path])[0])
    for text in ("train_loss=0.25", "auc=0.96126", "steps=3e6"):
        target = Target.parse(text)
        figure = figures.draw(problem.methods, "round", target.metric, target)
        drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert drawn.x0 >= 0 and drawn.y0 >= 0 and drawn.x1 <= width and drawn.y1 <= height


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0.5, 0.7), "0.6000 ± 0.1414"), ((0.0,), "0.0000"), ((1.5e-7,), "1.5e-07"), ((123.44,), "123.4"),
        ((59_030.4, 59_030.4), "59,030 ± 0"), ((-0.25,), "-0.2500"), ((3e12,), "3e+12"), ((math.nan,), "nan"),
        ((math.nan, math.nan), "nan ± nan"),
    ],
)  # fmt: skip
def test_metrics_in_digits(values, words):
    assert str(Spread(values)) == words


def test_a_browser_shows_it_on_a_screen_and_on_a_phone(made, tmp_path):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium here (Debian: apt-get install chromium)")
    text = html.escape((made[0] / "page.html").read_text())
    frames = "".join(
        f'<iframe style="border: 0" width={width} height=900 srcdoc="{text}"></iframe>' for width in WIDTHS
    )
    look = """<script>
        const seen = frame => {
            const page = frame.contentDocument, images = [...page.images]
            return [images.filter(i => i.complete && i.naturalWidth > 0).length, frame.contentWindow.innerWidth,
                    page.documentElement.scrollWidth, Math.max(...images.map(i => i.getBoundingClientRect().right))]
        }
        const frames = [...document.querySelectorAll('iframe')]
        addEventListener('load', () => { document.title = frames.map(frame => seen(frame).join(' ')).join(';') })
    </script>"""
    (tmp_path / "frames.html").write_text(f"<!doctype html><html><body>{frames}{look}</body></html>")
    ended = execute(
        [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--dump-dom",
            f"--user-data-dir={tmp_path / 'chromium'}", "--window-size=1400,900", f"file://{tmp_path / 'frames.html'}",
        ]
    )  # fmt: skip
    seen = re.search(r"<title>([\d. ;]+)</title>", ended.stdout)[1].split(";")
    for width, (shown, inner, scroll, right) in zip(WIDTHS, (map(float, words.split()) for words in seen)):
        assert (shown, inner) == (12, width)
        assert scroll <= width and right <= width  # nothing is cut off, nothing scrolls sideways


def test_a_setting_that_older_runs_do_not_have_splits_no_methods(tmp_path):
    make_run(tmp_path / "old", "fafed", 0)
    make_run(tmp_path / "new", "fafed", 1, tf32=False)
    make_run(tmp_path / "other", "fafed", 1, clients=8)
    (problem,) = problems(find_runs([tmp_path])[0])
    assert {method.label: len(method.runs) for method in problem.methods} == {
        "fafed, clients 4": 2, "fafed, clients 8": 1,
    }  # fmt: skip


def test_settings_of_speed_split_no_methods(tmp_path):
    speeds = [
        {"threads": 1, "eval_every": 5, "device": "cpu", "transport": "shared"},
        {"threads": 4, "eval_every": 2, "device": "cuda", "transport": "allreduce"},
    ]
    for seed, speed in enumerate(speeds):
        make_run(tmp_path / f"{seed}", "fafed", seed, **speed)
    (problem,) = problems(find_runs([tmp_path])[0])
    assert {method.label: len(method.runs) for method in problem.methods} == {"fafed": 2}
    assert ("device", "cpu, cuda") in section(problem, ["red"], Table([], []), [], Table([], []), {})["settings"].rows


def test_methods_of_different_runs_are_named_by_what_differs(tmp_path):
    make_run(tmp_path / "a", "fafed", 0, clients=4, batch_size=50)
    make_run(tmp_path / "b", "fafed", 1, clients=4, batch_size=50)
    make_run(tmp_path / "c", "fedavg", 0, clients=8, batch_size=10)
    (problem,) = problems(find_runs([tmp_path])[0])
    assert {method.label: len(method.runs) for method in problem.methods} == {
        "fafed, batch_size 50, clients 4": 2, "fedavg, batch_size 10, clients 8": 1,
    }  # fmt: skip


@pytest.mark.parametrize(("out", "folder"), [("page.html", "page"), ("runs.html", "runs-files"), ("x", "x-files")])
def test_figures_never_lie_among_runs(tmp_path, out, folder):
    make_run(tmp_path / "runs" / "a", "fafed", 0)
    assert files_folder(tmp_path / out) == tmp_path / folder


def test_a_value_that_is_no_number_is_not_the_best(tmp_path, capsys):
    """It stands in its row; neither the findings nor the marks nor the live view take it for a value to compare."""
    folders = [make_run(tmp_path / name, name, 0, rounds=2) for name in FLOOR]
    record = {"round": 3, "loss": math.nan, "train_loss": math.nan, "accuracy": math.nan}
    for folder in folders[:2]:
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
    (problem,) = problems(find_runs(folders)[0])
    table = final_table(problem)
    assert [row[table.header.index("test accuracy")] for row in table.rows][:2] == ["nan", "nan"] and not table.best
    text = page([("problem", section(problem, ["red"] * 3, table, [], table, {}))], [])
    assert text.count("</b>scaffold</li>") == 2 and "<b>nan" not in text
    watch(folders, 0.1, lambda refresh: None)
    assert "nan" in capsys.readouterr().out


def test_a_run_that_stopped_is_waited_for_if_it_may_go_on(tmp_path):
    manifest = (
        make_run(tmp_path / "job", "fafed", 0, rounds=4, ended=False) / "checkpoints" / "000004" / "manifest.json"
    )
    assert not may_go_on(read_run(tmp_path / "job"))
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    run = read_run(tmp_path / "job")
    assert may_go_on(run) and not may_go_on(run, now=time.time() + RESTART + 1)
    assert not is_running(run, now=time.time() + RESTART - 1) and may_go_on(run, now=time.time() + RESTART - 1)
    (tmp_path / "job" / "model.safetensors").touch()
    assert not may_go_on(read_run(tmp_path / "job"))
    shutil.rmtree(manifest.parents[1])
    manifest.parents[1].touch()  # a folder of checkpoints that cannot be read
    assert not may_go_on(run)
    (tmp_path / "job" / "metrics.jsonl").unlink()
    assert not is_running(run)


@pytest.mark.parametrize(("seconds", "silence"), [([1, 2, 3], 60), ([2, 22, 25], 200)])
def test_a_run_has_stopped_after_a_minute_or_ten_rounds(tmp_path, seconds, silence):
    file = make_run(tmp_path / "job", "fafed", 0, rounds=3, ended=False) / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    times = {round_index: time for round_index, time in enumerate(seconds, 1)}
    file.write_text("".join(json.dumps(line | {"seconds": times[line["round"]]}) + "\n" for line in lines))
    os.utime(file, (1000, 1000))
    run = read_run(tmp_path / "job")
    assert [is_running(run, now=1000 + silence + more) for more in (-0.5, 0.5)] == [True, False]


def test_a_run_without_a_round_yet_is_said_to_be_one(tmp_path):
    make_run(tmp_path / "job", "fafed", 0)
    (tmp_path / "job" / "metrics.jsonl").unlink()
    assert find_runs([tmp_path])[1] == [f"{tmp_path / 'job'}: no round is recorded yet"]


def test_bands_go_over_seeds_only_and_as_far_as_all_runs(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / f"a-{seed}", "fafed", seed, rounds=30 + 4 * seed, ended=False, out=f"elsewhere-{seed}")
    make_run(tmp_path / "b", "fafed", 0, algorithm={"name": "fafed", "step_size": 0.2})
    runs, complaints = find_runs([tmp_path])
    (problem,) = problems(runs)
    assert complaints == []
    assert [method.label for method in problem.methods] == ["fafed, step_size 0.1", "fafed, step_size 0.2"]
    points = curve(problem.methods[0], "round", "train_loss")
    assert points[-1].x == 30
    both = [loss("fafed", seed, 30) for seed in (0, 1)]
    assert (points[-1].low, points[-1].mean, points[-1].high) == pytest.approx(
        (both[0], statistics.fmean(both), both[1])
    )


def test_a_run_that_did_not_end_is_left_out_where_another_did(tmp_path):
    make_run(tmp_path / "a", "fedavg", 0)
    make_run(tmp_path / "b", "fedavg", 1, rounds=3, ended=False)
    (problem,) = problems(find_runs([tmp_path])[0])
    assert final(problem.methods[0], "accuracy").values == (accuracy("fedavg", 0, ROUNDS),)


def test_different_data_are_different_comparisons(tmp_path):
    make_run(tmp_path / "a", "fafed", 0)
    make_run(tmp_path / "b", "fafed", 0, task={"name": "classification", "data": "/data/silos.h5"})
    assert [problem.label for problem in problems(find_runs([tmp_path])[0])] == ["digits, even", "silos, even"]


def test_problems_are_distinguished_by_settings_that_all_runs_have(tmp_path):
    """Another partition's settings stand in no label; equal file names and settings of a new version do no harm."""
    dirichlet = {"name": "dirichlet", "concentration": 0.3, "min_samples": 1}
    make_run(tmp_path / "a", "fafed", 0)
    make_run(tmp_path / "b", "fafed", 0, partition={"name": "even", "new_setting": 1})
    make_run(tmp_path / "c", "fafed", 0, partition=dirichlet)
    make_run(tmp_path / "d", "fafed", 0, partition={**dirichlet, "concentration": 0.5})
    make_run(tmp_path / "e", "fafed", 0, task={"name": "classification", "data": "/one/silos.h5", "flip": False})
    make_run(tmp_path / "f", "fafed", 0, task={"name": "classification", "data": "/two/silos.h5", "flip": False})
    assert [problem.label for problem in problems(find_runs([tmp_path])[0])] == [
        "digits, even", "digits, dirichlet, concentration 0.3", "digits, dirichlet, concentration 0.5",
        "silos, even, data /one/silos.h5", "silos, even, data /two/silos.h5",
    ]  # fmt: skip


def test_names_of_figures_are_short_and_each_its_own(tmp_path):
    pytest.importorskip("matplotlib")
    for number in range(3):
        data = {"name": "classification", "data": f"{'far/' * 50}{number}/{'long' * 20}.h5"}
        make_run(tmp_path / f"runs/{number}", "fafed", 0, rounds=2, task=data)
    ended = report(tmp_path / "runs", "--out", tmp_path / "page.html", "--format", "svg")
    assert ended.returncode == 0, ended.stderr
    names = [path.name for path in (tmp_path / "page").glob("*accuracy-round.svg")]
    assert len(names) == 3 and all(len(name) < 80 for name in names)


@pytest.mark.parametrize(
    ("text", "value", "from_above"),
    [
        ("accuracy=0.85", 0.85, False),
        ("train_loss=0.3", 0.3, True),
        ("accuracy<=.5", 0.5, True),
        ("x >= 1e3", 1e3, False),
    ],
)  # fmt: skip
def test_targets(text, value, from_above):
    target = Target.parse(text)
    assert (target.value, target.from_above) == (value, from_above)


def test_broken_folders_get_a_line_each(tmp_path):
    good = make_run(tmp_path / "good", "fafed", 0)
    empty = make_run(tmp_path / "empty", "fafed", 1, rounds=0, ended=False)
    broken = make_run(tmp_path / "broken", "fafed", 2)
    (broken / "metrics.jsonl").write_text('{"round": 1}\nnonsense\n')
    (tmp_path / "other").mkdir()
    bad = [empty, broken, tmp_path / "other", tmp_path / "missing"]
    ended = report(good, *bad, "--out", tmp_path / "page.html")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stderr.splitlines()
    for folder, words in zip(bad, ("no round is recorded yet", "line 2", "not a run folder", "no such folder")):
        assert any(str(folder) in line and words in line for line in lines), words
    assert len(lines) == 4
    ended = report(*bad[2:], "--out", tmp_path / "none.html")
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1 and not (tmp_path / "none.html").exists()


@pytest.mark.parametrize(
    "line",
    [
        '{"round": "x"}', '{"round": null}', '{"round": true}', '{"round": 0}', "[1, 2]", "3", '{"loss": 1}',
        '{"round": 1, "seconds": NaN}', '{"round": 1, "bytes": "x"}',
    ],
)  # fmt: skip
def test_a_damaged_record_is_a_complaint(tmp_path, line):
    make_run(tmp_path / "good", "fafed", 0)
    broken = make_run(tmp_path / "broken", "fafed", 1)
    (broken / "metrics.jsonl").write_text(f"{line}\n")
    runs, complaints = find_runs([tmp_path])
    assert [run.path.name for run in runs] == ["good"]
    assert complaints == [f"{broken / 'metrics.jsonl'}: line 1 is not the record of a round"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"paper": 3}, "paper: expected"), ({"paper": {"printed": {"accuracy": 3}}}, "paper: expected"),
        ({"algorithm": ["x"]}, "algorithm = ['x']: expected a name"), ({"algorithm": None}, "expected a name"),
        ({"task": 3}, "task = 3: expected a name"), ({"rounds": "many"}, "rounds = 'many': expected a whole number"),
        ({"seed": [1]}, "seed = [1]: expected a whole number"),
    ],
)  # fmt: skip
def test_damaged_settings_are_a_complaint(tmp_path, damage, message):
    make_run(tmp_path / "good", "fafed", 0)
    broken = make_run(tmp_path / "broken", "fafed", 1)
    settings = yaml.safe_load((broken / "settings.yaml").read_text())
    (broken / "settings.yaml").write_text(yaml.safe_dump(settings | damage))
    runs, complaints = find_runs([tmp_path])
    assert [run.path.name for run in runs] == ["good"]
    assert len(complaints) == 1 and str(tmp_path / "broken") in complaints[0] and message in complaints[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "required: RUN"),
        (("{run}", "--target", "accuracy"), "like accuracy=0.85"),
        (("{run}", "--target", "acuracy=0.5"), "no run measured it"),
        (("{run}", "--watch", "never"), "--watch: never: expected seconds from 0.1 to 3600"),
        (("{run}", "--watch", "0"), "--watch: 0: expected seconds from 0.1 to 3600"),
        (("{run}", "--out", "{run}/settings.yaml/page.html"), "cannot be written"),
    ],
)
def test_wrong_words_get_one_line(tmp_path, words, message):
    run = make_run(tmp_path / "run", "fafed", 0)
    ended = report(*(word.format(run=run) for word in words))
    assert ended.returncode == 2
    assert message in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_without_matplotlib_there_is_one_clear_line(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')")
    run = make_run(tmp_path / "run", "fafed", 0)
    ended = report(run, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert ended.returncode == 2
    assert "pip install" in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_it_starts_without_torch_and_mpi(tmp_path):
    made = make_run(tmp_path / "run", "fafed", 0)
    program = (
        "import sys; from fedmpi.cli.report.__main__ import main; main(sys.argv[1:]);"
        "print(sorted({'torch', 'mpi4py'} & set(sys.modules)))"
    )
    ended = execute([sys.executable, "-c", program, made, "--watch", "1"], env={"PYTHONPATH": str(ROOT)})
    assert ended.stdout.endswith("[]\n"), ended.stdout + ended.stderr


@contextlib.contextmanager
def watching(*words):
    """The report as a process that runs, and does not outlive the test."""
    job = subprocess.Popen(
        [sys.executable, "-u", "-m", "fedmpi", "report", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, preexec_fn=hear_ctrl_c,
    )  # fmt: skip
    try:
        yield job
    finally:
        job.kill()
        job.communicate()


def test_watching_a_job_until_it_ends(tmp_path):
    pytest.importorskip("matplotlib")
    run = make_run(tmp_path / "runs" / "job", "fafed", 0, rounds=5, ended=False)
    page = tmp_path / "live.html"
    with watching(tmp_path / "runs", "--watch", 0.2, "--out", page) as job:
        wait_for(page.exists)
        assert 'http-equiv="refresh"' in page.read_text()
        record = {"round": 6, "loss": 0.5, "seconds": 3.0, "bytes": 18e6, "gradients": 240, "accuracy": 0.75}
        with open(run / "metrics.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n" + '{"round": 7, "lo')  # a line that is still being written
        (run / "model.safetensors").touch()
        output, errors = job.communicate(timeout=LIMIT)
    assert (job.returncode, errors) == (0, "")
    assert "5/40" in output and "6/40" in output and "0.7500" in output and "complete" in output
    assert 'http-equiv="refresh"' not in page.read_text()


def test_watching_follows_a_run_that_stops_and_goes_on(tmp_path):
    """It stopped ten minutes ago; when it is resumed, the records after its checkpoint are made again."""
    run = make_run(tmp_path / "runs" / "job", "fafed", 0, rounds=5, ended=False)
    (run / "checkpoints" / "000004").mkdir(parents=True)
    (run / "checkpoints" / "000004" / "manifest.json").touch()
    records = run / "metrics.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    os.utime(records, (time.time() - 600,) * 2)
    with watching(tmp_path / "runs", "--watch", 0.2) as job:
        assert "stopped" in "".join(job.stdout.readline() for _ in range(3))
        with open(records, "r+") as file:
            file.truncate(len("".join(lines[:4])))
            file.seek(0, os.SEEK_END)
            file.writelines([lines[4], lines[4].replace('"round": 5', '"round": 6')])
        (run / "model.safetensors").touch()
        output, errors = job.communicate(timeout=LIMIT)
    assert (job.returncode, errors) == (0, "")
    assert "6/40" in output and "complete" in output


def test_watching_ends_with_ctrl_c(tmp_path):
    make_run(tmp_path / "job", "fafed", 0, rounds=5, ended=False)
    with watching(tmp_path, "--watch", 0.2) as job:
        assert "job" in job.stdout.readline() + job.stdout.readline()
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=LIMIT)
    assert (job.returncode, errors) == (0, "")


def test_watching_fits_into_a_small_terminal(tmp_path):
    """Wrapped or scrolled lines could not be rewritten: lines end in "…", and what does not fit follows at the end."""
    for number in range(12):
        make_run(tmp_path / f"a-long-name-of-a-run-{number}", "fafed", number, rounds=5)
    ours, its = pty.openpty()
    size = {"COLUMNS": "40", "LINES": "6", "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    job = subprocess.run(
        [sys.executable, "-m", "fedmpi", "report", str(tmp_path), "--watch", "0.2"],
        stdout=its, stderr=subprocess.PIPE, env={**os.environ, **size}, timeout=LIMIT, text=True,
    )  # fmt: skip
    os.close(its)
    written = os.read(ours, 100_000).decode()
    os.close(ours)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written).replace("\r", "\n").splitlines()
    assert (job.returncode, job.stderr) == (0, "")
    assert max(map(len, lines)) <= 40 and "…" in written and "run-11" in written
    assert all(int(up) < 6 for up in re.findall(r"\x1b\[(\d+)A", written))


def test_watching_ends_when_the_job_fell_silent(tmp_path):
    run = make_run(tmp_path / "job", "fafed", 0, rounds=5, ended=False)
    os.utime(run / "metrics.jsonl", (0, 0))
    ended = report(tmp_path, "--watch", 0.2)
    assert ended.returncode == 0 and "stopped" in ended.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_counted_by_round(tmp_path, ranks):
    """FAFED: one at the start per client, then two per local step; only half of the clients take part."""
    words = ("--clients", 4, "--rounds", 3, "--local-steps", 2, "--participation", 0.5, "--name", "it")
    ended = train(ranks, tmp_path, *words)
    assert ended.returncode == 0, ended.stderr
    records = [json.loads(line) for line in (tmp_path / "it" / "metrics.jsonl").read_text().splitlines()]
    assert [record["gradients"] for record in records] == [4 + 2 * 2 * 2 * number for number in (1, 2, 3)]


def test_a_run_that_diverges_says_so_in_its_folder(tmp_path):
    words = ("--algorithm", "fedavg", "--algorithm.step_size", 1e30, "--clients", 2, "--name", "it")
    assert train(1, tmp_path, *words).returncode == 1
    assert "client 0" in (tmp_path / "it" / "diverged.txt").read_text()
    ended = report(tmp_path / "it")
    assert ended.returncode == 2 and "try a smaller step_size" in ended.stderr
