"""Communication rounds as the papers count them: gradient norms against rounds, clients and local steps (not timed).

Settings are those of the papers' theorems (`fedmpi.theory`) up to fixed factors; the budget grows, and the slope of the
mean square gradient norm is compared with the proved one, which is an upper bound. The problems are the tasks `slow`
and `saddle` with their default settings; the run is that of `fedmpi.federation` with the algorithms' own classes.
"""

import dataclasses
import functools
import pathlib

import numpy as np

from fedmpi import algorithms, theory
from fedmpi.cli.bench.rates import FEWEST, Hit, Trial, best_hit, first_hit, means, slope, slope_of, verdict
from fedmpi.ground.errors import UserError
from fedmpi.ground.text import format_table
from fedmpi.tasks.saddle_toys import Saddle
from fedmpi.tasks.toys import Slow

NOISE = 8.0  # s for FedAvg-M and its relatives: so large that the noise dominates and the weight is below 1
LOCAL = 0.02  # their ηK / γ
DRIFT = (0.4, 0.2, 0.1, 0.05)  # β of FedAvg-M with exact gradients


@dataclasses.dataclass(frozen=True)
class Line:
    """One slope: a method, what grows, its sizes, the trial of a size, and the proved exponent of the mean square."""

    method: str
    grows: str
    sizes: tuple
    trial: object
    proved: float
    source: str

    @property
    def key(self):
        return f"{self.method}/{self.grows}"


def recursive(method, q, N, T=None):
    """A `Trial` of STEM, FAFED or FMGDA with q local steps and T = q³N²: steps k/(Lq), weights α of the theorem times
    fixed factors, as literal constants would need far longer runs."""
    T = T or q**3 * N**2
    if method == "fmgda":
        problem = Saddle().problem(N)
        given = theory.fmgda(L_f=2, mu=1, N=N, T=T, q=q, schedule="constant", weight_scale=4.0)
        own = given.algorithm | {"step_size": 0.5 / q, "dual_step_size": 1.0 / q}
        algorithm = algorithms.FMGDA(**own)
    else:
        problem, scales = Slow().problem(N), {"step_scale": 12.0, "weight_scale": 1.44}
        given = getattr(theory, method)(L=1, N=N, T=T, q=q, schedule="constant", **scales)
        algorithm = getattr(algorithms, method.upper())(**given.algorithm)
    return Trial(problem, algorithm, given.run["rounds"], q, N, q)


MOMENTUM = {  # class, factor k, γ/k of β, N, S, K
    "fedavg_m": (algorithms.FedAvgM, 4.0, lambda beta, N, S, K: beta / 6),
    "fedavg_m_vr": (algorithms.FedAvgMVR, 4.0, lambda beta, N, S, K: np.sqrt(beta * N * K / 54)),
    "scaffold_m": (algorithms.SCAFFOLDM, 2.0, lambda beta, N, S, K: beta / 6),
    "scaffold_m_vr": (algorithms.SCAFFOLDMVR, 4.0, lambda beta, N, S, K: np.sqrt(beta * S / 126)),
}


def momentum(method, R, N=4, S=None, K=4):
    """A `Trial` of FedAvg-M or one of its relatives: β and B of the theorem, γ = k times its γ without the cap."""
    S = S or N
    problem = Slow(noise=NOISE).problem(N)
    constants = {"L": 1, "Delta": problem.Delta, "sigma": NOISE, "N": N, "K": K, "R": R}
    own = {"S": S} if method.startswith("scaffold") else {"G_0": problem.G_0}
    given = getattr(theory, method)(**constants, **own)
    cls, k, rule = MOMENTUM[method]
    gamma = float(k * rule(given.algorithm["fresh_weight"], N, S, K))
    steps = {"server_step_size": gamma, "step_size": LOCAL * gamma / K}
    return Trial(problem, cls(**given.algorithm | steps), R, K, S, given.run["first_batch_size"])


