"""``--track``: trackers receive every record."""

import json

import pytest
from conftest import train

import fedmpi
from fedmpi.runs.trackers.base import Tracker, make_trackers, titled

RUN = ("--clients", 2, "--rounds", 4, "--eval-every", 2, "--local-steps", 2, "--name", "run")


class Listening(Tracker):
    """A tracker of the user's own."""

    module = "json"
    calls = []

    def begin(self, folder, settings, done):
        self.calls.append(("begin", folder.name, settings["rounds"], done))

    def round(self, number, values):
        self.calls.append((number, values))

    def close(self):
        self.calls.append("end")


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scalars_of(folder):
    """Title -> [(step, value)] in TensorBoard's event files."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_what_the_records_say(tmp_path):
    pytest.importorskip("tensorboard")
    done = train(2, tmp_path, *RUN, "--track", "tensorboard")
    assert done.returncode == 0, done.stderr
    lines, scalars = records(tmp_path / "run"), scalars_of(tmp_path / "run")
    assert {"loss", "train_loss", "accuracy", "run/bytes", "run/seconds"} <= scalars.keys()
    for title, points in scalars.items():
        name = title.removeprefix("run/")
        expected = [(line["round"], line[name]) for line in lines if name in line]
        assert [step for step, _ in points] == [step for step, _ in expected], title
        assert [value for _, value in points] == pytest.approx([value for _, value in expected], rel=1e-6), title


def test_trackers_of_other_packages(tmp_path):
    """W&B offline and MLflow in files, where they are installed."""
    missing = []
    for name in ("wandb", "mlflow"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
            continue
        done = train(1, tmp_path / name, *RUN, "--track", name)
        assert done.returncode == 0, done.stderr
        place = tmp_path / name / ("run/wandb" if name == "wandb" else "mlruns")
        assert any(path.is_file() for path in place.rglob("*"))
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def test_a_tracker_of_the_users_own_gets_every_round(tmp_path):
    Listening.calls.clear()
    fedmpi.train(clients=2, rounds=3, local_steps=1, out=str(tmp_path), name="run", track=f"{__name__}.Listening")
    assert Listening.calls[0] == ("begin", "run", 3, 0) and Listening.calls[-1] == "end"
    assert [number for number, _ in Listening.calls[1:-1]] == [1, 2, 3]
    assert Listening.calls[1][1].keys() >= {"loss", "run/iteration"}


def test_titles():
    assert titled({"round": 1, "loss": 0.5, "clients": {"loss": [1.0]}}) == {"run/round": 1, "loss": 0.5}


def test_unknown_and_missing_trackers_are_one_line(tmp_path):
    with pytest.raises(fedmpi.UserError, match="unknown tracker 'tensorbord'; did you mean 'tensorboard'"):
        make_trackers("tensorbord")
    assert make_trackers(None) == []

    class Missing(Listening):
        module, extra = "no_such_package", "none"

    with pytest.raises(fedmpi.UserError, match=r"track = missing: needs a package: pip install 'fedmpi\[none\]'"):
        Missing()
    ended = train(1, tmp_path, *RUN, "--track", "nobody")
    assert ended.returncode == 2 and "unknown tracker 'nobody'" in ended.stderr and not (tmp_path / "run").exists()
