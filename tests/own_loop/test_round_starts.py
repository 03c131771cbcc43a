"""What a round begins with, as stages and aggregations see it in own loops: the same as in `fedmpi.train`."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from helpers import PROGRAMS, start

import fedmpi
from fedmpi.aggregation.mean import Mean
from fedmpi.aggregation.stages import Stage
from fedmpi.aggregation.stages.norm_bound import NormBound

WHOLE = torch.eye(3)
pytestmark = pytest.mark.usefixtures("one_thread")


def begin(door, sending, private=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))

    def loss():
        return (model(WHOLE) - 1).square().mean()

    if door == "join":
        fed = fedmpi.join(model, algorithm="fedavg", local_steps=4, step_size=0.5, private=private, **sending)
        return model, fed, lambda: fed.step(loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    fed = fedmpi.average(model, optimizer, every=4, private=private, **sending)

    def step():
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        fed.step()

    return model, fed, step


SENDINGS = {"stage": {"stages": [NormBound(bound=0.05)]}, "aggregation": {"aggregation": "start_reader"}}


@dataclasses.dataclass(kw_only=True)
class StartReader(Mean):
    """Half of the mean move."""

    needs_start = True

    def average(self, out):
        super().average(out)
        out.copy_(torch.lerp(self.start[: out.numel()], out, 0.5))


def made(sending):
    return {"aggregation": StartReader()} if "aggregation" in sending else sending


@pytest.mark.parametrize("private", [None, "2", "bn"])
@pytest.mark.parametrize("sending", SENDINGS.values(), ids=SENDINGS)
@pytest.mark.parametrize("door", ["join", "average"])
def test_a_loop_goes_on_with_the_same_bits_wherever_it_was_left(door, sending, private):
    model, fed, step = begin(door, made(sending), private)
    states = {}
    for number in range(12):
        if number in (4, 6, 8):  # between two rounds, and within one
            states[number] = fed.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
        step()
    fed.finish()
    for number, (state, counted) in states.items():
        other, fed, step = begin(door, made(sending), private)
        fed.load_state_dict(state)
        counters = {name: value for name, value in counted.items() if not value.is_floating_point()}
        other.load_state_dict({**other.state_dict(), **counters})
        for _ in range(number, 12):
            step()
        fed.finish()
        for name, value in model.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), (number, name)


@pytest.mark.parametrize("door", ["join", "average"])
@pytest.mark.parametrize("sending", SENDINGS.values(), ids=SENDINGS)
def test_a_model_that_was_set_is_no_move(door, sending):
    model, fed, step = begin(door, made(sending))
    for _ in range(4):
        step()
    fed.set_model({"0.weight": torch.full((2, 3), 5.0)})
    before = model[0].weight.detach().clone()
    for _ in range(4):
        step()
    fed.finish()
    assert (before == 5).all() and (model[0].weight - 5).norm() < 1


@pytest.mark.parametrize("door", ["join", "average"])
def test_what_stays_with_a_rank_is_no_part_of_its_move(door):
    """Eight moves of 0.5 of what is shared, however far the private part moves."""
    model = torch.nn.ParameterDict({"shared": torch.zeros(1), "own": torch.zeros(1)})

    def loss():
        return 0.5 * (model["shared"] - 5).square().sum() + 0.5 * (model["own"] - 100).square().sum()

    stages, optimizer = [NormBound(bound=0.5)], torch.optim.SGD(model.parameters(), lr=0.9)
    if door == "join":
        fed = fedmpi.join(model, algorithm="fedavg", local_steps=1, step_size=0.9, private="own", stages=stages)
    else:
        fed = fedmpi.average(model, optimizer, every=1, private="own", stages=stages)
    for _ in range(8):
        if door == "join":
            fed.step(loss)
        else:
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
            fed.step()
    fed.finish()
    assert model["shared"].item() == pytest.approx(4.0, abs=1e-5)
    assert model["own"].item() == pytest.approx(100, abs=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_loop_goes_on_with_the_same_bits(tmp_path, ranks):
    def run(folder, until):
        command = [
            "mpirun",
            "-np",
            str(ranks),
            sys.executable,
            PROGRAMS / "bounded_loop.py",
            tmp_path / folder,
            str(until),
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ})

    whole, killed = run("whole", 40), run("killed", 20)
    assert killed.returncode != 0
    again = run("killed", 40)
    lines = [{line for line in out.stdout.splitlines() if line.startswith("model")} for out in (whole, again)]
    assert lines[0] == lines[1] and len(lines[0]) == 1, whole.stderr + again.stderr


@pytest.mark.parametrize("name", ["FAFED", "STEM", "FedAvg", "LocalSGDA", "MimeAdam", "SCAFFOLDM"])
def test_a_step_size_that_is_set_within_a_round_is_that_of_the_move_after_its_average(name):
    """A schedule of the loop's own equals the algorithm's."""
    cls, ends = getattr(fedmpi.algorithms, name), []
    period = 3 if cls.clock == "iteration" else 2
    for own in (True, False):
        settings = {"schedule": "step", "schedule_period": period, "schedule_factor": 0.5} if own else {}
        model = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.constant_(model.weight, 5.0)

        def loss(model=model):
            return 0.5 * (model.weight - 1).square().sum()

        fed = fedmpi.join(model, algorithm=cls(step_size=0.2, **settings), local_steps=4)
        fed.whole = loss if name == "MimeAdam" else None
        for step in range(16):
            if not own:
                t = step + 1 if period == 3 else step // 4
                fed.step_size = 0.2 * 0.5 ** (t // period)
            fed.step(loss)
        fed.finish()
        ends.append(model.weight.item())
    assert ends[0] == pytest.approx(ends[1], rel=1e-14)


@pytest.mark.parametrize("door", ["join", "average"])
def test_facts_of_stages_and_aggregations_are_in_the_accounts(door):
    class Counting(Stage):
        def apply(self, sent):
            self.calls = getattr(self, "calls", 0) + 1

        def facts(self):
            return {"calls": getattr(self, "calls", 0)}

    _, fed, step = begin(door, {"stages": [Counting()]})
    for _ in range(8):
        step()
    fed.finish()
    assert fed.accounts()["counting_calls"] == 2


def test_constants_are_no_moves_and_what_a_loop_does_between_rounds_is_one():
    """Moves of three values by 1 and 2 are within 10, whatever constants there are; one of two ranks moves by 1."""
    ended = start(2, PROGRAMS / "starts_of_rounds.py")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line for line in lines if "constant" in line] == ["constant [3.0, 3.0, 3.0] 0.0"] * 6, ended.stdout
    assert [line for line in lines if "between" in line] == ["between [0.5, 0.0, 0.0] 0.5"] * 4, ended.stdout


@pytest.mark.parametrize("name", ["stem", "fedadam", "fafed", "scaffold_m"])
def test_a_state_from_before_the_first_step_begins_with_the_start(name):
    ends = []
    for is_loaded in (False, True):
        torch.manual_seed(0)
        model, inputs = torch.nn.Linear(2, 1), torch.randn(8, 2)
        fed = fedmpi.join(model, name, local_steps=2, step_size=0.05)
        if is_loaded:
            fed.load_state_dict(fed.state_dict())
        for _ in range(4):
            fed.step(lambda model=model, inputs=inputs: (model(inputs) - 1).square().mean())
        fed.finish()
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends)