def lines(quick):
    """The `Line`s."""
    found = []
    for method, source in (("fafed", "FAFED, Theorem 2"), ("stem", "FAFED with A = 1"), ("fmgda", "AUC, Theorem 1")):
        sizes = (2, 3, 4, 6) if quick else (2, 3, 4, 6, 8, 11)
        rounds = tuple(q**2 * 16 for q in sizes)
        found.append(Line(method, "R", rounds, _by_rounds(method, 4), -1.0, source))
        if not quick and method != "fmgda":
            found.append(Line(method, "N", (2, 4, 8, 16), _by_clients(method, 8192), -2 / 3, source))
    for method in MOMENTUM:
        reduced, partial = method.endswith("vr"), method.startswith("scaffold")
        order = -2 / 3 if reduced else -0.5
        source = f"MOM, Theorem {list(MOMENTUM).index(method) + 1}"
        size = {"N": 16, "S": 4} if partial else {"N": 4}
        rounds = (64, 256, 1024) if quick else (64, 256, 1024, 4096)
        found.append(Line(method, "R", rounds, _of(method, "R", size), order, source))
        if not quick:
            grows, sizes = ("S", (2, 4, 8, 16)) if partial else ("N", (2, 4, 8, 16, 32))
            found.append(Line(method, grows, sizes, _of(method, grows, size | {"R": 1024}), order, source))
            if not partial:
                found.append(Line(method, "K", (1, 2, 4, 8, 16), _of(method, "K", size | {"R": 1024}), order, source))
    return found


def _by_rounds(method, N):
    return lambda R: recursive(method, round((R / N**2) ** 0.5), N)


def _by_clients(method, T):
    return lambda N: recursive(method, max(1, round((T / N**2) ** (1 / 3))), N, T)


def _of(method, grows, size):
    return lambda value: momentum(method, **size | {grows: value})


def measure(bench):
    """Print the tables and write the figure. Collective."""
    if bench.options.figure:
        _check_figure(bench.options.figure)
    seeds = tuple(range(3 if bench.quick else 6))
    chosen = lines(bench.quick)
    trials = [dataclasses.replace(line.trial(size), seeds=seeds) for line in chosen for size in line.sizes]
    of_all, of_half = np.split(_run(bench.link, trials), 2, axis=1)
    rows, points, first = [], {}, 0
    for line in chosen:
        part = slice(first, first := first + len(line.sizes))
        found = [slope(line.sizes, squares[part]) for squares in (of_all, of_half)]
        points[line] = np.sqrt(of_half[part].mean(1))
        says = verdict(line.proved, *found)
        rows.append([line.method, line.grows, line.source, f"{line.proved:.2f}", *map(str, found), says])
        for name, exponent in zip(("all", "half"), found):
            bench.results.record(f"rates/{line.key}/{name}", exponent.value, "exponent")
    heads = ["method", "grows", "from", "proved", "all rounds", "last half", ""]
    bench.results.print("", "rates: exponents of the mean square gradient norm, with intervals over seeds")
    bench.results.print(*format_table(heads, rows))
    _drift(bench)
    if not bench.quick:
        _bounds(bench, seeds)
        _ablations(bench, seeds[:3])
        _first_hits(bench)
    if bench.options.figure and bench.link.rank == 0:
        draw(points, pathlib.Path(bench.options.figure))


def _run(link, trials):
    """[trials, 2 seeds]: means over all rounds, and over the last half; every rank runs a part of the trials."""
    found = np.zeros((len(trials), 2 * len(trials[0].seeds)))
    for number in range(link.rank, len(trials), link.size):
        found[number] = np.concatenate([squares[0] for squares in means(trials[number].run()).values()])
    return link.allgather(found.ravel()).sum(0).reshape(found.shape)


