"""Statistics of all silos together equal pandas' on the files in one place, and no row or rare word leaves a silo."""

import json
import math
import warnings
from fractions import Fraction

import h5py
import numpy as np
import pytest
from helpers import start

from fedmpi.comm.solo import SoloLink
from fedmpi.data.hidden_sum import hidden_sum
from fedmpi.ground.errors import UserError
from fedmpi.prepare.__main__ import main as data
from fedmpi.prepare.formats.features import Columns
from fedmpi.prepare.statistics import Silo, pooled

pandas = pytest.importorskip("pandas")
SIZES = (400, 90, 211)
NUMBERS = ("age", "crp", "beats", "time", "constant", "whole", "rare")


def tables():
    """A table per silo; one has a ward and a diagnosis that no other has, and columns have gaps, or nothing else."""
    stream, found = np.random.default_rng(0), []
    for silo, size in enumerate(SIZES):
        rows = pandas.DataFrame({"age": (60 + 9 * silo + 12 * stream.standard_normal(size)).round(1)})
        rows["crp"] = np.exp(stream.standard_normal(size) + silo)
        rows["beats"] = stream.integers(50, 90, size)
        rows.loc[stream.random(size) < 0.1, "crp"] = np.nan
        rows["time"] = 1e9 + 1e-3 * stream.standard_normal(size) + silo  # a deviation of 1e-9 of the mean
        rows["constant"], rows["whole"] = 7.3, stream.integers(-(2**40), 2**40, size)
        rows["rare"] = stream.standard_normal(size) if silo == 2 else np.nan  # empty in the others
        rows["note"] = "" if silo == 0 else stream.choice(["calm", "loud", "odd", "new", "old"], size)
        rows["ward"] = stream.choice(["surgery", "neurology"], size)
        rows["ill"] = stream.choice(["no", "yes"], size)
        if silo == 1:
            rows.loc[rows.index[:9], "ward"], rows.loc[rows.index[:9], "ill"] = "Planted-ward", "Planted-code"
        found.append(rows)
    return found


def write(folder, frames):
    for silo, rows in enumerate(frames):
        rows.to_csv(folder / f"silo_{silo}.csv", index=False)
    return str(folder / "silo_{client}.csv")


