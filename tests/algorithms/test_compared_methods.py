"""Special cases and invariants of the methods that papers compare with today: FedDyn, FedAdamW, FedMuon, ..."""

import ast
import functools
import inspect
import io
import tokenize
import types

import numpy as np
import pytest
import reference
import torch
from test_every_algorithm import FULL, PARTIAL, X0, gradient, run_rank

from fedmpi import simulate
from fedmpi.algorithms import DESLOC, SCAFFOLD, FedAdamW, FedAvg, FedDyn, FedExP, FedLADA, FedMuon, FedNova, Scaffnew
from fedmpi.comm.solo import SoloLink
from fedmpi.ground.errors import UserError

ANY_PARTICIPATION = pytest.mark.parametrize("setup", [FULL, PARTIAL], ids=["full", "partial"])


def moments(algorithm, setup, row="x", **options):
    """A row after the start, after every local step and after every round."""
    num_clients, local_steps, rounds, participants = setup
    trace = simulate(algorithm, gradient, X0, num_clients, rounds, local_steps, participants, **options)
    return np.array([record["rows"][row] for record in trace])


def assert_equal(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)


@ANY_PARTICIPATION
def test_scaffnew_is_scaffold_at_half_the_bytes(setup):
    for row in ("x", "c", "c_i"):
        ours, theirs = (moments(cls(step_size=0.1), setup, row) for cls in (Scaffnew, SCAFFOLD))
        assert_equal(ours, theirs)


@ANY_PARTICIPATION
def test_scaffnew_that_never_changes_h_is_fedavg(setup):
    assert_equal(moments(Scaffnew(step_size=0.1, probability=0.0), setup), moments(FedAvg(step_size=0.1), setup))


def test_scaffnew_that_averages_after_every_step_is_gradient_descent():
    """p = 1: the mean of h_i is 0, so that it is not in the mean of the steps."""
    setup = (*FULL[:1], 1, *FULL[2:])
    for settings in ({}, {"average_chance": 1.0, "probability": 1.0}):
        assert_equal(
            moments(Scaffnew(step_size=0.1, **settings), setup)[2::2], moments(FedAvg(step_size=0.1), setup)[2::2]
        )


@ANY_PARTICIPATION
@pytest.mark.parametrize("settings", [{"average_chance": 0.4}, {"average_chance": 0.7, "coin_seed": 3}])
def test_scaffnew_averages_when_the_coin_says_so(setup, settings):
    num_clients, local_steps, rounds, participants = setup
    twin = reference.scaffnew(
        reference.Clients(gradient, num_clients), X0, rounds, [local_steps] * num_clients, participants, 0.1, **settings
    )
    expected = [{name: np.array(row) for name, row in rows.items()} for rows in twin]
    for row in ("x", "c"):
        found = moments(Scaffnew(step_size=0.1, **settings), setup, row)
        np.testing.assert_allclose(found, [rows[row] for rows in expected], rtol=1e-12, atol=1e-12)


def test_the_numbers_of_steps_of_scaffnew_are_geometric_and_it_reaches_the_optimum():
    """One local step a round, as the paper has it; the clients' curvatures and minima differ."""
    algorithm = Scaffnew(step_size=0.2, average_chance=0.2)
    server = types.SimpleNamespace()
    averages = []
    for server.round_index in range(4000):
        averages.append(algorithm.averages(server))
    lengths = np.diff(np.flatnonzero(averages))
    assert abs(lengths.mean() - 5) < 0.4 and abs((lengths == 1).mean() - 0.2) < 0.04
    curvature, centre = np.array([1.0, 2.0, 3.0]), np.array([5.0, -1.0, 2.0])
    trace = simulate(algorithm, lambda i, x, s: curvature[i] * (x - centre[i]), [0.0], rounds=600, local_steps=1)
    assert_equal(trace[-1]["rows"]["x"][:, 0], np.full(3, (curvature * centre).sum() / curvature.sum()))


@ANY_PARTICIPATION
@pytest.mark.parametrize(
    ("algorithm", "mean", "own"),
    [
        (FedDyn(step_size=0.1), "h", "h_i"),
        (Scaffnew(step_size=0.1), "c", "c_i"),
        (Scaffnew(step_size=0.1, probability=0.2), "c", "c_i"),
    ],
)
def test_what_the_server_sums_up_is_the_mean_of_what_clients_do(algorithm, mean, own, setup):
    """Also with weights and unequal numbers of steps."""
    weights, uneven = [1.0, 2.0, 5.0], (3, [2, 4, 1].__getitem__, *setup[2:])
    seen, federation = run_rank(algorithm, SoloLink(), range(3), uneven, weights=weights)
    expected = sum(w * getattr(client, own) for w, client in zip(weights, federation.clients)) / sum(weights)
    np.testing.assert_allclose(seen[-1][mean], expected, rtol=1e-12, atol=1e-14)


