"""--check makes every method of the papers again on data, and notices if one computes something else."""

import importlib
import inspect
import itertools
import types

import pytest
from helpers import ROOT

from fedmpi import algorithms
from fedmpi.algorithms import minmax
from fedmpi.ground.registry import command_name
from fedmpi.oracles import two_point
from fedmpi.oracles.two_point import Directions
from reproduction import digits, manifest
from reproduction.agree import of_manifest, on_digits

RESULTS = ROOT / "reproduction" / "results"
METHODS = [(paper, method) for paper, methods in digits.METHODS.items() for method in methods]
CLASSES = {command_name(one): one for name in dir(algorithms) if inspect.isclass(one := getattr(algorithms, name))}


def test_the_manifest_has_every_file_of_numbers_as_it_is(tmp_path):
    """After a change of a CSV file, `python -m reproduction --pages` writes the manifest, too."""
    assert manifest.differences(RESULTS) == []
    assert [row[-1] for row in of_manifest(RESULTS)] == [True]
    rows = {row["file"]: row for row in manifest.entries(RESULTS)}
    assert {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.csv")} == {*rows, manifest.NAME}
    assert all(rows[name]["commits"] for name in rows if name.endswith("-runs.csv"))
    copy = tmp_path / "small" / "fafed_theorem1.csv"
    copy.parent.mkdir()
    content = (RESULTS / "small" / "fafed_theorem1.csv").read_bytes()
    copy.write_bytes(content)
    manifest.write(tmp_path)
    assert manifest.differences(tmp_path) == []
    copy.write_bytes(content.replace(b"1", b"2", 1))
    (tmp_path / "digits.csv").write_bytes(b"a,b\n1,2\n")
    assert [name for name, *_ in manifest.differences(tmp_path)] == ["small/fafed_theorem1.csv", "digits.csv"]
    assert [row[-1] for row in of_manifest(tmp_path)] == [False, False]


@pytest.mark.rarely
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
        was = vars(cls).get(name)
        if inspect.isfunction(value) and inspect.isfunction(was):
            if value.__closure__:  # super(): of the class itself, not of the one that was made here
                value = types.FunctionType(value.__code__, value.__globals__, name, was.__defaults__, was.__closure__)
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
    ("fafed", "stem", "client.d.sub_(g_prev).mul_(1 - a).add_(g)", "client.d.mul_(1 - a).add_(g)"),
    ("fafed", "fafed", "torch.sqrt(server.v, out=server.A).add_(self.epsilon)",
     "torch.sqrt(server.v + self.epsilon, out=server.A)"),
    ("fafed", "fafed", "client.x.addcdiv_(client.m, server.A, value=-self.eta(client))",
     "client.x.addcdiv_(client.m, client.v.sqrt().add_(self.epsilon), value=-self.eta(client))"),
    ("fafed", "fafed", "server.x.addcdiv_(server.m, server.A, value=-self.eta(server))", "pass"),
    ("fafed", "fafed_code", 'self.sync_order == "code" or not client.is_last_step', "not client.is_last_step"),
    ("fafed", "fedadam", "return corrections(self, server.round_index)",
     "return (1, 1 - self.momentum ** (server.round_index + 1), 1)"),
    ("lamb", "fed_lamb", "(client.step_index + 1)", "(client.step_index + 2)"),
    ("lamb", "fed_lamb", "client.v.copy_(server.v_hat)", "client.v.zero_()"),
    ("mom", "fedavg_m", "alpha=self.server_step_size or path_length", "alpha=path_length"),
    ("mom", "fedavg_m_vr", ".sub_(g_prev, alpha=1 - self.fresh_weight)", ""),
    ("mom", "scaffold_m", "server.c.add_(server.delta_c, alpha=server.participation)", "server.c.add_(server.delta_c)"),
    ("mom", "mb_storm", "client.g.mul_(1 - self.fresh_weight)", "pass"),
    ("mom", "ce_lsgd", "client.u.add_(g).sub_(g_prev)", "client.u.add_(g)"),
    ("auc", "momentum_local_sgda", "self.time_step * weight", "weight"),
    ("auc", "coda", "self.step_decay**stage", "1"),
    ("auc", "codasca", "client.delta_c[block].div_(client.num_steps * eta)",
     "client.delta_c[block].div_(client.num_steps * self.eta(client))"),
]  # fmt: skip


@pytest.mark.rarely
@pytest.mark.parametrize(("paper", "method", "given", "instead"), MUTATIONS)
def test_other_arithmetic_is_noticed(monkeypatch, paper, method, given, instead):
    mutate(monkeypatch, method, given, instead)
    assert not all(agrees for *_, agrees in on_digits(RESULTS, paper, [method]))


def test_directions_of_a_pair_that_are_drawn_twice_are_noticed(monkeypatch):
    of, calls = Directions.of, itertools.count()
    monkeypatch.setattr(Directions, "of", lambda self, noise: of(self, noise + next(calls)))
    assert not all(agrees for *_, agrees in on_digits(RESULTS, "zo", ["fafedzo"]))


def test_an_estimate_with_another_smoothing_factor_is_noticed(monkeypatch):
    """Also by FAFedZO, whose steps are almost the same at every scale of the gradient."""

    def unscaled(out, differences, directions, smoothing, num_directions):
        return out.addmv_(directions.T, differences, alpha=1 / (smoothing * num_directions))

    monkeypatch.setattr(two_point, "add_estimate", unscaled)
    assert not all(agrees for *_, agrees in on_digits(RESULTS, "zo", ["fafedzo"]))


def test_an_attack_with_another_objective_is_noticed(monkeypatch):
    """The distortion of the images counts twice."""
    monkeypatch.setitem(digits.ATTACK, "task", {"name": "attack", "distortion_weight": 2.0})
    assert not all(agrees for *_, agrees in on_digits(RESULTS, "zo", ["attack"]))


def test_an_ascent_that_descends_is_noticed(monkeypatch):
    by_block = minmax._by_block

    def descending(server, primal, dual):
        return [(block, -value if block in server.dual else value) for block, value in by_block(server, primal, dual)]

    monkeypatch.setattr(minmax, "_by_block", descending)
    assert not all(agrees for *_, agrees in on_digits(RESULTS, "auc", ["fmgda"]))