def bounded(method):
    """(`Trial`, bound): a method with exactly the settings of its theorem, on the problem's true constants.

    So little noise that the bound is below the square at the start: a method that does not move exceeds it.
    """
    N, S, K, R = 4, 3 if method.startswith("scaffold") else 4, 2, 1024
    problem = Slow(power=2.0, heterogeneity=0.2, curvature_noise=0.01, noise=0.02).problem(N)
    smooth = problem.L_sample if method.endswith("vr") else problem.L
    constants = {"L": smooth, "Delta": problem.Delta, "sigma": problem.sigma, "N": N, "K": K, "R": R}
    own = {"S": S} if method.startswith("scaffold") else {"G_0": problem.G_0}
    given = getattr(theory, method)(**constants, **own)
    algorithm = MOMENTUM[method][0](**given.algorithm)
    return Trial(problem, algorithm, R, K, S, given.run["first_batch_size"]), given.bound


def _bounds(bench, seeds):
    trials, bounds = zip(*map(bounded, MOMENTUM))
    found = _run(bench.link, [dataclasses.replace(trial, seeds=seeds) for trial in trials])[:, : len(seeds)].max(1)
    rows = [
        [method, f"{value:.4g}", f"{bound:.4g}", "exceeded" if value > bound else ""]
        for method, value, bound in zip(MOMENTUM, found, bounds)
    ]
    bench.results.print("", "rates: mean square gradient norm with a theorem's own constants, and its bound")
    bench.results.print(*format_table(["method", "measured", "bound", ""], rows))


def drift(beta):
    """A `Trial` of FedAvg-M with exact gradients: it ends where clients that differ in curvature pull it."""
    problem = Slow(noise=0.0, curvature_noise=0.0).problem(4)
    problem.start[: problem.task.num_slow] = 0  # there h' = 0, so that only the variables v move
    algorithm = algorithms.FedAvgM(step_size=0.02, server_step_size=0.5, fresh_weight=beta)
    return Trial(problem, algorithm, 300, 8, 4, seeds=(0,))


def _drift(bench):
    ends = [float(np.sqrt(drift(beta).run()[-1, 0, 0])) for beta in DRIFT]
    found = slope(DRIFT, np.array(ends)[:, None])
    bench.results.record("rates/drift", found.value, "exponent")
    bench.results.print("", "rates: ‖∇f‖ where FedAvg-M ends with exact gradients, against β (1 is expected)")
    bench.results.print(*format_table(["β", "‖∇f‖"], [[f"{b:g}", f"{end:.4g}"] for b, end in zip(DRIFT, ends)]))
    bench.results.print(f"  exponent {found.value:.3f}")


def ablations():
    """(what is changed, its value, `Trial`) of theorem-shaped runs of STEM and FedAvg-M in which one thing changes."""
    stem, momentous = recursive("stem", 4, 4, 4096), momentum("fedavg_m", 1024)
    found = [("stem: q, T fixed", q, recursive("stem", q, 4, 4096)) for q in (1, 2, 4, 8, 16, 32)]
    found += [("stem: N, q fixed", N, recursive("stem", 4, N, 4096)) for N in (2, 4, 8, 16)]
    for unlike in (0.0, 0.5, 1.0, 2.0):
        found.append(
            ("stem: heterogeneity", unlike, dataclasses.replace(stem, problem=Slow(heterogeneity=unlike).problem(4)))
        )
    for label, trial in (("stem: α / its own", stem), ("fedavg_m: β / its own", momentous)):
        for factor in (0.1, 0.3, 1.0, 3.0, 10.0):
            weight = min(1.0, factor * trial.algorithm.fresh_weight)
            changed = dataclasses.replace(trial.algorithm, fresh_weight=weight)
            found.append((label, factor, dataclasses.replace(trial, algorithm=changed)))
    return found


def _ablations(bench, seeds):
    labels, values, trials = zip(*ablations())
    found = np.sqrt(_run(bench.link, [dataclasses.replace(trial, seeds=seeds) for trial in trials]))
    of_all, of_half = (roots.mean(1) for roots in np.split(found, 2, axis=1))
    rows = [[*map(str, row[:2]), *(f"{mean:.4f}" for mean in row[2:])] for row in zip(labels, values, of_all, of_half)]
    bench.results.print("", "rates: root mean square of ‖∇f‖ where one thing changes")
    bench.results.print(*format_table(["what", "value", "all rounds", "last half"], rows))


