"""A loop of the user's own that goes on within a round, with parts that keep state and ranks that are left out."""

import dataclasses
import functools

import pytest
import torch

import fedmpi
from fedmpi.aggregation.codecs.half import Half
from fedmpi.aggregation.mean import Mean
from fedmpi.aggregation.stages.norm_bound import NormBound

Q, STEPS = 3, 15
pytestmark = pytest.mark.usefixtures("one_thread")


@dataclasses.dataclass(kw_only=True)
class Counting(Mean):
    """A mean that moves by another share in every exchange; it counts them as they begin."""

    needs_start = True
    count = 0

    def begin(self, moment, weights):
        super().begin(moment, weights)
        self.count += 1

    def average(self, out):
        super().average(out)
        out.copy_(torch.lerp(self.start[: len(out)], out, 1 / (1 + self.count % 4)))

    def state(self):
        return {"count": self.count}

    def restore(self, state):
        self.count = state["count"]


@dataclasses.dataclass(kw_only=True)
class Scaled(Half):
    """The same of a codec."""

    count = 0

    def begin(self, moment):
        super().begin(moment)
        self.count += 1

    def encode(self, moves):
        return super().encode(moves * (1 + self.count % 3))

    def decode(self, words):
        return super().decode(words) / (1 + self.count % 3)

    def state(self):
        return {"count": self.count}

    def restore(self, state):
        self.count = state["count"]


SENDINGS = {
    "counts": {"aggregation": Counting()},
    "codec": {"codec": Scaled(), "stages": [NormBound(bound=0.1)]},
}


def batch(rank, step, faulty):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs, targets = (torch.randn(8, size, generator=generator).double() for size in (5, 2))
    if (rank, step) in faulty:
        targets[0, 0] = torch.nan
    return inputs, targets


def loss(model, inputs, targets):
    return torch.nn.functional.mse_loss(model(inputs), targets)


def loop(algorithm, given, cut=None, faulty=()):
    """Everything that the loop has at its end; at step `cut`, another one goes on from its state."""

    def begin():
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 2).double()
        return model, fedmpi.join(model, algorithm, local_steps=Q, **given)

    model, fed = begin()
    for step in range(STEPS):
        if step == cut:
            state, own = fed.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
            fed.finish()
            model, fed = begin()
            model.load_state_dict(own)
            fed.load_state_dict(state)
        inputs, targets = batch(fed.rank, step, faulty)
        fed.step(functools.partial(loss, model, inputs, targets))
    found = {name: value for name, value in fed.state_dict().items() if torch.is_tensor(value)}
    found |= {name: value for name, value in fed.accounts().items() if "seconds" not in name}
    found["loss"] = fed.round_loss
    fed.finish()
    return found


def check_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        is_same = torch.equal(found[name], value) if torch.is_tensor(value) else found[name] == value
        assert is_same, name


@pytest.mark.mpi
@pytest.mark.parametrize("given", SENDINGS.values(), ids=SENDINGS)
@pytest.mark.parametrize("algorithm", ["fafed", "scaffold", "local_amsgrad"])
def test_an_exchange_that_is_begun_again_begins_with_the_same(algorithm, given):
    """A part counted it twice; gradients and losses of the round's earlier steps were missing."""
    whole = loop(algorithm, given)
    assert whole["gradients"] >= STEPS
    for cut in (6, 7, 8):
        check_same(loop(algorithm, given, cut), whole)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", ["fafed", "scaffold", "local_amsgrad", "diloco"])
def test_a_rank_that_is_left_out_in_such_a_round_gets_the_state_of_before_it(algorithm):
    """What it got was that of the middle of the round, with nan in m and v, and so it was left out for good."""
    given = {"faulty": "leave_out"}
    for faulty, cut in (((1, 4), 5), ((1, 5), 5), ((0, 7), 8)):
        whole = loop(algorithm, given, faulty={faulty})
        assert whole["times_left_out"] == 1
        check_same(loop(algorithm, given, cut, faulty={faulty}), whole)


@pytest.mark.mpi
def test_a_state_within_a_round_that_has_nothing_to_go_back_to_is_one_line():
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 2).double()
    fed = fedmpi.join(model, "fedavg", local_steps=Q)
    inputs, targets = batch(fed.rank, 0, ())
    fed.step(functools.partial(loss, model, inputs, targets))
    state = fed.state_dict()
    fed.finish()
    fed = fedmpi.join(torch.nn.Linear(5, 2).double(), "fedavg", local_steps=Q, faulty="leave_out")
    with pytest.raises(fedmpi.UserError, match="taken within a round without faulty = leave_out"):
        fed.load_state_dict(state)
    fed.finish()
