"""The part rates of the benchmark: it measures our algorithms, its verdicts can fail, and its bounds hold."""

import dataclasses

import numpy as np
import pytest
from helpers import start

from fedmpi import algorithms
from fedmpi.cli.bench.parts import rates
from fedmpi.cli.bench.rates import CLOSE, Hit, Slope, Trial, best_hit, first_hit, means, slope, verdict
from fedmpi.comm.solo import SoloLink
from fedmpi.tasks.saddle_toys import Saddle
from fedmpi.tasks.toys import Slow

SEEDS = (10, 11, 12)  # not those of the benchmark


def slopes(line, replaced=None, **settings):
    """The slopes of a `Line` over all rounds and the last half, also of another class with the same settings."""
    found = []
    for size in line.sizes:
        trial = dataclasses.replace(line.trial(size), seeds=SEEDS)
        if replaced is not None:
            given = dataclasses.asdict(trial.algorithm)
            names = {field.name for field in dataclasses.fields(replaced)}
            own = {name: value for name, value in given.items() if name in names} | settings
            trial = dataclasses.replace(trial, algorithm=replaced(**own))
        found.append(means(trial.run()))
    return [slope(line.sizes, [one[part][0] for one in found]) for part in ("all", "half")]


LINES = {line.key: line for line in rates.lines(quick=True)}


@pytest.mark.rarely
@pytest.mark.parametrize("key", LINES)
def test_orders_agree_on_other_seeds(key):
    of_all, of_half = slopes(LINES[key])
    assert verdict(LINES[key].proved, of_all, of_half) == "agrees"
    assert of_half.value == pytest.approx(LINES[key].proved, abs=0.2)


def test_what_grows_is_what_a_line_says():
    """Its size is the trial's R, N, S or K; with N, T = 8192 local steps stay, of which q = (T / N²)^(1/3) a round."""
    for line in rates.lines(quick=False):
        for size in line.sizes:
            trial = line.trial(size)
            found = {"R": trial.rounds, "N": trial.problem.num_clients, "S": trial.num_participants}
            assert (found | {"K": trial.local_steps})[line.grows] == size
        if line.key in ("fafed/N", "stem/N"):
            trials = [line.trial(size) for size in (2, 4, 8, 16)]
            assert [one.local_steps for one in trials] == [13, 8, 5, 3] and line.proved == -2 / 3
            assert [one.rounds for one in trials] == [-(-8192 // q) for q in (13, 8, 5, 3)]


class UncorrectedSTEM(algorithms.STEM):
    """STEM whose momentum is a plain decaying mean of gradients."""

    def local_step(self, client, server, oracle):
        client.d.lerp_(oracle.gradient(client.x, oracle.draw()), self.alpha(client, self.fresh_weight, None))
        if not client.is_last_step:
            client.x.add_(client.d, alpha=-self.eta(client))


class OwnMomentumSTEM(algorithms.STEM):
    """STEM whose clients keep their own momentum: it is not averaged."""

    exchanged = ("x",)
    exchanged_at_start = ()
    client_rows = ("x_prev", "d")

    def server_start(self, server):
        """x_1 = x_0."""

    def local_step(self, client, server, oracle):
        g, g_prev = oracle.gradient_pair(client.x, client.x_prev, oracle.draw())
        client.d.sub_(g_prev).mul_(1 - self.fresh_weight).add_(g)
        client.x_prev.copy_(client.x)
        client.x.add_(client.d, alpha=-self.eta(client))

    def server_step(self, server):
        """x is the average."""


class ForgetfulFedAvgM(algorithms.FedAvgM):
    """FedAvg-M whose server forgets g: nothing is averaged over rounds."""

    def server_step(self, server):
        super().server_step(server)
        server.g.zero_()


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("stem/R", UncorrectedSTEM),
        ("stem/R", OwnMomentumSTEM),
        ("fafed/R", algorithms.FedAvg),
        ("fedavg_m_vr/R", algorithms.FedAvg),
        ("fedavg_m/R", ForgetfulFedAvgM),
    ],
)
def test_a_wrong_algorithm_does_not_agree(key, wrong):
    wrong = dataclasses.dataclass(frozen=True)(wrong) if "__dataclass_params__" not in vars(wrong) else wrong
    of_all, of_half = slopes(LINES[key], wrong)
    assert verdict(LINES[key].proved, of_all, of_half) != "agrees"