def test_feddyn_leaves_a_client_where_its_own_minimum_is_everybodys():
    """h_i tends to -∇f_i(x) / α, which makes the clients' penalised minima equal."""
    curvature, centre = np.array([1.0, 2.0, 3.0]), np.array([5.0, -1.0, 2.0])
    minimum = (curvature * centre).sum() / curvature.sum()
    trace = simulate(FedDyn(step_size=0.1, proximal_weight=0.5), lambda i, x, s: curvature[i] * (x - centre[i]), [0.0],
                     rounds=600, local_steps=5)  # fmt: skip
    rows = trace[-1]["rows"]
    assert_equal(rows["x"][:, 0], np.full(3, minimum))
    assert_equal(rows["h_i"][:, 0], -curvature * (minimum - centre) / 0.5)


def first_steps(optimizer, num_steps):
    """The iterates of a torch optimizer that it makes for x = X0 on client 0's samples 0, 1, ..."""
    x = torch.tensor(X0, requires_grad=True)
    optimizer, found = optimizer([x]), []
    for sample in range(num_steps):
        x.grad = torch.tensor(gradient(0, x.detach(), sample))
        optimizer.step()
        found.append(x.detach().numpy().copy())
    return found


@pytest.mark.parametrize("form", ["paper", "code"])
def test_the_first_round_of_fedadamw_is_adamws(form):
    settings = {"momentum": 0.7, "second_moment_decay": 0.8, "epsilon": 1e-3, "decay": 0.3}
    found = moments(FedAdamW(step_size=0.05, **settings, form=form), (1, 4, 1, None))[1:5, 0]
    adamw = functools.partial(torch.optim.AdamW, lr=0.05, betas=(0.7, 0.8), eps=1e-3, weight_decay=0.3)
    assert_equal(found, first_steps(adamw, 4))


def test_one_sample_alone_decides_the_size_of_a_step():
    """Without memory a step is η g / (|g| + ε)."""
    g = gradient(0, X0, 0)
    memoryless = {"step_size": 0.05, "momentum": 0.0, "second_moment_decay": 0.0, "epsilon": 0.1, "alignment": 0.0}
    for algorithm in (FedAdamW(**memoryless, decay=0.0), FedLADA(**memoryless)):
        assert_equal(moments(algorithm, (1, 1, 1, None))[-1, 0], X0 - 0.05 * g / (np.abs(g) + 0.1))


