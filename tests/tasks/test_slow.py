"""The problems `slow` and `saddle`: their constants against numerical suprema, their gradients, their noise."""

import functools
import json

import numpy as np
import pytest
import torch
from helpers import start

from fedmpi.tasks.saddle_toys import Saddle
from fedmpi.tasks.toys import Slow

GRID = np.concatenate([np.linspace(-4, 4, 2001), 10.0 ** np.arange(1, 7), -(10.0 ** np.arange(1, 7))])
PROBLEMS = [
    Slow().problem(8),
    Slow(num_slow=1, num_unlike=3, power=1.5, heterogeneity=0.4, curvature_noise=1.0, noise=0.2).problem(5, seed=3),
    Slow(heterogeneity=0.0).problem(3),
    Saddle().problem(4),
    Saddle(concavity=0.3, coupling=2.0, heterogeneity=1.5).problem(5),
]


def x_gradient(problem, client, x):
    """[..., dim]: ∇_θ f_i, up to the constant of e_i."""
    if not problem.num_dual:
        return problem.gradient(client, x)
    at_optimum = np.concatenate([x, problem.task.coupling * x], axis=1)  # where the coupling vanishes but for e_i
    return problem.gradient(client, at_optimum)[:, : problem.dim]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_gradients_are_those_of_the_losses(problem):
    generator = torch.Generator().manual_seed(0)
    shape = len(problem.start)
    z, delta = torch.randn(shape, generator=generator).double(), torch.rand(problem.dim, generator=generator).double()
    gradients = []
    for client in range(problem.num_clients):
        x = torch.linspace(-2, 3, shape, dtype=torch.float64).requires_grad_()
        problem.loss(client, x, delta, z).backward()
        closed = problem.gradient(client, x.detach().numpy(), delta.numpy(), z.numpy())
        np.testing.assert_allclose(x.grad, closed, atol=1e-12)
        gradients.append(problem.gradient(client, np.linspace(-2, 3, shape)))
    if not problem.num_dual:
        np.testing.assert_allclose(np.mean(gradients, 0), problem.gradient(None, np.linspace(-2, 3, shape)), atol=1e-12)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_constants_are_the_suprema(problem):
    """Each variable has a term of its own, so suprema over x are sums or maxima over the grid of one variable."""
    x = np.tile(GRID[:, None], problem.dim)
    of = np.array([x_gradient(problem, client, x) for client in range(problem.num_clients)])
    near = np.abs(GRID) <= 4
    step = GRID[1] - GRID[0]
    curved = np.abs(np.diff(of[:, near], axis=1)) / step
    task, mean = problem.task, x_gradient(problem, None, x)
    np.testing.assert_allclose(np.abs(np.diff(mean[near], axis=0)).max() / step, 1.0, atol=1e-3)
    pairs = np.abs(of[:, None] - of).max(2)
    if not problem.num_dual:
        assert pytest.approx(max(curved.max(), 1), rel=1e-3) == problem.L and problem.L_f == 1
        assert pytest.approx(np.sqrt((np.abs(of).max(1) ** 2).sum(1).max()), rel=1e-5) == problem.G
        assert problem.zeta == pytest.approx(np.sqrt((pairs**2).sum(2).max()), rel=1e-5, abs=1e-9)
        unlike = ((of - mean) ** 2).mean(0).max(0).sum()
        assert problem.zeta_mean == pytest.approx(np.sqrt(unlike), rel=1e-4, abs=1e-9)
        at_start = [problem.gradient(client, problem.start) for client in range(problem.num_clients)]
        assert pytest.approx((np.array(at_start) ** 2).sum(1).mean()) == problem.G_0
    else:
        dual = problem.mu * np.sqrt(((problem.shift[:, None] - problem.shift) ** 2).sum(2).max())
        assert problem.zeta == pytest.approx(max(np.sqrt((pairs**2).sum(2).max()), dual), rel=1e-5)
    added = problem.linear + (problem.L_12 * problem.shift if problem.num_dual else 0)  # no noise multiplies it
    spread = task.curvature_noise**2 / 3 * (np.abs(of + added[:, None]).max(1) ** 2).sum(1).max()
    assert problem.sigma == pytest.approx(np.sqrt(task.noise**2 + spread), rel=1e-5)
    if not problem.num_dual:
        delta = np.linspace(-1, 1, 101)[:, None] * task.curvature_noise
        x, clients = np.full((101, problem.dim), 1e-5), range(problem.num_clients)  # at 0 h and g bend most
        bent = np.array([problem.gradient(client, x, delta) + problem.linear[client] for client in clients]) / 1e-5
        assert problem.L_sample == pytest.approx(np.abs(bent).max(), rel=1e-3)
        square = np.trapezoid(bent**2, delta[:, 0], axis=1).max() / np.ptp(delta)
        assert problem.L_mean_square == pytest.approx(np.sqrt(square), rel=1e-3)
    exact = problem.task.num_slow * 2 ** (-task.power / 2) / task.power
    assert problem.Delta == pytest.approx(exact)