@pytest.mark.parametrize("method", rates.MOMENTUM)
def test_bounds_of_the_momentum_paper_are_not_exceeded(method):
    trial, bound = rates.bounded(method)
    measured = means(dataclasses.replace(trial, seeds=SEEDS).run())["all"]
    start = (trial.problem.gradient(None, trial.problem.start) ** 2).sum()
    assert (measured <= bound).all() and bound < start, "a method that does not move would exceed it"


def test_drift_is_proportional_to_the_weight():
    ends = [np.sqrt(rates.drift(beta).run()[-1]) for beta in rates.DRIFT]
    assert slope(rates.DRIFT, np.array(ends)[:, 0]).value == pytest.approx(1, abs=0.02)


SIDE_BY_SIDE = [
    (Slow().problem(3), algorithms.FMGDA(step_size=0.1, dual_step_size=0.2)),
    (Saddle().problem(3), algorithms.FMGDA(step_size=0.1, dual_step_size=0.2)),
    (Slow().problem(3), algorithms.FAFED(step_size=0.2, epsilon=0.3)),  # not linear in the gradients
    (Slow().problem(3), algorithms.STEM(step_size=0.2)),
    (Slow().problem(3), algorithms.SCAFFOLD(step_size=0.2)),
    (Slow().problem(3), algorithms.FedAvgM(step_size=0.1, server_step_size=0.3)),
]


@pytest.mark.parametrize(("problem", "algorithm"), SIDE_BY_SIDE)
def test_copies_are_runs_of_their_own(problem, algorithm):
    """Each copy is the run with its seed alone, and a factor is one of all step sizes."""
    together = Trial(problem, algorithm, 6, 3, 2, 5, scales=(1.0, 0.5), seeds=(4, 5)).run()
    assert together.shape == (6, 2, 2) and np.isfinite(together).all()
    steps = {name: value / 2 for name, value in dataclasses.asdict(algorithm).items() if name.endswith("step_size")}
    if isinstance(algorithm, algorithms.SCAFFOLD):  # its server's is a multiple of the step of the clients
        del steps["server_step_size"]
    halved = dataclasses.replace(algorithm, **steps)
    first = Trial(problem, halved, 6, 3, 3, 5, seeds=(5,)).run()
    of_all = Trial(problem, algorithm, 6, 3, 3, 5, scales=(1.0, 0.5), seeds=(4, 5)).run()
    np.testing.assert_allclose(of_all[:, 1, 1], first[:, 0, 0], rtol=1e-9)
    assert not np.allclose(of_all[-1, 0, 0], of_all[-1, 0, 1])


def test_a_run_that_diverges_is_nan_or_huge():
    squares = Trial(Slow().problem(2), algorithms.FedAvg(step_size=1e6), 3, 2, 2).run()
    assert np.isfinite(squares[0]).all()


def test_slopes_and_their_verdicts():
    sizes = np.array([1, 2, 4, 8])
    values = sizes[:, None] ** -0.5 * np.exp([[0.01, -0.01, 0.0]] * 4)
    found = slope(sizes, values)
    assert found.value == pytest.approx(-0.5) and found.deviation == pytest.approx(0, abs=1e-12)

    def says(of_all, of_half, deviation=0.01):
        return verdict(-0.5, Slope(of_all, deviation), Slope(of_half, deviation))

    assert says(-0.4, -0.5) == says(-0.45, -0.7) == "agrees"
    assert says(-0.2, -0.3) == says(np.nan, -0.5) == "contradicted"
    assert says(-0.2, -0.38, 0.1) == says(-0.9, -0.9) == "not readable"


def test_no_exponent_of_the_last_half_is_close_to_two_neighbouring_orders():
    """One that is clearly shallower than -2/3 + 1/12 cannot pass for -2/3, and -1/2 is."""
    assert -2 / 3 + CLOSE < -1 / 2 and -1 / 2 - CLOSE >= -2 / 3 + CLOSE - 1e-12
    assert verdict(-2 / 3, Slope(-0.42, 0.01), Slope(-0.53, 0.01)) == "contradicted"
    assert verdict(-1 / 2, Slope(-0.42, 0.01), Slope(-0.53, 0.01)) == "agrees"


