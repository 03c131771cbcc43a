"""What authors of algorithms rely on: a mistake gives one line, and the declared rows are what is exchanged."""

import dataclasses

import numpy as np
import pytest
import torch

from fedmpi import Algorithm, Exchange, setting, simulate
from fedmpi.algorithms import FAFED, MBSTORM, FedAMS, FedAvg
from fedmpi.algorithms.check import check_rows
from fedmpi.federation.client import Client, Server
from fedmpi.ground.errors import UserError


def gradient(client, x, sample):
    return x - client


@dataclasses.dataclass(frozen=True)
class Rebinding(FedAvg):
    def local_step(self, client, server, oracle):
        client.x = client.x - self.step_size * oracle.gradient(client.x, oracle.draw())


@dataclasses.dataclass(frozen=True)
class Subtracting(FedAvg):
    def local_step(self, client, server, oracle):
        client.x -= self.step_size * oracle.gradient(client.x, oracle.draw())


def test_a_row_is_changed_in_place_and_not_replaced():
    with pytest.raises(AttributeError, match=r"client.x is a row: change it in place, like x.copy_"):
        simulate(Rebinding(), gradient, [1.0])
    found, expected = (simulate(cls(step_size=0.2), gradient, [1.0])[-1]["rows"]["x"] for cls in (Subtracting, FedAvg))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"client_rows": ("x",)}, r"client_rows = \('x',\): x is named already"),
        ({"scratch": ("a", "a")}, "a is named already"),
        ({"client_rows": ("round",)}, r"client_rows = \('round',\): round is not a row: expected another name"),
        ({"server_rows": ("segments",)}, "segments is not a row"),
        ({"server_rows": "v"}, r"server_rows = 'v': expected a tuple of names"),
        ({"exchanged": ["x"]}, "expected a tuple of names"),
        ({"exchanged": ("y",)}, "has no row 'x', the model"),
    ],
)
def test_rows_are_names_and_each_stands_once(rows, message):
    with pytest.raises(UserError, match=message):
        simulate(type("Mine", (FedAvg,), rows)(), gradient, [1.0])


def test_what_clients_and_servers_have_is_no_row():
    used = {*vars(Client(0)), *vars(Server({}, 1, [], 1)), "oracle", "round", "rows"}
    for name in used:
        with pytest.raises(UserError, match=f"{name} is not a row: expected another name"):
            check_rows(type("Mine", (FedAvg,), {"client_rows": (name,)})())


def step(self, client, server, oracle):
    client.x.add_(oracle.gradient(client.x, oracle.draw()), alpha=-self.eta(client))


def two(first, second):
    """A function of the exchanges of some rows, and then others."""
    return lambda self: (Exchange(first), Exchange(second, work=lambda client, server, oracle: None))


TWO_ROWS = {"exchanged": ("x", "g")}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {**TWO_ROWS, "exchanges": two(("g",), ("x",))},
            r"rows \('x',\), and one before it g: .* from front to back of",
        ),
        ({**TWO_ROWS, "exchanges": two(("x",), ("gg",))}, r"the rows \('gg',\): gg is not in exchanged \('x', 'g'\)"),
        ({**TWO_ROWS, "exchanges": two("x", "g")}, "an exchange has the rows 'x': expected a tuple of names"),
        ({"exchanged_at_start": ("gg",)}, r"exchanged_at_start = \('gg',\): gg is not in exchanged \('x',\)"),
        ({"kinds": {"gg": "gradient"}}, r"Mine.kinds: gg is not in exchanged \('x',\)"),
        ({"serverstep": lambda self, server: None}, "serverstep is no method of Algorithm; did you mean 'server_step'"),
        ({"momentum": setting(0.5, "β")}, "algorithm.momentum: class Mine is no dataclass: expected @dataclasses"),
        ({"step_size": setting(0.5, "η")}, "algorithm.step_size: class Mine is no dataclass"),
    ],
)
def test_a_declaration_that_means_something_else_gives_one_line(given, message):
    with pytest.raises(UserError, match=message):
        simulate(type("Mine", (FedAvg,), given)(), gradient, [1.0])


