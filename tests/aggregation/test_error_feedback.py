"""The stage error_feedback: with FedAMS it is FedCAMS, here against the listing of its paper in numpy."""

import numpy as np
import pytest

import fedmpi
from fedmpi.aggregation.stages import Stage
from fedmpi.aggregation.stages.error_feedback import ErrorFeedback
from fedmpi.algorithms import FAFED, FedAMS, FedAvg, FedDyn
from fedmpi.training.config import read_command_line

N, DIM, ROUNDS, STEPS = 3, 8, 7, 2
X0 = np.linspace(1, -1, DIM)
PARTS = [[0, 1, 2], [0, 2], [1], [1, 2], [0, 1, 2], [2], [0, 1]]


def gradient(client, x, sample):
    i = np.arange(DIM)
    return (1 + 0.5 * np.cos(client + i)) * (np.asarray(x) - client + 0.2 * i) + 0.1 * np.sin(3 * sample + i)


def compressed(vector, compressor, fraction):
    if compressor == "sign":
        return np.sign(vector) * np.abs(vector).mean()
    kept = np.zeros(DIM)
    places = np.argsort(-np.abs(vector))[: max(1, round(fraction * DIM))]
    kept[places] = vector[places]
    return kept


@pytest.mark.parametrize("settings", [{"compressor": "sign"}, {"compressor": "top_k", "fraction": 0.25}])
def test_fedams_is_fedcams(settings):
    eta_l, eta, beta1, beta2, eps = 0.1, 0.05, 0.9, 0.99, 1e-3
    x, m, v, v_hat, errors = X0, np.zeros(DIM), np.zeros(DIM), np.zeros(DIM), np.zeros((N, DIM))
    draws, expected = np.zeros(N, int), []
    for here in PARTS:
        hats = []
        for i in here:
            x_i = x
            for _ in range(STEPS):
                x_i = x_i - eta_l * gradient(i, x_i, draws[i])
                draws[i] += 1
            hat = compressed(x_i - x + errors[i], fraction=settings.get("fraction"), compressor=settings["compressor"])
            errors[i] = x_i - x + errors[i] - hat
            hats.append(hat)
        delta = np.mean(hats, axis=0)
        m, v = beta1 * m + (1 - beta1) * delta, beta2 * v + (1 - beta2) * delta**2
        v_hat = np.maximum(np.maximum(v_hat, v), eps)
        x = x + eta * m / np.sqrt(v_hat)
        expected.append(x)
    fedams = FedAMS(
        step_size=eta_l, server_step_size=eta, momentum=beta1, second_moment_decay=beta2, epsilon=eps, option=1
    )
    sending = fedmpi.Sending(stages=[ErrorFeedback(**settings)])
    trace = fedmpi.simulate(fedams, gradient, X0, N, ROUNDS, STEPS, PARTS.__getitem__, sending=sending)
    found = [record["rows"]["x"][0] for record in trace if record["step"] is None][1:]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


def end(algorithm, sending=None, rounds=60):
    trace = fedmpi.simulate(algorithm, gradient, X0, N, rounds, STEPS, sending=sending)
    return {name: row[0] if row.ndim == 2 else row for name, row in trace[-1]["rows"].items()}


@pytest.mark.parametrize("algorithm", [FedAvg(step_size=0.1), FedAMS(), FedDyn(step_size=0.1), FAFED(step_size=0.1)])
def test_the_largest_of_all_values_are_all_values(algorithm):
    sending = fedmpi.Sending(stages=[ErrorFeedback(compressor="top_k", fraction=1.0)])
    plain, kept = end(algorithm, rounds=5), end(algorithm, sending, rounds=5)
    for name, row in plain.items():
        np.testing.assert_allclose(kept[name], row, rtol=1e-12, atol=1e-12, err_msg=name)


def test_means_of_squares_and_the_start_pass_unchanged():
    class Watch(Stage):
        def apply(self, sent):
            seen.append((sent.moment.round_index, {name: row.clone() for name, row in sent.rows.items()}))

    seen = []
    sending = fedmpi.Sending(stages=[Watch(), ErrorFeedback(compressor="top_k"), Watch()])
    end(FAFED(step_size=0.1), sending, rounds=1)
    for (round_index, before), (_, after) in zip(seen[::2], seen[1::2]):
        equal = {name: bool((before[name] == after[name]).all()) for name in before}
        assert equal == (dict.fromkeys(before, True) if round_index < 0 else {"x": False, "m": False, "v": True})


def test_what_is_left_out_is_sent_later():
    """FedAvg, one value in eight a round: it ends where it ends with all of them, but for a small circle."""
    sending = fedmpi.Sending(stages=[ErrorFeedback(compressor="top_k", fraction=1 / 8)])
    algorithm = FedAvg(step_size=0.02)
    plain, kept = end(algorithm, rounds=400)["x"], end(algorithm, sending, rounds=400)["x"]
    assert np.abs(plain - kept).max() < 0.1 < np.abs(plain - X0).max()


def test_its_name_on_the_command_line():
    words = ["--stages", "error_feedback", "--stages.error_feedback.compressor", "top_k"]
    config = read_command_line([*words, "--stages.error_feedback.fraction", "0.25"])
    assert config.sending.stages == (ErrorFeedback(compressor="top_k", fraction=0.25),)
