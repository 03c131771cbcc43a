"""What `data prepare` notes about a table, and what comes of the words that it names: each is followed here."""

import json
import re
import shlex

import numpy as np
import pandas
import pytest
from test_columns import column, prepare, prepared, refused, table

import fedmpi
from fedmpi.prepare.formats import notes

DRAW = np.random.default_rng(7)
AGE = DRAW.integers(20, 90, 200)


@pytest.fixture(autouse=True)
def equal_draws():
    """Every test draws the same, whichever tests the same process has run before."""
    DRAW.bit_generator.state = np.random.default_rng(0).bit_generator.state


def notes_of(account):
    """All notes, but that labels follow from a column, as they do in these tables."""
    return [line for line in account["notes"] if "its order is that of" not in line]


def noted(account, name):
    """The only note, which is on this column, besides on classes that are in one part only."""
    (line,) = [line for line in notes_of(account) if not line.startswith("labels: ")]
    assert line.startswith(f"{name}: ")
    return line


def advised(line, option):
    """The words of a line from an option on, as a shell divides them: up to the end of its own values."""
    words = shlex.split(re.split(r", if |; ", line[line.index(option) :])[0])
    return words


def with_values(value, count, others):
    values = np.array(others, float)
    values[:count] = value
    return values


@pytest.mark.parametrize("ending", ["csv", "parquet", "xlsx"])
@pytest.mark.parametrize("value", [-999, -9, 9999, 99])
def test_values_that_mean_none_are_named_and_left_out_as_advised(tmp_path, value, ending):
    """They were values: a mean of -40 where 3.9 is right."""
    known = DRAW.gamma(2, 2, 200).round(2)
    frame = pandas.DataFrame({"age": AGE, "crp": with_values(value, 12, known), "y": np.where(AGE > 50, "p", "n")})
    path = tmp_path / f"t.{ending}"
    {"csv": frame.to_csv, "parquet": frame.to_parquet, "xlsx": frame.to_excel}[ending](path, index=False)
    _, account = prepared(tmp_path, path)
    line = noted(account, "crp")
    assert f"has the value {value} in 12 rows" in line
    words = advised(line, "--na-in")
    source, account = prepared(tmp_path, path, *words)
    assert not notes_of(account)
    assert (column(source, 1) == np.float32(value)).sum() == 0
    filled = np.sort([*known[12:], *[np.median(source.read("train", np.arange(160))[:, 1])] * 12])
    assert np.median(column(source, 1)) == pytest.approx(np.median(filled), rel=0.02)
    for_all, _ = prepared(tmp_path, path, "--na", value, "--missing", "median")
    assert np.array_equal(column(for_all, 1), column(source, 1))


def test_values_of_other_columns_stay_when_one_column_has_none(tmp_path):
    frame = table(t=np.tile([-9.0, -3, 4, 12], 25), crp=with_values(-9, 5, DRAW.gamma(2, 2, 100).round(1)))
    source, account = prepare(tmp_path, frame, "--na-in", "crp=-9", "--missing", "median")
    names = source.attributes["feature_names"].tolist()
    assert (column(source, names.index("t")) == -9).sum() == 25 and column(source, names.index("crp")).min() >= 0
    assert "--na-in crp=-9" in account["command"] and not notes_of(account)


@pytest.mark.parametrize(
    "values",
    [
        DRAW.integers(20, 100, 100),  # ages, of which one may be 99
        np.tile([-1.0, 0, 1, 2], 25),
        np.tile([-9.0, -8, 3, 9], 25),
        DRAW.integers(88, 180, 100),
        np.tile([7.0, 8, 9], 34)[:100],
        DRAW.normal(-900, 60, 100).round(),
    ],
)
def test_ordinary_values_are_not_named(tmp_path, values):
    _, account = prepare(tmp_path, table(c=values))
    assert not [line for line in account["notes"] if "has the value" in line]


