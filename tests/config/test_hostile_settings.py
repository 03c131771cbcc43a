"""Settings files from strangers: data of a limited size that mean what a person reads, or one line."""

import os

import pytest

from fedmpi.config.build import read_command_line
from fedmpi.config.grammar import read_file
from fedmpi.errors import UserError
from fedmpi.presets.reading import LARGEST_FILE

BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}, *{old}, *{old}, *{old}, *{old}, *{old}]\n" for old, new in zip("abcdef", "bcdefg")
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, r"line 2: an alias \(\*\)"),
        ("seed: 1\nrounds: 3\nseed: 2\n", "line 3: the key seed appears twice"),
        ("algorithm: {name: fafed, name: stem}\n", "the key name appears twice"),
        ("seed: !!python/object/apply:os.system ['true']\n", "a tag"),
        ("seed: !!set {a, b}\n", "a tag"),
        ("? [a, b]\n: 1\n", "a key that is not a word"),
        ("1: 2\n", "the key 1: expected a word"),
        ("a: " + "[" * 500 + "]" * 500, "nested more than 20 levels"),
        ("a: " + "{b: " * 3000 + "1" + "}" * 3000, "nested more than 20 levels"),
        ("a: " + "9" * 500, "a number of more than 400 digits"),
        ("a: " + "9" * 5000, "cannot be read"),
        ("- 1\n", "expected settings like"),
        ("", "expected settings like"),
        ("a: \x1b[31m\n", "cannot be read"),
        ("\ufeffa: [", "cannot be read"),
        ("x" * (LARGEST_FILE + 1), "expected at most"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_a_hostile_file_is_one_line(tmp_path, text, message):
    (tmp_path / "it.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message) as error:
        read_file(tmp_path / "it.yaml", "--config")
    line = str(error.value)
    assert line.startswith(f"--config {tmp_path}/it.yaml: ") and line.isprintable() and len(line) < 600


def test_toml_is_limited_too(tmp_path):
    for text in ("a = " + "[" * 3000 + "]" * 3000, "a = " + "9" * 500, "a = 1\na = 2\n"):
        (tmp_path / "it.toml").write_text(text)
        with pytest.raises(UserError):
            read_file(tmp_path / "it.toml")


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "fifo.yaml")
    for path in (tmp_path / "fifo.yaml", type(tmp_path)("/dev/zero"), tmp_path):
        with pytest.raises(UserError, match="expected a regular file"):
            read_file(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 010", "seed = 010: expected a whole number, without leading zeros"),
        ("rounds: 1:30", "rounds = 1:30: expected a whole number, without leading zeros and colons"),
        ("batch_size: 2024-01-01", "batch_size = 2024-01-01: expected a whole number"),
        ("algorithm: {name: fafed, step_size: 1:30.5}", "algorithm.step_size = 1:30.5: expected a finite number"),
        ("rounds: 1e999", "rounds = 1e999: expected a whole number"),
        ("algorithm: {name: fedavg, step_size: 1.0e+999}", "algorithm.step_size = "),
        ("seed: " + "9" * 30, "of fewer than 19 digits"),
        ("rounds: {}", "rounds = {}: expected a whole number"),
        ("rounds: [1, 2]", "rounds = "),
        ("clients: 10000000", "clients = 10000000: expected a number >= 1 and <= 1000000"),
    ],
)
def test_values_that_mean_something_else_are_refused(tmp_path, text, message):
    (tmp_path / "it.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        read_command_line(["--config", str(tmp_path / "it.yaml")])
    assert "\n" not in str(error.value)


def test_words_of_yaml_1_1_stay_words(tmp_path):
    (tmp_path / "it.yaml").write_text("name: no\nout: 010\nrounds: 1_000\nseed: 7\nalgorithm: {step_size: 1e-3}\n")
    config = read_command_line(["--config", str(tmp_path / "it.yaml")])
    assert (config.run.name, config.run.out, config.run.rounds, config.run.seed) == ("no", "010", 1000, 7)
    assert config.algorithm.step_size == 1e-3
