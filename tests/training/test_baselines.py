"""The baselines of a run equal runs by hand, to the bit, and their table says what they measured."""

import html
import json
import sys

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
from helpers import ROOT, execute, start, train

import fedmpi
from fedmpi.ground.errors import UserError
from fedmpi.runs import baselines

SIZES = (60, 24, 9)
COMMON = {"algorithm": {"name": "fedavg", "step_size": 0.2}, "model": "mlp", "local_steps": 3, "batch_size": 8}
COMMON |= {"threads": 1, "clients": 3, "rounds": 4}


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    """Three silos of different sizes, whose classes are different mixtures."""
    folder, draw = tmp_path_factory.mktemp("silos"), np.random.default_rng(0)
    for client, size in enumerate(SIZES):
        with h5py.File(folder / f"silo_{client}.h5", "w") as file:
            file.attrs["num_classes"], file.attrs["silo"] = 2, ("Aachen", "Bonn", "Celle")[client]
            for split, number in (("train", size), ("test", size)):
                labels = (draw.random(number) < (0.2, 0.7, 0.5)[client]).astype(int)
                inputs = draw.standard_normal((number, 4)) + labels[:, None] * (1 - client)
                file[f"{split}/images"], file[f"{split}/labels"] = inputs.astype("float32"), labels
    return str(folder / "silo_{client}.h5")


def by_hand(out, silos, **settings):
    return fedmpi.train(**{**COMMON, "data": silos, "out": out, **settings})


@pytest.fixture(scope="module")
def compared(silos, tmp_path_factory):
    out = tmp_path_factory.mktemp("compared")
    return by_hand(out, silos, name="all", baselines="local,pooled,tuned", cross_site=True)


def rows_of(found):
    """Method -> its values, of a `Comparison` or of the content of a file."""
    if isinstance(found, baselines.Comparison):
        return {name: vars(method) for name, method in found.methods.items()}
    return {row["method"]: row for row in found["rows"]}


def bytes_of(folder):
    files = sorted([*folder.glob("models/*.safetensors"), folder / "model.safetensors"])
    return {file.name: safetensors.torch.load_file(file) for file in files}


def assert_same_models(one, other):
    one, other = bytes_of(one), bytes_of(other)
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert all(torch.equal(value, other[name][key]) for key, value in values.items()), name


def test_each_baseline_equals_a_run_by_hand_to_the_bit(silos, compared, tmp_path):
    rows = rows_of(compared.baselines)
    made = {
        "federated": by_hand(tmp_path, silos),
        "local": by_hand(tmp_path, silos, private="*"),
        "pooled": by_hand(tmp_path, silos, local_steps=1, rounds=12, weighting="samples"),
        "tuned": by_hand(tmp_path, silos, private="*", init=str(compared.folder)),
    }
    for name, run in made.items():
        assert_same_models(type(run.folder)(rows[name]["folder"]), run.folder)
        right = fedmpi.load_run(run.folder).clients["accuracy"]
        assert rows[name]["clients"] == right and rows[name]["worst"] == min(right)
        assert rows[name]["mean"] == pytest.approx(np.mean(right))
    sent = made["federated"].metrics[-1]["bytes"]
    assert [rows[name]["nbytes"] for name in made] == [sent, 0, made["pooled"].metrics[-1]["bytes"], sent]
    # 12 steps of 8 samples; the last silo's 9 samples are a minibatch of 8 and one of 1.
    assert rows["federated"]["samples"] == rows["local"]["samples"] == rows["pooled"]["samples"]
    assert rows["tuned"]["samples"] == 2 * rows["local"]["samples"]


def test_the_table_says_what_a_silo_gains(compared):
    rows, words = rows_of(compared.baselines), str(compared.baselines).splitlines()
    gain = rows["federated"]["mean"] - rows["local"]["mean"]
    found = compared.baselines.gain
    assert found.mean == pytest.approx(gain) and found.low <= gain <= found.high and found.rows == 93
    assert f"the test accuracy of a silo on its own tests by {abs(gain):.4f} on average (95 % interval " in words[0]
    assert ("not clear with 93 test rows" in words[0]) == (abs(gain) <= found.deviation)
    assert all(row["low"] < row["mean"] < row["high"] for row in rows.values())
    assert words[0].startswith(f"taking part {'improves' if gain > 0 else 'worsens'}") and "of 3 silos gain" in words[0]
    assert "Aachen" in words[1] and "all silos' tests" in words[1] and "test accuracy: own tests, mean" in words[1]
    assert any(line.startswith("  own tests: each silo's own test data") for line in words)
    for line, name in zip(words[2:], ("federated", "local", "pooled", "tuned")):
        cells = line.split()
        assert cells[:4] == [name, "0.2", f"{rows[name]['mean']:.4f}", f"{rows[name]['worst']:.4f}"]
    assert any("given, because nothing is held out to choose it by (--holdout)" in line for line in words)
    pytest.importorskip("matplotlib")
    from fedmpi.cli.report.__main__ import main

    page = compared.folder.parent / "page.html"
    assert not main([str(compared.folder), "--out", str(page)])
    text = html.unescape(page.read_text())
    assert words[0] in text and "The tuned model of each silo on the tests of each silo" in text
    assert f"{rows['local']['mean']:.4f}" in text and "each silo trains alone, on its own data only" in text
    assert (
        json.loads((compared.folder / "baselines.json").read_text())["rows"][1]["clients"] == rows["local"]["clients"]
    )


