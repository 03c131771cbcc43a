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

from fedmpi.aggregation.codecs.half import Half
from fedmpi.aggregation.codecs.random_k import RandomK, subset
from fedmpi.aggregation.masked import Masked
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
from fedmpi.ground.streams import generator
from fedmpi.oracles import FunctionOracle

pytestmark = pytest.mark.mpi

N, ROUNDS = 5, 7
WEIGHTS, UNEQUAL = [1.0, 2.0, 5.0, 0.5, 3.0], [2, 4, 1, 3, 2]
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
    ("aggregation", "steps"),
    [(Reproducible, [2] * N), (Mean, UNEQUAL), (functools.partial(Masked, least_ranks=1), UNEQUAL)],
    ids=["equal", "unequal", "masked"],
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
    found = run(link, cls(**settings), UNEQUAL, SENDINGS[name])
    whole = run(SoloLink(), cls(**settings), UNEQUAL, SENDINGS[name], resumed=())
    for rows, expected in zip(found, whole, strict=True):
        for key, row in rows.items():
            torch.testing.assert_close(row, expected[key], rtol=1e-10, atol=1e-11, msg=lambda m, k=key: f"{k}: {m}")


class Words:
    """The mean of moves in a codec, in numpy: bfloat16, or half of the coordinates."""

    def __init__(self, codec):
        self.is_half = codec == "half"

    def begin(self, round_index, number):
        draw = generator(0, "random_k", round_index, number)
        self.places = range(len(X0)) if self.is_half else subset(draw, len(X0), round(0.5 * len(X0)))

    def read(self, moves):
        """What is left of them."""
        if self.is_half:
            return torch.as_tensor(moves).to(torch.bfloat16).double().numpy()
        return np.where(np.isin(np.arange(len(X0)), self.places), moves, 0)

    def mean(self, moves, clients, kind):
        mean = np.average([self.read(moves[i]) for i in clients], axis=0, weights=[WEIGHTS[i] for i in clients])
        mean = self.read(mean) if kind != "difference" else mean
        return mean * (len(X0) / len(self.places) if kind == "point" else 1)


def fednova_in(words):
    """x after each round."""
    x, draws = X0, [0] * N
    for r in range(ROUNDS):
        moves = np.zeros((N, len(X0)))
        for i in here(r):
            y = x
            for _ in range(UNEQUAL[i]):
                y, draws[i] = y - 0.1 * gradient(i, y, draws[i]), draws[i] + 1
            moves[i] = (y - x) / UNEQUAL[i]
        words.begin(r, 0)
        length = np.average([UNEQUAL[i] for i in here(r)], weights=[WEIGHTS[i] for i in here(r)])
        x = x + length * words.mean(moves, here(r), "difference")
        yield {"x": x}


def desloc_in(words):
    """x, m and v after each round; m is averaged in every second one, v in every third."""
    sent = {"x": X0, "m": np.zeros(len(X0)), "v": np.zeros(len(X0))}
    rows, draws = {name: np.tile(row, (N, 1)) for name, row in sent.items()}, [0] * N
    for r in range(ROUNDS):
        x, m, v = rows.values()
        for i in here(r):
            for _ in range(UNEQUAL[i]):
                g, draws[i] = gradient(i, x[i], draws[i]), draws[i] + 1
                m[i], v[i] = 0.7 * m[i] + 0.3 * g, 0.8 * v[i] + 0.2 * g * g
                x[i] -= 0.05 * m[i] / np.sqrt(v[i] + 0.01)
        due = [row for row, every in (("x", 1), ("m", 2), ("v", 3)) if (r + 1) % every == 0]
        for number, row in enumerate(due):
            words.begin(r, number)
            moved = words.mean(rows[row] - sent[row], here(r), "point" if row == "x" else "moment")
            sent[row] = sent[row] + moved
            rows[row][:] = sent[row] = np.maximum(sent[row], 0) if row == "v" else sent[row]
        yield {name: row.copy() for name, row in rows.items()}


IN_NUMPY = {
    "fednova": (FedNova(step_size=0.1), fednova_in),
    "desloc": (DESLOC(0.05, momentum=0.7, second_moment_decay=0.8, epsilon=0.1, m_every=2, v_every=3), desloc_in),
}


@pytest.mark.parametrize("codec", [Half(), RandomK(fraction=0.5)], ids=["half", "random_k"])
@pytest.mark.parametrize("name", IN_NUMPY)
def test_rows_in_a_codec_are_those_of_a_loop_in_numpy(link, name, codec):
    algorithm, loop = IN_NUMPY[name]
    found = run(link, algorithm, UNEQUAL, Sending(codec=codec))
    check_equal(found, list(loop(Words("half" if isinstance(codec, Half) else "random_k"))))
