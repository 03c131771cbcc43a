"""The min-max algorithms against independent transcriptions, and the special cases that they promise."""

import functools

import numpy as np
import pytest
import reference_minmax as reference
import torch
from test_every_algorithm import new_vectors_in_round_2

import fedmpi
from fedmpi.algorithms import FAFED, STEM, FedAvg
from fedmpi.algorithms.minmax import CODA, CODASCA, FMGDA, LocalSGDA, MomentumLocalSGDA
from fedmpi.comm.solo import SoloLink
from fedmpi.federation.participation import Plan
from fedmpi.federation.rounds import Federation
from fedmpi.federation.variables import Variables
from fedmpi.ground.errors import UserError
from fedmpi.oracles import FunctionOracle
from fedmpi.tasks.auc import auc_loss

N, D1, D = 3, 3, 5
ASCENT = slice(D1, None)


class Saddles:
    """f_i(θ, w) = ½ θᵀ A_i θ + θᵀ B_i w - ½ wᵀ C_i w + b_iᵀ θ + c_iᵀ w, strongly convex-concave.

    `gradient` adds noise that belongs to (client, sample), a shift and a tilt, so that a pair on one
    sample differs from a pair on two.
    """

    def __init__(self, seed=0, identical=False, noise=0.3):
        draw = np.random.default_rng(seed)

        def positive(k):
            root = draw.normal(size=(k, k))
            return root @ root.T / k + np.eye(k)

        self.H, self.b = np.zeros((N, D, D)), np.zeros((N, D))
        for i in range(N):
            if identical and i:
                self.H[i], self.b[i] = self.H[0], self.b[0]
                continue
            coupling = draw.normal(size=(D1, D - D1))
            self.H[i] = np.block([[positive(D1), coupling], [coupling.T, -positive(D - D1)]])
            self.b[i] = draw.normal(size=D)
        self.noise, self.identical = noise, identical

    def __call__(self, client, z, sample):
        z = np.asarray(z, float)
        g = self.H[client] @ z + self.b[client]
        draw = np.random.default_rng([0 if self.identical else client, sample + 10])
        return g + self.noise * (draw.normal(size=D) + draw.normal(size=D) * z)

    def saddle(self):
        return np.linalg.solve(self.H.mean(0), -self.b.mean(0))


NOISY = Saddles()
Z0 = np.random.default_rng(5).normal(size=D)


def some(round_index):
    """Two of three clients, another pair in every round."""
    return [c for c in range(N) if c != (2 * round_index + 1) % 3]


def averages(trace, row="x"):
    """The row after the start and after every communication, one for all clients."""
    rests = [r["rows"][row] for r in trace if r["step"] is None]
    for rows in rests[1:]:
        assert (rows == rows[0]).all()
    return [rows[0] for rows in rests]


def steps(trace, row="x"):
    return [r["rows"][row] for r in trace if r["step"] is not None]


def run(algorithm, gradient=NOISY, rounds=4, q=2, participants=None, ascent=ASCENT, **more):
    return fedmpi.simulate(algorithm, gradient, Z0, N, rounds, q, participants, ascent=ascent, **more)


