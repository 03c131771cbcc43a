"""Runs on a problem with known constants: gradient norms by round, and slopes of their means."""

import copy
import dataclasses
import functools

import numpy as np
import torch

from fedmpi.comm.solo import SoloLink
from fedmpi.federation.participation import Plan
from fedmpi.federation.rounds import Federation
from fedmpi.federation.variables import Variables
from fedmpi.ground.streams import FIRST, WHOLE, generator
from fedmpi.oracles import FunctionOracle

BLOCK = 256  # samples whose noise is drawn at once
FEWEST = 10  # rounds of a first hit
# How far a slope may be from the proved one: half of what is between the orders -1/2 and -2/3.
CLOSE = 1 / 12


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run: copies of a problem stand side by side in x, each with its own noise.

    Attributes:
        problem: a `fedmpi.tasks.toys.SlowProblem`. algorithm: an `Algorithm`, for all copies.
        rounds, local_steps, num_participants: R, q and S. first_batch_size: B.
        scales: factors of all step sizes, which are tried side by side. A copy's point is start + factor * (x - start):
            every method here moves by step sizes times functions of the gradients, so this is a run with such steps.
        weights: of the fresh gradient, one per factor, instead of the algorithm's own.
        seeds: of the noise, one per copy (and per factor; equal noise for all factors).
    """

    problem: object
    algorithm: object
    rounds: int
    local_steps: int
    num_participants: int
    first_batch_size: int = 1
    scales: tuple = (1.0,)
    seeds: tuple = (0, 1, 2)
    weights: tuple = ()

    def run(self, enough=None):
        """[rounds, scales, seeds]: ‖∇f(x^r)‖² at the server's x when round r begins, nan if it is not finite.

        Args:
            enough: `enough(squares so far)`, asked ever more rarely: whether the run may end; what is left is nan.
        """
        problem, N, shape = self.problem, self.problem.num_clients, (len(self.scales), len(self.seeds), -1)
        blocks = len(problem.start) // problem.dim
        factor = np.reshape(self.scales, (-1, 1, 1))
        noise = [_Noise(problem, client, self.seeds, self.first_batch_size) for client in range(N)]

        def of_copies(x):  # [scales, seeds, blocks * dim]; in x each block of all copies is one piece
            x = x.numpy().reshape(blocks, -1, problem.dim).swapaxes(0, 1) if blocks > 1 else x.numpy()
            x = x.reshape(shape)
            return x if self.scales == (1.0,) else problem.start + factor * (x - problem.start)

        def gradient(client, x, sample):
            g = problem.gradient(client, of_copies(x), *noise[client](sample))
            return g.reshape(-1, blocks, problem.dim).swapaxes(0, 1) if blocks > 1 else g

        start = np.tile(problem.start.reshape(blocks, 1, -1), (1, len(self.scales) * len(self.seeds), 1))
        start = torch.tensor(start.ravel(), dtype=torch.float64)
        ascent = slice(len(start) // 2, len(start)) if problem.num_dual else None
        algorithm, draw = copy.copy(self.algorithm), functools.partial(self._participants, N)
        if self.weights:  # one number for each entry of x, which no setting may be
            weights = np.tile(np.repeat(self.weights, len(self.seeds) * problem.dim), blocks)
            object.__setattr__(algorithm, "fresh_weight", torch.tensor(weights))
        plan = Plan(N, self.local_steps, None if self.num_participants == N else draw)
        oracle = functools.partial(_Oracle, gradient, ascent=ascent)
        federation = Federation(
            algorithm, SoloLink(), dict.fromkeys(range(N), oracle), plan, Variables(start, ascent=ascent)
        )
        federation.start()
        squares, ask = np.full((self.rounds, *shape[:2]), np.nan), FEWEST
        with np.errstate(all="ignore"):
            for r in range(self.rounds):
                squares[r] = (problem.gradient(None, of_copies(federation.server.x)) ** 2).sum(-1)
                if enough and r == ask:
                    if enough(squares[:r]):
                        break
                    ask += ask // 8 + 1
                federation.server.x.nan_to_num_(nan=1e30, posinf=1e30, neginf=-1e30)
                federation.run_round()
        return squares

    def _participants(self, N, round_index):
        return sorted(generator(self.seeds[0], "rates", round_index).choice(N, self.num_participants, replace=False))


class _Oracle(FunctionOracle):
    """Without the copies that protect an oracle from functions of others: here they would take a third of the time."""

    def _evaluate(self, z, xi):
        return torch.from_numpy(self._gradient_of(self.client.index, z, xi).reshape(-1))


class _Noise:
    """The noise of one client's samples, [seeds, dim] each, the same at every point and in every method."""

    def __init__(self, problem, client, seeds, first_batch_size):
        self._problem, self._client, self._seeds, self._first = problem, client, seeds, first_batch_size
        self._block, self._drawn = None, None

    def __call__(self, sample):
        if sample == WHOLE:
            return 0.0, 0.0
        if sample == FIRST:
            return tuple(noise[0] for noise in self._draw("first", 1, self._first))
        block, place = divmod(sample, BLOCK)
        if block != self._block:
            self._block, self._drawn = block, self._draw(block, BLOCK, 1)
        return tuple(noise[place] for noise in self._drawn)

    def _draw(self, purpose, count, size):
        """(δ, z): [count, seeds, dim] means over `size` samples."""
        drawn = []
        for seed in self._seeds:
            draw = generator(seed, "rates", self._client, purpose)
            draws = functools.partial(_normal, draw, count), functools.partial(_uniform, draw, count)
            drawn.append(self._problem.draw(*draws, size))
        return tuple(np.stack(of_seeds, axis=1) for of_seeds in zip(*drawn))


