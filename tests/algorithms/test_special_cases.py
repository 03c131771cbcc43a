"""Where one algorithm is another: the numbered list of exact special cases, for minimisation.

Number 8, the counter-example of the FAFED paper, has a file of its own: test_counterexample.py.
"""

import functools

import numpy as np
import pytest
import torch
from test_every_algorithm import CASES, EVERY_CASE, X0, gradient

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
    FedAvgMVR,
    FedLAMB,
    FedProx,
    FedYogi,
    LocalAMSGrad,
)
from fedmpi.comm.solo import SoloLink
from fedmpi.federation import Federation, Plan, Variables
from fedmpi.oracles import FunctionOracle


def partial(r):
    """Two of three clients, or one."""
    return [[0, 2], [1], [1, 2], [0, 1], [0, 2], [2]][r % 6]


def all_clients(r):
    return [0, 1, 2]


ANY_PARTICIPATION = pytest.mark.parametrize("participants", [all_clients, partial])


def full_batch(client, x, sample):
    """Exact gradients: all samples are one."""
    return gradient(client, x, 0)


def shared_data(client, x, sample):
    """All clients draw the same minibatches from the same data."""
    return gradient(0, x, sample)


class Spy:
    """A gradient function that remembers its answers."""

    def __init__(self, function=gradient):
        self.function, self.answers = function, []

    def __call__(self, client, x, sample):
        self.answers.append((client, sample, self.function(client, x, sample)))
        return self.answers[-1][-1]


def run(algorithm, function=gradient, rounds=6, local_steps=3, **options):
    return simulate(algorithm, function, X0, rounds=rounds, local_steps=local_steps, **options)


def rounds_of(trace, row="x"):
    """[rounds + 1, ...]: a row after the start and after every round."""
    return np.array([record["rows"][row] for record in trace if record["step"] is None])


def every_moment(trace, row="x"):
    """A row after the start, after every local step and after every round."""
    return np.array([record["rows"][row] for record in trace])


