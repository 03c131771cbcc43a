"""Tables with empty fields, categories and parquet: the features are the same on every silo."""

import json

import h5py
import numpy as np
import pytest
from helpers import ROOT, train

from fedmpi.cli.predict.__main__ import main as predict
from fedmpi.ground.errors import UserError
from fedmpi.prepare.__main__ import main
from fedmpi.prepare.formats import find_reader
from fedmpi.prepare.formats.common import ReaderOptions

LINES = ["age,sex,ill", "10,f,no", ",m,yes", "30,f,no", "50,,yes", "20,m,no", "40,f,yes"]


def read(folder, lines=LINES, **options):
    path = folder / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    reader, path = find_reader("mine", path)
    splits, attributes = reader(path, ReaderOptions(test_share=0.2, **options))
    rows = np.concatenate([splits["train/images"], splits["test/images"]])
    return rows[np.lexsort(rows.T[::-1])], list(attributes["feature_names"])


def test_empty_fields_are_refused_or_filled(tmp_path):
    with pytest.raises(UserError, match="line 3 has an empty field in column age.*--missing median"):
        read(tmp_path)
    rows, names = read(tmp_path, missing="median")
    assert names == ["age"]
    assert sorted(rows[:, 0]) == [10, 20, 25, 30, 40, 50]  # 25: without the test row, 50
    far = [line.replace("30,", "3000,") for line in LINES]
    rows, _ = read(tmp_path, far, missing="median", columns=str(tmp_path / "far.json"))
    assert sorted(rows[:, 0]) == [10, 20, 30, 40, 50, 3000]  # 30 is the median of 10, 20, 40, 3000, not their mean
    age = json.loads((tmp_path / "far.json").read_text())["columns"]["age"]
    filled = [10, 30, 3000, 20, 40]
    assert age == {"median": 30, "mean": pytest.approx(np.mean(filled)), "std": pytest.approx(np.std(filled))}
    rows, names = read(tmp_path, [line.replace("30,", "NA,") for line in LINES], missing="category")
    assert names == ["age", "age is missing"]
    assert [row[0] for row in rows.tolist() if row[1] == 1] == [20, 20]
    with pytest.raises(UserError, match="line 7 has an empty field in column ill, the label"):
        read(tmp_path, [*LINES[:6], "40,f,"], missing="median")


@pytest.mark.parametrize("value", [7, 0.1])
def test_a_column_of_one_value_is_scaled_by_1(tmp_path, value):
    """Divided by its deviation, 0 or a rounding error of the mean, it would be no feature."""
    lines = [LINES[0], *(f"{value},{line.split(',', 1)[1]}" for line in LINES[1:] + LINES[1:3])]  # 6 are for training
    read(tmp_path, lines, columns=str(tmp_path / "columns.json"))
    content = json.loads((tmp_path / "columns.json").read_text())
    assert content["columns"] == {"age": {"median": value, "mean": pytest.approx(value), "std": 1}}


def test_silos_that_share_the_columns_have_the_same_features(tmp_path):
    agreed = tmp_path / "columns.json"
    options = {"missing": "category", "one_hot": ("sex",), "columns": str(agreed)}
    rows, names = read(tmp_path, **options)
    assert names == ["age", "age is missing", "sex=f", "sex=m", "sex=missing"]
    content = json.loads(agreed.read_text())
    assert content["columns"] == {"age": {"median": 25, "mean": 25, "std": 10}, "sex": ["f", "m", "missing"]}
    assert content["classes"] == ["no", "yes"]
    assert (rows[:, 2:].sum(1) == 1).all() and rows[:, 2].sum() == 3
    only_women = ["sex,age,ill", "f,90,yes", "f,,yes", "f,70,yes"]  # other order, median, classes
    rows, its_names = read(tmp_path, only_women, **options)
    assert its_names == names
    assert rows.tolist() == [[25, 1, 1, 0, 0], [70, 0, 1, 0, 0], [90, 0, 1, 0, 0]]
    for lines, message in (
        ([*LINES, "20,d,no"], "column sex contains d, which is not among f, m, missing"),
        ([*LINES, "20,f,perhaps"], "column ill contains perhaps, which is not among the classes no, yes"),
        ([f"weight,{line}" if line == LINES[0] else f"7{n},{line}" for n, line in enumerate(LINES)], "column weight"),
        ([line.replace("50", "old") for line in LINES], "line 5 has old in column age: expected a number"),
        ([line.partition(",")[2] for line in LINES], "lacks the column age"),
    ):
        with pytest.raises(UserError, match=message):
            read(tmp_path, lines, **options)
    with pytest.raises(UserError, match="was made with --missing category --one-hot sex"):
        read(tmp_path, columns=str(agreed), missing="median")
    with pytest.raises(UserError, match="--one-hot set: .* has no such column"):
        read(tmp_path, one_hot=("set",))
    for text in (
        '{"columns": 3}',
        agreed.read_text().replace("10.0", "0.0"),
        agreed.read_text().replace("10.0", "9" * 400),
        "[1",
        "[" * 9999,
    ):
        agreed.write_text(text)
        with pytest.raises(UserError, match="--columns .*columns.json: (expected what|cannot be read as JSON)"):
            read(tmp_path, **options)
    agreed.unlink()
    with pytest.raises(UserError, match=r"line 4 has 1e\+99 in column age: expected a finite number"):
        read(tmp_path, [line.replace("30", "1e99") for line in LINES], **options)
    assert not agreed.exists()