def visits(names=("patient", "visit"), constant=True):
    """40 patients with 10 visits each, whose measurements are their own, and whose label is drawn."""
    patient = np.repeat(np.arange(40), 10)
    own = DRAW.standard_normal((40, 3))[patient] + 0.05 * DRAW.standard_normal((400, 3))
    labels = DRAW.integers(0, 2, 40)[patient] if constant else DRAW.integers(0, 2, 400)
    frame = pandas.DataFrame(own.round(3), columns=[*"abc"])
    return frame.assign(**{names[0]: patient, names[1]: np.tile(np.arange(10), 40), "ill": labels})


@pytest.mark.parametrize("name", ["patient", "PatientID", "subject_no", "mrn", "id", "visit_id", "number", "k"])
@pytest.mark.parametrize("constant", [True, False])
def test_numbers_of_patients_are_named_and_kept_apart_as_advised(tmp_path, name, constant):
    """They were a feature, and each patient's rows were to train and to test."""
    frame = visits((name, "visit"), constant)
    source, account = prepare(tmp_path, frame)
    line = noted(account, name)
    assert "40 numbers in 400 rows" in line
    source, account = prepare(tmp_path, frame, *advised(line, "--group"))
    assert source.attributes["feature_names"].tolist() == ["a", "b", "c", "visit"] and not notes_of(account)
    sides = [{*source.column(name, split).tolist()} for split in ("train", "test")]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 40


def test_ordinary_whole_numbers_are_no_identifiers(tmp_path):
    """Ages, counts and scores explain others, too, but smoothly."""
    age = DRAW.integers(20, 90, 600)
    frame = pandas.DataFrame(
        {
            "age": age,
            "pressure": (90 + 0.8 * age + 8 * DRAW.standard_normal(600)).round(),
            "score": age // 3 + DRAW.integers(0, 4, 600),
            "days": DRAW.poisson(9, 600),
            "valid": DRAW.integers(0, 15, 600),  # "id" is in its name
            "caseload": DRAW.integers(0, 15, 600),
            "y": np.where(age + 20 * DRAW.standard_normal(600) > 55, "p", "n"),
        }
    )
    assert not notes_of(prepare(tmp_path, frame)[1])


def quantity(digits):
    x = DRAW.standard_normal((300, 2)).round(3)
    return pandas.DataFrame({"a": x[:, 0], "b": x[:, 1], "days": (20 + 5 * x[:, 0] - 3 * x[:, 1]).round(digits)})


@pytest.mark.parametrize("digits", [0, 1])
def test_a_quantity_as_label_is_named_and_learned_as_advised(tmp_path, monkeypatch, digits):
    """Every value became a class, without a word."""
    import torch

    monkeypatch.chdir(tmp_path)
    frame = quantity(digits)
    line = noted(prepare(tmp_path, frame)[1], "days")
    assert "is it a quantity?" in line and 'fedmpi.train(task="regression")' in line
    values = torch.tensor(frame.to_numpy(), dtype=torch.float32)
    values = (values - values.mean(0)) / values.std(0)
    sets = [torch.utils.data.TensorDataset(part[:, :2], part[:, 2:]) for part in values.chunk(3)]
    algorithm = fedmpi.algorithms.FedAvg(step_size=0.1)
    run = fedmpi.train(task="regression", data=sets[:2], test_data=sets[2], model=torch.nn.Linear(2, 1),
                       algorithm=algorithm, rounds=40, threads=1)  # fmt: skip
    assert run.final["r2"] > 0.95
    other = frame.assign(y=np.where(frame.a > 0, "p", "n"))[["y", "a", "b", "days"]]
    account = prepare(tmp_path, other, *advised(line.replace("COLUMN learn another column", "y"), "--drop")[:2],
                      "--label", "y")[1]  # fmt: skip
    assert [*account["features"]] == ["a", "b"] and [*account["classes"]] == ["n", "p"]