def assert_equal_up_to_rounding(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


# 1 ---------------------------------------------------------------------------------------------------


@ANY_PARTICIPATION
@pytest.mark.parametrize("server_step_size", [1.0, 0.7])
def test_01_fedprox_without_its_term_is_fedavg(participants, server_step_size):
    prox = FedProx(step_size=0.1, proximal_weight=0, server_step_size=server_step_size)
    avg = FedAvg(step_size=0.1, server_step_size=server_step_size)
    a, b = run(prox, participants=participants), run(avg, participants=participants)
    np.testing.assert_array_equal(every_moment(a), every_moment(b))


def test_01_fedavg_with_one_local_step_is_sgd_on_all_minibatches():
    x = X0
    for t, record in enumerate(rounds_of(run(FedAvg(step_size=0.1), local_steps=1))[1:]):
        x = x - 0.1 * np.mean([gradient(i, x, t) for i in range(3)], axis=0)
        assert_equal_up_to_rounding(record[0], x)


@pytest.mark.parametrize("algorithm", [FedAvg(step_size=0.1), SCAFFOLD(step_size=0.1, c0="gradient")])
def test_01_one_client_is_sgd(algorithm):
    expected = [X0]
    for t in range(18):
        expected.append(expected[-1] - 0.1 * gradient(0, expected[-1], t))
    assert_equal_up_to_rounding(rounds_of(run(algorithm, num_clients=1))[:, 0], expected[::3])


# 2, 3 ------------------------------------------------------------------------------------------------


class UnitFAFED(FAFED):
    """FAFED with A = 1 at all times."""

    def _refresh(self, server):
        server.A.fill_(1)


class UnitFAFEDCode(FAFEDCode):
    """The same of the authors' code."""

    _refresh = UnitFAFED._refresh


@ANY_PARTICIPATION
@pytest.mark.parametrize(
    ("cls", "more"), [(UnitFAFED, {}), (UnitFAFEDCode, {"sync_order": "paper", "first_step": "adaptive"})]
)
@pytest.mark.parametrize(
    "settings",
    [
        {"step_size": 0.1, "fresh_weight": 0.3},
        {"step_size": 0.2, "fresh_weight_scale": 20.0, "schedule": "cube_root", "schedule_rate": 2.0},
        {"step_size": 0.2, "fresh_weight": 0.9, "schedule": "step", "schedule_every": 4, "schedule_period": 1},
    ],
)
def test_02_fafed_without_adaptation_is_stem(settings, cls, more, participants):
    ours = run(cls(**settings, **more), participants=participants)
    stem = run(STEM(**settings), participants=participants)
    assert_equal_up_to_rounding(every_moment(ours), every_moment(stem))
    assert_equal_up_to_rounding(every_moment(ours, "m"), every_moment(stem, "d"))


@pytest.mark.parametrize("algorithm", [UnitFAFED(step_size=0.1, fresh_weight=1.0), STEM(step_size=0.1, fresh_weight=1)])
def test_03_without_memory_it_is_one_sgd_step_and_then_fedavg(algorithm):
    x1 = X0 - 0.1 * np.mean([gradient(i, X0, -1) for i in range(3)], axis=0)
    fedavg = simulate(FedAvg(step_size=0.1), gradient, x1, rounds=6, local_steps=3)
    for ours, theirs in zip(run(algorithm), fedavg):
        if ours["step"] != 2:  # the last move of a round is made by the server
            assert_equal_up_to_rounding(ours["rows"]["x"], theirs["rows"]["x"])


# 4 - 7 -----------------------------------------------------------------------------------------------

ANY_FAFED = pytest.mark.parametrize(("cls", "settings"), [(c, s) for c, s in CASES if c in (FAFED, FAFEDCode)])


@ANY_FAFED
@pytest.mark.parametrize("num_clients", [2, 3, 5])
@pytest.mark.parametrize("local_steps", [1, 4])
def test_04_fafed_on_identical_clients_is_one_client(cls, settings, num_clients, local_steps):
    many = run(cls(**settings), shared_data, num_clients=num_clients, local_steps=local_steps)
    one = run(cls(**settings), shared_data, num_clients=1, local_steps=local_steps)
    for row in ("x", "m", "v", "x_prev"):
        ours, single = every_moment(many, row), every_moment(one, row)
        assert_equal_up_to_rounding(ours, np.broadcast_to(single, ours.shape))


def test_04_one_client_with_one_local_step_is_adaptive_storm():
    eta, a, beta, rho = 0.1, 0.3, 0.6, 0.05
    g = gradient(0, X0, -1)
    m, v, x_prev, x = g, g**2, X0, X0 - eta * g
    fafed = FAFED(step_size=eta, fresh_weight=a, second_moment_decay=beta, epsilon=rho)
    for t, ours in enumerate(rounds_of(run(fafed, num_clients=1, local_steps=1, rounds=12))[1:]):
        g = gradient(0, x, t)
        m = g + (1 - a) * (m - gradient(0, x_prev, t))
        v = beta * v + (1 - beta) * g**2
        x_prev, x = x, x - eta * m / (np.sqrt(v) + rho)
        assert_equal_up_to_rounding(ours[0], x)


@pytest.mark.parametrize("adaptive_matrix", ["diagonal", "global", "adagrad_norm"])
def test_05_the_mean_of_fafed_moves_by_the_mean_momentum(adaptive_matrix):
    trace = run(FAFED(step_size=0.1, fresh_weight=0.3, adaptive_matrix=adaptive_matrix))
    for before, now, after in zip(trace, trace[1:], trace[2:]):
        if now["step"] is None:
            continue
        mean_x = now["rows"]["x_prev"].mean(0)  # x_t: the step stored it before it moved
        moved = after if now["step"] == 2 else now
        expected = mean_x - 0.1 * now["rows"]["m"].mean(0) / moved["rows"]["A"]
        assert_equal_up_to_rounding(moved["rows"]["x"].mean(0), expected)
        assert_equal_up_to_rounding(before["rows"]["x"].mean(0), mean_x)


@pytest.mark.parametrize("a", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("local_steps", [1, 2, 5])
@pytest.mark.parametrize("cls", [STEM, FAFED])
def test_06_full_batches_make_the_mean_momentum_the_mean_gradient(cls, local_steps, a):
    trace = run(cls(step_size=0.05, fresh_weight=a), full_batch, local_steps=local_steps)
    row = "d" if cls is STEM else "m"
    for record in trace:
        if record["step"] is not None:
            at = record["rows"]["x_prev"]  # x_{t,i}
            expected = np.mean([full_batch(i, at[i], 0) for i in range(3)], axis=0)
            assert_equal_up_to_rounding(record["rows"][row].mean(0), expected)


def test_07_fafed_with_beta_1_keeps_its_matrix_and_both_orders_agree():
    settings = {"step_size": 0.1, "fresh_weight": 0.3, "second_moment_decay": 1.0, "epsilon": 0.05}
    paper, code = run(FAFED(**settings)), run(FAFEDCode(**settings))
    A = every_moment(paper, "A")
    assert_equal_up_to_rounding(A, np.broadcast_to(A[0], A.shape))
    assert_equal_up_to_rounding(rounds_of(paper), rounds_of(code))
    other = {**settings, "second_moment_decay": 0.5}
    paper, code = run(FAFED(**other)), run(FAFEDCode(**other))
    assert np.abs(rounds_of(paper) - rounds_of(code)).max() > 1e-4


@ANY_FAFED
def test_07_fafed_with_all_clients_in_every_block_is_full_participation(cls, settings):
    a, b = run(cls(**settings)), run(cls(**settings), participants=all_clients)
    np.testing.assert_array_equal(every_moment(a), every_moment(b))


# 9 - 12 ----------------------------------------------------------------------------------------------

SCAFFOLDS = [(cls, settings) for cls, settings in CASES if cls in (SCAFFOLD, SCAFFOLDM, SCAFFOLDMVR)]


@ANY_PARTICIPATION
@pytest.mark.parametrize(("cls", "settings"), SCAFFOLDS)
def test_09_c_is_the_mean_of_all_c_i(cls, settings, participants):
    trace = run(cls(**settings), participants=participants)
    c, c_i = rounds_of(trace, "c"), rounds_of(trace, "c_i")
    assert_equal_up_to_rounding(c, c_i.mean(1))
    assert np.abs(c[-1]).max() > 0.01
    for r in range(6):
        for absent in set(range(3)) - set(participants(r)):
            np.testing.assert_array_equal(c_i[r + 1, absent], c_i[r, absent])


@ANY_PARTICIPATION
@pytest.mark.parametrize("cls", [SCAFFOLD, SCAFFOLDM, SCAFFOLDMVR])
def test_09_new_c_i_is_the_mean_local_gradient(cls, participants):
    spy = Spy()
    trace = run(cls(step_size=0.1), spy, participants=participants)
    c_i = rounds_of(trace, "c_i")
    for r in range(6):
        for client in participants(r):
            number = sum(client in participants(s) for s in range(r))
            answers = {}
            for i, sample, g in spy.answers:
                if i == client and 3 * number <= sample < 3 * number + 3:
                    answers.setdefault(sample, g)  # the first of a pair is the one at x_i
            assert_equal_up_to_rounding(c_i[r + 1, client], np.mean(list(answers.values()), axis=0))


def test_10_scaffold_on_identical_clients_is_fedavg():
    scaffold, fedavg = run(SCAFFOLD(step_size=0.1), shared_data), run(FedAvg(step_size=0.1), shared_data)
    assert_equal_up_to_rounding(every_moment(scaffold), every_moment(fedavg))


@pytest.mark.parametrize("c0", ["zero", "gradient"])
def test_10_scaffold_with_one_local_step_of_all_clients_is_fedavg(c0):
    scaffold = run(SCAFFOLD(step_size=0.1, c0=c0), local_steps=1)
    fedavg = run(FedAvg(step_size=0.1), local_steps=1)
    assert_equal_up_to_rounding(rounds_of(scaffold), rounds_of(fedavg))


def test_11_scaffold_reaches_the_minimum_with_full_batches_and_fedavg_does_not():
    h, b = np.array([[1.0], [3.0], [5.0]]), np.array([[0.0], [1.0], [-2.0]])
    minimum = (h * b).sum() / h.sum()

    def quadratic(client, x, sample):
        return h[client] * (np.asarray(x) - b[client])

    def distance(algorithm):
        trace = simulate(algorithm, quadratic, [1.0], rounds=300, local_steps=4)
        return abs(trace[-1]["rows"]["x"][0, 0] - minimum)

    assert distance(SCAFFOLD(step_size=0.05)) < 1e-12
    assert distance(FedAvg(step_size=0.05)) > 0.01


@ANY_PARTICIPATION
@pytest.mark.parametrize("gamma", [None, 0.2])
def test_12_without_momentum_the_four_are_fedavg_and_scaffold(gamma, participants):
    eta_g = 1.0 if gamma is None else gamma / (0.1 * 3)
    settings = {"step_size": 0.1, "fresh_weight": 1.0, "server_step_size": gamma}

    def moments(algorithm):
        return every_moment(run(algorithm, participants=participants))

    fedavg = moments(FedAvg(step_size=0.1, server_step_size=eta_g))
    assert_equal_up_to_rounding(moments(FedAvgM(**settings)), fedavg)
    assert_equal_up_to_rounding(moments(FedAvgMVR(**settings)), fedavg)
    for c0 in ("zero", "gradient"):
        scaffold = moments(SCAFFOLD(step_size=0.1, server_step_size=eta_g, c0=c0))
        assert_equal_up_to_rounding(moments(SCAFFOLDM(**settings, c0=c0)), scaffold)
        assert_equal_up_to_rounding(moments(SCAFFOLDMVR(**settings, c0=c0)), scaffold)


# 13 - 16 ---------------------------------------------------------------------------------------------


def test_13_fedavg_m_with_beta_0_never_moves():
    x = every_moment(run(FedAvgM(step_size=0.1, fresh_weight=0.0)))
    np.testing.assert_array_equal(x, np.broadcast_to(X0, x.shape))


@pytest.mark.parametrize("gamma", [None, 0.2])
def test_13_g_of_fedavg_m_mixes_the_mean_gradient_into_the_old_g(gamma):
    spy = Spy()
    trace = run(FedAvgM(step_size=0.1, fresh_weight=0.3, server_step_size=gamma), spy)
    g, x = rounds_of(trace, "g"), rounds_of(trace)[:, 0]
    fresh = np.array([answer for *_, answer in spy.answers]).reshape(6, 9, -1).mean(1)
    assert_equal_up_to_rounding(g[1:], 0.3 * fresh + 0.7 * g[:-1])
    assert_equal_up_to_rounding(g[1:], (x[:-1] - x[1:]) / (gamma or 0.3))


@ANY_PARTICIPATION
@pytest.mark.parametrize(("cls", "settings"), [(FedAvgM, {}), (FedAvgMVR, {}), (SCAFFOLDM, {}), (SCAFFOLDMVR, {})])
def test_13_gamma_eta_K_is_the_plain_average(cls, settings, participants):
    trace = run(cls(step_size=0.1, fresh_weight=0.3, **settings), participants=participants)
    for last, after in zip(trace, trace[1:]):
        if last["step"] == 2:
            mean = last["rows"]["x"][participants(after["round"])].mean(0)
            assert_equal_up_to_rounding(after["rows"]["x"][0], mean)


@ANY_PARTICIPATION
@pytest.mark.parametrize("gamma", [None, 0.2])
@pytest.mark.parametrize("cls", [FedAvgM, SCAFFOLDM])
def test_14_the_reparameterised_form_makes_the_same_iterates(cls, gamma, participants):
    beta = 0.3
    original = run(
        cls(step_size=0.1, fresh_weight=beta, server_step_size=gamma),
        participants=participants,
    )
    other = run(
        cls(
            step_size=beta * 0.1,
            fresh_weight=beta,
            server_step_size=None if gamma is None else beta * gamma,
            form="reparameterised",
        ),
        participants=participants,
    )
    assert_equal_up_to_rounding(every_moment(original), every_moment(other))
    assert_equal_up_to_rounding(every_moment(original, "g"), beta * every_moment(other, "g"))


def test_15_with_one_local_step_of_all_clients_control_variates_cancel():
    settings = {"step_size": 0.1, "fresh_weight": 0.3}
    a, b = run(SCAFFOLDM(**settings), local_steps=1), run(FedAvgM(**settings), local_steps=1)
    assert_equal_up_to_rounding(rounds_of(a), rounds_of(b))


def test_15_with_one_local_step_of_all_clients_four_methods_are_one():
    settings = {"step_size": 0.1, "fresh_weight": 0.3}
    storm = run(MBSTORM(**settings), local_steps=1)
    for cls in (SCAFFOLDMVR, FedAvgMVR, CELSGD):
        ours = rounds_of(run(cls(**settings), local_steps=1, chosen=lambda r: r % 3))
        assert_equal_up_to_rounding(ours, rounds_of(storm))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_16_mb_storm_with_full_batches_has_the_exact_gradient(beta):
    trace = run(MBSTORM(step_size=0.05, fresh_weight=beta), full_batch)
    x, g = rounds_of(trace)[:, 0], rounds_of(trace, "g")
    for r in range(6):
        exact = np.mean([full_batch(i, x[r], 0) for i in range(3)], axis=0)
        assert_equal_up_to_rounding(g[r + 1], np.tile(exact, (3, 1)))


def test_16_ce_lsgd_alone_with_full_batches_is_gradient_descent():
    x = [X0]
    for _ in range(18):
        x.append(x[-1] - 0.1 * full_batch(0, x[-1], 0))
    ours = rounds_of(run(CELSGD(step_size=0.1, fresh_weight=0.3), full_batch, num_clients=1))
    assert_equal_up_to_rounding(ours[:, 0], x[::3])


# 17, 18 ----------------------------------------------------------------------------------------------


def moves(trace):
    """[rounds, dim]: Δ of FedAvg's clients and what the server made of it."""
    deltas, steps = [], []
    x = trace[0]["rows"]["x"][0]
    for last, after in zip(trace, trace[1:]):
        if last["step"] is not None and after["step"] is None:
            deltas.append(last["rows"]["x"].mean(0) - x)
            steps.append(after["rows"]["x"][0] - x)
            x = after["rows"]["x"][0]
    return np.array(deltas), np.array(steps)


@ANY_PARTICIPATION
@pytest.mark.parametrize("cls", [FedAdam, FedYogi])
def test_17_adaptive_server_with_frozen_moments_is_fedavg(cls, participants):
    tau = 0.03
    frozen = cls(step_size=0.1, momentum=0.0, second_moment_decay=1.0, epsilon=tau, server_step_size=2 * tau)
    a, b = run(frozen, participants=participants), run(FedAvg(step_size=0.1), participants=participants)
    assert_equal_up_to_rounding(every_moment(a), every_moment(b))


def test_17_fedadam_without_memory_moves_by_the_normalised_delta():
    trace = run(FedAdam(step_size=0.1, server_step_size=0.2, momentum=0.0, second_moment_decay=0.0, epsilon=0.01))
    delta, step = moves(trace)
    assert_equal_up_to_rounding(step, 0.2 * delta / (np.abs(delta) + 0.01))


def test_17_v_of_fedadagrad_is_the_sum_of_squares():
    trace = run(FedAdagrad(step_size=0.1, epsilon=0.01))
    delta, _ = moves(trace)
    assert_equal_up_to_rounding(rounds_of(trace, "v")[1:], 0.01**2 + np.cumsum(delta**2, axis=0))


@ANY_PARTICIPATION
def test_17_fedams_with_frozen_moments_is_fedavg(participants):
    epsilon = 0.04
    frozen = FedAMS(step_size=0.1, momentum=0.0, second_moment_decay=1.0, epsilon=epsilon, server_step_size=0.2)
    a, b = run(frozen, participants=participants), run(FedAvg(step_size=0.1), participants=participants)
    assert_equal_up_to_rounding(every_moment(a), every_moment(b))


@pytest.mark.parametrize("option", [1, 2])
def test_17_v_hat_of_fedams_never_decreases(option):
    trace = run(FedAMS(step_size=0.1, second_moment_decay=0.4, epsilon=1e-4, server_step_size=0.01, option=option))
    v_hat = rounds_of(trace, "v_hat")
    assert (np.diff(v_hat, axis=0) >= 0).all() and (np.diff(v_hat, axis=0) > 0).any()
    assert option == 2 or (v_hat[1:] >= 1e-4).all()


def test_18_local_amsgrad_alone_with_one_local_step_is_amsgrad():
    x, m, v = X0, 0, np.full(5, 0.3)
    v_hat = v
    ours = run(
        LocalAMSGrad(step_size=0.1, momentum=0.7, second_moment_decay=0.8, v0=0.3),
        num_clients=1,
        local_steps=1,
        rounds=12,
    )
    for t, after in enumerate(rounds_of(ours)[1:]):
        g = gradient(0, x, t)
        m, v = 0.7 * m + 0.3 * g, 0.8 * v + 0.2 * g**2
        v_hat = np.maximum(v_hat, v)
        x = x - 0.1 * m / np.sqrt(v_hat)
        assert_equal_up_to_rounding(after[0], x)


@ANY_PARTICIPATION
@pytest.mark.parametrize("refresh", ["before", "after"])
def test_18_v_hat_of_local_amsgrad_never_decreases(refresh, participants):
    v_hat = every_moment(
        run(LocalAMSGrad(step_size=0.1, second_moment_decay=0.5, refresh=refresh), participants=participants), "v_hat"
    )
    assert (np.diff(v_hat, axis=0) >= 0).all() and (np.diff(v_hat, axis=0) > 0).any()


# 19, 20 ----------------------------------------------------------------------------------------------

LAYERS = [slice(0, 2), slice(2, 3), slice(3, 5)]
NONZERO = np.array([1.0, -0.5, 0.7, 2.0, 0.3])


@pytest.mark.parametrize("layer_decay", [0.0, 0.1])
def test_19_every_layer_of_fed_lamb_steps_as_far_as_its_norm_says(layer_decay):
    trace = simulate(FedLAMB(step_size=0.03, layer_decay=layer_decay), gradient, NONZERO, segments=LAYERS, rounds=6)
    for before, after in zip(trace, trace[1:]):
        if after["step"] is None:
            continue
        x, moved = before["rows"]["x"], after["rows"]["x"]
        for layer in LAYERS:
            lengths = np.linalg.norm((moved - x)[:, layer], axis=1)
            assert_equal_up_to_rounding(lengths, 0.03 * np.linalg.norm(x[:, layer], axis=1))


@pytest.mark.parametrize("scale", [1e-3, 100.0])
def test_19_fed_lamb_does_not_see_the_scale_of_the_loss(scale):
    algorithm = FedLAMB(step_size=0.03, epsilon=1e-30)
    plain = simulate(algorithm, gradient, NONZERO, segments=LAYERS, rounds=6)
    scaled = simulate(algorithm, lambda i, x, s: scale * gradient(i, x, s), NONZERO, segments=LAYERS, rounds=6)
    assert_equal_up_to_rounding(every_moment(plain), every_moment(scaled))


def test_19_layers_that_start_at_zero_move():
    trace = simulate(FedLAMB(step_size=0.03, epsilon=0.01), gradient, np.zeros(5), segments=LAYERS, rounds=1)
    for layer in LAYERS:
        assert (np.linalg.norm(trace[2]["rows"]["x"][:, layer], axis=1) > 1e-3).all()


@ANY_PARTICIPATION
def test_20_fed_lamb_without_layers_is_a_restarted_local_amsgrad(participants):
    epsilon, beta1 = 1e-3, 0.7
    settings = {"step_size": 0.01, "momentum": beta1, "second_moment_decay": 0.8}

    class Unscaled(FedLAMB):
        def ratio(self, x, u):
            return 1.0

    class Restarted(LocalAMSGrad):
        def download(self, client, server):
            client.m.zero_()
            client.v.copy_(server.v_hat)
            torch.sqrt(server.v_hat, out=client.denominator).add_(epsilon)

        def eta(self, client):
            return super().eta(client) / (1 - beta1 ** (client.step_index + 1))

    lamb = run(Unscaled(**settings, epsilon=epsilon), participants=participants)
    amsgrad = run(Restarted(**settings, v0=epsilon, refresh="after"), participants=participants)
    assert_equal_up_to_rounding(every_moment(lamb), every_moment(amsgrad))
    assert_equal_up_to_rounding(every_moment(lamb, "v_hat"), every_moment(amsgrad, "v_hat"))


# 21 --------------------------------------------------------------------------------------------------


@EVERY_CASE
def test_21_identical_clients_are_one_client(cls, settings):
    def same(client, x, sample):
        # CE-LSGD lets clients draw unequal numbers of samples
        return gradient(0, x, 0 if cls is CELSGD else sample)

    many, one = run(cls(**settings), same, num_clients=4), run(cls(**settings), same, num_clients=1)
    for row in one[0]["rows"]:
        ours, single = rounds_of(many, row), rounds_of(one, row)
        assert_equal_up_to_rounding(ours, np.broadcast_to(single, ours.shape))


def test_the_first_denominator_of_local_amsgrad_is_never_0():
    """Where an initial gradient is 0, v̂ begins at 1e-8; elsewhere at the mean square."""
    start = Variables(torch.tensor([0.0, 3.0], dtype=torch.float64))
    oracles = dict.fromkeys(range(2), functools.partial(FunctionOracle, lambda client, x, sample: (1 + client) * x))
    federation = Federation(LocalAMSGrad(), SoloLink(), oracles, Plan(2), start)
    federation.start()
    assert federation.server.v_hat.tolist() == [1e-8, pytest.approx((9 + 36) / 2)]
