"""Files as people have them: what they contain is read, or a line says why not."""

import json
import zipfile

import numpy as np
import pandas
import pytest
from test_columns import prepared

from fedmpi.prepare.formats import frames

NUMBERS = np.arange(40)
FRAME = pandas.DataFrame({"a": NUMBERS % 7 / 2, "b": NUMBERS % 5, "y": np.where(NUMBERS % 2, "yes", "no")})
TEXT = FRAME.to_csv(index=False)


def lines(**columns):
    """JSON lines of columns."""
    return pandas.DataFrame(columns).to_json(orient="records", lines=True)


def everything(source):
    """All samples, those to train first."""
    return np.concatenate([source.read(split, np.arange(len(source.labels[split]))) for split in ("train", "test")])


def read(folder, name, content, *words):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return prepared(folder, folder / name, *words)


@pytest.mark.parametrize(
    ("name", "content", "encoding"),
    [
        ("t.csv", TEXT.encode("utf-16-le"), "utf-16-le"),
        ("t.csv", TEXT.encode("utf-32"), "utf-32"),
        ("t.CSV", TEXT.replace("\n", ",\n").encode(), "utf-8"),  # every line ends with a separator
    ],
)
def test_texts_are_read_whole(tmp_path, name, content, encoding):
    source, account = read(tmp_path, name, content)
    assert [*account["features"]] == ["a", "b"] and [*account["classes"]] == ["no", "yes"]
    assert account["assumed"][1] == f"the encoding is {encoding}"
    found = everything(source)
    assert sorted(found[:, 0]) == sorted(FRAME.a)