def assert_same(found, expected, tolerance=1e-12):
    assert len(found) == len(expected)
    for f, e in zip(found, expected):
        np.testing.assert_allclose(f, e, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("q", [2, 3])
@pytest.mark.parametrize("active", [None, some], ids=["all", "some"])
class TestAgainstTranscriptions:
    def test_local_sgda(self, q, active):
        found = run(LocalSGDA(step_size=0.05, dual_step_size=0.02), q=q, participants=active)
        assert_same(averages(found), reference.local_sgda(NOISY, Z0, D1, N, 4, q, 0.05, 0.02, active))

    def test_fmgda(self, q, active):
        algorithm = FMGDA(step_size=0.05, dual_step_size=0.02, fresh_weight=0.3, dual_fresh_weight=0.6)
        found = run(algorithm, q=q, participants=active)
        assert_same(averages(found), reference.fmgda(NOISY, Z0, D1, N, 4, q, 0.05, 0.02, 0.3, 0.6, active))

    @pytest.mark.parametrize("closed", [False, True])
    @pytest.mark.parametrize("average", [False, True])
    def test_coda(self, q, active, closed, average):
        algorithm = CODA(
            step_size=0.06,
            dual_step_size=0.03,
            prox_weight=0.4,
            stage_rounds=2,
            step_decay=2.0,
            prox="closed" if closed else "explicit",
            stage_output="average" if average else "last",
        )
        found = run(algorithm, rounds=6, q=q, participants=active)
        expected = reference.coda(NOISY, Z0, D1, N, 3, 2, q, 0.06, 0.03, 0.4, 2.0, closed, average, active)
        assert_same(averages(found), expected)

    def test_codasca(self, q, active):
        algorithm = CODASCA(
            step_size=0.06, dual_step_size=0.03, prox_weight=0.4, stage_rounds=2, step_decay=2.0, server_step_size=0.7
        )
        found, controls = run(algorithm, rounds=6, q=q, participants=active), []
        expected = reference.codasca(NOISY, Z0, D1, N, 3, 2, q, 0.06, 0.03, 0.4, 2.0, 0.7, active, controls)
        assert_same(averages(found), expected)
        rests = [r["rows"] for r in found if r["step"] is None][1:]
        for rows, (c_theta, c_w, C_theta, C_w) in zip(rests, controls):
            assert_same([rows["c_i"], rows["c"]], [np.hstack([c_theta, -c_w]), np.hstack([C_theta, -C_w])], 1e-11)


@pytest.mark.parametrize("active", [None, some], ids=["all", "some"])
@pytest.mark.parametrize("average", [False, True])
def test_stages_that_grow(active, average):
    """Stages of 2, 3 and 5 rounds (2, 3.2 and 5.12, rounded), the step sizes halved after each."""
    settings = {"prox_weight": 0.4, "stage_rounds": 2, "step_decay": 2.0, "stage_growth": 1.6}
    found = run(
        CODA(0.06, 0.03, stage_output="average" if average else "last", **settings), rounds=10, participants=active
    )
    arguments = (NOISY, Z0, D1, N, 3, 2, 2, 0.06, 0.03, 0.4, 2.0)
    assert_same(averages(found), reference.coda(*arguments, average=average, active=active, growth=1.6))
    found = run(CODASCA(0.06, 0.03, **settings), rounds=10, participants=active)
    assert_same(averages(found), reference.codasca(*arguments, active=active, growth=1.6))


@pytest.mark.parametrize("cls", [CODA, CODASCA])
def test_a_stage_of_the_authors_code_starts_at_the_last_point_and_is_pulled_to_the_average(cls):
    def rows(output, rounds):
        algorithm = cls(0.06, 0.03, prox_weight=0.4, stage_rounds=2, stage_output=output)
        return run(algorithm, rounds=rounds)[-1]["rows"]

    last, average, code = (rows(output, 2) for output in ("last", "average", "code"))
    np.testing.assert_array_equal(code["x"], last["x"])
    np.testing.assert_allclose(code["x_ref"][:D1], average["x"][0, :D1], rtol=1e-12)
    assert not np.array_equal(code["x_ref"][:D1], last["x_ref"][:D1]) and not code["x_sum"].any()
    assert not np.array_equal(rows("code", 3)["x"], rows("last", 3)["x"])  # the pull differs


def test_growing_stages_need_a_first_length():
    with pytest.raises(UserError, match=r"algorithm.stage_growth = 3: expected stage_rounds too"):
        CODASCA(stage_growth=3)


@pytest.mark.parametrize("schedule", ["constant", "cube_root"])
@pytest.mark.parametrize("own_scale", [True, False], ids=["c1-c2", "c1"])
@pytest.mark.parametrize("q", [2, 3])
@pytest.mark.parametrize("active", [None, some], ids=["all", "some"])
def test_fmgda_with_the_weights_of_its_theorem(q, active, own_scale, schedule):
    """α_t = c_1 η_t² and β_t = c_2 η_t², η_t the step size of move t, after which estimate t is made."""

    def eta(t):
        return 0.05 * (1.0 if schedule == "constant" else (1 + t) ** (-1 / 3))

    c1, c2 = 150.0, 90.0 if own_scale else None
    settings = {"fresh_weight_scale": c1, "dual_fresh_weight_scale": c2, "schedule": schedule}
    found = run(FMGDA(step_size=0.05, dual_step_size=0.02, **settings), q=q, participants=active)
    weights = [lambda t: min(1, c1 * eta(t) ** 2), lambda t: min(1, (c2 or c1) * eta(t) ** 2)]
    expected = reference.fmgda(NOISY, Z0, D1, N, 4, q, eta, lambda t: 0.4 * eta(t), *weights, active)
    assert_same(averages(found), expected)


def test_fmgda_weighs_each_block_by_what_is_set_for_it():
    """The ascent has its own scale, else its own weight, else the weight of the descent; none exceeds 1."""
    step = {"step_size": 0.05}
    for settings, alpha, beta in (
        ({"fresh_weight_scale": 100.0, "dual_fresh_weight": 0.6}, 0.25, 0.6),
        ({"fresh_weight": 0.3, "dual_fresh_weight_scale": 200.0}, 0.3, 0.5),
        ({"fresh_weight_scale": 9999.0}, 1.0, 1.0),
    ):
        expected = reference.fmgda(NOISY, Z0, D1, N, 4, 2, 0.05, 0.05, alpha, beta)
        assert_same(averages(run(FMGDA(**step, **settings))), expected)


@pytest.mark.parametrize("q", [2, 3])
def test_momentum_local_sgda_against_its_transcription(q):
    algorithm = MomentumLocalSGDA(
        step_size=0.05, dual_step_size=0.02, fresh_weight=0.3, dual_fresh_weight=0.6, time_step=0.8
    )
    expected = reference.momentum_local_sgda(NOISY, Z0, D1, N, 4, q, 0.05, 0.02, 0.3, 0.6, 0.8)
    assert_same(averages(run(algorithm, q=q)), expected)


class TestUnevenSteps:
    """K_i local steps on client i (`local_steps=callable`): 1, 4 and 2."""

    K = (1, 4, 2)

    def found(self, algorithm, **more):
        return averages(run(algorithm, q=self.K.__getitem__, **more))

    @pytest.mark.parametrize("active", [None, some], ids=["all", "some"])
    def test_local_sgda(self, active):
        expected = reference.local_sgda(NOISY, Z0, D1, N, 4, self.K, 0.05, 0.02, active)
        assert_same(self.found(LocalSGDA(step_size=0.05, dual_step_size=0.02), participants=active), expected)

    @pytest.mark.parametrize("active", [None, some], ids=["all", "some"])
    def test_fmgda(self, active):
        algorithm = FMGDA(step_size=0.05, dual_step_size=0.02, fresh_weight=0.3, dual_fresh_weight=0.6)
        expected = reference.fmgda(NOISY, Z0, D1, N, 4, self.K, 0.05, 0.02, 0.3, 0.6, active)
        assert_same(self.found(algorithm, participants=active), expected)

    def test_momentum_local_sgda(self):
        algorithm = MomentumLocalSGDA(0.05, 0.02, fresh_weight=0.3, dual_fresh_weight=0.6, time_step=0.8)
        expected = reference.momentum_local_sgda(NOISY, Z0, D1, N, 4, self.K, 0.05, 0.02, 0.3, 0.6, 0.8)
        assert_same(self.found(algorithm), expected)

    @pytest.mark.parametrize("average", [False, True])
    def test_coda(self, average):
        settings = {"prox_weight": 0.4, "stage_rounds": 2, "stage_output": "average" if average else "last"}
        expected = reference.coda(NOISY, Z0, D1, N, 2, 2, self.K, 0.06, 0.03, 0.4, average=average, active=some)
        assert_same(self.found(CODA(0.06, 0.03, **settings), participants=some), expected)

    def test_codasca(self):
        algorithm = CODASCA(0.06, 0.03, prox_weight=0.4, stage_rounds=2)
        expected = reference.codasca(NOISY, Z0, D1, N, 2, 2, self.K, 0.06, 0.03, 0.4, active=some)
        assert_same(self.found(algorithm, participants=some), expected)


class Scores:
    """Deep AUC with the score h = m1 sigmoid(m2 x) on batches of 6 numbers x, of which client 0 has positives only."""

    p, start = 0.6, np.array([0.7, -0.4, 1.0, 0.0, 0.3])  # m1, m2, a, b, w

    def sample(self, client, number):
        draw = np.random.default_rng([client, number])
        labels = np.where(draw.random(6) < self.p, 1, -1) if client else np.ones(6)
        return draw.normal(size=6) + labels, labels

    def scores(self, client, z, number):
        x, labels = self.sample(client, number)
        return z[0] / (1 + np.exp(-z[1] * x)), labels

    def gradient(self, client, z, number):
        x, labels = self.sample(client, number)
        z = torch.as_tensor(z).detach().clone().requires_grad_()
        h = z[0] * torch.sigmoid(z[1] * torch.as_tensor(x))
        auc_loss(h, torch.as_tensor(labels > 0).double(), self.p, *z[2:]).backward()
        return z.grad.numpy()


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("active", [None, some], ids=["all", "some"])
def test_the_dual_restarts_from_the_pooled_mean_scores(average, active):
    problem, output = Scores(), "average" if average else "last"
    algorithm = CODA(0.3, 0.2, prox_weight=0.4, stage_rounds=2, stage_output=output, dual_restart=True)
    found = fedmpi.simulate(
        algorithm, problem.gradient, problem.start, N, rounds=6, local_steps=3, participants=active, ascent=slice(4, 5)
    )
    arguments = (problem.gradient, problem.start, 4, N, 3, 2, 3, 0.3, 0.2, 0.4)
    expected = reference.coda(*arguments, average=average, active=active, scores=problem.scores)
    assert_same(averages(found), expected, 1e-11)
    goes_on = reference.coda(*arguments, average=average, active=active)
    assert abs(goes_on[2][4] - expected[2][4]) > 0.01  # the restart is seen


def with_private_parts(problem, private, output, rounds=6, q=3):
    """[N, 5] each client's own (θ, a, b, w) after stages of two rounds, all clients in one loop."""
    z, draws = np.tile(problem.start, (N, 1)), [0] * N
    ref, visited, shared = z.copy(), np.zeros_like(z), [j for j in range(5) if j not in private]
    for r in range(rounds):
        eta, eta_w = 0.3 / 3 ** (r // 2), 0.2 / 3 ** (r // 2)
        for i in range(N):
            for _ in range(q):
                g, draws[i] = problem.gradient(i, z[i], draws[i]), draws[i] + 1
                z[i, :4] -= eta * (g[:4] + 0.4 * (z[i, :4] - ref[i, :4]))
                z[i, 4] += eta_w * g[4]
                visited[i] += z[i] / (2 * q)
        z[:, shared] = z[:, shared].mean(0)
        if r % 2 == 0:
            continue
        visited[:, shared] = visited[:, shared].mean(0)
        if output == "average":
            z[:, :4] = visited[:, :4]
        ref, found = (visited if output == "code" else z).copy(), []
        for i in range(N):
            found.append(problem.scores(i, z[i], draws[i]))
            draws[i] += 1
        for pool in [[i] for i in range(N)] if 4 in private else [list(range(N))]:
            h, labels = (np.concatenate(parts) for parts in zip(*(found[i] for i in pool)))
            if len({*labels}) == 2:
                z[pool, 4] = h[labels < 0].mean() - h[labels > 0].mean()
        visited[:] = 0
    return z


@pytest.mark.parametrize("output", ["last", "average", "code"])
@pytest.mark.parametrize("private", [[0, 1], [2, 3], [4], [3, 4], [2, 3, 4], [0, 1, 2, 3, 4]], ids=str)
def test_the_dual_restarts_with_private_parts(private, output):
    """From a client's own scores if w is its own, else from all; a and b may be private or not."""
    problem, ascent = Scores(), slice(4, 5)
    algorithm = CODA(0.3, 0.2, prox_weight=0.4, stage_rounds=2, stage_output=output, dual_restart=True)
    oracle = functools.partial(FunctionOracle, problem.gradient, ascent=ascent)
    places = tuple(slice(place, place + 1) for place in private)
    variables = Variables(torch.as_tensor(problem.start), ascent=ascent, private=places)
    federation = Federation(algorithm, SoloLink(), dict.fromkeys(range(N), oracle), Plan(N, 3), variables)
    federation.start()
    for _ in range(6):
        federation.run_round()
    server, models = federation.server, federation.private.model
    found = [models(client, server.x, federation.store.buffers)[0].numpy() for client in federation.clients]
    np.testing.assert_allclose(found, with_private_parts(problem, private, output), rtol=1e-10, atol=1e-11)


def test_the_dual_restart_sends_where_a_stage_ends_only():
    link, problem = SoloLink(), Scores()
    oracle = functools.partial(FunctionOracle, problem.gradient, ascent=slice(4, 5))
    variables = Variables(torch.as_tensor(problem.start), ascent=slice(4, 5))
    federation = Federation(CODA(stage_rounds=2, dual_restart=True), link, {0: oracle}, Plan(1), variables)
    federation.start()
    sent = []
    for _ in range(4):
        federation.run_round()
        sent.append(link.traffic.collectives)
    assert sent == [1, 3, 4, 6]


def test_the_dual_goes_on_where_a_batch_has_one_kind_of_sample_only():
    problem, settings = Scores(), {"step_size": 0.3, "stage_rounds": 2}
    runs = [
        averages(
            fedmpi.simulate(CODA(**settings, **more), problem.gradient, problem.start, 1, 2, 2, ascent=slice(4, 5))
        )
        for more in ({}, {"dual_restart": True})
    ]
    assert_same(*runs)


def test_the_dual_restart_says_what_it_needs():
    with pytest.raises(UserError, match="stage_rounds"):
        CODA(dual_restart=True)
    with pytest.raises(UserError, match="task auc"):
        run(CODA(dual_restart=True, stage_rounds=2))


def test_control_variates_are_mean_gradients_whatever_the_schedule():
    trace = fedmpi.simulate(
        CODASCA(step_size=0.1, prox_weight=0.0, schedule="cube_root"),
        lambda client, x, sample: np.array([1.0, -1.0]),
        [1.0, 2.0], 2, rounds=4, local_steps=5, ascent=slice(1, None),
    )  # fmt: skip
    for record in trace:
        if record["step"] is None and record["round"] >= 0:
            np.testing.assert_allclose(record["rows"]["c_i"], [[1.0, 1.0]] * 2, rtol=1e-12)


def test_dual_weight_and_step_default_to_the_primal_ones():
    both = FMGDA(step_size=0.05, dual_step_size=0.05, fresh_weight=0.3, dual_fresh_weight=0.3)
    assert_same(averages(run(both)), averages(run(FMGDA(step_size=0.05, fresh_weight=0.3))))


def test_sign_and_step_of_each_block():
    """One step of SGDA from z: down along ∇_θ with η_θ, up along ∇_w with η_w; also a block in the middle."""
    g = NOISY(0, Z0, 0)
    for ascent in (slice(3, None), slice(0, 2), slice(1, 3), slice(-1, None)):
        rate = np.full(D, -0.1)
        rate[ascent] = 0.004
        found = fedmpi.simulate(LocalSGDA(0.1, 0.004), NOISY, Z0, 1, rounds=1, local_steps=1, ascent=ascent)
        assert_same([averages(found)[1]], [Z0 + rate * g])


def test_an_ascent_block_must_hold_something():
    for wrong in (slice(D, None), slice(2, 1), slice(0, 4, 2)):
        with pytest.raises(UserError, match="ascent"):
            run(LocalSGDA(), ascent=wrong)


def test_24_local_sgda_with_one_step_is_centralised_sgda():
    z, expected = Z0, [Z0]
    for t in range(5):
        g = np.mean([NOISY(i, z, t) for i in range(N)], axis=0)
        z = np.concatenate([z[:D1] - 0.05 * g[:D1], z[D1:] + 0.02 * g[D1:]])
        expected.append(z)
    assert_same(averages(run(LocalSGDA(step_size=0.05, dual_step_size=0.02), rounds=5, q=1)), expected)


@pytest.mark.parametrize("prox", ["explicit", "closed"])
def test_24_coda_in_one_stage_without_prox_is_local_sgda(prox):
    coda = run(CODA(step_size=0.05, prox_weight=0, prox=prox), q=3)
    sgda = run(LocalSGDA(step_size=0.05), q=3)
    assert_same(averages(coda) + steps(coda), averages(sgda) + steps(sgda))


@pytest.mark.parametrize("stage_rounds", [None, 2])
def test_24_codasca_on_identical_clients_is_coda(stage_rounds):
    saddles, settings = Saddles(identical=True), {"step_size": 0.05, "prox_weight": 0.3, "stage_rounds": stage_rounds}
    coda, codasca = (run(cls(**settings), saddles, rounds=5) for cls in (CODA, CODASCA))
    assert_same(averages(codasca) + steps(codasca), averages(coda) + steps(coda))


def test_24_codasca_keeps_c_the_mean_of_all_c_i():
    found = run(CODASCA(step_size=0.05), rounds=6, participants=some)
    rests = [r["rows"] for r in found if r["step"] is None]
    for s, (before, after) in enumerate(zip(rests, rests[1:])):
        np.testing.assert_allclose(after["c"], after["c_i"].mean(0), atol=1e-13)
        for absent in set(range(N)) - set(some(s)):
            assert (after["c_i"][absent] == before["c_i"][absent]).all()


def test_24_codasca_finds_the_saddle_where_local_sgda_is_biased():
    exact = Saddles(noise=0)
    last = functools.partial(run, gradient=exact, rounds=400, q=4)
    saddle = exact.saddle()
    assert np.abs(averages(last(CODASCA(step_size=0.05, prox_weight=0)))[-1] - saddle).max() < 1e-9
    assert np.abs(averages(last(LocalSGDA(step_size=0.05)))[-1] - saddle).max() > 1e-2


@pytest.mark.parametrize("q", [1, 2, 3])
def test_25_fmgda_without_momentum_is_local_sgda_on_shifted_samples(q):
    """Every client, every step: Local SGDA on the samples B_0, ξ_1, ξ_2, ..., which simulate numbers -1, 0, 1, ..."""

    def shifted(client, z, sample):
        return NOISY(client, z, sample - 1)

    settings = {"step_size": 0.05, "dual_step_size": 0.02}
    fmgda = run(FMGDA(fresh_weight=1, **settings), q=q)
    sgda = run(LocalSGDA(**settings), shifted, q=q)
    assert_same(averages(fmgda) + steps(fmgda), averages(sgda) + steps(sgda))


def test_26_fmgda_without_dual_and_one_step_is_stem_one_round_ahead():
    fmgda = run(FMGDA(step_size=0.05, fresh_weight=0.3), q=1, rounds=6, ascent=None)
    stem = run(STEM(step_size=0.05, fresh_weight=0.3), q=1, rounds=5, ascent=None)
    assert_same(averages(fmgda)[1:], averages(stem))


def test_26_fmgda_with_more_steps_differs_from_stem():
    fmgda = run(FMGDA(step_size=0.05, fresh_weight=0.3), q=2, ascent=None)
    stem = run(STEM(step_size=0.05, fresh_weight=0.3), q=2, ascent=None)
    assert np.abs(averages(fmgda)[1] - averages(stem)[1]).max() > 1e-3


def test_27_momentum_local_sgda_without_momentum_is_local_sgda_until_the_first_average():
    def shifted(client, z, sample):
        return NOISY(client, z, sample - 1)

    momentum = run(MomentumLocalSGDA(step_size=0.05, fresh_weight=1), q=3, rounds=3)
    plain = run(LocalSGDA(step_size=0.05), shifted, q=3, rounds=3)
    assert_same(averages(momentum)[:2] + steps(momentum)[:3], averages(plain)[:2] + steps(plain)[:3])
    assert np.abs(averages(momentum)[2] - averages(plain)[2]).max() > 1e-3


def test_fmgda_with_full_batches_keeps_the_mean_of_d_the_mean_gradient():
    """Test 6 of the list for FMGDA: only where x_prev is the client's own and the pair shares its sample."""
    exact = Saddles(noise=0)
    found = run(FMGDA(step_size=0.05, fresh_weight=0.2), exact, q=3, rounds=3)
    points = None
    for record in found:
        if record["step"] is None:
            points = record["rows"]["x"]
            continue
        g = np.mean([exact(i, points[i], 0) for i in range(N)], axis=0)
        g[ASCENT] *= -1
        np.testing.assert_allclose(record["rows"]["D"].mean(0), g, atol=1e-12)
        points = record["rows"]["x"]


def test_minimisation_algorithms_run_on_a_saddle():
    """FedAvg is Local SGDA with equal steps, with a scale too; FAFED comes near the saddle."""
    assert_same(averages(run(FedAvg(step_size=0.05))), averages(run(LocalSGDA(step_size=0.05))))
    scaled = run(FedAvg(step_size=0.05), ascent_scale=0.2)
    assert_same(averages(scaled), averages(run(LocalSGDA(step_size=0.05, dual_step_size=0.01))))
    exact = Saddles(noise=0)
    reached = averages(run(FAFED(step_size=0.02), exact, rounds=400))[-1]
    assert np.abs(reached - exact.saddle()).max() < 0.1 * np.abs(Z0 - exact.saddle()).max()


def test_absent_clients_draw_nothing():
    asked = []

    def gradient(client, z, sample):
        asked.append((client, sample))
        return NOISY(client, z, sample)

    run(FMGDA(), gradient, rounds=2, q=2, participants=lambda s: [s])
    assert set(asked) == {(0, -1), (0, 0), (1, 0), (1, 1)}


@pytest.mark.parametrize("num_clients", [1, 3])
@pytest.mark.parametrize(
    "algorithm",
    [
        LocalSGDA(0.1, 0.2),
        MomentumLocalSGDA(0.1, 0.2),
        FMGDA(0.1, 0.2),
        CODA(0.1, 0.2, stage_rounds=1, stage_output="average", prox="closed"),
        CODASCA(0.1, 0.2, stage_rounds=1, stage_output="average"),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_two_blocks_allocate_nothing_either(algorithm, num_clients):
    assert new_vectors_in_round_2(algorithm, num_clients, 1000, ascent=slice(500, None)) == []
