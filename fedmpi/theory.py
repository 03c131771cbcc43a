"""The settings that the papers' theorems prescribe: from the constants of a problem to an algorithm's settings.

One function per theorem, called by keywords; it returns a `Prescription`. Arithmetic only: no torch, no MPI.
Letters of all functions: L smoothness; N clients, S of them in a round; T local steps per client and q per round, or
R rounds of K steps; b samples in a minibatch, B in the first one; sigma deviation of ONE sample's gradient (a minibatch
has sigma²/b); zeta the clients' heterogeneity; Delta = f(x_0) - inf f; G the largest norm of a client's gradient.

Where a printed constant is not the one that the proof needs, the proof's is used; `printed=True` gives the printed one.
The constants are safe, not good: `step_scale` multiplies all step sizes, `weight_scale` the weight of the fresh
gradient, and no fixed factor changes an order. A bound is given only for settings that meet all conditions.
"""

import dataclasses
import functools
import inspect
import math
import numbers

from fedmpi.ground.errors import UserError

WHOLE = {"N", "S", "T", "K", "R", "q", "b", "h", "d", "b2"}  # constants that are whole numbers
MAY_BE_ZERO = {"sigma", "zeta", "G", "G_0", "w_distance"}
CUBE_ROOT = {"schedule": "cube_root", "schedule_offset": 1.5, "schedule_rate": 1.0}
SAFE = 1 + 1e-9  # a condition that holds with equality is not violated by rounding


@dataclasses.dataclass(frozen=True)
class Prescription:
    """What a theorem prescribes.

    Attributes:
        method: the algorithm's name. source: paper, theorem, equations.
        algorithm: setting -> value of the algorithm. run: setting -> value of the run.
        derived: name -> number: the theorem's own constants, and samples and gradients that the run costs.
        bound: of the theorem's measure, or None if it cannot be evaluated.
        warnings: a sentence for each condition that is violated, or that needs to be known.
    """

    method: str
    source: str
    algorithm: dict
    run: dict
    derived: dict
    bound: float | None = None
    warnings: tuple = ()