def _normal(draw, count, dim):
    return draw.standard_normal((count, dim))


def _uniform(draw, count, size, dim):
    return draw.random((size, count, dim))


def means(squares):
    """{"all", "half"} -> [...]: means of the squares over all rounds, and over the last half of them."""
    return {"all": squares.mean(0), "half": squares[len(squares) // 2 :].mean(0)}


def first_hit(squares, epsilon):
    """The first R >= 10 at which the mean over rounds R/2 to R and over seeds is at most ε², or None.

    No single crossing and no minimum so far counts: both select noise.

    Args:
        squares: [rounds, seeds].
    """
    sums = np.concatenate([[0.0], np.cumsum(squares.mean(1))])
    rounds = np.arange(FEWEST, len(sums))
    with np.errstate(all="ignore"):
        below = (sums[rounds] - sums[rounds // 2]) / (rounds - rounds // 2) <= epsilon**2
    return int(rounds[below.argmax()]) if below.any() else None


@dataclasses.dataclass(frozen=True)
class Hit:
    """The cheapest point of a grid that reaches ε, and whether it can be trusted.

    Attributes:
        rounds: None if no point reaches ε. q, alpha, scale: local steps, weight of the fresh gradient (None: the method
            has none, and no first batch), step size.
        flag: "" if the point is inside the grid and the budget, otherwise why the number is void.
    """

    rounds: int | None
    q: int = 0
    alpha: float | None = None
    scale: float = 0.0
    flag: str = ""

    def count(self, rounds, by_rounds):
        """Rounds themselves, or the samples of a client in so many: local steps, and a first batch of q."""
        return rounds if by_rounds else self.q * (rounds + (self.alpha is not None))


def best_hit(runs, scales, epsilon, by_rounds=True):
    """The `Hit` of a grid. Its end may be best where no further point exists: at q = 1, and at α = 0 and 1.

    Args:
        runs: (q, α) -> [rounds, scales, seeds] squares. by_rounds: the fewest rounds, or the fewest samples.
    """
    found = [
        Hit(rounds, *point, scale)
        for point, squares in runs.items()
        for place, scale in enumerate(scales)
        if (rounds := first_hit(squares[:, place], epsilon)) is not None
    ]
    if not found:
        return Hit(None, flag="not reached")
    best = min(found, key=lambda hit: hit.count(hit.rounds, by_rounds))
    flags = {
        f"fewer than {FEWEST} rounds": best.rounds == FEWEST,
        "q at its end": best.q == max(q for q, _ in runs),
        "step size at its end": best.scale in (scales[0], scales[-1]),
        "budget": 2 * best.rounds > len(runs[best.q, best.alpha]),
    }
    return dataclasses.replace(best, flag=", ".join(text for text, is_so in flags.items() if is_so))


@dataclasses.dataclass(frozen=True)
class Slope:
    """The exponent y of value ~ size^y, and its interval by leaving out seeds (two deviations)."""

    value: float
    deviation: float

    def __str__(self):
        return f"{self.value:.2f} ± {2 * self.deviation:.2f}"


def slope(sizes, values):
    """The `Slope` of values [sizes, seeds] by size."""
    values = np.asarray(values)
    return slope_of(sizes, lambda seeds: values[:, seeds].mean(1), values.shape[1])


def slope_of(sizes, values, n):
    """The `Slope` of `values(seeds)`, [sizes], for a list of some of n seeds."""

    def fit(seeds):
        return np.polyfit(np.log(sizes), np.log(values(seeds)), 1)[0]

    without = np.array([fit([s for s in range(n) if s != left]) for left in range(n)]) if n > 1 else np.zeros(1)
    return Slope(float(fit(list(range(n)))), float(np.sqrt((n - 1) * ((without - without.mean()) ** 2).mean())))


def verdict(proved, of_all, of_half):
    """What two slopes of a mean square say about a proved one, an upper bound: a rule that is fixed before the runs.

    Theorems bound the mean over all rounds. It contains the start, which lasts the longer the smaller the steps are, so
    that its slope is shallower in runs that one can make; the last half's is what the rule rests on. "agrees": the last
    half's is at most `CLOSE` above the proved one, and one of the two at most 2 `CLOSE` below it. "contradicted": the
    last half's is above it by more than `CLOSE` and its interval. Otherwise "not readable".
    """
    if not np.isfinite([of_all.value, of_half.value]).all():
        return "contradicted"
    if of_half.value - 2 * of_half.deviation > proved + CLOSE:
        return "contradicted"
    near = max(of_all.value, of_half.value) >= proved - 2 * CLOSE
    return "agrees" if of_half.value <= proved + CLOSE and near else "not readable"