@pytest.mark.rarely
def test_blocks_of_the_saddle_are_as_smooth_as_it_says():
    for problem in PROBLEMS[3:]:
        n, largest = problem.dim, np.zeros(3)
        for client in range(problem.num_clients):
            for value in np.linspace(-4, 4, 201):
                x, h = np.full(2 * n, value), 1e-5
                ends = [[problem.gradient(client, x + side * e) for e in np.eye(2 * n)] for side in (h, -h)]
                bent = np.subtract(*ends)
                blocks = bent[:n, :n], bent[:n, n:], bent[n:, n:]
                largest = np.maximum(largest, [np.linalg.norm(one / (2 * h), 2) for one in blocks])
        np.testing.assert_allclose(largest, [problem.L_11, problem.L_12, problem.L_22], rtol=2e-3)
        assert problem.L_f * (1 + problem.L_f / problem.mu) == problem.L


def test_the_saddle_is_slow_under_the_maximum():
    """At w = kθ the dual gradient's mean is 0, and the mean of ∇_θ F_i is ∇f: Φ is f."""
    problem, theta = PROBLEMS[4], np.linspace(-1, 2, 12)
    z = np.r_[theta, problem.task.coupling * theta]
    mean = np.mean([problem.gradient(client, z) for client in range(5)], 0)
    np.testing.assert_allclose(mean, problem.gradient(None, z), atol=1e-12)
    np.testing.assert_allclose(mean[:12], PROBLEMS[0].gradient(None, theta), atol=1e-12)
    assert problem.metrics(z) == pytest.approx({"gradient_norm": np.linalg.norm(mean), "distance": 0})


@pytest.mark.rarely
@pytest.mark.parametrize("problem", PROBLEMS[::3])
@pytest.mark.parametrize("size", [1, 4])
def test_noise_has_the_variance_it_says(problem, size):
    generator = torch.Generator().manual_seed(1)
    normal, uniform = (functools.partial(draw, generator=generator) for draw in (torch.randn, torch.rand))
    draws = [problem.draw(normal, uniform, size) for _ in range(20000)]
    delta, z = (torch.stack(one) for one in zip(*draws))
    assert delta.mean().item() == pytest.approx(0, abs=0.01)
    assert delta.square().mean().item() == pytest.approx(problem.task.curvature_noise**2 / 3 / size, rel=0.02)
    blocks = 1 + bool(problem.num_dual)
    assert z.square().sum(1).mean().item() == pytest.approx(blocks * problem.task.noise**2 / size, rel=0.02)


CASES = [(1, "slow", "stem"), (2, "slow", "stem"), (2, "saddle", "fmgda")]


@pytest.mark.rarely
@pytest.mark.parametrize(("ranks", "task", "algorithm"), CASES)
def test_records_have_the_gradient_norm(tmp_path, ranks, task, algorithm):
    """Of one model, whatever the number of ranks; another batch size has another noise."""
    words = f"-m fedmpi.train --task {task} --algorithm {algorithm} --clients 2 --rounds 3 --batch_size".split()
    results = {}
    for size in (1, 9):
        done = start(ranks, *words, size, "--out", tmp_path, "--name", f"b{size}")
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / f"b{size}" / "metrics.jsonl").read_text().splitlines()
        results[size] = [json.loads(line)["gradient_norm"] for line in lines]
    assert len(results[1]) == 3 and results[1][-1] != results[9][-1]
    assert all(0 < value < 3 for value in results[1])
