"""Columns of a table: none is lost without a word, and their roles are obeyed by every split."""

import json
import os
import subprocess
import sys

import h5py
import numpy as np
import pandas
import pytest
import torch
from helpers import ROOT, train

from fedmpi.data.dealing import Dealer
from fedmpi.data.holdout import hold_out
from fedmpi.data.partitions import IID, Column, Dirichlet
from fedmpi.data.source import HDF5Source
from fedmpi.prepare.__main__ import main
from fedmpi.prepare.formats.features import _median as middle_of
from fedmpi.tasks.base import RankContext
from fedmpi.tasks.classification import Classification

DRAW = np.random.default_rng(0)


def table(**changed):
    """A table of 100 rows; the label is a function of the column a."""
    a = DRAW.standard_normal(100).round(3)
    return pandas.DataFrame(
        {"a": a, "b": DRAW.standard_normal(100).round(2), **changed, "y": np.where(a > 0, "p", "n")}
    )


def prepare(folder, frame, *words, name="t", ending="csv"):
    path = folder / f"{name}.{ending}"
    if isinstance(frame, str | bytes):
        path.write_bytes(frame.encode() if isinstance(frame, str) else frame)
    else:
        frame.to_csv(path, index=False)
    return prepared(folder, path, *words, name=name)


def prepared(folder, origin, *words, name="t"):
    """(the source, what was decided) after `data prepare` of a file or folder."""
    main([str(word) for word in ("prepare", name, "--from", origin, "--data-dir", folder, "--force", *words)])
    with h5py.File(folder / f"{name}.h5") as file:
        return HDF5Source(folder / f"{name}.h5"), json.loads(file.attrs["account"])


def refused(capsys, folder, frame, *words):
    with pytest.raises(SystemExit) as ended:
        prepare(folder, frame, *words)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1, error
    assert not [*folder.glob("*.h5")]
    return error


def column(source, number=0):
    """All values of a feature, sorted."""
    return np.sort(np.concatenate([source.read(s, np.arange(len(source.labels[s])))[:, number] for s in source.labels]))


@pytest.mark.parametrize(
    ("field", "words", "value"),
    [
        ("<0.3", ["--censored", "half"], 0.15),
        ("<0.3", ["--censored", "bound"], 0.3),
        ("?", ["--na", "?,-", "--missing", "median"], None),
        ("n/a", ["--na", "n/a", "--missing", "median"], None),
        ('"1,234.5"', ["--thousands", ","], 1234.5),
        ("12%", ["--drop", "c"], None),
        ("high", ["--one-hot", "c"], None),
    ],
)
def test_one_odd_field_in_a_column_of_numbers_does_not_make_words_of_it(tmp_path, capsys, field, words, value):
    """It turned the column off: accuracy .575 where .99 is right."""
    numbers = [f"{number}.5" for number in range(100)]
    numbers[17] = field
    text = "a,c,y\n" + "".join(f"{number},{one},{'pn'[number % 2]}\n" for number, one in enumerate(numbers))
    bare = field.strip('"')
    error = refused(capsys, tmp_path, text)
    assert f"line 19 has {bare} in column c, and " in error and "--drop c" in error
    source, account = prepare(tmp_path, text, *words)
    assert ("c" in account["features"]) == ("--drop" not in words)
    if value is not None:
        assert np.float32(value) in column(source, 1)


def test_what_other_programs_write_is_read(tmp_path):
    yes = DRAW.random(100) > 0.5
    frame = table(flag=np.where(yes, "TRUE", "False"), share=[f"{n}%" for n in range(100)], none="")
    source, account = prepare(tmp_path, frame)
    assert account["features"] == {"a": "numbers", "b": "numbers", "flag": "true or false", "share": "numbers"}
    assert account["not_used"] == {"none": "is empty"}
    assert column(source, 2).sum() == yes.sum() and column(source, 3).tolist() == [*range(100)]
    text = frame[["a", "share", "y"]].to_csv(index=False, sep=";", decimal=",").replace("%", "")
    for encoding in ("latin-1", "utf-16", "utf-8-sig"):
        source, account = prepare(tmp_path, text.replace("share", "größe").encode(encoding), "--decimal", ",")
        assert [*account["features"]] == ["a", "größe"] and "the separator is a semicolon" in account["assumed"]
        assert np.array_equal(column(source), np.sort(frame["a"].to_numpy(np.float32)))
    units = frame[["a", "b", "y"]].to_csv(index=False).replace("a,b,y\n", "a,b,y\nm,kg,-\n")
    source, _ = prepare(tmp_path, units, "--skip-lines", 2)
    assert len(column(source)) == 100


