"""Settings files from strangers: data of a limited size that mean what a person reads, or one line."""

import os
import re
import time

import pytest

import fedmpi
import fedmpi.algorithms
from fedmpi.config.grammar import read_file
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.settings_files import LARGEST_FILE
from fedmpi.training.config import read_command_line

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
        ("seed: 0\n? [a, b]\n: 1\n", "line 2: a key that is not a word"),
        ("1: 2\n", "the key 1: expected a word"),
        ("a: " + "[" * 500 + "]" * 500, "nested more than 20 levels"),
        ("a: " + "{b: " * 3000 + "1" + "}" * 3000, "nested more than 20 levels"),
        ("a: 1" + "0" * 400, "a number of more than 400 digits"),
        ("a: -1" + "0" * 400, "a number of more than 400 digits"),
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


def test_what_is_just_within_the_limits_is_read(tmp_path):
    (tmp_path / "it.yaml").write_text("a: " + "9" * 400 + "\nb: " + "[" * 19 + "1" + "]" * 19 + "\nc: -1_000\n")
    content = read_file(tmp_path / "it.yaml")
    assert (content["a"], content["c"]) == (10**400 - 1, -1000) and str(content["b"]) == "[" * 19 + "1" + "]" * 19


def test_toml_is_limited_too(tmp_path):
    for text in ("a = " + "[" * 3000 + "]" * 3000, "a = " + "9" * 500, "a = 1\na = 2\n"):
        (tmp_path / "it.toml").write_text(text)
        with pytest.raises(UserError):
            read_file(tmp_path / "it.toml")
    for begin, end in ("[", "]"), ("{b = ", "}"):
        (tmp_path / "it.toml").write_text(f"a = {begin * 19}1{end * 19}")
        assert str(read_file(tmp_path / "it.toml")).endswith("1" + end * 19 + "}")
        (tmp_path / "it.toml").write_text(f"a = {begin * 20}1{end * 20}")
        with pytest.raises(UserError, match="nested more than 20 levels deep"):
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
        ("stop: accuracy", "stop = accuracy: expected a metric, >= or <=, and a number, like accuracy>=0.9"),
        ("stop: accuracy>=nan", "stop = accuracy>=nan: expected a metric"),
    ],
)
def test_values_that_mean_something_else_are_refused(tmp_path, text, message):
    (tmp_path / "it.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        read_command_line(["--config", str(tmp_path / "it.yaml")])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("local-steps: 1\nlocal_steps: 2", "gives local_steps twice, as local-steps and as local_steps: leave one of"),
        ("Rounds: 1\nrounds: 2", "gives rounds twice, as Rounds and as rounds"),
        ("data: digits\ntask: {data: other}", "gives task.data twice, as data and as task.data"),
        ("algorithm: {step-size: 1, step_size: 2}", "as algorithm.step-size and as algorithm.step_size"),
        ("algorithm: {Step_Size: 1, step_size: 2}", "as algorithm.Step_Size and as algorithm.step_size"),
        ("algorithm: fafed\nAlgorithm: {name: fedavg}", "gives algorithm twice, as algorithm and as Algorithm"),
        ("algorithm.step_size: 1\nalgorithm: {step_size: 2}", "gives algorithm.step_size twice"),
        ("local-steps = 1\nlocal_steps = 2", "gives local_steps twice, as local-steps and as local_steps"),
        ("data = 'digits'\n[task]\ndata = 'other'", "gives task.data twice, as data and as task.data"),
    ],
)
@pytest.mark.parametrize("flag", ["--config", "--preset"])
def test_a_setting_in_two_spellings_is_refused(tmp_path, monkeypatch, text, message, flag):
    path = tmp_path / ("it.toml" if " = " in text else "it.yaml")
    if path.suffix == ".toml":
        pytest.importorskip("tomllib")
    path.write_text(text)
    monkeypatch.setattr("fedmpi.config.layers.preset_path", lambda name: path)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        read_command_line([flag, str(path)])
    assert str(error.value).startswith(f"{flag} {path}: ")


def test_on_the_command_line_the_last_one_counts(tmp_path):
    (tmp_path / "it.yaml").write_text("rounds: 7\n")
    words = ["--config", str(tmp_path / "it.yaml"), "--rounds", "1", "--Rounds=2", "--data", "a", "--task.data", "b"]
    config = read_command_line(words)
    assert config.rounds.rounds == 2 and config.task.data == "b"


def test_arguments_of_a_program_in_two_spellings_are_refused():
    with pytest.raises(UserError, match="gives local_steps twice, as local_steps and as local-steps"):
        fedmpi.train(**{"local_steps": 1, "local-steps": 2})
    with pytest.raises(UserError, match="gives task.data twice, as data and as task.data"):
        fedmpi.train(data="digits", task={"data": "other"})


@pytest.mark.parametrize("key", ["name", "out", "data", "data_dir", "init", "track", "checkpoint_clients"])
def test_a_text_with_a_zero_in_it_is_refused(tmp_path, key):
    (tmp_path / "it.yaml").write_text(f'{key}: "a\\0b"\n')
    for words in ([f"--{key}", "a\0b"], ["--config", str(tmp_path / "it.yaml")]):
        with pytest.raises(UserError, match=f"{key} = a b: expected a text without the character 0"):
            read_command_line(words)


@pytest.mark.parametrize("text", ["1e300", "1e31"])
@pytest.mark.parametrize("key", ["epochs", "timeout", "algorithm.step_size", "oracle.smoothing", "task.ascent_scale"])
def test_absurd_numbers_are_refused(key, text):
    words = ["--task", "auc", "--oracle", "two_point", f"--{key}={text}"]
    with pytest.raises(UserError, match=r"expected a number (of at most 1e\+30|>)") as error:
        read_command_line(words)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("number", [10**400, -(10**400), 10**5000, 1e300], ids=lambda number: f"{number > 0}")
def test_absurd_numbers_from_a_program_are_refused(number):
    with pytest.raises(UserError, match=r"algorithm.step_size = about -?10\^\d+: expected a number of at most 1e\+30"):
        fedmpi.algorithms.FedAvg(step_size=number)


@pytest.mark.parametrize("folder", ["{0}", "{client!r}", "{client:03d}", "{rank", "}{client}"])
def test_other_words_in_braces_are_refused(folder):
    with pytest.raises(UserError, match="expected a path with {client}, {rank} and nothing else in braces"):
        read_command_line(["--checkpoint-clients", folder])


def test_thousands_of_unknown_settings_are_a_short_line_at_once(tmp_path):
    (tmp_path / "it.yaml").write_text("".join(f"unknown_{number}: 1\n" for number in range(20_000)))
    words = [word for number in range(20_000) for word in (f"--unknown_{number}", "1")]
    message = "unknown setting unknown_0.*; also unknown: unknown_1, unknown_2, unknown_3, and 19,996 more$"
    for arguments in (words, ["--config", str(tmp_path / "it.yaml")]):
        began = time.process_time()
        with pytest.raises(UserError, match=message):
            read_command_line(arguments)
        assert time.process_time() - began < 4  # 0.4 s and 1.2 s


def test_words_of_yaml_1_1_stay_words(tmp_path):
    (tmp_path / "it.yaml").write_text("name: no\nout: 010\nrounds: 1_000\nseed: 7\nalgorithm: {step_size: 1e-3}\n")
    config = read_command_line(["--config", str(tmp_path / "it.yaml")])
    assert (config.folder.name, config.folder.out, config.rounds.rounds, config.data.seed) == ("no", "010", 1000, 7)
    assert config.algorithm.step_size == 1e-3