def test_a_figure_that_cannot_be_written_is_refused_before_the_runs():
    for path, message in (("x.gif", "ends in .svg"), ("no/x.svg", "there is no folder no")):
        done = start(1, "-m", "fedmpi", "bench", "rates", "--quick", "--figure", path)
        assert done.returncode == 2 and message in done.stderr


def test_the_figure_has_a_panel_for_everything_that_grows(tmp_path):
    rates.draw({line: np.array(line.sizes) ** -0.5 for line in rates.lines(quick=False)}, tmp_path / "rates.svg")
    text = (tmp_path / "rates.svg").read_text()
    assert all(f">{word}<" in text for word in ("R", "N", "K", "S", *rates.MOMENTUM, "fafed"))


def test_every_rank_has_a_part_of_the_runs():
    """The sums over ranks are the same results; here one rank has all of them."""
    trials = [Trial(Slow().problem(2), algorithms.FedAvg(), rounds, 1, 2) for rounds in (2, 4)]
    found = rates._run(SoloLink(), trials)
    np.testing.assert_allclose(found[1, 3:], means(trials[1].run())["half"][0])


def test_a_first_hit_is_no_single_crossing():
    squares = np.full((40, 2), 4.0)
    squares[5] = 0  # one lucky round, and one seed
    squares[10:, 0] = 0
    assert first_hit(squares, 0.5) is None
    squares[20:] = 0.01
    hit = first_hit(squares, 0.5)
    assert squares[hit // 2 : hit].mean() <= 0.25 < squares[(hit - 1) // 2 : hit - 1].mean()
    squares[30:] = np.nan  # later
    assert first_hit(squares, 0.5) == (hit if hit <= 30 else None)


def falling(rounds, scales):
    """[rounds, scales, 1]: fastest at the second scale."""
    speed = np.array([0.02, 0.3, 0.1])[:scales]
    return np.exp(-speed * np.arange(rounds)[:, None])[:, :, None]


def test_a_best_point_at_an_end_of_the_grid_is_flagged():
    """Larger q is faster up to 4: inside; without the neighbours, or the budget, the number is void."""
    slower = {1: 0.25, 2: 0.5, 4: 1.0, 8: 0.7}
    runs = {(q, None): falling(200, 3) ** (factor / 2) for q, factor in slower.items()}
    inside = best_hit(runs, (1, 2, 3), 0.1)
    assert (inside.q, inside.scale, inside.flag) == (4, 2, "")
    assert best_hit({(q, None): runs[q, None] for q in (1, 2, 4)}, (1, 2, 3), 0.1).flag == "q at its end"
    assert "step size at its end" in best_hit({q: one[:, :2] for q, one in runs.items()}, (1, 2), 0.1).flag
    short = {q: one[: inside.rounds + 5] for q, one in runs.items()}
    assert best_hit(short, (1, 2, 3), 0.1).flag == "budget"
    assert best_hit(runs, (1, 2, 3), 1.0).flag.startswith("fewer than 10 rounds")


def test_samples_are_local_steps_and_the_first_batch():
    counts = [Hit(10, 4, alpha).count(10, by_rounds) for alpha, by_rounds in ((0.1, True), (None, False), (0.1, False))]
    assert counts == [10, 40, 44]
    runs = {(q, None): falling(200, 3) ** factor for q, factor in {1: 0.4, 4: 1.0, 8: 0.5}.items()}
    assert [best_hit(runs, (1, 2, 3), 0.1, by_rounds).q for by_rounds in (True, False)] == [4, 1]
    assert best_hit(runs, (1, 2, 3), 1e-9).flag == "not reached"
    assert best_hit(runs, (1, 2, 3), 0.1, by_rounds=False).q == 1
    fewest = best_hit({(q, weight): one for (q, _), one in runs.items() for weight in (0.0, 0.5)}, (1, 2, 3), 0.1)
    assert (fewest.alpha, fewest.flag, fewest.count(fewest.rounds, by_rounds=False)) == (0.0, "", 4 * fewest.rounds + 4)


def test_local_steps_double_until_the_best_is_inside():
    runs, scales = rates.grid("fedavg", 320, (0.25, 1.0), (0,), epsilons=(0.8,))
    assert list(runs) == [(2**power, None) for power in range(len(runs))]
    assert all(one.shape == (320 // q, len(scales), 1) for (q, _), one in runs.items())
    best = best_hit(runs, scales, 0.8)
    assert best.q < max(q for q, _ in runs) or 2 * 10 * 2 * best.q > 320


@pytest.mark.parametrize("scales", [(2.0**-6, 2.0**-5), (1.0, 2.0)])
def test_step_sizes_are_added_until_the_best_is_inside(scales):
    """From either side; the added ones are the runs that they would have been from the beginning."""
    runs, found = rates.grid("fedavg", 160, scales, (0,), epsilons=(0.8,))
    best = best_hit(runs, found, 0.8)
    assert best.rounds and "step size" not in best.flag and set(scales) < set(found)
    assert list(found) == sorted(found)
    again = {(q, None): rates.hit("fedavg", q, (None,), 160 // q, found, (0,)).run() for q, _ in runs}
    done = np.isfinite(runs[1, None])  # runs end where nothing better can follow
    np.testing.assert_array_equal(again[1, None][done], runs[1, None][done])
    assert not done.all() and [best_hit(again, found, 0.8, by) for by in (True, False)] == [
        best_hit(runs, found, 0.8, by) for by in (True, False)
    ]


@pytest.mark.parametrize("method", ["stem", "fafed"])
def test_weights_of_the_fresh_gradient_are_tried_with_every_q(method):
    runs, scales = rates.grid(method, 160, (0.5, 1.0, 2.0), (0,), epsilons=(0.6,), alphas=(1.0, 0.0))
    assert {weight for _, weight in runs} == {0.0, 1.0} and len(runs) == 2 * len({q for q, _ in runs})
    q, place = 2, scales.index(1.0)
    known = {"epsilon": 1.0} if method == "fafed" else {}
    cls = getattr(algorithms, method.upper())
    alone = Trial(Slow().problem(8), cls(step_size=1.0, fresh_weight=0.0, **known), 80, q, 8, q, seeds=(0,)).run()
    side_by_side = runs[q, 0.0][:, place]
    done = np.isfinite(side_by_side)
    np.testing.assert_allclose(side_by_side[done], alone[:, 0][done], rtol=1e-9)
    assert done.sum() >= 10


def test_an_exponent_of_first_hits_needs_four_numbers_without_a_flag(monkeypatch):
    """On other seeds than the grid's; FedAvg with q = 4 falls below every ε of the benchmark but the last."""
    epsilons = (0.7, 0.6, 0.5, 0.4)
    monkeypatch.setitem(rates.HITS, "fedavg", (algorithms.FedAvg, 0.5, (None,), epsilons, 320, (3, 4)))
    found = [Hit(12, 2, None, 0.25) for _ in epsilons]
    *rows, last = rates._hits("fedavg", False, found, 4)
    assert [row[3] for row in rows] == [24] * 4 and all(float(row[4]) >= 20 for row in rows)
    assert isinstance(last[4], Slope) and last[4].value < 0
    found[1] = dataclasses.replace(found[1], flag="budget")
    *rows, last = rates._hits("fedavg", False, found, 4)
    assert last[4] == "not readable" and rows[1][4] is None and rows[1][-1] == "budget"


def test_ablations_change_one_thing():
    found = rates.ablations()
    own = [trial for what, value, trial in found if what == "stem: α / its own" and value == 1]
    for what, value, trial in found:
        if what == "stem: heterogeneity":
            assert trial.problem.task.heterogeneity == value and trial.algorithm == own[0].algorithm
        elif "own" in what:
            same = next(one for kind, factor, one in found if kind == what and factor == 1).algorithm
            assert trial.algorithm.fresh_weight == pytest.approx(min(1, value * same.fresh_weight))
            assert dataclasses.replace(trial.algorithm, fresh_weight=1) == dataclasses.replace(same, fresh_weight=1)
        else:
            assert trial.rounds * trial.local_steps >= 4096 > (trial.rounds - 1) * trial.local_steps
    trial = dataclasses.replace(own[0], rounds=3, seeds=(0,))
    assert np.isfinite(trial.run()).all()