def test_a_row_of_units_decimal_commas_and_dates_are_named(tmp_path, capsys):
    units = table().to_csv(index=False).replace("a,b,y\n", "a,b,y\nm,kg,p\n")
    assert "line 2 has m in column a" in (error := refused(capsys, tmp_path, units))
    assert "--skip-lines 2" in error and "the same is so of b" in error
    comma = table().to_csv(index=False, sep=";", decimal=",")
    assert "--decimal ," in refused(capsys, tmp_path, comma)
    days = pandas.date_range("1970-01-02", periods=100).astype(str)
    source, account = prepare(tmp_path, table(when=days))
    assert "words, 100 of 100 differ" in account["not_used"]["when"]
    source, account = prepare(tmp_path, table(when=days), "--date", "when")
    assert account["features"]["when"] == "dates" and column(source, 2).tolist() == [*range(1, 101)]


@pytest.mark.parametrize("ending", ["parquet", "feather", "json", "csv.gz", "tsv", "arff", "xlsx"])
def test_formats(tmp_path, ending):
    pytest.importorskip({"parquet": "pyarrow", "feather": "pyarrow", "xlsx": "openpyxl"}.get(ending, "pandas"))
    frame = table(flag=DRAW.random(100) > 0.5)
    path = tmp_path / f"t.{ending}"
    if ending == "arff":
        head = "@relation t\n@attribute a numeric\n@attribute b numeric\n@attribute flag {True,False}\n"
        head += "@attribute y {n,p}\n"
        path.write_text(f"{head}@data\n{frame.to_csv(index=False, header=False)}")
    else:
        write = {"json": frame.to_json, "csv.gz": frame.to_csv, "xlsx": frame.to_excel}
        named = {"parquet": frame.to_parquet, "feather": frame.to_feather, "tsv": frame.to_csv} | write
        options = {"csv.gz": {"index": False}, "tsv": {"index": False, "sep": "\t"}, "xlsx": {"index": False}}
        named[ending](path, **options.get(ending, {}))
    main(["prepare", "t", "--from", str(path), "--data-dir", str(tmp_path)])
    source = HDF5Source(tmp_path / "t.h5")
    assert source.attributes["feature_names"].tolist() == ["a", "b", "flag"]
    assert np.allclose(column(source), np.sort(frame["a"])) and column(source, 2).sum() == frame["flag"].sum()


def test_roles_of_columns(tmp_path, capsys):
    frame = table(**{"": range(100), "site": DRAW.integers(0, 3, 100), "name": [f"n{n}" for n in range(100)]})
    source, account = prepare(tmp_path, frame, "--keep", "site", "--id", "name")
    assert [*account["features"]] == ["a", "b"] and account["not_used"] == {
        "Unnamed: 2": "has no name, like the row numbers that pandas writes"
    }
    assert {*source.columns()} == {"site", "name"}  # a column of numbers may split, too
    assert {*prepare(tmp_path, frame)[0].columns()} == set()  # words that are not learned from are not stored
    (tmp_path / "t.h5").unlink()
    assert "is in --drop, --id, --group or --keep" in refused(capsys, tmp_path, frame, "--drop", "a", "--features", "a")
    assert "--drop z: " in refused(capsys, tmp_path, frame, "--drop", "z")
    _, account = prepare(tmp_path, frame, "--features", "b")
    assert [*account["features"]] == ["b"] and account["not_used"]["a"] == "is not in --features"
    notes = prepare(tmp_path, table(number=DRAW.permutation(100)))[1]["notes"]
    assert notes == [
        "a: its order is that of y: does it contain the answer?",
        "number: nearly all of its whole numbers differ: is it an identifier? (--drop, --id)",
    ]