@pytest.mark.parametrize("labels", [np.arange(300) % 10, np.arange(900) % 30, np.array([*"ab"] * 150)])
def test_classes_that_are_numbers_are_no_quantity(tmp_path, labels):
    frame = pandas.DataFrame({"a": DRAW.standard_normal(len(labels)).round(3), "y": labels})
    assert not [line for line in prepare(tmp_path, frame)[1]["notes"] if "quantity" in line]


def mixed(marks="., ", number=100):
    fields = [f"{value:.2f}" for value in DRAW.gamma(2, 2, number)]
    return [field.replace(".", ",") if index % 9 == 3 else field for index, field in enumerate(fields)]


def test_both_decimal_marks_are_read_as_advised(tmp_path, capsys):
    """The advice was `--decimal ,`, which the other numbers refused."""
    fields = mixed()
    frame = pandas.DataFrame({"age": AGE[:100] + 0.5, "crp": fields, "y": np.where(AGE[:100] > 50, "p", "n")})
    error = refused(capsys, tmp_path, frame.to_csv(index=False, sep=";"))
    assert "--decimal .," in error and "--decimal ,," not in error and f"--na {fields[3]}" not in error
    source, account = prepare(tmp_path, frame.to_csv(index=False, sep=";"), "--decimal", ".,")
    expected = np.sort([float(field.replace(",", ".")) for field in fields])
    assert np.allclose(column(source, 1), expected) and account["features"]["age"] == "numbers"


def test_a_comma_alone_is_read_as_advised(tmp_path, capsys):
    fields = [f"{value:.2f}".replace(".", ",") for value in DRAW.gamma(2, 2, 100)]
    frame = pandas.DataFrame({"age": AGE[:100], "crp": fields, "y": np.where(AGE[:100] > 50, "p", "n")})
    error = refused(capsys, tmp_path, frame.to_csv(index=False, sep=";"))
    assert "--decimal ,," in error and "--decimal .," not in error
    source, _ = prepare(tmp_path, frame.to_csv(index=False, sep=";"), "--decimal", ",")
    assert np.allclose(column(source, 1), np.sort([float(field.replace(",", ".")) for field in fields]))


def test_units_are_named_and_left_out_as_advised(tmp_path):
    """The column was lost: "words, 406 of 600 differ"."""
    known = DRAW.gamma(2, 2, 100).round(2)
    frame = table(crp=[f"{value} mg/L" for value in known])
    _, account = prepare(tmp_path, frame)
    line = account["not_used"]["crp"]
    assert "100% are numbers with a unit, mg/L (100)" in line
    source, account = prepare(tmp_path, frame, *advised(line.removesuffix(" leaves it out"), "--unit"))
    names = source.attributes["feature_names"].tolist()
    assert np.allclose(column(source, names.index("crp")), np.sort(known))
    assert "--unit mg/L" in account["command"]
    frame.loc[3, "crp"] = "12 mg/dL"
    assert "mg/L (99), mg/dL (1): expected one unit" in prepare(tmp_path, frame)[1]["not_used"]["crp"]


def test_the_share_of_words_among_numbers_is_said_and_they_are_left_out_as_advised(tmp_path):
    known = DRAW.gamma(2, 2, 100).round(2)
    frame = table(crp=["not done" if index % 4 == 0 else str(value) for index, value in enumerate(known)])
    line = prepare(tmp_path, frame)[1]["not_used"]["crp"]
    assert "25% are no numbers, most often not done (25)" in line
    source, account = prepare(tmp_path, frame, *advised(line, "--na-in"))
    assert account["features"]["crp"] == "numbers" and "crp" not in account["not_used"]


