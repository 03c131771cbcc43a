"""A round that loses ranks at any point is, to the last bit, one that was planned without their clients."""

import functools
import itertools

import pytest
import torch
from test_state import DIM, NAMES, check_same, gradient

import fedmpi.algorithms
from fedmpi.aggregation.mean import Mean
from fedmpi.aggregation.reproducible import Reproducible
from fedmpi.aggregation.sending import Sending
from fedmpi.aggregation.stages import Stage
from fedmpi.comm.ranks import RanksLost
from fedmpi.comm.solo import SoloLink
from fedmpi.federation import Federation, Plan, Variables
from fedmpi.oracles import FunctionOracle

ROUNDS, CLIENTS, LOST = 3, 3, 1


class Losing(SoloLink):
    """A link that loses the rank of one client in its call number `at`, as `MPILink` does.

    A sum spoils what is summed, and raises; any other call is repeated among the ranks that are left.
    """

    survives = True

    def __init__(self, at):
        super().__init__()
        self.calls, self.at, self.is_lost = itertools.count(), at, False

    def lost_clients(self):
        return frozenset({LOST}) if self.is_lost else frozenset()

    def loses(self):
        found = next(self.calls) == self.at
        self.is_lost |= found
        return found

    def allgather(self, values, kind):
        self.loses()
        return super().allgather(values, kind)

    def average(self, block, divisor, out, kind):
        self._sum(super().average, [block], block, divisor, out, kind)

    def add_integers(self, block, kind):
        self._sum(super().add_integers, [block], block, kind)

    def _sum(self, summed, spoiled, *arguments):
        if self.loses():
            for vector in spoiled:
                vector.fill_(12345.0)
            raise RanksLost
        summed(*arguments)


class Rounding(Stage):
    """Keeps what it rounds away until the client sends again."""

    kept_rows = ("error",)

    def apply(self, sent):
        for name, row in sent.rows.items():
            whole = row + sent.kept["error"][name]
            row.copy_((whole * 64).round() / 64)
            sent.kept["error"][name].copy_(whole - row)


class AbsentAtStart(Plan):
    def start(self, lost=frozenset()):
        return super().start(lost | {LOST})


def run(algorithm, link, participation, aggregation, lost_from=None):
    """(the federation after all rounds, the numbers of calls before and after the start and after each round).

    Args:
        lost_from: the round from which on the client is absent by plan; -1: the start.
    """
    drawn = {"all": range(CLIENTS), "one": [LOST], "two": [0, LOST]}[participation]

    def participants(round_index):
        absent = {LOST} if lost_from is not None and round_index >= lost_from else set()
        return sorted({*drawn} - absent or {*range(CLIENTS)} - absent)

    plan = (AbsentAtStart if lost_from == -1 else Plan)(CLIENTS, 2, participants, seed=1)
    is_min_max = type(algorithm).__module__.endswith("minmax")
    x = torch.linspace(-1, 1, DIM, dtype=torch.float64)
    variables = Variables(x, segments=[slice(0, 2), slice(2, DIM)], ascent=slice(4, 5) if is_min_max else None)
    oracles = dict.fromkeys(range(CLIENTS), functools.partial(FunctionOracle, gradient))
    sending = Sending(aggregation(), (Rounding(),))
    federation = Federation(algorithm, link, oracles, plan, variables, sending)
    ends = [next(link.calls)]
    federation.start()
    ends.append(next(link.calls))
    for _ in range(ROUNDS):
        federation.run_round()
        ends.append(next(link.calls))
    return federation, ends


def end_of(federation):
    """The state without what has been spent, and without that of the lost client."""
    unlike = ("federation/num_gradients", "federation/traffic", "federation/seconds", f"clients/{LOST}/")
    state = {name: value for name, value in federation.state().items() if not name.startswith(unlike)}
    return {name: value for name, value in state.items() if not name.endswith("num_gradients")}


@pytest.mark.rarely
@pytest.mark.parametrize("participation", ["all", "two", "one"])
@pytest.mark.parametrize("name", NAMES)
def test_a_loss_at_any_point_of_a_round(name, participation):
    """The calls of the link are counted: a loss in each of them, from the start to the end of the last round."""
    aggregation = {"all": Mean, "two": Reproducible, "one": Mean}[participation]
    make = getattr(fedmpi.algorithms, name)
    _, ends = run(make(), Losing(-1), participation, aggregation)
    points = sorted({*range(ends[0], ends[-1])} - {*ends})
    assert len(points) >= 2 * ROUNDS
    planned = {}
    for point in points:
        lost_from = sum(end < point for end in ends) - 2
        if lost_from not in planned:
            planned[lost_from] = end_of(run(make(), Losing(-1), participation, aggregation, lost_from)[0])
        check_same(end_of(run(make(), Losing(point), participation, aggregation)[0]), planned[lost_from])