def test_parquet_is_read_like_csv(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    expected = read(tmp_path, missing="median", one_hot=("sex",))
    pandas.read_csv(tmp_path / "table.csv").to_parquet(tmp_path / "table.parquet")
    reader, path = find_reader("mine", tmp_path / "table.parquet")
    splits, attributes = reader(path, ReaderOptions(missing="median", one_hot=("sex",)))
    rows = np.concatenate([splits["train/images"], splits["test/images"]])
    assert np.array_equal(rows[np.lexsort(rows.T[::-1])], expected[0])
    assert list(attributes["feature_names"]) == expected[1]
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(UserError, match="cannot be read as parquet"):
        reader(tmp_path / "bad.parquet", ReaderOptions())


@pytest.mark.rarely
def test_silos_with_tables_of_their_own_train_together_only_with_the_same_columns(tmp_path, capsys):
    draw = np.random.default_rng(0)
    for silo, name in enumerate(("Aachen", "Bonn")):
        ages = draw.normal(60 + 10 * silo, 9, 100).round(1)
        rows = [
            "age,ward,ill",
            *(f"{age if age < 85 else ''},{'ab'[int(age % 2 > 1)]},{'yes' if age > 65 else 'no'}" for age in ages),
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(rows))

    def prepare(kind, *words):
        for silo, name in enumerate(("Aachen", "Bonn")):
            origin = ("--from", str(tmp_path / f"{name}.csv"), "--data-dir", str(tmp_path), "--silo", name)
            main(["prepare", f"{kind}_{silo}", *origin, "--missing", "median", "--one-hot", "ward", *words])

    def start(kind, name=None):
        return train(2, tmp_path, "--data", tmp_path / f"{kind}_{{client}}.h5", "--rounds", 20, "--name", name or kind)

    prepare("own")
    ended = start("own")
    assert ended.returncode == 2
    assert "client 1 has mean" in ended.stderr and "data prepare --columns" in ended.stderr
    prepare("shared", "--columns", str(tmp_path / "columns.json"))
    ended = start("shared")
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "shared" / "clients.json").read_text())["names"] == ["Aachen", "Bonn"]
    capsys.readouterr()
    out = tmp_path / "out.csv"
    predict([str(tmp_path / "shared"), str(tmp_path / "Bonn.csv"), "--label", "ill", "--out", str(out)])
    assert float(capsys.readouterr().out.split()[-1]) > 0.9
    assert len(out.read_text().splitlines()) == 101
    with h5py.File(tmp_path / "shared_1.h5", "a") as file:
        file.attrs["feature_names"] = ["weight", *file.attrs["feature_names"][1:]]
    assert "the feature names are not the same in the files of all 2 clients" in start("shared", "again").stderr


def test_predictions_have_ids_and_count_categories_that_are_not_known(tmp_path, capsys, monkeypatch):
    (tmp_path / "ownnet.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Sequential):\n    def __init__(self, shape, num_classes):\n"
        "        super().__init__(nn.Linear(shape[0], num_classes))\n"
    )
    lines = ["name,age,ward,ill", *(f"P{n},{n}.5,{'ab'[n % 2]},{'yes' if n > 49 else 'no'}" for n in range(100))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    words = ["--id", "name", "--one-hot", "ward", "--data-dir", str(tmp_path)]
    main(["prepare", "t", "--from", str(tmp_path / "t.csv"), *words])
    words = ["--data", tmp_path / "t.h5", "--rounds", 20, "--name", "it", "--model", "ownnet.Net"]
    ended = train(2, tmp_path, *words, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert ended.returncode == 0, ended.stderr
    (tmp_path / "t.csv").write_text("\n".join(lines).replace("P7,7.5,b", "P7,7.5,c"))
    monkeypatch.syspath_prepend(str(tmp_path))
    capsys.readouterr()
    words = [str(tmp_path / "it"), str(tmp_path / "t.csv"), "--out", str(tmp_path / "out.csv"), "--label", "ill"]
    predict([*words, "--import", "ownnet"])
    printed = capsys.readouterr()
    assert "1 rows have a category of ward that the model does not know" in printed.err and "accuracy" in printed.out
    rows = (tmp_path / "out.csv").read_text().splitlines()
    assert rows[0] == "sample,predicted,probability,label,name" and rows[8].split(",")[3:] == ["no", "P7"]
    with pytest.raises(SystemExit):
        predict([*words, "--import", "no_such_module"])
    assert "--import no_such_module: ModuleNotFoundError" in capsys.readouterr().err
