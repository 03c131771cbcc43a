"""Settings in sections: each is declared once, beside its owner, and says itself who may take it."""

import dataclasses

import pytest

from fedmpi.config.build import CHOICES, STAGES, resolve
from fedmpi.config.grammar import SHORT
from fedmpi.config.layers import read_layers
from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import Section, setting
from fedmpi.training.config import Config, read_command_line
from fedmpi.training.settings import RunSettings


def settings(**values):
    return RunSettings(**RunSettings.filled(values))


def test_a_setting_has_one_name_and_one_section():
    names = [field.name for section in RunSettings.classes().values() for field in dataclasses.fields(section)]
    others = {*CHOICES, STAGES, *SHORT, *RunSettings.classes()} - {
        "rounds",
        "data",
    }  # sections, whose names are no keys
    assert len(names) == len({*names}) and not {*names} & others
    assert {*RunSettings.declared()} == {*names} == {*settings().flat()}


def test_flat_values_are_those_of_the_sections():
    given = settings(rounds=7, checkpoint_every=3, baselines="local", data_dir="here")
    assert (given.rounds.rounds, given.folder.checkpoint_every, given.studies.methods) == (7, 3, ["local"])
    assert RunSettings(**RunSettings.filled(given.flat())) == given
    other = given.replaced({"rounds": 9, "batch_size": 4})
    assert {key for key, value in other.flat().items() if value != given.flat()[key]} == {"rounds", "batch_size"}
    with pytest.raises(UserError, match="^rounds = 0: expected "):
        given.replaced({"rounds": 0})


def test_who_may_take_a_setting():
    assert RunSettings.marked("each_start") == {"out", "name", "ranks", "resume"}
    assert RunSettings.marked("may_change") == {"rounds", "epochs"}
    changing = settings().may_change
    assert {"rounds", "epochs", "threads", "out", "evaluate", "eval_every", "evaluate_samples"} <= changing
    assert not {"seed", "batch_size", "result", "task", "algorithm", "clients", "init"} & changing
    for decides in ({"result": "best"}, {"stop": "accuracy>0.9"}, {"patience": 2}):
        assert changing - settings(**decides).may_change == {"evaluate", "eval_every", "evaluate_samples"}


def test_help_lists_the_settings_by_section():
    text = read_command_line(["--help"])
    places = {name: text.index(f"\n{name} (") for name in RunSettings.classes()}
    places["algorithm"] = text.index("\nalgorithm: fafed (")
    assert sorted(places.values()) == [*places.values()]
    for section, after in zip([*places][:-1], [*places][1:]):
        own = {field.name for field in dataclasses.fields(RunSettings.classes()[section])}
        part = text[places[section] : places[after]]
        assert own == {line.split()[0][2:] for line in part.splitlines() if line.startswith("  --")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger(Section):
    """What is paid."""

    budget: float = setting(1.0, "what may be paid", above=0, role="place")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithLedger(Config):
    ledger: Ledger


def test_a_new_section_is_declared_in_one_place():
    words = ["--budget", "3", "--rounds", "2"]
    config = resolve(read_layers(words), None, WithLedger)
    assert (config.ledger.budget, config.rounds.rounds, config.resolved["budget"]) == (3.0, 2, 3.0)
    assert WithLedger.role("budget") == "place" and "budget" in config.may_change
    assert "ledger (what is paid):\n" in (text := resolve(read_layers(["--help"]), None, WithLedger))
    assert "--budget VALUE" in text
    with pytest.raises(UserError, match=r"^budget = 0.0: expected a number > 0 \(what may be paid\)"):
        resolve(read_layers(["--budget", "0"]), None, WithLedger)
    with pytest.raises(UserError, match="unknown setting budget"):
        read_command_line(words)
