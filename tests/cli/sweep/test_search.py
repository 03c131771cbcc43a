"""Sweeps that draw settings through Optuna."""

import json
import sys

import pytest
import yaml
from helpers import execute

from fedmpi.ground.errors import UserError

optuna = pytest.importorskip("optuna")

from fedmpi.cli.sweep.plan import Plan, Planned  # noqa: E402
from fedmpi.cli.sweep.search import Search, make_space  # noqa: E402

WORDS = ("--task", "quadratic", "--clients", "2", "--rounds", "3", "--holdout", "0", "--metric", "train_loss")
SPACE = (
    "--range",
    "algorithm.step_size=0.001:0.3:log",
    "--range",
    "local_steps=1:4",
    "--grid",
    "algorithm=fedavg,fafed",
)


def sweep(out, *words):
    ended = execute([sys.executable, "-m", "fedmpi", "sweep", "--out", out, *WORDS, *SPACE, *words])
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.rarely
def test_a_search_goes_on_and_writes_the_best(tmp_path):
    code, printed, errors = sweep(tmp_path, "--search", "tpe", "--trials", "2")
    assert code == 0 and "2 of them still to do" in printed, errors
    code, printed, errors = sweep(tmp_path, "--search", "tpe", "--trials", "3")
    assert code == 0 and "1 of them still to do" in printed, errors
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert len({json.dumps(line["parameters"]) for line in lines}) == 3, "each trial is another point"
    for line in lines:
        settings = yaml.safe_load((tmp_path / line["name"] / "settings.yaml").read_text())
        assert settings["algorithm"]["name"] == line["varied"]["algorithm"]
        assert settings["local_steps"] == line["parameters"]["local_steps"] in range(1, 5)
        assert settings["algorithm"]["step_size"] == pytest.approx(line["parameters"]["algorithm.step_size"], rel=1e-3)
    best = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert any(best["algorithm"]["step_size"] == float(line["varied"]["algorithm.step_size"]) for line in lines)


class Job:
    """A run that has not ended."""

    begun, is_ended = 0.0, False

    def __init__(self, run):
        self.run = run

    def poll(self):
        return None

    def end(self):
        self.is_ended = True


@pytest.mark.parametrize(("loss", "prunes"), [(9.0, True), (0.1, False), (9.0, False)])
def test_a_run_that_is_worse_than_the_median_is_ended(tmp_path, loss, prunes):
    space = make_space(["local_steps=1:9"], [])
    search = Search(Plan(tmp_path, {}, []), space, "random", 0, "train_loss", prunes)
    for number in range(5):
        search._study.add_trial(
            optuna.trial.create_trial(
                params={"local_steps": number + 1}, distributions=space, value=-1.0, intermediate_values={1: -1.0}
            )
        )
    trial, run = search._next()
    (tmp_path / run.name).mkdir()
    (tmp_path / run.name / "settings.yaml").write_text("rounds: 9\n")
    (tmp_path / run.name / "metrics.jsonl").write_text(json.dumps({"round": 1, "train_loss": loss}) + "\n")
    job, ended = Job(run), []
    assert search._look_after(trial, job, {}, lambda *how: ended.append(how)) == prunes == job.is_ended
    assert [how[1] for how in ended] == ["pruned"] * prunes
    again = Search(Plan(tmp_path, {}, []), space, "random", 0, "train_loss", prunes)
    assert again.recall() == prunes  # a pruned trial has ended; the other is made again
    assert again._plan.runs == [Planned(run.name, run.varied)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--range", "local_steps=9"), "--range local_steps=9: expected a setting with its smallest and largest value"),
        (("--range", "local_steps=1:9:cube"), "scale cube"),
        (("--range", "local_steps=9:1"), "--range local_steps=9:1: expected"),
        (("--range", "local_steps=1:" + "9" * 400), "a value is not finite, or too large"),
        (("--range", "algorithm.step_size=nan:1"), "a value is not finite, or too large"),
        ((), "nothing to vary"),
    ],
)
def test_wrong_ranges_are_one_line(words, message):
    with pytest.raises(UserError, match=message):
        make_space(words[1:], [])


def test_ranges_need_a_search(tmp_path):
    code, _, errors = sweep(tmp_path)
    assert code == 2 and "expected only with --search" in errors and "Traceback" not in errors