def test_cross_site_is_the_matrix_of_models_and_tests(silos, compared):
    for name in ("local", "tuned"):
        row = rows_of(compared.baselines)[name]
        for i in range(3):
            model = fedmpi.load(row["folder"], client=i)
            for j in range(3):
                with h5py.File(silos.format(client=j)) as file, torch.no_grad():
                    answers = model(torch.tensor(file["test/images"][:])).argmax(1).numpy()
                    assert row["matrix"][i][j] == pytest.approx((answers == file["test/labels"][:]).mean())
        assert row["all_tests"] == pytest.approx(np.mean(row["matrix"]))
        assert [row["matrix"][k][k] for k in range(3)] == row["clients"]
        names, matrix = fedmpi.load_run(row["folder"]).tables["cross_site_accuracy"]
        assert names == ["Aachen", "Bonn", "Celle"] and np.allclose(matrix, row["matrix"])


def test_a_private_run_has_the_matrix_as_an_attribute(silos, compared, tmp_path):
    run = by_hand(tmp_path, silos, private="*", cross_site=True)
    assert run.baselines is None and compared.cross_site == {}
    assert run.cross_site["accuracy"] == compared.baselines.methods["local"].matrix
    assert np.allclose(fedmpi.load_run(run.folder).tables["cross_site_accuracy"][1], run.cross_site["accuracy"])


def test_pooled_is_gradient_descent_on_all_data(silos, tmp_path):
    words = {"model": torch.nn.Linear(4, 2), "batch_size": 100, "dtype": "float64", "baselines": "pooled"}
    run = by_hand(tmp_path, silos, **words)
    inputs, labels = [], []
    for client in range(3):
        with h5py.File(silos.format(client=client)) as file:
            inputs.append(torch.tensor(file["train/images"][:]).double())
            labels.append(torch.tensor(file["train/labels"][:]))
    model = words["model"].double()
    for _ in range(12):
        loss = torch.nn.functional.cross_entropy(model(torch.cat(inputs)), torch.cat(labels))
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.2 * parameter.grad
    found = safetensors.torch.load_file(f"{rows_of(run.baselines)['pooled']['folder']}/model.safetensors")
    for name, value in model.state_dict().items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-7)