def test_columns_that_do_not_fit(tmp_path, capsys):
    frame = table(site=["x", "y"] * 50)
    for given, words, message in [
        (frame, ["--separator", ";;"], "--separator ;;: expected one character"),
        (frame, ["--label", "z"], f"{tmp_path}/t.csv: expected rows and a column z; its header is a, b, site, y"),
        (frame[:1], [], f"{tmp_path}/t.csv: expected rows and a column y; its header is a, b, site, y"),
        (frame[:0], [], f"{tmp_path}/t.csv: expected rows and a column y; its header is "),
        (
            frame.rename(columns={"site": "images"}),
            ["--keep", "images"],
            "a column that is stored is called images: expected another name for it",
        ),
    ]:
        assert message in refused(capsys, tmp_path, given, *words), message
    frame.assign(a="w").to_csv(tmp_path / "other.csv", index=False)
    what = f"--test-from: column a contains numbers in {tmp_path}/t.csv and words in {tmp_path}/other.csv: expected the"
    assert what in refused(capsys, tmp_path, frame, "--test-from", tmp_path / "other.csv")
    frame["site"] = ["x", "y", None, None, None] * 20
    notes = prepare(tmp_path, frame, "--group", "site")[1]["notes"]
    assert "site: 60 rows have none, and count as one group" in notes


def test_options_that_contradict_the_file_of_columns(tmp_path, capsys):
    frame, shared = table(site=["x", "y"] * 50), tmp_path / "columns.json"
    prepare(tmp_path, frame, "--columns", shared, "--one-hot", "site")
    (tmp_path / "t.h5").unlink()
    content, given = json.loads(shared.read_text()), f"--columns {shared}"
    for words, message in [
        (["--drop", "b"], f"{given}: was made with the features a, b, site: expected no other, and none left out"),
        (
            ["--features", "a,b"],
            f"{given}: was made with the features a, b, site: expected no other, and none left out",
        ),
        (["--classes", "p,n"], f"{given}: was made with the classes n, p: expected the same in --classes"),
        (["--missing", "median"], f"{given}: was made with --missing refuse --one-hot site: expected the same options"),
    ]:
        assert message in refused(capsys, tmp_path, frame, "--columns", shared, *words), message
    shared.write_text(json.dumps(content | {"missing": "guess"}))
    what = "missing is not one of refuse, median, category"
    assert what in refused(capsys, tmp_path, frame, "--columns", shared)
    shared.write_text(json.dumps(content | {"columns": {**content["columns"], "a": ["u", "v"]}}))
    what = ", which is not among u, v: add it to --classes or the file of --columns, and prepare all silos so"
    assert what in refused(capsys, tmp_path, frame, "--columns", shared)


def test_rows_of_a_group_are_never_divided(tmp_path):
    """One patient's rows in training and test set: .995 was reported where .475 is right."""
    frame = table(patient=[f"P{n // 5}" for n in range(100)])
    assert "40 of 100" not in prepare(tmp_path, frame)[1]["not_used"]["patient"]
    assert "--group patient" in prepare(tmp_path, frame)[1]["not_used"]["patient"]
    source, _ = prepare(tmp_path, frame, "--group", "patient")
    patients = {split: source.column("patient", split) for split in ("train", "test")}
    assert len(patients["test"]) == 20 and not {*patients["train"]} & {*patients["test"]}
    for partition in (IID(), Dirichlet()):
        parts = partition.split_source(source, 3, 0)
        assert sorted(np.concatenate(parts)) == [*range(80)]
        owners = [{*patients["train"][part]} for part in parts]
        assert sum(map(len, owners)) == len(set.union(*owners))
    training, held = hold_out(80, 0.25, 0, 0, source.groups())
    assert len(held) == 20 and not {*patients["train"][training]} & {*patients["train"][held]}
    at_start = dict(enumerate(np.array_split(np.arange(80), 4)))
    dealer = Dealer(IID(redeal=True), source.labels["train"], lambda _: [0, 2, 3], 0, at_start, source.groups())
    for number in range(3):  # each round's clients share no patient
        owners = [{*patients["train"][part]} for part in dealer.parts(number).values()]
        assert sum(map(len, owners)) == len(set.union(*owners)) == 16


def test_columns_of_numbers_split_silos_in_their_order(tmp_path):
    """Numbers were stored as words: 10 came before 9."""
    frame = table(site=np.arange(100) % 12, weight=np.arange(100) / 8 + 50, code=[f"{n:03}" for n in range(100)])
    source, _ = prepare(tmp_path, frame, "--keep", "site", "--keep", "weight", "--keep", "code")
    assert [source.column(name).dtype.kind for name in ("site", "weight", "code")] == ["i", "f", "S"]
    parts = Column(by="weight", cut=True).split_source(source, 4, 0)
    weights = [source.column("weight")[part] for part in parts]
    assert all(low.max() < high.min() for low, high in zip(weights, weights[1:]))
    assert Column(by="site").names(source, Column(by="site").split_source(source, 12, 0))[0] in map(str, range(12))