def test_methods_of_a_class_may_have_names_of_their_own():
    own = {"restart": step, "my_server_step": step, "_server_step": step, "server_steps": step}
    given = {**own, "server_step": lambda self, server: None}
    assert simulate(type("Mine", (FedAvg,), given)(), gradient, [1.0])


def test_rows_that_skip_rounds_may_be_exchanged_after_those_behind_them():
    assert [e.rows for e in FAFED(v_every=2).exchanges()] == [("m", "x"), ("v",)]
    assert simulate(FAFED(v_every=2), gradient, [1.0])


def test_eta_needs_a_step_size():
    with pytest.raises(
        UserError, match="algorithm Sizeless: it has no step size, .* step_size: float = fedmpi.setting"
    ):
        simulate(type("Sizeless", (Algorithm,), {"local_step": step})(), gradient, [1.0])


def test_a_class_without_a_local_step_is_refused():
    class Stepless(Algorithm):
        step_size = 0.1

    with pytest.raises(UserError, match="algorithm Stepless: expected that it defines local_step"):
        simulate(Stepless(), gradient, [1.0])


@pytest.mark.parametrize("participants", [[0, 0], [-1], [3], []])
def test_participants_are_different_clients(participants):
    with pytest.raises(UserError, match=r"participants of round 0 = .* expected at least one of the clients 0 to 2"):
        simulate(FedAvg(), gradient, [1.0], participants=lambda round_index: participants)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": FedAvg}, "expected an instance, like FedAvg"),
        ({"algorithm": "fedavg"}, "expected an instance"),
        ({"x0": None}, "expected x0"),
        ({"num_clients": 0}, "num_clients = 0: expected at least 1"),
        ({"local_steps": 0}, "local_steps = 0: expected at least 1"),
        ({"local_steps": lambda client: client}, "local_steps = 0: expected at least 1"),
    ],
)
def test_arguments_of_simulate(arguments, message):
    with pytest.raises(UserError, match=message):
        simulate(**{"algorithm": FedAvg(), "gradient": gradient, "x0": [1.0], **arguments})


def test_dtype_may_stand_behind_the_participants():
    trace = simulate(FedAvg(), gradient, [1.0], 3, 2, 2, None, torch.float32)
    assert trace[-1]["rows"]["x"].dtype == np.float32


def test_tensors_that_require_a_gradient_are_taken_as_they_are():
    def differentiable(client, x, sample):
        return x.requires_grad_() - client

    found = simulate(FedAvg(), differentiable, torch.ones(2, dtype=torch.float64, requires_grad=True))
    np.testing.assert_array_equal(found[-1]["rows"]["x"], simulate(FedAvg(), gradient, np.ones(2))[-1]["rows"]["x"])


def test_x_has_a_row_per_client_also_where_only_the_server_has_it():
    for record in simulate(MBSTORM(), gradient, [1.0, 2.0]):
        assert record["rows"]["x"].shape == (3, 2)
        assert record["rows"]["x_prev"].shape == (2,)


@pytest.mark.parametrize("value", ["a", None, np.float32(-0.1), torch.tensor(0.1), float("inf"), float("nan")])
def test_a_step_size_is_a_number_in_its_range(value):
    with pytest.raises(UserError, match="step_size = .*: expected a number > 0"):
        FAFED(step_size=value)


def test_numbers_of_numpy_are_numbers():
    assert FAFED(step_size=np.float32(0.5), fresh_weight_scale=None).step_size == 0.5


def test_a_word_in_the_place_of_a_number_is_shown_as_a_word():
    with pytest.raises(UserError, match=r"option = '1': expected one of 1, 2$"):
        FedAMS(option="1")


def test_the_server_knows_how_many_take_part():
    seen = []

    class Curious(FedAvg):
        def server_start(self, server):
            seen.append((server.round_index, server.num_participants, server.num_steps, server.iteration))

        def server_step(self, server):
            seen.append((server.round_index, server.num_participants, server.num_steps, server.iteration))

    simulate(Curious(), gradient, [1.0], 4, 2, lambda client: 1 + client, lambda r: [[1, 3], [0, 1, 2]][r])
    assert seen == [(-1, 4, 0, 0), (0, 2, 3, 4), (1, 3, 2, 8)]
