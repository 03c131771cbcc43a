"""--check makes every method of the papers again on data, and notices if one computes something else."""

import importlib
import inspect
import itertools

import pytest
from helpers import ROOT

from fedmpi import algorithms
from fedmpi.algorithms import minmax
from fedmpi.ground.registry import command_name
from fedmpi.oracles.two_point import Directions
from reproduction import digits
from reproduction.agree import on_digits

RESULTS = ROOT / "reproduction" / "results"
METHODS = [(paper, method) for paper, methods in digits.METHODS.items() for method in methods]
CLASSES = {command_name(one): one for name in dir(algorithms) if inspect.isclass(one := getattr(algorithms, name))}


@pytest.mark.parametrize(("paper", "method"), METHODS)
def test_a_run_again_agrees(paper, method):
    rows = on_digits(RESULTS, paper, [method])
    assert len(rows) >= 8 and all(agrees for *_, agrees in rows)


def test_the_file_has_every_method_and_no_other():
    rows = digits.read_rows(digits.path_of(RESULTS), digits.COLUMNS)
    assert list(dict.fromkeys((row["paper"], row["method"]) for row in rows)) == METHODS


def mutate(monkeypatch, method, given, instead):
    """Put other code in the place of a piece of the module of a method's class."""
    cls = next(base for base in CLASSES[method].__mro__ if given in inspect.getsource(base))
    module = importlib.import_module(cls.__module__)
    source = inspect.getsource(module)
    of_class = inspect.getsource(cls)
    assert of_class.count(given) == 1, of_class.count(given)
    namespace = dict(vars(module))
    exec(compile(source.replace(of_class, of_class.replace(given, instead)), module.__file__, "exec"), namespace)
    for name, value in vars(namespace[cls.__name__]).items():
        if inspect.isfunction(value) and name in vars(cls) and value.__closure__ is None:
            monkeypatch.setattr(cls, name, value)


MUTATIONS = [
    ("fafed", "fafed", "gradient_pair(client.x, client.x_prev,", "gradient_pair(client.x, client.x,"),
    ("fafed", "scaffold", "g.sub_(client.c_i).add_(server.c)", "g.add_(client.c_i).sub_(server.c)"),
    ("fafed", "scaffold", "client.delta_c.div_(client.num_steps * self.eta(client)).sub_(server.c)",
     "client.delta_c.div_(client.num_steps * self.eta(client)).add_(server.c)"),
    ("fafed", "fedams", "torch.maximum(server.v_hat, super().update_v(server, square), out=server.v_hat)",
     "server.v_hat.copy_(FedAdam.update_v(self, server, square))"),
    ("fafed", "fafed", "self._square(g), 1 - self.second_moment_decay)", "self._square(g), self.second_moment_decay)"),
    ("lamb", "local_amsgrad", "torch.maximum(server.v_hat, server.v_mean, out=server.v_hat)",
     "server.v_hat.copy_(server.v_mean)"),
    ("lamb", "fed_lamb", "torch.maximum(server.v_hat, server.v, out=server.v_hat)", "server.v_hat.copy_(server.v)"),
]  # fmt: skip


@pytest.mark.parametrize(("paper", "method", "given", "instead"), MUTATIONS)
def test_other_arithmetic_is_noticed(monkeypatch, paper, method, given, instead):
    mutate(monkeypatch, method, given, instead)
    assert not all(agrees for *_, agrees in on_digits(RESULTS, paper, [method]))


def test_directions_of_a_pair_that_are_drawn_twice_are_noticed(monkeypatch):
    of, calls = Directions.of, itertools.count()
    monkeypatch.setattr(Directions, "of", lambda self, noise: of(self, noise + next(calls)))
    assert not all(agrees for *_, agrees in on_digits(RESULTS, "zo", ["fafedzo"]))


def test_an_ascent_that_descends_is_noticed(monkeypatch):
    by_block = minmax._by_block

    def descending(server, primal, dual):
        return [(block, -value if block in server.dual else value) for block, value in by_block(server, primal, dual)]

    monkeypatch.setattr(minmax, "_by_block", descending)
    assert not all(agrees for *_, agrees in on_digits(RESULTS, "auc", ["fmgda"]))