@pytest.mark.rarely
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_they_are_pandas_on_all_files(tmp_path, ranks):
    frames = tables()
    together, pattern = pandas.concat(frames), write(tmp_path, frames)
    words = ("data", "statistics", pattern, "--label", "ill", "--one-hot", "ward", "--missing", "median")
    words += ("--clients", "3")
    ended = start(ranks, "-m", "fedmpi", *words, "--json", "--out", tmp_path / "columns.json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout[ended.stdout.index("{") :])
    assert found["rows"] == sum(SIZES) and found["silos"] == 3
    assert {*found["numbers"]} == {*NUMBERS}
    for name in NUMBERS:
        column, of = together[name], found["numbers"][name]
        assert of["missing"] == column.isna().sum()
        assert of["mean"] == pytest.approx(column.mean(), rel=1e-9) and of["std"] == pytest.approx(
            column.std(), rel=1e-9
        )
        for key, share in (("25 %", 0.25), ("median", 0.5), ("75 %", 0.75)):
            quantile, of_known = column.quantile(share), column.dropna()
            if (of_known == quantile).sum() >= 5:  # --least
                assert of[key] == quantile, (name, key)
            else:
                assert abs((of_known < of[key]).mean() - share) < 0.02, (name, key)
            assert of[key] == pytest.approx(quantile, abs=0.02 * column.std()), (name, key)
    ward, ill = together["ward"].value_counts(), together["ill"].value_counts()
    assert found["words"]["ward"] == {"rows": {k: ward[k] for k in ("neurology", "surgery")}, "other": 9}
    assert found["words"][""] == {"rows": {k: ill[k] for k in ("no", "yes")}, "other": 9}
    written = (tmp_path / "columns.json").read_text()
    assert "Planted" not in ended.stdout + ended.stderr + written
    columns = Columns.read(str(tmp_path / "columns.json"))
    filled = together["crp"].fillna(columns.columns["crp"]["median"])
    assert columns.columns["crp"]["mean"] == pytest.approx(filled.mean(), rel=1e-9)
    assert columns.columns["crp"]["std"] == pytest.approx(filled.std(ddof=0), rel=1e-9)
    assert columns.columns["ward"] == ["neurology", "surgery"] and columns.classes == ["no", "yes"]
    assert "rare" in columns.columns and "note" not in columns.columns
    shown = start(ranks, "-m", "fedmpi", *words)
    assert "701 rows of 3 silos" in shown.stdout and "others, each in fewer than 2 silos" in shown.stdout
    for silo in (0, 2):
        warnings.simplefilter("error")
        words = (
            "--label",
            "ill",
            "--one-hot",
            "ward",
            "--missing",
            "median",
            "--columns",
            str(tmp_path / "columns.json"),
        )
        data(["prepare", f"ready_{silo}", "--from", pattern.format(client=silo), "--data-dir", str(tmp_path), *words])
        with h5py.File(tmp_path / f"ready_{silo}.h5") as file:
            assert file.attrs["mean"][0] == pytest.approx(together["age"].mean(), rel=1e-9)


def test_files_of_samples(tmp_path):
    stream, rows = np.random.default_rng(1), []
    for silo, size in enumerate(SIZES):
        images, labels = stream.standard_normal((size, 2)).astype("f4"), stream.integers(0, 3, size)
        with h5py.File(tmp_path / f"silo_{silo}.h5", "w") as file:
            file["train/images"], file["train/labels"] = images, labels
            file.attrs["num_classes"] = 3
        rows.append(
            pandas.DataFrame({"0": images[:, 0].astype(float), "1": images[:, 1].astype(float), "label": labels})
        )
    together = pandas.concat(rows)
    found = pooled(SoloLink(), [Silo.of_file(tmp_path / f"silo_{silo}.h5") for silo in range(3)], 5, 2)
    for name in "01":
        assert found["numbers"][name]["mean"] == pytest.approx(together[name].mean(), abs=1e-12)
        assert found["numbers"][name]["std"] == pytest.approx(together[name].std(), rel=1e-12)
    counts = together["label"].value_counts()
    assert found["words"][""] == {"rows": {str(k): counts[k] for k in range(3)}, "other": 0}


def test_numbers_of_few_rows_are_not_shown():
    def silo(values, labels):
        return Silo({"x": np.array(values, float)}, {"": dict_of(labels)})

    silos = [silo([1, 2, math.nan], "aab"), silo([3, 4, 5, 6], "abbc")]
    found = pooled(SoloLink(), silos, 4, 2)
    assert found["numbers"]["x"]["missing"] is None and found["numbers"]["x"]["mean"] == 3.5
    # c is one silo's; a number that is not shown could be found from the others, so two are not shown
    assert found["words"][""] == {"rows": {"a": None, "b": None}, "other": None}
    assert pooled(SoloLink(), silos, 1, 2)["words"][""] == {"rows": {"a": 3, "b": 3}, "other": 1}
    assert pooled(SoloLink(), silos, 7, 2)["numbers"]["x"]["mean"] is None
    with pytest.raises(UserError, match="the columns are not the same in the files of all 2 clients"):
        pooled(SoloLink(), [silos[0], Silo({"y": np.zeros(9)}, {"": dict_of("a")})], 1, 1)


def dict_of(labels):
    from collections import Counter

    return Counter(labels)


@pytest.mark.parametrize("parts", [
    [[7.3] * 40, [7.3] * 9], [[0.1] * 3, [0.1] * 7, [0.1]], [[1e9 + 1e-4 * k for k in range(50)], [1e9]],
    [[1e15, 1e15 + 2], [1e15 + 1]], [[1e-300, 2e-300], [5e-300]], [[1e38, -1e38], [3e38]], [[5, math.nan], [5]],
])  # fmt: skip
def test_odd_columns(parts):
    silos = [Silo({"x": np.array(part)}, {"": dict_of("a" * len(part))}) for part in parts]
    found, together = pooled(SoloLink(), silos, 1, 1)["numbers"]["x"], pandas.Series(np.concatenate(parts))
    assert found["mean"] == pytest.approx(together.mean(), rel=1e-15)
    is_constant = together.dropna().nunique() == 1
    assert found["std"] == (0 if is_constant else pytest.approx(together.std(), rel=1e-9))
    assert found["missing"] == together.isna().sum()


@pytest.mark.parametrize("parts", [
    [[1e16, 1.0, 1.0, 3.0], [-1e16, 2.0]], [[1e15] * 50, [1e15] * 5 + [1e15 + 0.125]], [[1e30, 0.1], [-1e30, 0.2]],
    [[1e9 + 1e-6 * k for k in range(50)], [1e9 + 1e-7]], [[1e15 + k % 3 / 8 for k in range(500)], [1e15 + 0.5]],
])  # fmt: skip
def test_sums_that_cancel_are_exact_where_those_of_floats_are_not(parts):
    silos = [Silo({"x": np.array(part)}, {"": dict_of("a" * len(part))}) for part in parts]
    found, values = (
        pooled(SoloLink(), silos, 1, 1)["numbers"]["x"],
        [Fraction(value) for part in parts for value in part],
    )
    mean = sum(values) / len(values)
    assert found["mean"] == float(mean)
    squares = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    assert found["std"] == pytest.approx(math.sqrt(squares), rel=1e-14)


@pytest.mark.parametrize(
    ("parts", "least"),
    [
        ([[0.0] * 20, [1.0] * 20], 5),  # the median lies between two rows
        ([[3.0] * 9 + [-2.0] * 6, [3e38, *[1.5] * 6]], 5),  # a number that is far away
        ([np.random.default_rng(0).integers(0, 5, 99), [7.0] * 5], 5),
        ([np.random.default_rng(0).standard_normal(90), 1e9 + np.arange(9.0)], 1),  # single rows may be seen
    ],
)
def test_quantiles_are_those_of_pandas_where_enough_rows_are_equal(parts, least):
    silos = [Silo({"x": np.array(part, float)}, {"": dict_of("a" * len(part))}) for part in parts]
    found, together = pooled(SoloLink(), silos, least, 1)["numbers"]["x"], pandas.Series(np.concatenate(parts))
    for key, share in (("25 %", 0.25), ("median", 0.5), ("75 %", 0.75)):
        assert found[key] == pytest.approx(together.quantile(share), rel=1e-12), key


@pytest.mark.parametrize("values", [[0.1, -1e300, 5e-324, 3.0, -0.0], []])
def test_a_sum_of_one_rank_is_exact(values):
    assert hidden_sum(SoloLink(), values).tolist() == values


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x_{client}.csv"], "client 0 has no file"),
        (["x.txt"], "expected a file ending in .h5, or a table"),
        (["silo_{client}.csv", "--least", "0"], "--least 0: expected at least 1"),
        (["silo_{client}.csv", "--least-silos", "9"], "--least-silos 9: there are 3 silos: expected 1 to 3"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, words, message):
    write(tmp_path, tables())
    words = [str(tmp_path / words[0]), *words[1:]]
    ended = start(1, "-m", "fedmpi", "data", "statistics", *words)
    assert ended.returncode == 2 and message in ended.stderr, ended.stdout + ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_single_silo_writes_no_name_of_few_rows(tmp_path, capsys):
    frame = tables()[1]
    frame.loc[:3, "ward"], frame.loc[:8, "ill"] = "Few", "no"
    frame[["age", "ward", "ill"]].to_csv(tmp_path / "one.csv", index=False)
    out = tmp_path / "columns.json"
    words = ["statistics", str(tmp_path / "one.csv"), "--label", "ill", "--one-hot", "ward", "--out", str(out)]
    data(words)
    assert "others, each of fewer than 5 rows" in (shown := capsys.readouterr().out) and "Few" not in shown
    assert "Planted-ward" in out.read_text() and "Few" not in out.read_text()  # 5 rows have the first one
    out.unlink()
    data([*words, "--least", "1"])
    assert "Few" in out.read_text()
