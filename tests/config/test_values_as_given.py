"""What a Python program gives is what arrives: no text becomes a number, and the record gives the same run back."""

import pathlib
import sys
import types
import typing

import numpy as np
import pytest
import torch

import fedmpi
from fedmpi.comm.solo import SoloLink
from fedmpi.config.build import resolve
from fedmpi.config.grammar import read_file
from fedmpi.config.layers import read_layers
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.settings_files import settings_text
from fedmpi.training.api import _read
from fedmpi.training.build import read_config
from fedmpi.training.config import Config, read_command_line

TEXTS = (
    "on", "off", "yes", "no", "1e3", "1e-3", "0x10", "1_000", "12:30", "010", "nan", ".nan", "inf", "null", "~", "",
    " on ", "true", "3", "[1, 2]", "{a: 1}", "# no remark", "a: b", "'quoted'", '"quoted"', "é", "line\nline", "word",
    "2026-11-22", "-", "*x", "9" * 500,
)  # fmt: skip
OTHERS = (None, True, 3, 0.5, 1e-5, (64, 32), [64, "on", "1e3"], {"on": "off", "inner": [1, {"a": "3"}]}, [])


@pytest.fixture
def own(monkeypatch):
    """The name of a module with models whose parameters are annotated in several ways; it remembers what came."""
    module = types.ModuleType("models_of_others")

    def network(
        shape,
        num_classes,
        gate="off",
        word: str = "",
        number: float = 0.5,
        count: int = 1,
        some: int | None = None,
        either: int | str = 0,
        switch: bool = False,
        choice: typing.Literal["on", "off", 1] = "off",
        sizes=(64,),
        rates: tuple[float, ...] = (),
    ):
        module.came = {name: value for name, value in locals().items() if name not in ("shape", "num_classes")}
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(num_classes))

    network.__module__, network.__qualname__ = module.__name__, "network"
    module.network = network
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def config_of(**settings):
    given, objects = _read(settings, {}, False)
    return read_config(given, SoloLink(), objects)


def model_settings(**values):
    return config_of(model={"name": "models_of_others.network", **values}).model_settings


def repeated(config, folder):
    """The model's settings of a run that repeats another one from its record, and of one that goes on."""
    path = folder / "settings.yaml"
    path.write_text(settings_text(config.resolved), encoding="utf-8")
    again = read_command_line(["--config", str(path)]).model_settings
    resumed = {"folder": str(folder), "settings": read_file(path), "paper": {}}
    return again, resolve(read_layers([]), resumed, Config).model_settings


@pytest.mark.rarely
@pytest.mark.parametrize("value", [*TEXTS, *OTHERS], ids=repr)
def test_a_value_arrives_as_it_is_and_the_record_gives_it_back(own, tmp_path, value):
    names = ("gate", "word", "either") if isinstance(value, str) else ("gate",)
    for name in names:
        config = config_of(model={"name": "models_of_others.network", name: value})
        found = config.model_settings[name]
        assert found == value and type(found) is type(value)
        for again in repeated(config, tmp_path):
            expected = [*value] if isinstance(value, tuple) else value
            assert again[name] == expected and type(again[name]) is type(expected), name
        dotted = config_of(model="models_of_others.network", **{f"model.{name}": value})
        assert dotted.model_settings == config.model_settings


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("count", np.int64(3), 3), ("count", np.uint8(3), 3), ("count", np.array(3), 3), ("count", torch.tensor(3), 3),
        ("number", np.float32(0.5), 0.5), ("number", np.float64(0.5), 0.5), ("number", 3, 3.0),
        ("number", np.int8(3), 3.0),
        ("number", torch.tensor(0.5), 0.5), ("switch", np.bool_(True), True), ("gate", np.int64(3), 3),
        ("gate", np.str_("on"), "on"), ("gate", np.bool_(False), False), ("some", None, None), ("some", np.int32(2), 2),
        ("either", "3", "3"), ("either", 3, 3), ("choice", "on", "on"), ("choice", 1, 1), ("sizes", (8, 4), (8, 4)),
        ("sizes", [8, 4], [8, 4]), ("rates", [1, 0.5], (1.0, 0.5)), ("rates", (np.float32(0.5),), (0.5,)),
        ("gate", [np.int64(3), (np.bool_(True),)], [3, (True,)]), ("word", pathlib.Path("a/b"), "a/b"),
    ],
    ids=repr,
)  # fmt: skip
def test_numbers_of_numpy_and_torch_are_numbers(own, name, value, expected):
    found = model_settings(**{name: value})[name]
    # A list for a parameter whose default is a tuple is a tuple, because the record holds both as lists.
    expected = tuple(expected) if name == "sizes" else expected
    assert found == expected and type(found) is type(expected)
    assert [*map(type, found)] == [*map(type, expected)] if isinstance(found, list | tuple) else True


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("count", "3", "a whole number"), ("count", True, "a whole number"), ("count", 3.0, "a whole number"),
        ("count", None, "a whole number"), ("count", np.float32(3), "a whole number"),
        ("number", "0.5", "a finite number"), ("number", "nan", "a finite number"),
        ("number", True, "a finite number"), ("switch", 1, "true or false"),
        ("switch", "on", "true or false"), ("switch", np.int64(1), "true or false"), ("word", 3, "text"),
        ("word", True, "text"), ("word", None, "text"), ("some", "null", "a whole number or null"),
        ("choice", True, ""),
        ("choice", "1", ""), ("gate", pathlib.Path("a"), ""), ("gate", np.arange(3), "a number, a text"),
        ("gate", torch.ones(2), "a number, a text"), ("gate", 1j, "a number"), ("gate", {3: 4}, "a number, a text"),
        ("gate", {1, 2}, "a number"), ("gate", frozenset(), "a number"), ("gate", b"on", "a number"),
        ("gate", np.datetime64("2026-11-22"), "a number"), ("gate", [1, frozenset()], "a number"), ("rates", "0.5", ""),
        ("rates", ["0.5"], ""), ("sizes", frozenset(), "a number"), ("gate", 10**30, "a whole number of fewer"),
    ],
    ids=repr,
)  # fmt: skip
def test_what_has_another_type_is_refused_in_one_line(own, name, value, allowed):
    with pytest.raises(UserError) as error:
        model_settings(**{name: value})
    text = str(error.value)
    assert text.startswith(f"model.{name} ") and f"expected {allowed}" in text and "\n" not in text