def test_classes_are_named_stripped_and_told_all_at_once(tmp_path, capsys):
    frame = table()
    frame["y"] = np.where(frame["a"] > 0, " p", "n ")
    source, account = prepare(tmp_path, frame, "--classes", "m,n,p", "--columns", tmp_path / "c.json")
    assert source.num_classes == 3 and account["classes"]["m"] == 0 and account["classes"]["n"] > 0
    other = table().assign(y=np.where(DRAW.random(100) > 0.5, "P", "N "))
    (tmp_path / "t.h5").unlink()
    error = refused(capsys, tmp_path, other, "--columns", tmp_path / "c.json")
    hint = '"aliases": {"y": {"N": "n", "P": "p"}}'
    assert "contains N, P, which is not among the classes m, n, p" in error and hint in error
    content = json.loads((tmp_path / "c.json").read_text())
    (tmp_path / "c.json").write_text(json.dumps({**content, "aliases": {"y": {"N": "n", "P": "p"}}}))
    source, _ = prepare(tmp_path, other, "--columns", tmp_path / "c.json")
    assert {*np.concatenate([*source.labels.values()])} == {1, 2}


def test_large_numbers_keep_their_differences(tmp_path):
    """Unix seconds in float32 differ by 128: .908 for 1.000; a sum of squares gave the deviation 50.6 for 30.2."""
    seconds = 1_700_000_000 + np.arange(100)
    source, _ = prepare(tmp_path, table(seconds=seconds))
    assert source.dtype == np.float64 and column(source, 2).tolist() == seconds.tolist()
    x = 1e9 + DRAW.standard_normal((100, 2))
    np.savez(tmp_path / "x.npz", x=x, y=np.arange(100) % 2)
    main(["prepare", "x", "--from", str(tmp_path / "x.npz"), "--data-dir", str(tmp_path)])
    source = HDF5Source(tmp_path / "x.h5")
    assert np.allclose(source.std, source.read("train", np.arange(80)).std(0))


def test_thousands_of_columns_and_classes(tmp_path):
    """More than 64 KiB of names did not fit into the file."""
    wide = pandas.DataFrame(np.eye(10, 9000, dtype=np.int8), columns=[f"gene {n}" for n in range(9000)])
    source, account = prepare(tmp_path, wide.assign(y=np.arange(10) % 2))
    assert len(source.attributes["feature_names"]) == 9000 == len(account["features"])


def test_a_test_file_and_the_command_that_repeats_everything(tmp_path, capsys):
    frame = table()
    frame[80:].to_csv(tmp_path / "test.csv", index=False)
    source, account = prepare(tmp_path, frame[:80], "--test-from", tmp_path / "test.csv")
    assert [len(source.labels[split]) for split in ("train", "test")] == [80, 20]
    assert account["test_rows"] == f"those of {tmp_path / 'test.csv'}"
    capsys.readouterr()
    prepare(tmp_path, frame, "--drop", "b", "--json")
    account = json.loads(capsys.readouterr().out)
    assert account["command"] == (
        f"python -m fedmpi data prepare t --from {tmp_path / 't.csv'} --label y --drop b --separator , --encoding utf-8"
    )
    assert account["rows"] == {"train": 80, "test": 20} and account["not_used"] == {"b": "--drop"}
    main(["show", str(tmp_path / "t.h5")])
    shown = capsys.readouterr().out
    assert "not used: b: --drop" in shown and "features, 1 columns: a (numbers)" in shown
    main(["show", str(tmp_path / "t.h5"), "--json"])
    assert json.loads(capsys.readouterr().out) == account


def test_test_rows_are_a_share_of_each_class(tmp_path):
    frame = table().assign(y=["rare"] * 10 + ["often"] * 90)
    source, _ = prepare(tmp_path, frame)
    assert np.bincount(source.labels["test"]).tolist() == [18, 2]