def test_lines_of_a_title_in_excel_are_left_out(tmp_path, capsys):
    frame = table()
    with pandas.ExcelWriter(tmp_path / "t.xlsx") as book:
        frame.to_excel(book, index=False, startrow=3)
        book.sheets["Sheet1"]["A1"] = "Study X, export of 2026-01-31"
    with pytest.raises(SystemExit):
        prepared(tmp_path, tmp_path / "t.xlsx")
    assert "--skip-lines 1 leaves out a title" in capsys.readouterr().err
    plain, _ = prepare(tmp_path, frame)
    for lines in ("1", ["1", "2", "3"]):
        source, account = prepared(tmp_path, tmp_path / "t.xlsx", "--skip-lines", *lines)
        assert np.array_equal(column(source), column(plain)) and len(source.labels["train"]) == 80
    frame.to_parquet(tmp_path / "t.parquet")
    for words in (["--skip-lines", "1"], ["--separator", ";"]):
        with pytest.raises(SystemExit):
            prepared(tmp_path, tmp_path / "t.parquet", *words)
        assert f"{words[0]}: has no meaning for" in capsys.readouterr().err


def hospitals(folder):
    """Two tables with the same columns, in another order: the label is not the last one of the second."""
    for name, order in (("A", ["age", "smoker", "ill"]), ("B", ["age", "ill", "smoker"])):
        age = DRAW.integers(20, 90, 200)
        frame = pandas.DataFrame({"age": age, "ill": np.where(age > 50, "yes", "no")})
        frame = frame.assign(smoker=np.where(DRAW.integers(0, 2, 200), "yes", "no"), clinic=np.repeat(range(20), 10))
        frame[[*order[:1], "clinic", *order[1:]]].to_csv(folder / f"{name}.csv", index=False)


def test_the_file_of_columns_knows_label_and_groups(tmp_path, capsys):
    """The second silo learned its own last column: .667 where .850 is right."""
    hospitals(tmp_path)
    agreed = tmp_path / "columns.json"
    words = ["--columns", agreed]
    prepared(tmp_path, tmp_path / "A.csv", *words, "--group", "clinic", "--na", "-9")
    assert json.loads(agreed.read_text())["label"] == "ill"
    source, account = prepared(tmp_path, tmp_path / "B.csv", *words)
    ages = source.read("train", np.arange(len(source.labels["train"])))[:, 0]
    assert account["label"] == "ill" and np.array_equal(source.labels["train"], ages > 50)
    assert not {*source.column("clinic", "train")} & {*source.column("clinic", "test")}
    frame = pandas.read_csv(tmp_path / "B.csv")
    frame.rename(columns={"ill": "sick"}).to_csv(tmp_path / "C.csv", index=False)
    frame.drop(columns="clinic").to_csv(tmp_path / "D.csv", index=False)
    (tmp_path / "old.json").write_text(json.dumps({**json.loads(agreed.read_text()), "label": ""}))
    for name, more, line in (
        ("B.csv", ["--label", "smoker"], "was made with --label ill: expected the same, not smoker"),
        ("B.csv", ["--group", "age"], "was made with --group clinic: expected the same, not age"),
        ("B.csv", ["--censored", "half"], "--censored half: expected no --censored"),
        ("C.csv", [], "has no column ill, which is the label in --columns"),
        ("D.csv", [], "has no column clinic, which is the group in --columns"),
        ("B.csv", ["--columns", tmp_path / "old.json"], "does not say which column is the label"),
    ):
        with pytest.raises(SystemExit):
            prepared(tmp_path, tmp_path / name, *words, *more)
        assert line in capsys.readouterr().err


def test_a_silo_with_other_marks_keeps_what_the_first_says_of_missing_values(tmp_path):
    """`--decimal ,` replaced all that the file of --columns says of fields: -999 was a value again."""
    known = DRAW.gamma(2, 2, 100).round(2)
    frame = table(crp=with_values(-999, 5, known))
    words = ["--columns", tmp_path / "columns.json", "--missing", "median"]
    prepare(tmp_path, frame, *words, "--na", "-999", name="a")
    text = frame.to_csv(index=False, sep=";", decimal=",")
    source, _ = prepare(tmp_path, text, *words, "--decimal", ",", "--na", "?", name="b")
    assert column(source, source.attributes["feature_names"].tolist().index("crp")).min() >= 0


def test_markers_are_numbers_of_one_digit():
    assert {-9, -99, -999, -9999, 99, 999, 9999, 888, -77} <= {*notes.MARKERS}
