"""Where the methods end on heterogeneous quadratics with exact gradients, whose minimum is known.

f_i(x) = ½ Σ h_i (x - b_i)², diagonal, with curvatures h_i in [1, 3] and far-apart minima b_i. A method
is free of client drift if the minimum of the mean is a fixed point of its round: a round that starts
there also ends there, at a constant step size and with several local steps.
"""

import numpy as np
import pytest

from fedmpi import simulate
from fedmpi.algorithms import (
    CELSGD,
    FAFED,
    MBSTORM,
    SCAFFOLD,
    SCAFFOLDM,
    SCAFFOLDMVR,
    STEM,
    FAFEDCode,
    FedAdagrad,
    FedAdam,
    FedAMS,
    FedAvg,
    FedAvgM,
    FedDyn,
    FedProx,
    FedYogi,
    MimeAdam,
    Scaffnew,
)

N, DIM, K = 3, 3, 3
_draw = np.random.default_rng(0)
H = 1 + 2 * _draw.random((N, DIM))
B = _draw.standard_normal((N, DIM))
MINIMUM = (H * B).sum(0) / H.sum(0)


def gradient(client, x, sample):
    return H[client] * (np.asarray(x) - B[client])


def end(algorithm, rounds=120, participants=None):
    trace = simulate(
        algorithm,
        gradient,
        np.ones(DIM),
        num_clients=N,
        rounds=rounds,
        local_steps=K,
        participants=participants,
        chosen=lambda r: r % N,
    )
    return np.atleast_2d(trace[-1]["rows"]["x"])[0]


def distance(algorithm, **options):
    return np.abs(end(algorithm, **options) - MINIMUM).max()


FREE_OF_DRIFT = {
    # c - c_i turns each local gradient near x* into that of f: a fixed point is c_i = ∇f_i(x*), c = 0
    "scaffold": SCAFFOLD(step_size=0.1),
    "scaffold option I": SCAFFOLD(step_size=0.1, option="I"),
    "scaffold_m": SCAFFOLDM(step_size=0.1, fresh_weight=0.5),
    "scaffold_m_vr": SCAFFOLDMVR(step_size=0.1, fresh_weight=0.5),
    "scaffnew": Scaffnew(step_size=0.1, probability=0.2),
    # the penalty of a client that stands still at x* has the gradient -∇f_i(x*) there
    "feddyn": FedDyn(step_size=0.1, proximal_weight=1.0),
    # clients step along c + ∇f_i(y) - ∇f_i(x), which is 0 at y = x = x*; ε bounds the step η / (√v + ε)
    "mimeadam": MimeAdam(step_size=0.1, momentum=0.5, second_moment_decay=0.8, epsilon=1.0),
    # no client moves: gradient descent
    "mb_storm": MBSTORM(step_size=0.1, fresh_weight=0.5),
    # one client moves, from the gradient of f on and by differences of its own gradients
    "ce_lsgd": CELSGD(step_size=0.1, fresh_weight=0.5),
    # recursive momentum starts each round from the mean and changes by differences of gradients; the
    # weight α of the client's own fresh gradient is what lets it drift, and exact gradients need none
    "stem": STEM(step_size=0.1, fresh_weight=0),
    "fafed": FAFED(step_size=0.1, fresh_weight=0, epsilon=0.5),
    "fafed code": FAFEDCode(step_size=0.1, fresh_weight=0, epsilon=0.5),
}


@pytest.mark.rarely("fedmpi", "tests/algorithms")
@pytest.mark.parametrize("algorithm", FREE_OF_DRIFT.values(), ids=FREE_OF_DRIFT)
def test_methods_free_of_client_drift_reach_the_minimum(algorithm):
    assert distance(algorithm) < 1e-8


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (SCAFFOLD, {}),
        (SCAFFOLDM, {"fresh_weight": 0.5}),
        (SCAFFOLDMVR, {"fresh_weight": 0.5}),
        (Scaffnew, {"probability": 0.2}),
        (FedDyn, {"proximal_weight": 1.0}),
    ],
)
def test_control_variates_need_only_some_of_the_clients(cls, settings):
    """c, or h, is the mean over all clients, also of those that are absent."""
    assert distance(cls(step_size=0.1, **settings), rounds=300, participants=lambda r: [r % N, (r + 1) % N]) < 1e-8


DRIFTING = {
    "fedavg": FedAvg(step_size=0.1),
    "fedprox": FedProx(step_size=0.1, proximal_weight=0.1),
    "fedavg_m": FedAvgM(step_size=0.1, fresh_weight=0.5),
    "mimelite": MimeAdam(step_size=0.1, momentum=0.5, second_moment_decay=0.8, epsilon=1.0, lite=True),
}


@pytest.mark.parametrize("algorithm", DRIFTING.values(), ids=DRIFTING)
def test_methods_with_client_drift_stop_elsewhere(algorithm):
    assert distance(algorithm) > 1e-3


@pytest.mark.parametrize(
    "algorithm",
    [
        FedAvg(step_size=0.1),
        FedAvg(step_size=0.1, server_step_size=0.5),
        FedAdam(step_size=0.1, server_step_size=0.4, epsilon=0.3, momentum=0.5),
        FedYogi(step_size=0.1, server_step_size=0.4, epsilon=0.3, momentum=0.5),
        FedAdagrad(step_size=0.1, server_step_size=1.0, epsilon=0.3),
        FedAMS(step_size=0.1, server_step_size=0.2, momentum=0.5),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_every_server_over_local_sgd_stops_where_the_mean_move_is_zero(algorithm):
    """K steps of client i end at b_i + ρ_i (x - b_i) with ρ_i = (1 - η h_i)^K: a weighted mean of the b_i."""
    pull = 1 - (1 - 0.1 * H) ** K
    expected = (pull * B).sum(0) / pull.sum(0)
    assert np.abs(expected - MINIMUM).max() > 0.01
    np.testing.assert_allclose(end(algorithm), expected, atol=1e-8)


def test_smaller_steps_drift_less():
    """The bias of FedAvg is of first order in η (K - 1)."""
    large, small = (distance(FedAvg(step_size=eta), rounds=round(6 / eta)) for eta in (0.08, 0.02))
    assert 3 < large / small < 5