def test_lines_that_are_too_long_and_a_missing_header(tmp_path, capsys):
    """A fourth field was left out without a word, and the first row was a header."""
    rows = [f"{n}.5,{n},{'pn'[n % 2]}" for n in range(40)]
    assert "line 42 has 4 fields: expected 3" in refused(capsys, tmp_path, "\n".join(["a,b,y", *rows, "1,2,p,9"]))
    assert "line 42 has 5 fields: expected 3" in refused(capsys, tmp_path, "\n".join(["a,b,y", *rows, "1,2,p,9,9"]))
    source, account = prepare(tmp_path, "\n".join(["a,b,y", *(f"{row}," for row in rows)]))
    assert len(source.labels["train"]) == 32 and not any("header" in note for note in account["notes"])
    _, account = prepare(tmp_path, "\n".join(rows))
    assert "the header contains numbers (0.5, 0): is it a row" in account["notes"][0]


def test_words_that_mean_the_same_in_two_silos(tmp_path, capsys):
    """The advice made four classes of yes, no, Yes and No."""
    shared = tmp_path / "columns.json"
    words = ["--label", "y", "--columns", shared]
    for silo in (0, 1):
        frame = table()
        frame["y"] = frame["y"].map({"p": ("yes", "Yes")[silo], "n": ("no", "No")[silo]})
        frame.to_csv(tmp_path / f"s{silo}.csv", index=False)
    prepared(tmp_path, tmp_path / "s0.csv", *words, name="s0")
    with pytest.raises(SystemExit):
        prepared(tmp_path, tmp_path / "s1.csv", *words, name="s1")
    assert '"aliases": {"y": {"No": "no", "Yes": "yes"}}' in capsys.readouterr().err
    content = json.loads(shared.read_text()) | {"aliases": {"y": {"No": "no", "Yes": "yes"}}}
    shared.write_text(json.dumps(content))
    for silo in (0, 1):
        source, _ = prepared(tmp_path, tmp_path / f"s{silo}.csv", *words, name=f"s{silo}")
        assert source.num_classes == 2
        values = source.read("train", np.arange(80))[:, 0]
        assert np.array_equal(source.labels["train"], values > 0)
    ended = train(2, tmp_path, "--data", tmp_path / "s{client}.h5", "--rounds", 40, "--name", "run")
    assert ended.returncode == 0, ended.stderr
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["accuracy"] > 0.9 and len(last["clients"]["accuracy"]) == 2


def test_whole_numbers_above_those_of_floats(tmp_path):
    """2^53 + 1 became 2^53 without a word."""
    _, account = prepare(tmp_path, table(c=2**53 + np.arange(100) % 9))
    assert "c: whole numbers above 2^53 are rounded: is it an identifier? (--drop, --id)" in account["notes"]
    source, _ = prepare(tmp_path, table(c=2**53 + np.arange(100)), "--id", "c")
    assert {*np.concatenate([source.column("c", s) for s in source.labels])} == {
        str(2**53 + n).encode() for n in range(100)
    }


def test_two_at_once_leave_one_complete_file(tmp_path):
    frames = [table(), table()]
    for number, frame in enumerate(frames):
        frame.to_csv(tmp_path / f"{number}.csv", index=False)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "fedmpi", "data", "prepare", "t", "--from", tmp_path / f"{number}.csv", "--force"],
            env={**os.environ, "FEDMPI_DATA": str(tmp_path), "PYTHONPATH": str(ROOT)}, cwd=tmp_path,
            stdout=subprocess.DEVNULL,
        )
        for number in (0, 1)
    ]  # fmt: skip
    assert [one.wait(300) for one in started] == [0, 0]
    found = column(HDF5Source(tmp_path / "t.h5"))
    assert any(np.allclose(found, np.sort(frame["a"])) for frame in frames)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.csv", "1.csv", "t.h5"]


def test_groups_are_held_out_whole_from_samples_that_are_dealt_anew(tmp_path):
    who = np.arange(100) // 5
    prepare(tmp_path, table(who=who, patient=[f"P{number}" for number in who]), "--group", "patient")
    place = RankContext(2, range(2), 0, 1, 0, None, torch.device("cpu"), torch.float64, 0.25)
    task = Classification(data=str(tmp_path / "t.h5")).load(place, IID(redeal=True))
    for number in range(3):
        parts = task.dealer.parts(number)
        dealt = [task.batch(client, torch.from_numpy(part))[0][:, 2].numpy() for client, part in parts.items()]
        counts = [np.unique(one, return_counts=True)[1] for one in dealt]
        assert all((one == 5).all() for one in counts)
        assert sum(map(len, counts)) == len(np.unique(np.concatenate(dealt))) == 12  # of 16; each client holds out 2


