"""Tables with empty fields, categories and parquet: the features are the same on every silo."""

import json

import numpy as np
import pytest

from fedmpi.data.formats import find_reader
from fedmpi.data.formats.common import ReaderOptions
from fedmpi.errors import UserError

LINES = ["age,sex,ill", "10,f,no", ",m,yes", "30,f,no", "90,,yes", "20,m,no", "40,f,yes"]


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
    assert sorted(rows[:, 0]) == [10, 20, 30, 30, 40, 90]
    rows, names = read(tmp_path, missing="category")
    assert names == ["age", "age is missing"]
    assert [row[0] for row in rows.tolist() if row[1] == 1] == [30]


def test_silos_that_share_the_names_have_the_same_features(tmp_path):
    agreed = tmp_path / "columns.json"
    options = {"missing": "category", "one_hot": ("sex",), "columns": str(agreed)}
    rows, names = read(tmp_path, **options)
    assert names == ["age", "age is missing", "sex=f", "sex=m", "sex=missing"]
    assert json.loads(agreed.read_text()) == {"sex": ["f", "m", "missing"]}
    assert (rows[:, 2:].sum(1) == 1).all() and rows[:, 2].sum() == 3
    only_women = ["age,sex,ill", "10,f,no", ",f,yes", "30,f,no"]
    assert read(tmp_path, only_women, **options)[1] == names
    with pytest.raises(UserError, match="contains d, which is not among f, m, missing"):
        read(tmp_path, [*LINES, "20,d,no"], **options)
    with pytest.raises(UserError, match="--one-hot set: .* has no such column"):
        read(tmp_path, one_hot=("set",))


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