@pytest.mark.parametrize(
    ("name", "content", "words", "line"),
    [
        ("t.csv", "made by me\n\n" + TEXT, [], "line 3 has 3 fields: expected 1"),
        ("t.csv", TEXT + "x,3,no\n", [], "line 42 has x in column a, and 98% of its values are numbers"),
        ("t.csv", TEXT.encode() + "1,2,jä\n".encode("latin-1"), ["--encoding", "utf-8"], "expected --encoding"),
        ("t.csv", TEXT.replace("0.5,", "1.13.2026,"), ["--date", "a"], "line 2 has 0.0: expected dates like"),
        ("t.csv", TEXT, ["--size", "3"], "--size: has no meaning for"),
        ("t.csv", TEXT, ["--test-from", "t.npz"], "--test-from t.npz: expected a table"),
        ("t.csv", TEXT, ["--label", "y", "--id", "y"], "no such column besides the label"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, capsys, monkeypatch, name, content, words, line):
    monkeypatch.setattr(frames, "FIELDS_AT_ONCE", 40)  # a later chunk has a word
    with pytest.raises(SystemExit):
        read(tmp_path, name, content, *words)
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1 and not [*tmp_path.glob("*.h5")]


def test_types_of_json_are_kept(tmp_path):
    number = 1_500_000_000 + NUMBERS
    _, account = read(tmp_path, "t.jsonl", lines(updated_at=number, date=number, y=np.where(NUMBERS % 2, "01", "1")))
    assert account["features"] == {"updated_at": "numbers", "date": "numbers"}
    assert account["classes"] == {"01": 20, "1": 20}


def test_an_index_of_parquet_is_a_column(tmp_path):
    named = FRAME.set_axis(pandas.Index(NUMBERS * 3, name="dose"))
    named.to_parquet(tmp_path / "t.parquet")
    _, account = prepared(tmp_path, tmp_path / "t.parquet", "--label", "y")
    assert [*account["features"]] == ["dose", "a", "b"]
    named.rename_axis(None).to_parquet(tmp_path / "t.parquet")
    _, account = prepared(tmp_path, tmp_path / "t.parquet", "--label", "y")
    assert [*account["features"]] == ["a", "b"] and [*account["not_used"]] == ["Unnamed: row 0"]


def test_further_sheets_are_named(tmp_path):
    pytest.importorskip("openpyxl")
    with pandas.ExcelWriter(tmp_path / "t.xlsx") as book:
        for name in ("first", "second"):
            FRAME.rename(columns={"a": "a\n(mg)"}).to_excel(book, sheet_name=name, index=False)
    _, account = prepared(tmp_path, tmp_path / "t.xlsx")
    assert account["assumed"] == ["the sheet is first, the first of first, second"]
    assert [*account["features"]] == ["a (mg)", "b"]


def test_a_question_mark_of_arff_is_no_value(tmp_path):
    rows = "".join(f"{'?' if n == 3 else n % 7},{'?' if n == 4 else 'pq'[n % 2]},{n % 3 > 0}\n" for n in NUMBERS)
    content = f"@relation r\n@attribute a numeric\n@attribute b {{p,q}}\n@attribute y {{True,False}}\n@data\n{rows}"
    source, account = read(tmp_path, "t.arff", content, "--missing", "median", "--one-hot", "b")
    assert source.attributes["feature_names"].tolist() == ["a", "b=p", "b=q"]


def test_dates_with_dots_are_days(tmp_path):
    dates = pandas.date_range("2026-01-31", periods=40)
    frame = FRAME.assign(a=dates.strftime("%d.%m.%Y"))
    _, account = read(tmp_path, "t.csv", frame.to_csv(index=False))
    assert "--date a" in account["not_used"]["a"]
    source, _ = read(tmp_path, "t.csv", frame.to_csv(index=False), "--date", "a")
    found = everything(source)
    assert sorted(found[:, 0]) == [*range(20484, 20524)]  # 2026-01-31 is 56 years of 365 days, 14 leap days, and 30


@pytest.mark.parametrize(
    ("labels", "note"),
    [
        (["no", "yes", "Yes", "no"], "differ from"),
        (["1", "1.0", "0", "0"], "differ from"),
        (["no", "yes", "?", "no"], "? is a class"),
    ],
)
def test_classes_that_may_be_the_same_are_named(tmp_path, labels, note):
    _, account = read(tmp_path, "t.csv", FRAME.assign(y=labels * 10).to_csv(index=False))
    assert any(note in line for line in account["notes"])


def test_labels_of_arrays_with_gaps_are_named(tmp_path):
    np.savez(tmp_path / "t.npz", x=np.ones((40, 3)), y=NUMBERS % 2 * 2)
    assert "no sample has label 1, of 3 classes" in str(prepared(tmp_path, tmp_path / "t.npz")[1]["notes"])


def test_groups_are_not_divided_in_any_format(tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "images").mkdir()
    for number in NUMBERS:
        image.fromarray(np.full((4, 4), number * 900, np.uint16)).save(tmp_path / f"images/{number}.png")
    table = pandas.DataFrame({"file": [f"{n}.png" for n in NUMBERS], "who": NUMBERS // 5, "y": NUMBERS % 2})
    table.to_csv(tmp_path / "images" / "labels.csv", index=False)
    source, _ = prepared(tmp_path, tmp_path / "images", "--group", "who")
    sides = [{*source.column("who", split)} for split in ("train", "test")]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 8
    assert source.groups().max() == len(sides[0]) - 1
    np.savez(tmp_path / "t.npz", x=np.ones((40, 3)), y=NUMBERS % 2, who=NUMBERS // 5)
    table.assign(x=1).to_csv(tmp_path / "t.csv", index=False)
    table[:6].assign(x=1).to_csv(tmp_path / "other.csv", index=False)
    for origin, words, line in (
        ("t.npz", ["--group", "who"], "--group: has no meaning"),
        ("images", ["--mode", "L"], "deeper than L"),
        ("t.csv", ["--group", "who", "--test-from", tmp_path / "other.csv"], "has who 0, which"),
    ):
        with pytest.raises(SystemExit):
            prepared(tmp_path, tmp_path / origin, *words)
        assert line in capsys.readouterr().err
    table.iloc[-1, 0] = "0.png"
    table.to_csv(tmp_path / "images" / "labels.csv", index=False)
    with pytest.raises(SystemExit):
        prepared(tmp_path, tmp_path / "images")
    assert "0.png twice" in capsys.readouterr().err


def test_users_of_leaf_are_those_with_samples(tmp_path, capsys):
    (tmp_path / "leaf" / "train").mkdir(parents=True)
    data = {"a": {"x": np.ones((20, 3)).tolist(), "y": [0.0, 1.0] * 10}, "b": {"x": [], "y": []}}
    content = {"users": ["a", "b"], "num_samples": [20, 0], "user_data": data}
    (tmp_path / "leaf" / "train" / "all.json").write_text(json.dumps(content))
    assert prepared(tmp_path, tmp_path / "leaf")[1]["classes"] == {"0": 10, "1": 10}
    (tmp_path / "leaf" / "train" / "all.json").write_text(json.dumps({**content, "users": ["b"]}))
    with pytest.raises(SystemExit):
        prepared(tmp_path, tmp_path / "leaf")
    assert "users and user_data name different users" in capsys.readouterr().err


@pytest.mark.parametrize("inside", ["t.csv", "t", "t.TSV"])
def test_a_zipped_table_is_read(tmp_path, inside):
    with zipfile.ZipFile(tmp_path / "t.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(inside, TEXT.replace(",", "\t") if "TSV" in inside else TEXT)
    account = prepared(tmp_path, tmp_path / "t.zip")[1]
    assert [*account["features"]] == ["a", "b"] and sum(account["rows"].values()) == 40
    assert [*account["classes"]] == ["no", "yes"]


def test_columns_of_a_test_file(tmp_path, capsys):
    """The label is a column of the training file; a column is never lost in silence."""
    FRAME.to_csv(tmp_path / "t.csv", index=False)
    FRAME[["y", "b", "a"]][:10].assign(more=1).to_csv(tmp_path / "u.csv", index=False)
    source, account = prepared(tmp_path, tmp_path / "t.csv", "--test-from", tmp_path / "u.csv")
    assert account["label"] == "y" and account["not_used"] == {"more (u.csv)": "another part of the data"}
    assert np.array_equal(source.read("test", np.arange(10)), FRAME[["a", "b"]][:10])
    FRAME[["a", "y"]].to_csv(tmp_path / "u.csv", index=False)
    with pytest.raises(SystemExit):
        prepared(tmp_path, tmp_path / "t.csv", "--test-from", tmp_path / "u.csv", name="v")
    assert "u.csv: has no column b: expected the columns of" in capsys.readouterr().err


def test_what_columns_are_taken_for_is_said(tmp_path):
    codes = FRAME.assign(code=[f"{number % 9:03}" for number in NUMBERS])[["code", "a", "y"]]
    account = read(tmp_path, "t.csv", codes.to_csv(index=False))[1]
    assert account["assumed"][2:] == ["code: 000 is a number; if it is a code: --one-hot, --id or --drop"]
    codes.to_parquet(tmp_path / "t.parquet")
    assert prepared(tmp_path, tmp_path / "t.parquet")[1]["assumed"] == account["assumed"][2:]
    frame = FRAME.assign(wait=pandas.to_timedelta(NUMBERS, unit="h"), none=np.nan)
    frame.to_parquet(tmp_path / "t.parquet")
    account = prepared(tmp_path, tmp_path / "t.parquet", "--label", "y")[1]
    assert account["assumed"] == ["wait: times are numbers of days"] and account["not_used"] == {"none": "is empty"}


def test_names_of_classes_are_letters(tmp_path, capsys):
    labels = np.where(NUMBERS % 2, "ä".encode(), b"n")
    np.savez(tmp_path / "t.npz", x=np.ones((40, 3), np.float32), y=labels)
    assert [*prepared(tmp_path, tmp_path / "t.npz")[1]["classes"]] == ["n", "ä"]
    np.savez(tmp_path / "u.npz", x=np.ones((40, 3), np.float32), y=np.where(NUMBERS % 2, "a\0b", "n"))
    with pytest.raises(SystemExit):
        prepared(tmp_path, tmp_path / "u.npz", name="u")
    assert r"a class is called 'a\x00b': expected names without a NUL character" in capsys.readouterr().err


def test_marks_in_numbers_mean_the_same_in_every_format(tmp_path, capsys):
    """With --thousands ., 0.92 was read as 92; --decimal was obeyed in CSV only, and not with --censored."""
    frame = FRAME.assign(a=[f"{1000 * n:,}".replace(",", ".") + ",5" for n in NUMBERS])
    expected = sorted(1000 * NUMBERS + 0.5)
    frame.to_csv(tmp_path / "t.csv", sep=";", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    for name in ("t.csv", "t.parquet"):
        source, _ = prepared(tmp_path, tmp_path / name, "--decimal", ",", "--thousands", ".")
        assert sorted(everything(source)[:, 0]) == expected
    frame = FRAME.assign(a=[f"< {n},5" if n % 2 else f"{n},5" for n in NUMBERS])
    source, _ = read(tmp_path, "t.csv", frame.to_csv(sep=";", index=False), "--decimal", ",", "--censored", "half")
    assert sorted(everything(source)[:, 0]) == sorted((n + 0.5) / (1 + n % 2) for n in NUMBERS)
    for words, line in (
        (["--thousands", ".", "--decimal", ","], "line 2 has 0.0 in column a, and 100% of its values are numbers"),
        (["--thousands", "."], "expected two different characters"),
        (["--skip-lines", "0"], "expected numbers from 1 on"),
    ):
        with pytest.raises(SystemExit):
            read(tmp_path, "t.csv", TEXT, *words)
        assert line in capsys.readouterr().err


def test_names_are_given_once(tmp_path, capsys):
    """The second of two equal classes was another one; blanks made others of them."""
    assert [*read(tmp_path, "t.csv", TEXT, "--classes", "yes, no")[1]["classes"]] == ["yes", "no"]
    read(tmp_path, "t.csv", TEXT, "--columns", tmp_path / "c.json")
    columns = json.loads((tmp_path / "c.json").read_text())
    (tmp_path / "c.json").write_text(json.dumps({**columns, "classes": ["no", "yes", "no"]}))
    for words, line in (
        (["--classes", "no,yes,yes"], "--classes no,yes,yes: expected different names"),
        (["--classes", "no,yes,"], "expected different names"),
        (["--columns", tmp_path / "c.json"], "is there twice"),
        (["--one-hot", "y"], "y: is the label"),
        (["--date", "y"], "y: is the label"),
    ):
        with pytest.raises(SystemExit):
            read(tmp_path, "t.csv", TEXT, *words)
        assert line in capsys.readouterr().err


def test_a_text_of_another_encoding(tmp_path, capsys):
    """It was stored as it is: half of its words were none."""
    (tmp_path / "text").mkdir()
    for name in ("train.txt", "test.txt"):
        (tmp_path / "text" / name).write_bytes("Grüße aus Wien\n".encode("latin-1"))
    with pytest.raises(SystemExit):
        prepared(tmp_path, tmp_path / "text")
    assert "train.txt: cannot be read as UTF-8" in capsys.readouterr().err