def test_a_minus_of_typesetting_is_a_minus(tmp_path):
    """The column was taken for words."""
    frame = table(b=[f"\N{MINUS SIGN}{n}" if n % 2 else str(n) for n in range(100)])
    source, account = prepare(tmp_path, frame)
    assert account["features"]["b"] == "numbers" and column(source, 1).min() == -99


def test_a_label_that_may_be_none_is_noted(tmp_path):
    """25 values of a quantity were 25 classes without a word, and so was a label that is the same in all rows."""
    quantity = table().assign(y=np.arange(100) + 0.5).head(25)
    notes = "\n".join(prepare(tmp_path, quantity)[1]["notes"])
    assert "y: 25 classes in 25 rows, all of them numbers: is it a quantity?" in notes
    notes = prepare(tmp_path, table().assign(y="one"))[1]["notes"]
    assert "y: all rows have the class one: expected others, or --classes" in notes


@pytest.mark.parametrize("role", ["--label", "--id", "--one-hot"])
def test_a_nul_in_a_word_is_named_with_its_line(tmp_path, capsys, role):
    frame = table(w=["u", "v", "u@"] + ["v"] * 97)
    if role == "--label":
        frame["y"] = ["p", "n@"] * 50
    name, line = ("y", 3) if role == "--label" else ("w", 4)
    error = refused(capsys, tmp_path, frame.to_csv(index=False).replace("@", "\0"), role, name)
    with_line = f"line {line} has a character NUL in column {name}"
    assert (with_line if sys.version_info >= (3, 11) else "NUL") in error  # the csv module of 3.10 reads no such line


def test_columns_between_blanks_need_the_separator(tmp_path, capsys):
    text = table().to_csv(index=False, sep=" ")
    assert "--separator names the mark between columns" in refused(capsys, tmp_path, text)
    assert set(prepare(tmp_path, text, "--separator", " ")[1]["features"]) == {"a", "b"}


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (np.arange(20) % 3 * 1.0, "y: the whole numbers are classes"),
        (np.eye(3)[np.arange(20) % 3], "y: each row has one 1, at the place of its class"),
        (np.eye(3, dtype=bool)[np.arange(20) % 3], "y: each row has one 1, at the place of its class"),
    ],
)
def test_labels_as_other_packages_save_them(tmp_path, labels, said):
    x = np.arange(20.0)[:, None]
    np.savez(tmp_path / "it.npz", x=x, y=labels)
    assert prepared(tmp_path, tmp_path / "it.npz")[1]["assumed"] == [said]
    with h5py.File(tmp_path / "t.h5") as file:
        for split in ("train", "test"):
            rows = file[split]["images"][:].ravel()
            assert np.array_equal(file[split]["labels"][:], rows.astype(int) % 3)


@pytest.mark.parametrize("labels", [np.linspace(0, 1, 20), np.ones((20, 3)), np.full(20, np.nan)])
def test_labels_that_are_no_classes_are_refused(tmp_path, capsys, labels):
    np.savez(tmp_path / "it.npz", x=np.arange(20.0)[:, None], y=labels)
    with pytest.raises(SystemExit):
        prepared(tmp_path, tmp_path / "it.npz")
    assert capsys.readouterr().err.count("\n") == 1


def test_values_too_large_for_a_deviation_are_refused(tmp_path, capsys):
    """numpy's warning was printed, and the file had the deviation inf."""
    np.savez(tmp_path / "it.npz", x=np.arange(20.0)[:, None] * 1e300, y=np.arange(20) % 2)
    with pytest.raises(SystemExit):
        prepared(tmp_path, tmp_path / "it.npz")
    assert "values are too large for a standard deviation" in capsys.readouterr().err


def test_a_silo_in_another_unit_is_noted(tmp_path):
    """A silo with milligrams beside silos with grams was scaled like them without a word."""
    frame, how = table(), ["--columns", tmp_path / "columns.json"]
    assert not prepare(tmp_path, frame, *how, name="silo0")[1]["notes"][1:]
    assert not any("unit" in note for note in prepare(tmp_path, frame.tail(50), *how, name="silo1")[1]["notes"])
    other = frame.assign(b=1000 * (frame.b + 5))
    (note,) = [one for one in prepare(tmp_path, other, *how, name="silo2")[1]["notes"] if "unit" in one]
    assert note.startswith("b: its mean is ") and note.endswith("in the file of --columns: is the unit the same?")


