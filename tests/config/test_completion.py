"""What a shell completes: every option of every program, and the words that a setting can be."""

import pytest

from fedmpi.cli.completion.__main__ import SHELLS, _parsers, main


def options(program):
    return {word: action for action in _parsers()[program]._actions for word in action.option_strings}


def test_training_has_its_settings_flags_and_choices():
    found = options("train")
    assert {"fafed", "fedavg", "scaffold"} <= {*found["--algorithm"].choices} and "digits" not in found["--data"].help
    assert found["--result"].choices == ["last", "best", "uniform"]
    assert found["--deterministic"].choices == found["--task.flip"].choices == ["true", "false"]
    assert found["--rounds"].choices is None and found["--stages.norm_bound.bound"].choices is None
    assert "--model.hidden_layers" in found and "auc/cifar10" in found["--preset"].choices
    assert {"algorithms", "presets", "stages"} <= {*found["--list"].choices}
    assert {"--stages", "--data", "--autocast", "--compile", "--baselines.step_sizes"} <= {*found}
    assert found["--autocast"].help == "short for --oracle.autocast" and found["--stages"].choices is None
    assert found["--help"].nargs == found["--print_config"].nargs == 0  # flags without a value


def test_other_programs_have_theirs():
    assert {"bench", "data", "doctor", "evaluate", "predict", "report", "sweep", "train"} <= _parsers().keys()
    assert "--grid" in options("sweep") and "--probabilities" in options("predict") and "--quick" in options("bench")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_names_all_programs(shell, capsys):
    pytest.importorskip("shtab")
    main([shell])
    printed = capsys.readouterr().out
    assert all(name in printed for name in _parsers()) and "--algorithm" in printed