HITS = {  # class; largest step size of the first grid, α (a good one first), ε, local steps; proved orders of both
    "fedavg": (algorithms.FedAvg, 0.5, (None,), (0.28, 0.2, 0.14, 0.1), 6400, (3, 4)),
    "scaffold": (algorithms.SCAFFOLD, 2.0, (None,), (0.28, 0.2, 0.14, 0.1), 6400, (2, 4)),
    "stem": (algorithms.STEM, 2.0, (0.1, 0.3, 0.0, 1.0), (0.2, 0.14, 0.1, 0.07), 1600, (2, 3)),
    "fafed": (algorithms.FAFED, 4.0, (0.1, 0.3, 0.0, 1.0), (0.2, 0.14, 0.1, 0.07), 1600, (2, 3)),
}


def hit(method, q, alphas, rounds, scales, seeds):
    """A `Trial` with all weights `alphas`, (None,) if the method has none, and with each of them all step sizes."""
    offset = {"epsilon": 1.0} if method == "fafed" else {}
    own = {} if alphas[0] is None else {"fresh_weight": alphas[0]}
    algorithm = HITS[method][0](step_size=1.0, **offset, **own)
    weights = tuple(np.repeat(alphas, len(scales))) if len(alphas) > 1 else ()
    return Trial(Slow().problem(8), algorithm, rounds, q, 8, q, scales * len(alphas), seeds, weights)