def test_a_file_for_other_silos_says_nothing_of_single_rows(tmp_path, capsys):
    """It had every category of the first silo, also one that a single patient has, and medians that are one row's."""
    shared = tmp_path / "columns.json"
    ward = np.array(["surgery", "neurology"] * 50, dtype=object)
    ward[:4], ward[4:8] = "Rare-one", "Rare-two"
    frame = table(ward=ward)
    words = ["--columns", shared, "--one-hot", "ward", "--test-share", "0.5"]
    source, account = prepare(tmp_path, frame, *words)
    content = json.loads(shared.read_text())
    assert content["columns"]["ward"] == ["neurology", "surgery"] and "Rare" not in shared.read_text()
    (note,) = [note for note in account["notes"] if note.startswith("ward: ")]
    assert note == "ward: 8 of 100 rows have categories of fewer than 5 rows (--least): they count as unknown"
    assert "Rare" not in capsys.readouterr().out
    with h5py.File(tmp_path / "t.h5") as file:
        assert not any("Rare" in str(value) for value in file.attrs.values())
        training = file["train/images"][:]
    assert sum(column(source, number).sum() for number in (2, 3)) == 92  # unknown ones have 0 in both
    middle = np.sort(training[:, 0].astype(float))[22:28]  # of 50; no single one of them
    assert content["columns"]["a"]["median"] == pytest.approx(middle.mean())
    # Another silo's rare categories are unknown; of one of 5 rows, the others should know.
    other, theirs = table(ward=["surgery"] * 94 + ["Other"] * 4 + ["Single"] * 2), words[:2]
    account = prepare(tmp_path, other, *theirs)[1]
    assert any(note.startswith("ward: 6 of 100 rows have categories that the file of") for note in account["notes"])
    (tmp_path / "t.h5").unlink()
    other["ward"] = ["surgery"] * 95 + ["Other"] * 5
    error = refused(capsys, tmp_path, other, *theirs)
    assert "column ward contains Other, which is not among neurology, surgery: add it" in error
    prepare(tmp_path, other, *theirs, "--least", 6)
    (tmp_path / "t.h5").unlink()
    other["ward"] = ["surgery"] * 98 + ["Surgery "] * 2  # a mistake, however rare
    assert '"aliases": {"ward": {"Surgery": "surgery"}}' in refused(capsys, tmp_path, other, *theirs)
    # Without such a file, or with --least 1, every category is a feature.
    account = prepare(tmp_path, frame, "--one-hot", "ward")[1]
    assert len(HDF5Source(tmp_path / "t.h5").attributes["feature_names"]) == 6 and "ward" not in str(account["notes"])
    prepare(tmp_path, frame, "--columns", tmp_path / "all.json", "--one-hot", "ward", "--least", 1)
    assert "Rare-one" in (tmp_path / "all.json").read_text()


def test_rare_classes_and_columns_of_few_numbers_are_not_written_for_other_silos(tmp_path, capsys):
    shared = tmp_path / "columns.json"
    rare = table()
    rare.loc[:3, "y"] = "Rare-code"
    error = refused(capsys, tmp_path, rare, "--columns", shared)
    assert "column y has 1 class of fewer than 5 rows" in error and "Rare" not in error and not shared.exists()
    prepare(tmp_path, rare, "--columns", shared, "--classes", "Rare-code,n,p")  # they may know
    (tmp_path / "t.h5").unlink()
    shared.unlink()
    few = table(c=[0.5, 7.25, 3.5] + [np.nan] * 97)
    error = refused(capsys, tmp_path, few, "--columns", shared, "--missing", "median")
    assert "column c has fewer than 5 rows with a number" in error and not shared.exists()
    assert "--least 0: expected at least 1" in refused(capsys, tmp_path, few, "--least", 0)


@pytest.mark.parametrize(
    ("values", "least", "median"),
    [
        ([1, 2, 3, 4, 100], 5, 22),
        ([*range(10)], 5, 4.5),
        ([0, 0, 0, 0, 0, 1, 1, 1], 5, 0),  # 5 rows have it
        ([0, 1, 5, 7, 9, 11, 50], 5, 6.6),
        ([0, 1, 5, 7, 9, 11, 50], 1, 7),
        ([3, 9], 5, 6),
        ([7], 5, 7),
    ],
)
def test_a_median_of_several_rows(values, least, median):
    assert middle_of(np.array(values, float), least) == pytest.approx(median)
