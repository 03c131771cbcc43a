"""The one grammar of settings: keys, values and layers are read in the same way from everywhere."""

import pathlib
import typing
from collections.abc import Mapping, Sequence

import pytest
import yaml

from fedmpi.cli.sweep.plan import make_plan
from fedmpi.config.build import CHOICES, STAGES
from fedmpi.config.grammar import (
    as_text,
    assignments_of,
    find_key,
    merge,
    parse_command_line,
    read_file,
    spelling,
    typed,
)
from fedmpi.config.sections import GROUPS
from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import setting
from fedmpi.training.config import read_command_line
from fedmpi.training.settings import RunSettings


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ("--Local-Steps", "local_steps"),
        ("local_steps", "local_steps"),
        ("Algorithm.step-size", "algorithm.step_size"),
        ("model.numLayers", "model.numLayers"),  # an argument of a user's class
    ],
)
def test_a_key_has_one_spelling_everywhere(tmp_path, written, key):
    plain = written.removeprefix("--")
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"settings": {plain: 3}, "grid": {"seed": [0]}}))
    assert spelling(written) == key
    assert parse_command_line([f"--{plain}", "3"])[0] == assignments_of({plain: 3}) == [(key, "3")]
    assert make_plan(tmp_path, tmp_path / "plan.yaml", [], []).common == {key: "3"}
    assert make_plan(tmp_path, None, ["seed=0"], [f"--{plain}=3"]).common == {key: "3"}
    assert make_plan(tmp_path, None, [f"{plain}=3"], []).runs[0].varied == {key: "3"}


def test_an_argument_of_a_class_is_found_in_any_case_its_own_first():
    assert find_key("model.numlayers", ["model.numLayers"]) == "model.numLayers"
    assert find_key("model.N", ["model.n", "model.N"]) == "model.N"
    assert find_key("model.m", ["model.n"]) is None
    assert read_command_line(["--algorithm.STEP-SIZE", "0.5"]).algorithm.step_size == 0.5


@pytest.mark.parametrize(
    ("text", "value"), [("2026-11-22", "2026-11-22"), ("null", "null"), ("[0.5, 1]", "[0.5, 1]"), ("yes", "true")]
)
def test_a_value_in_a_file_is_the_text_of_the_command_line(text, value):
    assert as_text(yaml.safe_load(text)) == value


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("7", int, 7),
        ("1_000", int | None, 1000),
        ("1e-3", float, 0.001),
        ("7", float | None, 7.0),
        ("no", bool, False),
        ("null", str | None, None),
        ("null", str, "null"),
        ("[1, 2]", str, "[1, 2]"),
        ("[1, 2.5]", list[float], [1.0, 2.5]),
        ("[1, 2]", tuple[int, int], (1, 2)),
        ("[]", tuple[int, ...] | None, ()),
        ("{a: 1}", dict[str, float], {"a": 1.0}),
        ("[1, 2]", Sequence[int], [1, 2]),
        ("{a: 1}", Mapping[str, int], {"a": 1}),
        ("mean", typing.Literal["mean", "sum"], "mean"),
        ("[1, 2]", int | list[int], [1, 2]),
        ("1e-3", typing.Any, 0.001),
        ("off", typing.Any, False),
        ("word #2", typing.Any, "word #2"),
    ],
)
def test_a_text_is_read_as_the_type_of_its_setting(text, hint, value):
    read = typed(text, hint)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", int), ("", int | None), ("1.0", int), ("0x10", int), ("true", int), ("1", bool), ("word", float),
        ("[1, a]", list[int]), ("[1]", tuple[int, int]), ("5", list), ("max", typing.Literal["mean"]),
        ("[1]", typing.Callable), ("5", Sequence[int]), ("[1]", typing.TypeVar("T")), ("[1]", typing.Literal["a"]),
        ("[*x]", list), ("!!set {a}", dict), ("[" * 5000, list),
    ],
)  # fmt: skip
def test_a_text_of_another_type_is_refused(text, hint):
    with pytest.raises(ValueError):
        typed(text, hint)


def test_null_takes_a_setting_of_a_file_back(tmp_path):
    (tmp_path / "run.yaml").write_text("epochs: 2\npartition: halves\nmodel: mlp\nname: 2026-11-22\n")
    config = read_command_line(["--config", str(tmp_path / "run.yaml")])
    assert (config.rounds.epochs, config.folder.name, config.resolved["partition"]["name"]) == (
        2,
        "2026-11-22",
        "halves",
    )
    words = ["--epochs", "null", "--partition", "null", "--model", "null", "--name", "null"]
    config = read_command_line(["--config", str(tmp_path / "run.yaml"), *words])
    assert (config.rounds.epochs, config.folder.name, config.model_class) == (None, None, None)
    assert config.resolved["partition"]["name"] == "even"


def test_later_layers_override_earlier_ones():
    preset = [("algorithm", "fafed"), ("algorithm.epsilon", "1"), ("epochs", "3"), ("task.data", "mnist")]
    file = [("algorithm", "Fed_Avg"), ("rounds", "5"), ("data", "digits")]
    merged = dict(merge([preset, file], {"fedavg": {"step_size": 0.5}}))
    assert merged == {"algorithm": "Fed_Avg", "algorithm.step_size": "0.5", "rounds": "5", "task.data": "digits"}
    same = merge([preset, [("algorithm", "FAFED")]], {"fafed": {"step_size": 0.5}})
    assert ("algorithm.epsilon", "1") in same and ("algorithm.step_size", "0.5") not in same


def test_plans_are_toml_files_too(tmp_path):
    pytest.importorskip("tomllib")
    (tmp_path / "plan.toml").write_text('[settings]\nrounds = 5\n[grid]\n"algorithm.step_size" = [0.1, 0.2]\n')
    plan = make_plan(tmp_path, tmp_path / "plan.toml", [], [])
    assert plan.common == {"rounds": "5"}
    assert [run.varied for run in plan.runs] == [{"algorithm.step_size": text} for text in ("0.1", "0.2")]


def test_settings_that_one_cannot_write_down():
    with pytest.raises(UserError, match="missing.yaml: cannot be read"):
        read_file(pathlib.Path("missing.yaml"))
    with pytest.raises(TypeError, match="role haste"):
        setting(1, "a setting", role="haste")
    with pytest.raises(TypeError, match="bounds"):
        setting(1, "a setting", atleast=1)


def test_roles():
    by_role = {}
    for name, its_role in RunSettings.roles().items():
        by_role.setdefault(its_role, set()).add(name)
    assert by_role["seed"] == {"seed"}
    assert by_role["place"] == {
        "data_dir", "out", "name", "ranks", "track",
        "resume", "checkpoint_every", "checkpoint_minutes", "checkpoint_keep", "checkpoint_clients",
        "baselines", "baselines_step_sizes", "cross_site",
    }  # fmt: skip
    assert by_role["speed"] == {
        "eval_every", "evaluate", "evaluate_samples", "scores",
        "device", "threads", "transport", "timeout", "on_loss", "check_replicas",
        "deterministic",
    }  # fmt: skip
    assert set(GROUPS) == {*CHOICES, STAGES} and set(RunSettings.roles()) == {*RunSettings.declared(), *GROUPS}
    assert [RunSettings.role(key) for key in ("result", "task.data", "oracle", "of_a_newer_version")] == [
        "learning", "problem", "learning", "learning"
    ]  # fmt: skip
