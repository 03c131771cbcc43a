"""The 3-client example of the FAFED paper: its printed numbers, divergence, and FAFED's way home."""

import math

import numpy as np
import pytest
import torch

from fedmpi import simulate
from fedmpi.algorithms import FAFED, FedAvg, NaiveAdaptiveFedAvg
from fedmpi.comm.solo import SoloLink
from fedmpi.training.build import prepare
from fedmpi.training.config import read_command_line


def gradient(client, x, sample):
    """f_1 = 3x², f_2 = f_3 = -x² on [-1, 1], continued with the same slope outside."""
    return (6.0 if client == 0 else -2.0) * x.clamp(-1, 1)


def mean_x(trace):
    """x̄ after the start and after every communication."""
    return [record["rows"]["x"].mean() for record in trace if record["step"] is None]


# Rows of the specification's table: β -> x̄ after 1, 2, 5, 10 and 60 steps.
PRINTED = {
    0.1: (10.035136, 10.068638, 10.168656, 10.335323, 12.001990),
    0.5: (10.047140, 10.085630, 10.189559, 10.356734, 12.023417),
    0.9: (10.105409, 10.181881, 10.354843, 10.577750, 12.304454),
}


@pytest.mark.parametrize("beta", PRINTED)
@pytest.mark.parametrize("local_steps", [1, 5, 60])
def test_naive_adaptive_fedavg_walks_away_as_printed(beta, local_steps):
    naive = NaiveAdaptiveFedAvg(step_size=0.1, second_moment_decay=beta, epsilon=0)
    means = mean_x(simulate(naive, gradient, [10.0], rounds=60 // local_steps, local_steps=local_steps))
    for steps, expected in zip((1, 2, 5, 10, 60), PRINTED[beta]):
        if steps % local_steps == 0:
            assert means[steps // local_steps] == pytest.approx(expected, abs=1e-6)


def test_first_local_steps_of_the_naive_method_as_printed():
    naive = NaiveAdaptiveFedAvg(step_size=0.1, second_moment_decay=0.5, epsilon=0)
    first = simulate(naive, gradient, [10.0], rounds=1, local_steps=1)[1]["rows"]["x"].ravel()
    np.testing.assert_allclose(first, [9.858579, 10.141421, 10.141421], atol=1e-6)


def test_naive_method_counts_zero_over_zero_as_zero():
    naive = NaiveAdaptiveFedAvg(epsilon=0)
    trace = simulate(naive, lambda client, x, sample: 0 * x, [1.0, 2.0], rounds=2)
    np.testing.assert_array_equal(trace[-1]["rows"]["x"], np.tile([1.0, 2.0], (3, 1)))


@pytest.mark.parametrize("fresh_weight", [0.1, 0.9])
@pytest.mark.parametrize("beta", [0.1, 0.9])
@pytest.mark.parametrize("local_steps", [1, 5, 10])
def test_fafed_takes_its_closed_form_home(fresh_weight, beta, local_steps):
    fafed = FAFED(step_size=0.1, epsilon=0.01, fresh_weight=fresh_weight, second_moment_decay=beta)
    means = mean_x(simulate(fafed, gradient, [10.0], rounds=60 // local_steps, local_steps=local_steps))
    for rounds, mean in enumerate(means):
        steps = rounds * local_steps
        assert mean == pytest.approx(10 - 0.2 / 3 * (1 + steps / (math.sqrt(44 / 3) + 0.01)), abs=1e-9)


def test_fedavg_moves_two_thirds_of_a_step():
    means = mean_x(simulate(FedAvg(step_size=0.1), gradient, [10.0], rounds=12, local_steps=5))
    assert means[-1] == pytest.approx(6.0, abs=1e-9)


def test_fafed_converges_where_the_naive_method_does_not():
    fafed = simulate(FAFED(step_size=0.1), gradient, [10.0], rounds=1000, local_steps=2)
    naive = simulate(NaiveAdaptiveFedAvg(step_size=0.1), gradient, [10.0], rounds=1000, local_steps=2)
    assert abs(mean_x(fafed)[-1]) < 0.1  # a constant step size ends in a cycle of radius O(η q)
    assert mean_x(naive)[-1] > 70


@pytest.mark.parametrize("heterogeneity", [0, 2])
def test_quadratics_are_as_unlike_as_asked_for(heterogeneity):
    words = f"--task quadratic --task.dim 200 --task.heterogeneity {heterogeneity} --clients 3 --threads 1"
    job = prepare(read_command_line(words.split()), SoloLink())
    for client in job.federation.clients:
        zero = torch.zeros(200)
        slopes = [client.oracle.gradient(z, client.oracle.draw()).clone() for z in (zero, zero + 1)]
        curvature = slopes[1] - slopes[0]
        assert curvature.min() > 0.999 and curvature.max() < 1.001 + heterogeneity
        assert curvature.mean() == pytest.approx(1 + heterogeneity / 2, rel=0.1)
        assert (slopes[0] / curvature).std() == pytest.approx(heterogeneity, rel=0.2)


def test_saddles_are_quadratic():
    job = prepare(read_command_line(["--task", "saddle_quadratic", "--clients", "2", "--threads", "1"]), SoloLink())
    for client in job.federation.clients:
        start = torch.zeros(job.flat.dim)
        first, second, third = (client.oracle.gradient(start + n, client.oracle.draw()).clone() for n in (0, 1, 2))
        torch.testing.assert_close(third - second, second - first, rtol=1e-4, atol=1e-5)
        assert (second - first).abs().min() > 0
