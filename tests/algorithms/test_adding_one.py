"""A new algorithm is one class and its twin: nothing else in the tree has to be edited."""

import shutil
import sys

import pytest
from helpers import ROOT, execute

CLASS = '''
"""Gradient steps with momentum, which is averaged, too."""

import dataclasses

from fedmpi.algorithms.base import Algorithm
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class HeavyBall(Algorithm):
    """SGD with momentum on every client; parameters and momentum are averaged.

    Source: Nobody, "An Example", 1999, Algorithm 1.
    """

    step_size: float = setting(0.1, "η, step size of the local steps", above=0)
    momentum: float = setting(0.5, "β, weight of the old direction", least=0, below=1)

    exchanged = ("x", "m")

    def local_step(self, client, server, oracle):
        """m_i <- β m_i + ∇f_i(x_i; ξ), x_i <- x_i - η m_i."""
        client.m.mul_(self.momentum).add_(oracle.gradient(client.x, oracle.draw()))
        client.x.add_(client.m, alpha=-self.eta(client))
'''
TWIN = """
def heavyball(f, x, rounds, K, S, step_size, momentum=0.5):
    m = np.zeros(x.size)
    yield {"x": everywhere(x, f), "m": everywhere(m, f)}
    for r in range(rounds):
        x_i, m_i = everywhere(x, f), everywhere(m, f)
        for _, here in steps(S(r), K):
            m_i[here] = momentum * m_i[here] + f(here, x_i, f.draw(here))
            x_i[here] = x_i[here] - at(step_size, r) * m_i[here]
            yield {"x": x_i, "m": m_i}
        x, m = x_i[S(r)].mean(0), m_i[S(r)].mean(0)
        yield {"x": everywhere(x, f), "m": everywhere(m, f)}
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the package and of the algorithms' tests, with a new class and its twin in it."""
    copy = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "fedmpi", copy / "fedmpi", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "algorithms", copy / "tests" / "algorithms")
    shutil.copytree(ROOT / "tests" / "machinery", copy / "tests" / "machinery")
    for name in ("pytest.ini", "tests/conftest.py"):
        shutil.copy(ROOT / name, copy / name)
    (copy / "fedmpi" / "algorithms" / "heavy_ball.py").write_text(CLASS.lstrip(), encoding="utf-8")
    with open(copy / "tests" / "algorithms" / "reference.py", "a", encoding="utf-8") as file:
        file.write("\n" + TWIN)
    return copy


def run(copy, *words):
    return execute([sys.executable, *words], cwd=copy, env={"PYTHONPATH": str(copy)})


@pytest.mark.rarely
def test_the_programs_find_it(copy):
    listed = run(copy, "-m", "fedmpi.train", "--list", "algorithms").stdout
    (line,) = [line for line in listed.splitlines() if line.startswith("heavyball ")]
    assert line.endswith(" SGD with momentum on every client; parameters and momentum are averaged.")
    shown = run(copy, "-m", "fedmpi.train", "--algorithm", "HeavyBall", "--help").stdout
    assert "--algorithm.momentum" in shown
    assert "β, weight of the old direction" in shown


@pytest.mark.rarely
def test_the_shared_tests_find_it_and_compare_it_with_its_twin(copy):
    tests = "tests/algorithms/test_every_algorithm.py"
    done = run(copy, "-m", "pytest", "-q", "-x", tests, "-k", "heavyball or class_has_its_twin")
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 15
    source = copy / "tests" / "algorithms" / "reference.py"
    source.write_text(source.read_text(encoding="utf-8").replace("momentum=0.5", "momentum=0.6"), encoding="utf-8")
    assert run(copy, "-m", "pytest", "-q", "-x", tests, "-k", "heavyball and reference").returncode == 1
