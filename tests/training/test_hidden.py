"""Under --aggregation masked, what shows single silos' numbers is refused in one line, before data are loaded."""

import json
import math

import pytest
from helpers import train

from fedmpi.ground.errors import UserError
from fedmpi.training.config import read_command_line
from fedmpi.training.hidden import check_hidden

SILOS = "--data silo_{client}.h5"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--task.metrics f1", ""),
        (SILOS, ""),
        ("--task language " + SILOS, ""),
        ("--task quadratic", ""),
        ("--task auc", ""),
        ("--private *", ""),
        (f"--task.metrics f1 {SILOS}", "metrics of task classification need labels, outputs or counts of a silo's own"),
        (f"--task.metrics auroc --scores samples {SILOS}", "metrics of task classification need"),
        ("--task.metrics f1 --private *", "metrics of task classification need"),
        ("--task auc --holdout 0.2", "metrics of task auc need"),
        (f"--task auc {SILOS}", "metrics of task auc need"),
        (f"--task segmentation {SILOS}", "metrics of task segmentation need"),
        ("--private * --cross-site true", "--cross_site sends each silo's model to all"),
        ("--baselines local", "--baselines shows each silo's own results"),
        ("--participation 0.5", "at most 2 ranks have clients that take part in a round: expected at least"),
        ("--participation 0.5 --aggregation.least-ranks 2", ""),
    ],
)
def test_what_shows_a_silos_numbers_is_refused(words, line):
    config = read_command_line(["--aggregation", "masked", *words.split()])
    if not line:
        check_hidden(config, 4, 4)
        return
    with pytest.raises(UserError) as met:
        check_hidden(config, 4, 4)
    assert line in str(met.value) and "\n" not in str(met.value)
    check_hidden(read_command_line(words.split()), 4, 4)


def test_weights_that_all_ranks_know_are_not_said_to_be_hidden():
    config = read_command_line(["--aggregation", "masked", "--aggregation.hidden-weights", "true"])
    with pytest.raises(UserError, match="all ranks know how many samples and minibatches each silo has: expected"):
        check_hidden(config, 4, 4)


def test_a_run_says_so_before_it_reads_data(tmp_path):
    done = train(2, tmp_path, "--aggregation", "masked", "--data", "no_such_file.h5")
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(lines) == 1 and "at most 2 ranks have clients that take part in a round" in lines[0]


@pytest.mark.parametrize(("words", "names"), [("--task quadratic", ()), ("", ("test_loss", "accuracy"))])
def test_metrics_are_those_of_a_run_that_hides_nothing(tmp_path, words, names):
    found = {}
    for aggregation in ("reproducible", "masked"):
        own = ("--aggregation.least-ranks", 1) if aggregation == "masked" else ()
        out = tmp_path / aggregation
        done = train(2, out, "--clients", 2, "--rounds", 2, "--aggregation", aggregation, *own, *words.split())
        assert done.returncode == 0, done.stderr
        (file,) = out.glob("*/metrics.jsonl")
        found[aggregation] = file.read_text(encoding="utf-8").splitlines()
    last, hidden = (json.loads(lines[-1]) for lines in found.values())
    for name in ("train_loss", *names):
        assert math.isclose(last[name], hidden[name], rel_tol=1e-12)
    assert last["loss"] == hidden["loss"]


def test_checkpoints_keep_clients_rows_out_of_the_run_folder(tmp_path):
    """Unless the user names another, in a folder of the rank's user, from which the run goes on."""
    state, settings = tmp_path / "state", ("--aggregation", "masked", "--aggregation.least-ranks", 1, "--clients", 2)
    settings += ("--task", "quadratic", "--algorithm", "scaffold", "--name", "it", "--resume", "auto")
    env = {"XDG_STATE_HOME": str(state)}
    for rounds in (2, 3):
        done = train(1, tmp_path / "out", *settings, "--rounds", rounds, env=env)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count(f"a folder of its user, {state}/fedmpi/checkpoints, not in the run folder") == 1
    assert "it: continuing after round 2" in done.stdout
    assert (state / "fedmpi" / "checkpoints").stat().st_mode & 0o777 == 0o700
    files = [*state.rglob("client-*")]
    assert {file.name for file in files} == {"client-0000.safetensors", "client-0001.safetensors"}
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files) and not [*tmp_path.glob("out/**/client-*")]
    done = train(1, tmp_path / "out", *settings, "--rounds", 4, "--checkpoint-clients", tmp_path / "own", env=env)
    assert done.returncode == 0 and "it: continuing after round 3" in done.stdout, done.stderr
    assert [*tmp_path.glob("own/**/client-*")] and "folder of its user" not in done.stderr
