"""``--track``: trackers receive every record."""

import json

import pytest
from helpers import train

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


def read_mlflow(folder):
    """Metric -> [(step, value)]."""
    client = pytest.importorskip("mlflow").MlflowClient((folder / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("fedmpi").experiment_id])
    assert run.info.run_name == "run" and run.data.params["algorithm"] == "fafed"
    return {
        name.replace("run.", "run/"): [
            (point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)
        ]
        for name in run.data.metrics
    }


def parts_of_log(content):
    """The records of a log file in LevelDB's format, which W&B writes after 7 bytes of its own."""
    begin, data = 7, b""
    while begin + 7 <= len(content):
        if 32768 - begin % 32768 < 7:  # no header fits into the rest of the block
            begin += 32768 - begin % 32768
            continue
        size, kind = int.from_bytes(content[begin + 4 : begin + 6], "little"), content[begin + 6]
        data += content[begin + 7 : begin + 7 + size]
        begin += 7 + size
        if kind in (1, 4):  # the whole record, or its last part
            yield data
            data = b""


def read_wandb(folder):
    """Metric -> [(step, value)], of what ``wandb sync`` would send."""
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    found = {}
    (path,) = folder.glob("run/wandb/offline-run-*/*.wandb")
    for data in parts_of_log(path.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("history"):
            values = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
            }
            for name in values.keys() - {"_step", "_runtime", "_timestamp"}:
                found.setdefault(name, []).append((values["_step"], values[name]))
    return found


@pytest.mark.rarely
@pytest.mark.parametrize("read", [read_mlflow, read_wandb])
def test_trackers_of_other_packages_have_every_record(tmp_path, read, monkeypatch):
    name = read.__name__.removeprefix("read_")
    pytest.importorskip(name)
    ended = train(2, tmp_path, *RUN, "--track", name)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # to read them
    found = read(tmp_path)
    assert {"loss", "train_loss", "accuracy", "run/iteration"} <= found.keys()
    for title, points in found.items():
        key = title.rsplit("/", 1)[-1]
        assert points == [(line["round"], pytest.approx(line[key], rel=1e-6)) for line in lines if key in line], title


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