@pytest.mark.parametrize(
    "settings",
    [
        {"rounds": "5"}, {"rounds": True}, {"rounds": 5.0}, {"rounds": None}, {"participation": "1"}, {"name": 3},
        {"algorithm": {"name": "fedavg", "step_size": "0.1"}}, {"algorithm": {"name": "fedavg", "step_size": True}},
        {"algorithm.step_size": "1e-2"}, {"tf32": "on"}, {"tf32": 1}, {"seed": "0x10"}, {"clients": "4"},
        {"epochs": "null"}, {"batch_size": np.arange(2)}, {"partition": {"name": "dirichlet", "concentration": "0.3"}},
        {"task": {"name": "classification", "data": 3}},
        {"stages": {"name": "norm_bound", "norm_bound": {"bound": "1"}}},
    ],
    ids=repr,
)  # fmt: skip
def test_a_text_is_no_number_in_any_group(settings):
    with pytest.raises(UserError, match=r"^[^\n]+: expected [^\n]+$") as error:
        config_of(**settings)
    assert " = " in str(error.value) or " is a " in str(error.value)


def test_settings_of_every_group_take_numbers_of_numpy_and_paths(tmp_path):
    config = config_of(
        rounds=np.int64(7), participation=np.float32(0.5), tf32=np.bool_(True), out=tmp_path, clip_norm=np.int64(2),
        algorithm={"name": "fedavg", "step_size": np.float64(0.25)},
        stages={"name": "norm_bound", "norm_bound": {"bound": np.int8(3)}},
        partition={"name": "dirichlet", "concentration": torch.tensor(0.5)}, name="1e3",
    )  # fmt: skip
    assert (config.rounds.rounds, config.rounds.participation, config.machine.tf32) == (7, 0.5, True)
    assert (config.folder.out, config.rounds.clip_norm, config.folder.name) == (str(tmp_path), 2.0, "1e3")
    assert (config.algorithm.step_size, config.sending.stages[0].bound) == (0.25, 3.0)
    assert config.partition.concentration == 0.5


def test_none_takes_a_setting_of_a_file_back(tmp_path):
    (tmp_path / "run.yaml").write_text("epochs: 2\nclip_norm: 1.0\npartition: halves\nmodel: mlp\n")
    config = config_of(config=tmp_path / "run.yaml", epochs=None, model=None)
    assert (config.rounds.epochs, config.rounds.clip_norm) == (None, 1.0)
    assert config.resolved["model"]["name"] == "mlp"  # a group that is None is left out


def test_texts_in_quotes_in_a_file_are_texts(own, tmp_path):
    base = "model: {name: models_of_others.network, gate: %s, count: %s}\n"
    for gate, count, expected in (('"on"', '"3"', ("on", 3)), ("on", "3", (True, 3)), ("'1e3'", "3", ("1e3", 3))):
        (tmp_path / "run.yaml").write_text(base % (gate, count))
        found = read_command_line(["--config", str(tmp_path / "run.yaml")]).model_settings
        assert (found["gate"], found["count"]) == expected
    words = ["--model", "models_of_others.network", "--model.gate", "1e3", "--model.word", "on", "--model.choice", "on"]
    found = read_command_line(words).model_settings
    assert (found["gate"], found["word"], found["choice"]) == (1000.0, "on", "on")


def test_a_run_of_a_program_hands_the_values_on(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {"gate": "on", "word": "1e3", "count": np.int64(3), "sizes": (8,), "some": None, "either": "12:30"}
    run = fedmpi.train(
        algorithm="fedavg", rounds=1, threads=1, local_steps=1, model={"name": "models_of_others.network", **values}
    )
    came = own.came
    assert {name: came[name] for name in values} == values and type(came["count"]) is int
    fedmpi.train.main(["--config", str(run.folder / "settings.yaml"), "--name", "again"])
    assert own.came == came