def test_pooled_makes_as_many_steps_as_a_silo_does_on_average(silos, tmp_path):
    words = {**COMMON, "local_epochs": 1, "rounds": 2, "baselines": "pooled"}
    del words["local_steps"]
    row = rows_of(fedmpi.train(data=silos, out=tmp_path, **words).baselines)["pooled"]
    steps = (60 // 8 + 1 + 24 // 8 + 9 // 8 + 1) / 3  # of a silo in a round
    assert fedmpi.load_run(row["folder"]).records[-1]["iteration"] == round(2 * steps) == 9


def test_further_metrics_have_a_column_and_every_figure_a_file(silos, tmp_path):
    run = by_hand(tmp_path, silos, name="it", baselines="local", task={"name": "classification", "metrics": "f1"})
    for name, row in rows_of(run.baselines).items():
        right = fedmpi.load_run(row["folder"]).clients["f1"]
        assert row["further"] == {"f1": pytest.approx(np.mean(right))}, name
    assert "f1, mean" in str(run.baselines).splitlines()[1]
    pytest.importorskip("matplotlib")
    words = [sys.executable, "-m", "fedmpi", "report", tmp_path / "it", "--out", tmp_path / "page.html"]
    assert execute([*words, "--format", "pdf"], env={"PYTHONPATH": str(ROOT)}).returncode == 0
    assert [path for path in (tmp_path / "page").glob("baselines-of-*.pdf") if len(path.name) < 60]


def test_no_gain_that_can_be_printed_is_level():
    rows = [{"method": "federated", "clients": [0.50001], "mean": 0.50001},
            {"method": "local", "clients": [0.5], "mean": 0.5}]  # fmt: skip
    content = {"metric": "accuracy", "tests": "own tests", "names": [], "rows": rows}
    assert baselines.gain_in_words(content).startswith(
        "taking part leaves the test accuracy of a silo on its own tests level on average, from 0.5000 alone to 0.5000;"
    )


def test_what_a_silo_gains_in_a_loss():
    """A smaller one is better; silos without tests do not count."""
    assert baselines.mean_and_worst([0.3, np.nan, 0.5], "test_loss") == (pytest.approx(0.4), 0.5)
    rows = [{"method": "federated", "clients": [0.2, np.nan, 0.6], "mean": 0.4},
            {"method": "local", "clients": [0.5, np.nan, 0.5], "mean": 0.5}]  # fmt: skip
    content = {"metric": "test_loss", "tests": "own tests", "names": [], "rows": rows}
    assert baselines.gain_in_words(content) == (
        "taking part improves the test loss of a silo on its own tests by 0.1000 on average, from 0.5000 alone to "
        "0.4000; 1 of 2 silos gain, and silo 2 loses most, 0.1000"
    )


def test_step_sizes_are_chosen_by_the_loss_on_held_out_data(silos, tmp_path):
    run = by_hand(tmp_path, silos, holdout=0.25, baselines="local", baselines_step_sizes=[0.01, 1e6])
    rows, runs = rows_of(run.baselines), run.baselines.trials
    assert {key.partition("-")[0] for key in runs} == {"federated", "local"} and len(runs) == 6
    for name, row in rows.items():
        losses = {key: one.held_out for key, one in runs.items() if key.startswith(name)}
        assert all(np.isnan(loss) or loss >= row["held_out"] for loss in losses.values())
        words = {"holdout": 0.25, "private": "*" if name == "local" else None}
        again = by_hand(tmp_path, silos, **words, algorithm={"name": "fedavg", "step_size": 0.01})
        assert losses[f"{name}-0.01"] == again.final["holdout_loss"]


def test_ranks_agree_and_an_interrupted_comparison_goes_on(silos, compared, tmp_path):
    words = ["--data", silos, "--clients", 3, "--rounds", 4, "--local_steps", 3, "--batch_size", 8, "--model", "mlp"]
    words += ["--algorithm", "fedavg", "--algorithm.step_size", 0.2]
    ended = train(3, tmp_path, *words, "--name", "a", "--baselines", "local")
    assert ended.returncode == 0 and "of 3 silos gain" in ended.stdout, ended.stderr
    content = baselines.read(tmp_path / "a")
    baselines.write(tmp_path / "a", {**content, "pending": True})
    first = (tmp_path / "a/baselines/local-0.2/metrics.jsonl").stat().st_mtime_ns
    ended = train(2, tmp_path, "--resume", tmp_path / "a", "--baselines", "local,pooled,tuned")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "a/baselines/local-0.2/metrics.jsonl").stat().st_mtime_ns == first
    found = rows_of(baselines.read(tmp_path / "a"))
    for name, row in rows_of(compared.baselines).items():
        assert found[name]["clients"] == row["clients"]


def test_a_sweep_has_baselines_of_each_seed_and_says_that_all_have_one_test_set(tmp_path):
    words = ["--clients=2", "--rounds=2", "--local_steps=2", "--model=mlp", "--threads=1", "--baselines=local"]
    words += ["--algorithm=fedavg", "--grid=seed=3,4", f"--out={tmp_path / 'sweep'}", "--metric=train_loss"]
    ended = start(1, "-m", "fedmpi", "sweep", *words)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "sweep/sweep.csv").read_text().splitlines()[1].endswith(",2,2,0")  # no baseline counts as a run
    settings = {"clients": 2, "rounds": 2, "local_steps": 2, "model": "mlp", "algorithm": "fedavg", "threads": 1}
    for seed in (3, 4):
        rows = rows_of(content := baselines.read(tmp_path / f"sweep/seed={seed}"))
        local = fedmpi.train(**settings, seed=seed, private="*", out=tmp_path)
        federated = fedmpi.train(**settings, seed=seed, out=tmp_path)
        assert rows["local"]["clients"] == fedmpi.load_run(local.folder).clients["accuracy"]
        # The two parts of the test set differ by one sample.
        assert rows["federated"]["mean"] == pytest.approx(federated.final["accuracy"], abs=0.003)
        first, header, *_ = lines = baselines.in_words(content).splitlines()
        assert "of a silo on its part of the common tests" in first and "part of the common tests, mean" in header
        assert any(line.startswith("  part of the common tests: an equal part for each silo") for line in lines)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"baselines": "locl"}, "baselines = locl: expected some of local, pooled, tuned"),
        ({"baselines": "local", "task": "attack"}, "baselines = local: task attack has no model to train"),
        ({"baselines": "tuned", "private": "*"}, "each client has a model of its own already"),
        ({"baselines_step_sizes": [0.1]}, "expected numbers > 0, --baselines, and --holdout"),
        ({"cross_site": True}, "cross_site: expected --baselines or --private"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        fedmpi.train(rounds=1, out=tmp_path, **settings)
