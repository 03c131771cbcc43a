"""`fedmpi.average(every=None)`: gradients are averaged in each step."""

import json

import pytest
import torch
from helpers import PROGRAMS, launchers, start

import fedmpi


@pytest.mark.rarely
@pytest.mark.parametrize("mpi", launchers())
def test_the_steps_are_those_of_one_process_with_all_batches(mpi):
    ended = start(3, PROGRAMS / "gradients_of_ranks.py", mpi=mpi)
    assert ended.returncode == 0, ended.stderr
    found = dict(map(json.loads, ended.stdout.splitlines()))
    assert sorted(found) == [0, 1, 2]
    for rank in found.values():
        assert rank["equal"] < 1e-14 and rank["weighted"] < 1e-14 and rank["resumed"] < 1e-14
        assert rank["bfloat16"] == found[0]["bfloat16"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"outer": "nesterov"}, "outer = 'nesterov', every = None: expected a number of local steps with it, every=10"),
        ({"server_step_size": 0.5}, "server_step_size = 0.5, every = None: expected a number of local steps with it"),
        ({"private": "bias"}, "private = 'bias', every = None: expected"),
        ({"record": "folder"}, "record = 'folder', every = None: expected"),
        ({"participation": 0.5}, "participation = 0.5, every = None: expected all ranks"),
    ],
)
def test_what_is_about_averages_of_the_model_is_one_line(settings, message):
    with pytest.raises(fedmpi.UserError, match=message):
        fedmpi.average(torch.nn.Linear(1, 1), every=None, **settings)


def test_a_mistyped_argument_is_one_line_with_the_right_name():
    model = torch.nn.Linear(1, 1)
    with pytest.raises(fedmpi.UserError, match="unknown setting evry: .*did you mean 'every'"):
        fedmpi.average(model, evry=3)
    with pytest.raises(fedmpi.UserError, match="unknown setting local_step: .*did you mean 'local_steps'"):
        fedmpi.join(model, algorithm="fedavg", step_size=0.1, local_step=3)