def _theorem(function):
    """Check the constants before the theorem uses them.

    Raises:
        UserError: one line: which constant, what is expected.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(**constants):
        for name, value in signature.bind(**constants).arguments.items():
            if value is None or isinstance(value, bool) or name == "schedule":
                continue
            zero = name in MAY_BE_ZERO
            expected = "a whole number >= 1" if name in WHOLE else f"a number {'>=' if zero else '>'} 0"
            is_number = isinstance(value, numbers.Real) and math.isfinite(value)
            if not is_number or value < 0 or (value == 0 and not zero) or (name in WHOLE and value % 1):
                raise UserError(f"{name} = {value}: expected {expected}")
            constants[name] = int(value) if name in WHOLE else float(value)
        if constants.get("S") is not None and constants["S"] > constants["N"]:
            raise UserError(f"S = {constants['S']}: expected at most N = {constants['N']} clients")
        if constants.get("schedule", "constant") not in ("constant", "cube_root"):
            raise UserError(f"schedule = {constants['schedule']}: expected constant or cube_root")
        return function(**constants)

    return checked


def _ratio(above, below):
    return above / below if below else math.inf


# Recursive momentum: T local steps per client, q of them per round.


@_theorem
def fafed(
    *, L, N, T, b=1, rho=1.0, q=None, sigma=None, zeta=None, Delta=None, G=None,
    schedule="cube_root", step_scale=1.0, weight_scale=1.0, printed=False,
):  # fmt: skip
    """FAFED: bounds the mean over t of E‖∇f(x̄_t)‖, not squared.

    Args:
        rho: ρ, added to the root of the second moment. q: default (T/N²)^(1/3), Remark 1.
        schedule: cube_root (Eq. 5) or constant. With Remark 1's q the plateau W = 1728 T is longer than the run, so
            both are the same, and the step size and weight contain neither L nor ρ of the other.

    Source: Wu, Huang, Hu, Huang, "Faster Adaptive Federated Learning", AAAI 2023, Theorem 2, Eq. (5), Remark 1.
    Printed: 1/ρ for 1/ρ² in the bound's first term, 3ζ²/2 for 3ζ², and ρ for ρ² in the condition on c.
    """
    q, T = _steps(T, q or (T / N**2) ** (1 / 3))
    h, W = N ** (2 / 3) / L, 1728 * q**3 * N**2
    c = (L / rho) ** 2 * (1 / (12 * q * N**2) + 60 / (b * N))
    algorithm = _recursive(rho * h, W, c, schedule, step_scale, weight_scale) | {"epsilon": float(rho)}
    warnings = []
    limit, largest = 120 * L**2 / (b * N * rho ** (1 if printed else 2)), 720 * q * N * (2 * rho - 1 if printed else 1)
    if c > SAFE * limit:
        form = "720 q N (2 ρ - 1)" if printed else "720 q N"
        words = f"c = {c:.6g} is above its limit 120 L²/(b N {'ρ), as printed' if printed else 'ρ²)'}, {limit:.6g}"
        warnings.append(f"{words}: expected " + (f"b <= {form} = {largest:.6g}" if largest > 0 else "ρ > 0.5"))
    if T < N**2:
        warnings.append(f"T = {T}: Remark 1 needs at least N² = {N**2}")
    bound, derived = None, {"h_bar": h, "W": W, "c": c} | _plateau(rho * h, W, c)
    if None not in (sigma, zeta, Delta, G):
        n, power = (N * T) ** (2 / 3), 1 if printed else 2
        M = (12 * L * q / T + L / n) * Delta / rho**power + 6 * q * (sigma / rho) ** 2 / T + (sigma / rho) ** 2 / 2 / n
        unlike = 5 * sigma**2 / 3 + (1.5 if printed else 3) * zeta**2
        M += (21600 * q / (b**2 * T) + 1800 / (b**2 * n)) / rho**2 * unlike * (math.log(T) + 1)
        derived["M"] = M
        if step_scale == weight_scale == 1 and not warnings:
            bound = 4 * math.sqrt(sigma**2 + G**2 + rho**2) * math.sqrt(M)
    source = "Wu, Huang, Hu, Huang, AAAI 2023, Theorem 2, Eq. (5), Remark 1"
    return _iterations("fafed", source, algorithm, (N, N, T, q, b), derived, bound, warnings)


@_theorem
def stem(*, L, N, T, b=1, q=None, schedule="cube_root", step_scale=1.0, weight_scale=1.0):
    """STEM: FAFED's numbers with A = 1 and ρ = 1. Derived: STEM's own theorem is not used."""
    same = {"schedule": schedule, "step_scale": step_scale, "weight_scale": weight_scale}
    found = fafed(L=L, N=N, T=T, b=b, q=q, **same)
    algorithm = {key: value for key, value in found.algorithm.items() if key != "epsilon"}
    source = f"derived from {found.source}, with A = 1"
    return dataclasses.replace(found, method="stem", source=source, algorithm=algorithm)


@_theorem
def fafedzo(
    *, L, T, N=1, S=None, b=1, rho=1.0, q=None, d=None, b2=None, mu=None, eps=None,
    schedule="cube_root", step_scale=1.0, weight_scale=1.0,
):  # fmt: skip
    """FAFedZO: its rate is claimed, and never a bound here, because two steps of its proof fail.

    Args:
        q: p, default T^(1/3), as in the paper's text; its appendix has (T/S²)^(1/3).
        d, b2, mu: dimension, directions and radius of the estimates; the theorem fixes none. eps: wanted ‖∇f‖.

    Source: Lu, Gao, Zhang, Xu, "FAFedZO: Faster Zero-Order Adaptive Federated Learning Algorithm", 2025, Theorem 1,
    Eqs. (6), (7).
    """
    q, T = _steps(T, q or T ** (1 / 3))
    W, c = 1728 * q**3, (L / rho) ** 2 * (1 / (12 * q) + 30)
    algorithm = _recursive(rho / L, W, c, schedule, step_scale, weight_scale) | {"epsilon": float(rho)}
    warnings = ["claimed: the proof bounds the estimates' variance by L²μ² (A9), and η_t by (A38); neither holds"]
    derived = {"h_bar": 1 / L, "W": W, "c": c} | _plateau(rho / L, W, c)
    if d and b2:
        derived["kappa"] = kappa = (d + b2 - 1) / b2  # second moment of the estimate
        if kappa > 24 * q:
            warnings.append(f"(d + b2 - 1)/b2 = {kappa:.6g} > 24 p = {24 * q}: on a quadratic SGD is unstable")
    if mu and eps and mu > eps / (2 * L):
        warnings.append(f"mu = {mu:.6g} > eps/(2L) = {eps / (2 * L):.6g}: the estimates' bias stays above eps/2")
    oracle = {"oracle.smoothing": mu, "oracle.directions": b2}
    source = "Lu, Gao, Zhang, Xu, FAFedZO, 2025, Theorem 1, Eqs. (6), (7); claimed"
    found = _iterations("fafedzo", source, algorithm, (N, S or N, T, q, b), derived, None, warnings)
    return dataclasses.replace(found, run=found.run | {name: value for name, value in oracle.items() if value})


@_theorem
def fmgda(
    *, L_f, mu, N, T, b=1, q=None, c=None, sigma=None, zeta=None, Delta=None, w_distance=None,
    schedule="cube_root", step_scale=1.0, weight_scale=1.0, printed=False,
):  # fmt: skip
    """FMGDA: bounds the mean over t of E‖∇Φ(θ̄_t)‖², Φ = max_w F.

    Args:
        L_f: the largest of L_11, L_12, L_21, L_22 and 1. mu: F is μ-strongly concave in w, μ <= L_f.
        c: of the dual step c η_t; default: 0.9 of its upper limit, or its lower limit if that is larger.
        Delta: Φ(θ_0) - inf Φ. w_distance: ‖w_0 - w*(θ_0)‖.

    Source: "On the Convergence of Federated Deep AUC Maximization", Theorem 1, Corollary 1, Remark 1.
    Printed: W = 1728 q³N² (proof: 800) for 8000 q³N², ĉ = √(11/2880) c/κ² for √(17/14400) c/κ², 5σ²/μ² for 5κ²σ²/2.
    """
    if mu > L_f or L_f < 1:
        raise UserError(f"L_f = {L_f:g}, mu = {mu:g}: expected L_f >= 1 and mu <= L_f")
    q, T = _steps(T, q or (T / N**2) ** (1 / 3))
    kappa = L_f / mu
    L = L_f * (1 + kappa)  # smoothness of Φ
    h, W = N ** (2 / 3) / L, (1728 if printed else 8000) * q**3 * N**2
    c_1 = L**2 * (1 / (20 * q * N**2) + 60 / (b * N))
    lower, upper = 211 * mu / (2160 * L_f**2), min(1 / 6, 1 / (6 * L), mu / (6 * L))
    warnings = []
    if lower >= upper:
        warnings.append(f"no c: expected {lower:.6g} <= c < {upper:.6g}")
    if c is None:
        c = max(0.9 * upper, lower) if lower < upper else 0.9 * upper
    elif not lower <= c < upper and lower < upper:
        warnings.append(f"c = {c:.6g}: expected {lower:.6g} <= c < {upper:.6g}")
    if c_1 > SAFE * 90 * L**2 / (b * N):
        warnings.append(f"c_1 = {c_1:.6g} is above its limit 90 L²/(b N): expected b <= 600 q N = {600 * q * N}")
    if T < N**2:
        warnings.append(f"T = {T}: Remark 1 needs at least N² = {N**2}")
    c_hat = math.sqrt(11 / 2880 if printed else 17 / 14400) * c / kappa**2
    algorithm = _recursive(c_hat * h, W, c_1 / c_hat**2, schedule, step_scale, weight_scale)
    weight = "fresh_weight" if schedule == "constant" else "fresh_weight_scale"
    algorithm |= {"dual_step_size": algorithm["step_size"] * c / c_hat, f"dual_{weight}": algorithm[weight]}
    limits = {"c_lower": lower, "c_upper": upper, "c_1_limit": 90 * L**2 / (b * N)}
    derived = {"kappa": kappa, "L": L, "h_bar": h, "W": W, "c_1": c_1, "c": c, "c_hat": c_hat} | limits
    derived |= _plateau(h, W, c_1)
    bound = None
    if None not in (sigma, zeta, Delta, w_distance) and step_scale == weight_scale == 1 and not warnings:
        n, of_dual = (N * T) ** (2 / 3), 5 * sigma**2 / mu**2 if printed else 2.5 * (kappa * sigma) ** 2
        bound = (20 * L * q / T + L / n) * (2 * Delta / c_hat + 12 * L_f**2 * w_distance**2 / (c * mu))
        bound += 20 * sigma**2 * (q / T + 1 / n) * (1 + 50 * kappa**2)
        unlike = of_dual + sigma**2 / 20 + sigma**2 / (10 * b) + zeta**2 / 4
        bound += unlike * 2 * math.log(T + 1) * (288000 * q / T + 14400 / n) / b**2
    source = "On the Convergence of Federated Deep AUC Maximization, Theorem 1, Corollary 1, Remark 1"
    return _iterations("fmgda", source, algorithm, (N, N, T, q, b), derived, bound, warnings)


def _steps(T, q):
    """(q, T): local steps per round, and in all, a multiple of them."""
    q = max(1, round(q))
    return q, q * -(-int(T) // q)


def _plateau(step, W, c):
    """The step size and the weight of the fresh gradient on the plateau of the schedule, unscaled."""
    eta = step / W ** (1 / 3)
    return {"eta": eta, "alpha": c * eta**2}


def _recursive(step, W, c, schedule, step_scale, weight_scale):
    """Settings of η_t = step / max(W, 3/2 + t)^(1/3) and α_{t+1} = c η_t², each times its factor."""
    if schedule == "constant":
        flat = _plateau(step, W, c)
        return {"step_size": step_scale * flat["eta"], "fresh_weight": min(1.0, weight_scale * flat["alpha"])}
    scaled = {"step_size": step_scale * step, "schedule_plateau": float(W)}
    return CUBE_ROOT | scaled | {"fresh_weight_scale": weight_scale * c / step_scale**2}


def _iterations(method, source, algorithm, size, derived, bound, warnings):
    """The `Prescription` of a method that is run for T steps per client; size: N, S, T, q, b."""
    N, S, T, q, b = size
    run = {"rounds": T // q, "local_steps": q, "batch_size": b, "first_batch_size": b * q, "participation": S / N}
    costs = {"samples_per_client": T * b, "samples": S * T * b + N * b * q, "gradients": 2 * S * T * b + N * b * q}
    run |= {"result": "uniform"}
    return Prescription(method, source, algorithm, run, {"T": T, **derived, **costs}, bound, tuple(warnings))


# Momentum on the server: R rounds of K local steps.


@_theorem
def fedavg_m(
    *, L, Delta, sigma, N, K, R, G_0, b=1, c_0=1.0, step_scale=1.0, weight_scale=1.0, printed=False
):  # fmt: skip
    """FedAvg-M: bounds the mean over rounds of E‖∇f(x^r)‖² at the server's x.

    Args:
        G_0: mean over the clients of ‖∇f_i(x_0)‖². c_0: largest β, any constant in (0, 1]; lost from Eq. (19) in print.

    Source: Cheng, Huang, Wu, Yuan, arXiv:2306.16504, Theorem 1, Eq. (19); constants of Lemmas 5, 9, 10, Theorem 11.
    """
    v = sigma**2 / b
    beta = min(c_0, math.sqrt(_ratio(N * K * L * Delta, v * R)))
    gamma = min(1 / (24 * L), beta / (6 * L))

    def conditions(gamma, beta):
        drift = 288 * math.e * ((1 - beta) ** 2 + math.e * (beta * gamma * L * R) ** 2)
        return {
            "γL <= min{1/24, β/6}": lambda x: gamma * L / min(1 / 24, beta / 6),
            "ηKL <= 1/β": lambda x: x * beta,
            "288e x²((1-β)² + e(βγLR)²) <= 1": lambda x: drift * x**2,
            "x <= (LΔ/(G_0 β³R))^(1/2)": lambda x: x * math.sqrt(G_0 * beta**3 * R / (L * Delta)),
            "x <= (4βN)^(-1/2)": lambda x: x * math.sqrt(4 * beta * N),
            "x <= (8β³NK)^(-1/4)": lambda x: x * (8 * beta**3 * N * K) ** 0.25,
        }

    def bound(x, gamma, beta):
        start = 7 * Delta / (gamma * R) + 39 / 8 * 2 * L * Delta / (beta * R)
        return start + 78 * (math.e * beta * x) ** 2 * G_0 + 39 * beta * v / (2 * N * K)

    loose = [1, 1 / (beta * gamma * L * R), math.sqrt(_ratio(L * Delta, G_0 * beta**3 * R))]
    loose += [(beta * N) ** -0.5, (beta**3 * N * K) ** -0.25]
    given = _Momentum("fedavg_m", "Theorem 1, Eq. (19)", L, (N, N, K, R, b), (step_scale, weight_scale))
    return given.prescribe(beta, gamma, min(loose) if printed else None, conditions, bound)


@_theorem
def fedavg_m_vr(
    *, L, Delta, sigma, N, K, R, G_0, b=1, c_0=1.0, large_batch=False, step_scale=1.0, weight_scale=1.0, printed=False
):  # fmt: skip
    """FedAvg-M-VR: bounds the mean over rounds of E‖∇f(x^r)‖²; every sample's loss must be L-smooth.

    Args:
        G_0, c_0: as of `fedavg_m`. large_batch: Theorem 15's second variant, with a first batch of KR minibatches.

    Source: Cheng, Huang, Wu, Yuan, arXiv:2306.16504, Theorem 2, Eq. (27); constants of Lemmas 12 to 14, Theorem 15.
    Printed: x without its limit ~ β; second variant: β is a minimum with 1/R where the proof needs a maximum.
    """
    v = sigma**2 / b
    beta = _ratio(N * K * (L * Delta) ** 2, v**2 * R**2) ** (1 / 3)
    if large_batch:
        beta = min(1 / R, beta) if printed else max(1 / R, beta)
    beta = min(c_0, beta)
    gamma = min(1 / 24, math.sqrt(beta * N * K / 54)) / L
    B = K * R if large_batch else math.ceil(K / (R * beta**2))

    def conditions(gamma, beta):
        drift = 288 * math.e * (289 / 72 * (1 - beta) ** 2 + 8 * math.e * (gamma * beta * L * R) ** 2) / beta**2
        return {
            "γL <= min{1/24, (βNK/54)^(1/2)}": lambda x: gamma * L / min(1 / 24, math.sqrt(beta * N * K / 54)),
            "ηKL <= 1/(4e)": lambda x: x * 4 * math.e,
            "288e x²(289/72 (1-β)² + 8e(γβLR)²) <= β²": lambda x: drift * x**2,
            "x <= (β/(64N))^(1/2)": lambda x: x * math.sqrt(64 * N / beta),
            "x <= (β/(128NK))^(1/4)": lambda x: x * (128 * N * K / beta) ** 0.25,
            "128x²(1/K + 2x²)(γL)² <= β²/18": lambda x: 128 * 18 * (x * gamma * L / beta) ** 2 * (1 / K + 2 * x**2),
            "x <= (LΔ/(G_0 γLR))^(1/2)": lambda x: x * math.sqrt(G_0 * gamma * R / Delta),
        }

    def bound(x, gamma, beta):
        start = 7 * Delta / (gamma * R) + 39 / 8 * v / (N * B) / (beta * R)
        return start + 312 * (math.e * x) ** 2 * G_0 + 39 * beta * v / (2 * N * K)

    loose = [math.sqrt(_ratio(Delta, G_0 * gamma * R)), math.sqrt(beta / N), (beta / (N * K)) ** 0.25]
    given = _Momentum("fedavg_m_vr", "Theorem 2, Eq. (27)", L, (N, N, K, R, b), (step_scale, weight_scale), B)
    return given.prescribe(beta, gamma, min(loose) if printed else None, conditions, bound)


@_theorem
def scaffold_m(
    *, L, Delta, sigma, N, S, K, R, G_0=None, b=1, c_0=1.0, step_scale=1.0, weight_scale=1.0, printed=False
):  # fmt: skip
    """SCAFFOLD-M with S of N clients per round: bounds the mean over rounds of E‖∇f(x^r)‖².

    Args:
        G_0: as of `fedavg_m`, only for the fourth entry of the printed β, which belongs to c_i = 0.

    Source: Cheng, Huang, Wu, Yuan, arXiv:2306.16504, Theorem 3, Eq. (28); constants of Lemmas 16 to 18, Theorem 19.
    Printed: γ = β/L, x without ηK <= Nγ/(5S), β with the fourth entry.
    """
    v = sigma**2 / b
    beta = min(c_0, S / N ** (2 / 3), math.sqrt(_ratio(L * Delta * S * K, v * R)))
    fourth = None if G_0 is None else math.sqrt(_ratio(L * Delta * S**2, G_0 * N))
    beta = min(beta, fourth) if printed and fourth is not None else beta
    gamma = beta / L if printed else min(beta / 12, 1 / 24) / L
    B = math.ceil(N * K / (S * R))
    p_S = (N - S) / (S * max(1, N - 1))

    def conditions(gamma, beta):
        y, u = beta * gamma * L * N / S, 80 * math.e * beta
        return {
            "γL <= min{β/12, 1/24}": lambda x: gamma * L / min(beta / 12, 1 / 24),
            "βx <= 1/(24K^(1/4))": lambda x: 24 * beta * x * K**0.25,
            "ηK <= Nγ/(5S)": lambda x: 5 * S * x / (N * gamma * L),
            "160eβx² + 24y²(6p_S + 80eβx²) <= β/9": lambda x: (
                9 * (2 * u * x**2 + 24 * y**2 * (6 * p_S + u * x**2)) / beta
            ),
            "10x²(1/K + 2(βx)²) + 960eβx²/K <= 4/(SK)": lambda x: (
                S * K / 4 * (10 * x**2 * (1 / K + 2 * (beta * x) ** 2) + 12 * u * x**2 / K)
            ),
            "80eβx² <= 4/S": lambda x: u * x**2 * S / 4,
        }

    def bound(x, gamma, beta):
        start = 7 * Delta / (gamma * R) + 39 / 8 * 2 * L * Delta / (beta * R)
        return start + 585 * beta * N * v / B / (4 * S**2 * R) + 390 * beta * v / (S * K)

    loose = min(S**-0.5, 1 / (beta * K**0.25), S**0.5 / N) if printed else None
    given = _Momentum("scaffold_m", "Theorem 3, Eq. (28)", L, (N, S, K, R, b), (step_scale, weight_scale), B)
    found = given.prescribe(beta, gamma, loose, conditions, bound)
    return dataclasses.replace(found, derived=found.derived | {"fourth_entry": fourth})


@_theorem
def scaffold_m_vr(
    *, L, Delta, sigma, N, S, K, R, b=1, large_batch=False, step_scale=1.0, weight_scale=1.0, printed=False
):  # fmt: skip
    """SCAFFOLD-M-VR: bounds the mean over rounds of E‖∇f(x^r)‖²; every sample's loss must be L-smooth.

    Args:
        large_batch: Theorem 22's second variant, with a first batch of SKR/N minibatches; it needs R >= N/S.

    Source: Cheng, Huang, Wu, Yuan, arXiv:2306.16504, Theorem 4, Eq. (30); constants of Lemmas 20, 21, Theorem 22.
    Printed: γ = min{1, (βS)^(1/2)}/L, x without its limit ~ β; second variant: as of `fedavg_m_vr`.
    """
    v = sigma**2 / b
    beta = _ratio(K * L * Delta, v * R) ** (2 / 3) * S ** (1 / 3)
    if large_batch:
        beta = min(1 / R, beta) if printed else max(1 / R, beta)
    beta = min(S / N, beta)
    gamma = (min(1, math.sqrt(beta * S)) if printed else min(1 / 24, math.sqrt(beta * S / 126))) / L
    B = math.ceil(S * K * R / N if large_batch else max(S * K / (N * R * beta**2), N * K / (S * R)))
    p_S = (N - S) / (S * max(1, N - 1))

    def conditions(gamma, beta):
        y, u = beta * gamma * L * N / S, 720 / beta
        return {
            "γL <= min{1/24, (βS/126)^(1/2)}": lambda x: gamma * L / min(1 / 24, math.sqrt(beta * S / 126)),
            "ηKL <= 1/(4e)": lambda x: x * 4 * math.e,
            "ηK <= γN/(10S)": lambda x: 10 * S * x / (N * gamma * L),
            "720x²/β + 18y²(4p_S + 720x²/β) <= β/9": lambda x: 9 * (u * x**2 + 18 * y**2 * (4 * p_S + u * x**2)) / beta,
            "64(x²/β)(1/K + 2x²) + 8640x²/(βK) <= 5/(SK)": lambda x: (
                S * K / 5 * (64 * x**2 / beta * (1 / K + 2 * x**2) + 12 * u * x**2 / K)
            ),
            "720x²/β <= 1/S": lambda x: u * x**2 * S,
        }

    def bound(x, gamma, beta):
        start = 7 * Delta / (gamma * R) + 39 / 8 * v / (N * B) / (beta * R)
        return start + 585 * beta * N * v / B / (8 * S**2 * R) + 585 * beta * v / (2 * S * K)

    loose = min(math.sqrt(beta / S), (beta / (S * K)) ** 0.25) if printed else None
    given = _Momentum("scaffold_m_vr", "Theorem 4, Eq. (30)", L, (N, S, K, R, b), (step_scale, weight_scale), B)
    return given.prescribe(beta, gamma, loose, conditions, bound)


@dataclasses.dataclass(frozen=True)
class _Momentum:
    """What the four theorems have in common; size: N, S, K, R, b; scales: of the step sizes and of β."""

    method: str
    place: str
    L: float
    size: tuple
    scales: tuple
    B: int | None = None  # minibatches of the first batch

    def prescribe(self, beta, gamma, x, conditions, bound):
        """The `Prescription` of β, γ and x = ηKL; x = None is the largest that meets all conditions."""
        N, S, K, R, b = self.size
        x = _largest(conditions(gamma, beta).values()) if x is None else x
        derived = {"beta": beta, "gamma": gamma, "x": x, "B": self.B}
        steps, weights = self.scales
        x, gamma, beta = x * steps, gamma * steps, min(1.0, beta * weights)
        ratios = {text: ratio(x) for text, ratio in conditions(gamma, beta).items()}
        violated = tuple(f"violated by the factor {r:.4g}: {text}" for text, r in ratios.items() if r > SAFE)
        vr, form = self.method.endswith("vr"), {} if self.method.endswith("vr") else {"form": "original"}
        algorithm = {"step_size": x / (K * self.L), "server_step_size": gamma, "fresh_weight": beta, **form}
        algorithm |= {"c0": "gradient"} if self.method.startswith("scaffold") else {}
        first = b * (self.B or 0)
        run = {"rounds": R, "local_steps": K, "batch_size": b, "first_batch_size": first or b, "participation": S / N}
        derived |= {"samples": S * K * R * b + N * first, "gradients": (1 + vr) * S * K * R * b + N * first}
        value = None if violated else bound(x, gamma, beta)
        source = f"Cheng, Huang, Wu, Yuan, arXiv:2306.16504, {self.place}"
        return Prescription(self.method, source, algorithm, run, derived, value, violated)


def _largest(ratios):
    """The largest x at which no ratio is above 1; ratios that are above 1 at every x are left out."""
    ratios = [ratio for ratio in ratios if ratio(0.0) <= 1]
    low, high = 0.0, 1.0
    while all(ratio(high) <= 1 for ratio in ratios):
        low, high = high, 2 * high
    while low < (x := (low + high) / 2) < high:
        low, high = (x, high) if all(ratio(x) <= 1 for ratio in ratios) else (low, x)
    return low


# Layer-wise adaptive steps: a step size, and no bound that falls to 0.


@_theorem
def fed_lamb(*, h, R, k=1.0):
    """Fed-LAMB: α = k/√(hR) for h layers, each parameter tensor being one; k is free.

    Source: Karimi, Li, Li, arXiv:2110.00532, Corollary 1. Its (3) ends in a constant that does not fall with R.
    """
    algorithm = {"step_size": k / math.sqrt(h * R), "layer_decay": 0.0}
    source = "Karimi, Li, Li, arXiv:2110.00532, Theorem 1, Corollary 1"
    return Prescription("fed_lamb", source, algorithm, {"rounds": R}, {}, warnings=(LAMB,))


@_theorem
def local_amsgrad(*, N, R, d, k=1.0):
    """Local AMSGrad in the Fed-LAMB paper: α = k √N/√(R d) for d parameters; k is free.

    Source: Karimi, Li, Li, arXiv:2110.00532, Theorem 2.
    """
    algorithm = {"step_size": k * math.sqrt(N) / math.sqrt(R * d)}
    source = "Karimi, Li, Li, arXiv:2110.00532, Theorem 2"
    return Prescription("local_amsgrad", source, algorithm, {"rounds": R}, {}, warnings=(LAMB,))


LAMB = "no order can be tested: the theorem's bound ends in a constant, and its corollary does not follow from it"