def grid(method, budget, scales, seeds, epsilons, alphas=(None,)):
    """((q, α) -> [rounds, scales, seeds] squares with `budget` local steps, all scales), until the best is inside.

    That is, for all ε, by rounds and by samples. q doubles while the budget has the fewest rounds; step sizes are
    doubled and halved twice at a time and have no end: larger ones diverge, and smaller ones reach no ε.
    """
    together = [(alpha,) for alpha in alphas] if method == "fafed" else [alphas]  # FAFED needs a number, no vector
    runs, wanted = {}, [(epsilon, by_rounds) for epsilon in epsilons for by_rounds in (True, False)]

    def run(q, tried_scales, alphas):
        known = [
            winner.rounds and winner.count(winner.rounds, by_rounds) for winner, (_, by_rounds) in zip(best(), wanted)
        ]

        def enough(squares):  # no later hit can be a best one
            here = [best_hit({(q, alphas[0]): squares}, tried_scales * len(alphas), *goal).rounds for goal in wanted]
            so_far = [Hit(None, q, alphas[0]).count(len(squares), by_rounds) for _, by_rounds in wanted]
            return all(reached or (least and least <= now) for reached, least, now in zip(here, known, so_far))

        squares = hit(method, q, alphas, budget // q, tried_scales, seeds).run(enough)
        return {(q, alpha): of_alpha for alpha, of_alpha in zip(alphas, np.split(squares, len(alphas), axis=1))}

    def added(new_scales):
        points = [(q, weights) for q in sorted({q for q, _ in runs}) for weights in together]
        return {point: squares for q, weights in points for point, squares in run(q, new_scales, weights).items()}

    def best():
        return [best_hit(runs, scales, *goal) for goal in wanted]

    q, further = 1, True
    while further:
        while 2 * FEWEST * q <= budget and (q < 4 or any(winner.q in (0, q // 2) for winner in best())):
            for weights in together:
                runs |= run(q, scales, weights)
            q *= 2
        ends, further = {winner.scale for winner in best()}, ()
        if scales[0] in ends:
            further = (scales[0] / 4, scales[0] / 2)
            runs = {point: np.concatenate([squares, runs[point]], 1) for point, squares in added(further).items()}
            scales = further + scales
        elif scales[-1] in ends:
            further = (scales[-1] * 2, scales[-1] * 4)
            runs = {point: np.concatenate([runs[point], squares], 1) for point, squares in added(further).items()}
            scales += further
    return runs, scales


def _first_hits(bench):
    """Rounds and samples until ε, the fewest of grids: chosen on seeds 0 to 2, and again on ten others."""
    rows = []
    for method, (_, largest, alphas, epsilons, budget, orders) in HITS.items():
        steps = tuple(largest * 2.0**power for power in range(-7, 1))
        found = grid(method, budget, steps, (0, 1, 2), epsilons, alphas)
        for by_rounds, order in zip((True, False), orders):
            rows += _hits(method, by_rounds, [best_hit(*found, epsilon, by_rounds) for epsilon in epsilons], order)
    heads = ["method", "counts", "ε", "number", "other seeds", "q", "α", "η", "void because"]
    bench.results.print("", "rates: rounds and samples until the gradient norm is ε, the fewest of grids of q, α and η")
    bench.results.print(*format_table(heads, [["" if cell is None else str(cell) for cell in row] for row in rows]))


def _all_hit(epsilon, squares):
    """Whether ε is reached over all seeds, and over all but each one."""
    left_out = [np.delete(squares[:, 0], seed, 1) for seed in range(squares.shape[2])]
    return all(first_hit(of_seeds, epsilon) for of_seeds in (squares[:, 0], *left_out))


def _hits(method, by_rounds, found, order, seeds=tuple(range(100, 110))):
    """Rows of the table: what `found`, a `Hit` for each ε, needs on other seeds, and the exponent."""
    rows, clean, counts = [], {}, "rounds" if by_rounds else "samples"

    def needed(epsilon, columns):
        best, squares = clean[epsilon]
        rounds = first_hit(squares[:, columns], epsilon)
        return np.nan if rounds is None else best.count(rounds, by_rounds)

    for epsilon, best in zip(HITS[method][3], found):
        number = again = None
        if best.rounds is not None:
            number = best.count(best.rounds, by_rounds)
        if not best.flag:
            trial = hit(method, best.q, (best.alpha,), 3 * best.rounds, (best.scale,), seeds)
            clean[epsilon] = best, trial.run(functools.partial(_all_hit, epsilon))[:, 0]
            again = f"{needed(epsilon, list(range(len(seeds)))):g}"
        rows.append([method, counts, f"{epsilon:g}", number, again, best.q, best.alpha, f"{best.scale:g}", best.flag])
    fitted = "not readable"
    if len(clean) >= 4:
        fitted = slope_of(list(clean), lambda columns: [needed(epsilon, columns) for epsilon in clean], len(seeds))
    note = f"at least -{order} is proved; it needs 4 ε without a flag"
    return rows + [[method, counts, "exponent", None, fitted, None, None, None, note]]


def _check_figure(path):
    """Check before the runs that the figure can be drawn and written.

    Raises:
        UserError: if not.
    """
    path = pathlib.Path(path)
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise UserError(f"--figure {path}: expected a name that ends in .svg, .png or .pdf")
    if not path.parent.is_dir():
        raise UserError(f"--figure {path}: there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("--figure needs matplotlib: pip install 'fedmpi[plot]'") from None


def draw(points, path):
    """A panel for everything that grows: root mean squares over the last half, and the proved slopes as lines."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    from fedmpi.cli.report.figures import color, figure_settings, save
    from fedmpi.cli.report.style import Style

    panels = list(dict.fromkeys(line.grows for line in points))
    methods = list(dict.fromkeys(line.method for line in points))
    with matplotlib.rc_context(figure_settings(Style())):
        figure = Figure(figsize=(3.2 * len(panels) + 1.6, 3), layout="constrained")
        for axes, grows in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
            for line in (line for line in points if line.grows == grows):
                sizes, values, shade = np.array(line.sizes), points[line], color(methods.index(line.method))
                axes.loglog(sizes, values, "o", color=shade, label=line.method)
                middle = np.exp(np.log(values).mean() - line.proved / 2 * np.log(sizes).mean())
                axes.loglog(sizes, middle * sizes ** (line.proved / 2), color=shade, linewidth=1)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_major_formatter("{x:g}")
                axis.set_minor_locator(NullLocator())
            axes.set(xlabel=grows, ylabel="root mean square of ‖∇f‖, last half")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center")
    save(figure, path)
