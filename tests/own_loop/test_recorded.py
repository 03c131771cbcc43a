"""The run folder of a user's own loop: records, checkpoints, and the same bits after a stop."""

import json
import random

import numpy as np
import pytest
import torch
from helpers import PROGRAMS, start

import fedmpi
from fedmpi.own_loop.recorded import _decoded, _encoded, _Generators


def run(way, folder, *rest):
    return start(2, PROGRAMS / "recorded_loop.py", way, folder, 20, *rest, timeout=120)


def totals(ended):
    """What the ranks end with; without the step from which they went on."""
    assert ended.returncode == 0, ended.stderr
    return [line.partition(",")[2] for line in ended.stdout.splitlines() if line.startswith("from")]


@pytest.mark.rarely
@pytest.mark.parametrize("way", ["average", "fafed"])
def test_a_loop_goes_on_after_a_signal_and_after_a_kill_with_the_same_bits(way, tmp_path):
    whole = totals(run(way, tmp_path / "whole"))
    assert len(whole) == 2 and (whole[0].split()[-1] == whole[1].split()[-1]) == (way == "average"), "private layers"

    stopped = run(way, tmp_path / "stopped", "SIGTERM", 8)
    assert stopped.returncode == 75 and "stopped after round 3 by SIGTERM; start the program again" in stopped.stderr
    again = run(way, tmp_path / "stopped")
    assert "from 9, " in again.stdout and totals(again) == whole

    assert run(way, tmp_path / "killed", "SIGKILL", 17).returncode not in (0, 75)
    assert totals(run(way, tmp_path / "killed")) == whole

    records = [fedmpi.load_run(tmp_path / name).records for name in ("whole", "stopped", "killed")]
    assert [record["iteration"] for record in records[0]] == [3, 6, 9, 12, 15, 18, 20]
    learned = ("round", "iteration", "loss", "bytes", "gradients", "error", "size")
    for other in records[1:]:
        assert [[one.get(name) for name in learned] for one in other] == [
            [one.get(name) for name in learned] for one in records[0]
        ]
    for clock in ("seconds", "evaluation_seconds"):  # they go on where the loop was stopped
        times = [[record[clock] for record in of_run] for of_run in records]
        assert all(one == sorted(one) and one[0] < one[-1] for one in times), clock
    last = fedmpi.load_run(tmp_path / "whole")
    assert last.is_complete and last.records[5]["error"] == (1 * 1 + 3 * 2) / 4 and last.clients["error"] == [1, 2]


def test_a_run_folder_is_never_taken_for_another_run(tmp_path):
    program, folder = tmp_path / "once.py", tmp_path / "run"
    program.write_text(
        f"import fedmpi, torch\nfedmpi.average(torch.nn.Linear(1, 1), record={str(folder)!r}, every=1).finish()\n"
    )
    assert start(1, program).returncode == 0
    second = start(1, program)
    assert second.returncode != 0 and f"run folder {folder}: exists already" in second.stderr


@pytest.mark.always
def test_states_of_objects_are_as_they_were():
    state = {"a": [1, 2.5, None, True, "x"], 3: {"step": torch.tensor(1.0)}, "betas": (0.9, 0.99)}
    tensors = []
    text = json.dumps(_encoded(state, tensors, "one"))
    found = _decoded(json.loads(text), {f"objects/{n}": tensor for n, tensor in enumerate(tensors)})
    assert found == {**state, "betas": [0.9, 0.99]}
    with pytest.raises(fedmpi.UserError, match="objects: 'one' has a set in its state"):
        _encoded({"a": {1}}, [], "one")


@pytest.mark.always
def test_generators_of_the_process_go_on_where_they_were():
    def drawn():
        return torch.rand(3).tolist(), np.random.random(3).tolist(), random.random()

    tensors, generators = [], _Generators()
    text = json.dumps(_encoded(generators.state_dict(), tensors, "generators"))
    first = drawn()
    assert drawn() != first
    generators.load_state_dict(
        _decoded(json.loads(text), {f"objects/{n}": one.clone() for n, one in enumerate(tensors)})
    )
    assert drawn() == first
