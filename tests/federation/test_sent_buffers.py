"""Float buffers: those that clients change are averaged, the others are neither changed nor sent."""

import dataclasses

import pytest
import torch

from fedmpi.aggregation import Aggregation
from fedmpi.aggregation.mean import Mean
from fedmpi.aggregation.reproducible import Reproducible
from fedmpi.aggregation.sending import Sending
from fedmpi.algorithms import FAFED, FedAvg, MimeAdam
from fedmpi.comm.solo import SoloLink
from fedmpi.federation import Plan, Variables
from fedmpi.federation.rounds import Federation
from fedmpi.oracles import FunctionOracle
from fedmpi.oracles.flat_module import BufferPart

LOWEST = torch.finfo(torch.float64).min
START = torch.tensor([LOWEST, LOWEST, 1.0, 0.1, 0.7, torch.nan, 5.0], dtype=torch.float64)
SIZES = {"mask": 2, "late": 1, "constants": 3, "mean": 1}


def parts():
    found, offset = [], 0
    for name, size in SIZES.items():
        found.append(BufferPart(name, offset, size, torch.float64))
        offset += size
    return found


@dataclasses.dataclass(kw_only=True)
class Whole(Aggregation):
    """The mean by a class that knows nothing of buffers."""

    def average(self, out):
        def mean(slices):
            return sum(w * s for (_, w), s in zip(sorted(self.weights.items()), slices)) / sum(self.weights.values())

        return self.reduce_slices(mean, out)


class Changing(FunctionOracle):
    """Every client moves "mean" in every gradient; client 2 begins to change "late" after some gradients."""

    def __init__(self, client):
        super().__init__(lambda index, x, sample: x - index, client)

    def gradient(self, z, xi):
        self.client.buffers[6] += self.client.index
        if self.client.index == 2 and self.client.num_draws > 5:
            self.client.buffers[2] += 3
        return super().gradient(z, xi)


def run(algorithm, reduction, rounds=4, state=None, participants=None):
    link = SoloLink()
    plan = Plan(3, 2, participants, weights=[1.0, 2.0, 5.0])
    variables = Variables(torch.ones(4, dtype=torch.float64), START, buffer_parts=parts())
    federation = Federation(algorithm, link, dict.fromkeys(range(3), Changing), plan, variables, Sending(reduction()))
    federation.start() if state is None else federation.restore(state)
    for _ in range(rounds):
        federation.run_round()
    return federation


@pytest.mark.parametrize("reduction", [Mean, Reproducible, Whole])
@pytest.mark.parametrize("algorithm", [FedAvg(), FAFED(), MimeAdam()])
def test_what_a_client_changes_is_averaged_and_nothing_else(algorithm, reduction):
    federation = run(algorithm, reduction)
    buffers, names = federation.store.buffers, [parts()[k].name for k in sorted(federation.store.tail.sent.sent)]
    assert names == ["late", "mean"]
    constant = [0, 1, 3, 4, 5]
    assert torch.equal(buffers[constant].view(torch.int64), START[constant].view(torch.int64))
    assert buffers[2] > 1 and (buffers[2] - 1) % (3 * 5 / 8) == pytest.approx(0)
    if type(algorithm) is FedAvg:
        assert buffers[6] == pytest.approx(5 + 4 * 2 * (0 * 1 + 1 * 2 + 2 * 5) / 8)
    if type(algorithm) is FedAvg and reduction is not Whole:
        sums = 4 * 3 if reduction is Reproducible else 0  # of losses, their number and gradients
        assert federation.link.traffic.nbytes == 8 * (4 * 4 + 4 * 1 + 2 * 1 + sums)  # x, mean, late in the last two


@pytest.mark.parametrize("participants", [None, lambda index: [index % 2, 2]])
def test_a_restored_federation_goes_on_with_the_same_bits(participants):
    whole = run(FedAvg(), Mean, 5, participants=participants)
    first = run(FedAvg(), Mean, 2, participants=participants)
    second = run(FedAvg(), Mean, 3, first.state(), participants)
    assert torch.equal(second.store.buffers.view(torch.int64), whole.store.buffers.view(torch.int64))
    assert second.link.traffic.nbytes == whole.link.traffic.nbytes
