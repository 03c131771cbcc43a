"""The methods that papers compare with today, and those with periods, on several ranks against their plain twins.

With weights, clients that are absent, unequal numbers of local steps, several clients on a rank, and a federation that
goes on from the state of another one.
"""

import functools
import inspect
import itertools

import numpy as np
import pytest
import reference
import torch
from test_every_algorithm import CASES, LAYERS, SHAPES, X0, gradient, twin_of

from fedmpi.aggregation.codecs.random_k import RandomK
from fedmpi.aggregation.mean import Mean
from fedmpi.aggregation.reproducible import Reproducible
from fedmpi.aggregation.sending import Sending
from fedmpi.aggregation.stages.error_feedback import ErrorFeedback
from fedmpi.aggregation.stages.norm_bound import NormBound
from fedmpi.algorithms import DESLOC, FedAdamW, FedDyn, FedExP, FedLADA, FedMuon, FedNova, LocalAdam, Scaffnew
from fedmpi.comm.job.replicas import check_replicas
from fedmpi.comm.solo import SoloLink
from fedmpi.federation.client_state import SKIPPED, copied
from fedmpi.federation.participation import Plan, spread
from fedmpi.federation.rounds import Federation
from fedmpi.federation.variables import Variables
from fedmpi.oracles import FunctionOracle

pytestmark = pytest.mark.mpi

N, ROUNDS = 5, 7
WEIGHTS = [1.0, 2.0, 5.0, 0.5, 3.0]
COMPARED = (DESLOC, FedAdamW, FedDyn, FedExP, FedLADA, FedMuon, FedNova, LocalAdam, Scaffnew)
METHODS = [(cls, of) for cls, of in CASES if cls in COMPARED or "m_every" in of or "v_every" in of]
METHODS += [(Scaffnew, {"step_size": 0.1, "average_chance": 0.4})]  # averages in rounds 1, 5 and 8
EVERY_METHOD = pytest.mark.parametrize(("cls", "settings"), METHODS, ids=lambda v: getattr(v, "__name__", ""))


def here(round_index):
    """Client 0 is absent in rounds 2 and 5, when rows with a period of 2 or 3 are averaged."""
    return [[0, 1, 2, 3, 4], [1, 3], [1, 2, 4], [0, 4], [0, 1, 3], [2], [0, 2, 3, 4]][round_index]


def make(link, algorithm, steps, sending, weights=WEIGHTS):
    mine = spread(N, link.size)[link.rank]
    oracle = functools.partial(FunctionOracle, gradient)
    variables = Variables(torch.tensor(X0), segments=LAYERS, shapes=tuple(SHAPES))
    plan = Plan(N, steps.__getitem__, here, weights=weights)
    return Federation(algorithm, link, dict.fromkeys(mine, oracle), plan, variables, sending, poison=True)


def rows_of(federation):
    """Name -> row of the server; (name, client) -> row that a client has for itself."""
    found = {**federation.store.averaged_rows(), **federation.store.server_rows()}
    for client in federation.clients:
        found |= {(name, client.index): client.kept[SKIPPED][name] for name in client.skipped}
        found |= {(name, client.index): client.rows[name] for name in client.own}
    return copied(found)


def run(link, algorithm, steps, sending, resumed=(2, 3, 5), weights=WEIGHTS):
    """`rows_of` after every round; after the rounds of `resumed`, another federation goes on from the state."""
    federation = make(link, algorithm, steps, sending, weights)
    federation.start()
    found = []
    for number in range(ROUNDS):
        if number in resumed:
            state = copied(federation.state())
            federation = make(link, algorithm, steps, sending, weights)
            federation.restore(state)
        federation.run_round()
        check_replicas(federation)
        found.append(rows_of(federation))
    return found


def expected_rows(cls, settings, steps, weights=WEIGHTS):
    """The same of the twin, as name -> [N, dim] or [dim]."""
    twin = twin_of(cls)
    extra = {"segments": LAYERS, "shapes": SHAPES}
    extra = {name: value for name, value in extra.items() if name in inspect.signature(twin).parameters}
    trace = twin(reference.Clients(gradient, N, weights), X0, ROUNDS, steps, here, **settings, **extra)
    trace = [{name: np.array(row) for name, row in rows.items()} for rows in trace]
    ends = np.cumsum([1 + max(steps[i] for i in here(r)) for r in range(ROUNDS)])
    if cls.clock == "iteration":
        ends = np.arange(1, ROUNDS + 1) * (max(steps) + 1)
    return [trace[end] for end in ends]


def check_equal(found, expected, tolerance=1e-12):
    for number, (rows, twin) in enumerate(zip(found, expected, strict=True)):
        for key, row in rows.items():
            name, client = key if isinstance(key, tuple) else (key, None)
            if name not in twin:
                continue
            value = twin[name]
            if value.ndim == 2 and client is None and not (value == value[0]).all():
                continue  # a row that skips the round: what clients have is looked at
            if value.ndim == 2:
                value = value[0 if client is None else client]
            size = np.abs(twin[name]).max()
            np.testing.assert_allclose(row, value, rtol=tolerance, atol=tolerance * size, err_msg=f"{number}: {key}")


@EVERY_METHOD
@pytest.mark.parametrize(
    ("aggregation", "steps"), [(Reproducible, [2] * N), (Mean, [2, 4, 1, 3, 2])], ids=["equal", "unequal"]
)
def test_they_are_their_twins(link, cls, settings, aggregation, steps):
    found = run(link, cls(**settings), steps, Sending(aggregation()))
    check_equal(found, expected_rows(cls, settings, steps))


SENDINGS = {
    "bound": Sending(stages=[NormBound(bound=0.3)]),
    "feedback": Sending(Reproducible(), stages=[ErrorFeedback(compressor="top_k", fraction=0.4)]),
    "random": Sending(codec=RandomK(fraction=0.5)),
}
IN_TURN = [(*method, name) for method, name in zip(METHODS, itertools.cycle(SENDINGS))]


@pytest.mark.parametrize(("cls", "settings", "name"), IN_TURN)
def test_stages_and_codecs_see_the_same_on_every_layout(link, cls, settings, name):
    found = run(link, cls(**settings), [2, 4, 1, 3, 2], SENDINGS[name])
    whole = run(SoloLink(), cls(**settings), [2, 4, 1, 3, 2], SENDINGS[name], resumed=())
    for rows, expected in zip(found, whole, strict=True):
        for key, row in rows.items():
            torch.testing.assert_close(row, expected[key], rtol=1e-10, atol=1e-11, msg=lambda m, k=key: f"{k}: {m}")