@pytest.mark.parametrize(
    "algorithm",
    [FedAdamW(alignment=1.0, decay=0.0), FedLADA(alignment=1.0), FedMuon(alignment=1.0, matrix_factor=2.0)],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_the_direction_is_the_mean_local_step_divided_by_eta(algorithm):
    """By which x moves, K times, in the next round, if the client's own part has no weight."""
    rows = [record["rows"] for record in simulate(algorithm, gradient, X0, rounds=2, local_steps=4)]
    rounds = [rows[0], rows[5], rows[10]]
    x, direction = [r["x"][0] for r in rounds], [r["direction"] for r in rounds]
    eta = algorithm.step_size
    assert_equal(direction[1] * 4 * eta, x[0] - x[1])
    assert_equal(direction[2] * 4 * eta, x[1] - x[2])
    if not isinstance(algorithm, FedAdamW):  # whose own part always has the weight 1
        assert np.array_equal(x[0], x[1])


@ANY_PARTICIPATION
def test_fednova_with_equal_numbers_of_steps_is_fedavg(setup):
    assert_equal(moments(FedNova(step_size=0.1), setup), moments(FedAvg(step_size=0.1), setup))


def quadratics_end(algorithm, weights=None):
    """Where two clients with f_1 = ½ x², f_2 = ½ (x - 1)² and with 1 and 10 small steps a round end."""
    trace = simulate(algorithm, lambda i, x, s: x - i, [0.5], 2, 3000, lambda i: 1 + 9 * i, weights=weights)
    return trace[-1]["rows"]["x"][0, 0]


@pytest.mark.rarely("fedmpi/algorithms", "fedmpi/federation", "fedmpi/oracles")
def test_fednova_keeps_the_objective_where_fedavg_changes_it():
    """The minimum of the weighted loss is w_2 / (w_1 + w_2); FedAvg weighs each client by its steps, too."""
    for weights, minimum in ((None, 0.5), ([10, 1], 1 / 11)):
        steps = np.array([1, 10]) * (weights or [1, 1])
        assert abs(quadratics_end(FedAvg(step_size=1e-3), weights) - steps[1] / steps.sum()) < 3e-3
        assert abs(quadratics_end(FedNova(step_size=1e-3), weights) - minimum) < 3e-3
        assert abs(quadratics_end(FedNova(step_size=1e-3, momentum=0.5), weights) - minimum) < 5e-3


@pytest.mark.parametrize("settings", [{"momentum": 0.6}, {"proximal_weight": 2.0}])
def test_the_length_of_fednova_has_the_papers_closed_form(settings):
    rho, mu, eta, tau = settings.get("momentum", 0), settings.get("proximal_weight", 0), 0.1, 7
    momentum = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    expected = momentum if rho else (1 - (1 - eta * mu) ** tau) / (eta * mu)
    assert FedNova(step_size=eta, **settings).length(tau, eta) == pytest.approx(expected, rel=1e-13)


def test_fedexp_with_equal_moves_is_fedavg_and_moves_farther_the_more_they_differ():
    def shared(client, x, sample):
        return gradient(0, x, sample)

    for settings in ({"gradient": shared}, {"gradient": gradient, "num_clients": 1}):
        settings |= {"x0": X0, "rounds": 5, "local_steps": 3}
        ends = [simulate(cls(step_size=0.1), **settings)[-1]["rows"]["x"] for cls in (FedExP, FedAvg)]
        assert_equal(*ends)
    # moves of two clients by a and b: mean of squares / 2 mean² = 2 for a = 3, b = -1
    trace = simulate(FedExP(step_size=1.0, epsilon=1e-12), lambda i, x, s: x * 0 + [-3, 1][i], [0.0], 2, 1, 1)
    assert trace[-1]["rows"]["x"][0, 0] == pytest.approx(max(1, (9 + 1) / 2 / (2 * 1)) * 1, rel=1e-9)


SHAPES = [(3, 2), (2, 3), (2, 2, 2), (3,), ()]
DIM = 6 + 6 + 8 + 3 + 1


def wide(client, x, sample):
    i = np.arange(DIM)
    return (1 + 0.5 * np.cos(client + i)) * (np.asarray(x) - client + 0.1 * i) + 0.1 * np.sin(3 * sample + i)


def test_fedmuon_on_matrices_is_its_twin():
    settings = {"step_size": 0.01, "momentum": 0.8, "alignment": 0.3, "matrix_factor": 5.0, "epsilon": 1e-3}
    settings |= {"first_moment_decay": 0.6, "second_moment_decay": 0.8}
    x0, participants = np.sin(np.arange(DIM)), [[0, 1, 2], [1], [0, 2], [0, 1, 2]].__getitem__
    trace = simulate(FedMuon(**settings), wide, x0, 3, 4, 3, participants, shapes=SHAPES)
    twin = reference.fedmuon(reference.Clients(wide, 3), x0, 4, [3] * 3, participants, **settings, shapes=SHAPES)
    for record, expected in zip(trace, twin, strict=True):
        np.testing.assert_allclose(record["rows"]["x"], expected["x"], rtol=1e-11, atol=1e-11)


def test_one_client_without_alignment_makes_muons_steps():
    """torch.optim.Muon computes the orthogonal factor in bfloat16: 8 bits."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    goal = torch.ones(4, 3, dtype=torch.float64)
    settings = {"step_size": 0.05, "momentum": 0.9, "alignment": 0.0, "matrix_factor": 1.0}
    trace = simulate(FedMuon(**settings), lambda i, z, s: z - 1, x.detach(), 1, 4, 5, shapes=[(4, 3)])
    optimizer = torch.optim.Muon([x], lr=0.05, momentum=0.9, weight_decay=0.0, nesterov=False)
    start = x.detach().clone()
    for _ in range(20):
        x.grad = x.detach() - goal
        optimizer.step()
    ours = torch.tensor(trace[-1]["rows"]["x"][0]).view(4, 3)
    assert (ours - x.detach()).norm() < 0.03 * (ours - start).norm()


def test_shapes_that_are_not_those_of_x():
    for given in ({"shapes": [(2, 2)]}, {"shapes": [(5,)], "segments": [slice(0, 5)]}):
        with pytest.raises(UserError, match="^simulate: shapes = .*: expected shapes with 5 elements together"):
            simulate(FedMuon(), gradient, X0, **given)


def lines_of_code(tree, text):
    """The numbers of the lines of a class or function that have code: no comment, docstring or empty line."""
    parts = [part for part in ast.walk(tree) if isinstance(part, (ast.ClassDef, ast.FunctionDef))]
    docstrings = [part.body[0] for part in parts if ast.get_docstring(part)]
    texts = {n for each in docstrings for n in range(each.lineno, each.end_lineno + 1)}
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    words = [word for word in tokenize.generate_tokens(io.StringIO(text).readline) if word.type not in empty]
    code = {n for word in words for n in range(word.start[0], word.end[0] + 1)} - texts
    return code & set(range(min(part.lineno for part in [tree, *tree.decorator_list]), tree.end_lineno + 1))


@pytest.mark.parametrize("cls", [DESLOC, FedAdamW, FedDyn, FedExP, FedLADA, FedMuon, FedNova, Scaffnew])
def test_a_method_has_at_most_sixty_lines_of_code(cls):
    """With all that it stands on in its file."""
    text = inspect.getsource(inspect.getmodule(cls))
    parts = {part.name: part for part in ast.parse(text).body if isinstance(part, (ast.ClassDef, ast.FunctionDef))}
    needed, rest = set(), [cls.__name__]
    while rest:
        needed.add(name := rest.pop())
        used = {word.id for word in ast.walk(parts[name]) if isinstance(word, ast.Name)}
        rest += sorted((used & set(parts)) - needed - set(rest))
    assert 10 < sum(len(lines_of_code(parts[name], text)) for name in needed) <= 60
