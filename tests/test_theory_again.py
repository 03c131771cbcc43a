"""The theorems' settings against a second transcription, written apart from the first, on random constants."""

import math

import numpy as np
import pytest

from fedmpi import theory

E = math.e


def largest(conditions):
    """The largest x > 0 at which functions of x that grow are all at most 1."""
    low, high = 1e-40, 1e40
    for _ in range(400):
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = (middle, high) if all(one(middle) <= 1 for one in conditions) else (low, middle)
    return low


def fafed(L, N, T, b, rho, q, sigma, zeta, Delta, G, printed=False):
    """Theorem 2, Eq. (5): h = N^(2/3)/L; (1728 L³q³h³)^(1/3) = 12 L q h; c of Eq. (43)."""
    T = -(-T // q) * q
    h = N ** (2 / 3) / L
    c = 1 / (12 * L * q * h**3 * rho**2) + 60 * L**2 / (b * N * rho**2)
    W = (12 * L * q * h) ** 3
    eta = rho * h / W ** (1 / 3)
    per_step, per_all = 1 / T, 1 / (N * T) ** (2 / 3)
    M = Delta * L / (rho if printed else rho**2) * (12 * q * per_step + per_all)
    M += sigma**2 / rho**2 * (6 * q * per_step + per_all / 2)
    M += (
        (5 * sigma**2 + (4.5 if printed else 9) * zeta**2)
        / 3
        * (math.log(T) + 1)
        * (21600 * q * per_step + 1800 * per_all)
        / (rho * b) ** 2
    )
    return {
        "step_size": rho * h,
        "fresh_weight_scale": c,
        "schedule_plateau": W,
        "eta": eta,
        "alpha": c * eta**2,
        "first_batch_size": b * q,
        "rounds": T / q,
        "M": M,
        "too large": c * b * N * (rho if printed else rho**2) > 120 * L**2,
        "bound": 4 * math.sqrt((sigma**2 + G**2 + rho**2) * M),
    }


def stem(L, N, T, b):
    """FAFED with A = 1 and ρ = 1: η = 1/(12 L q), α = (1/(12 q N²) + 60/(b N))/(144 q²); q of Remark 1."""
    q = max(1, round((T / N**2) ** (1 / 3)))
    W, alpha = 1728 * q**3 * N**2, (1 / (12 * q * N**2) + 60 / (b * N)) / (144 * q**2)
    eta = 1 / (12 * L * q)
    settings = {"step_size": eta * W ** (1 / 3), "fresh_weight_scale": alpha / eta**2, "schedule_plateau": W}
    return settings | {"eta": eta, "alpha": alpha, "local_steps": q, "rounds": -(-T // q), "first_batch_size": b * q}


def fafedzo(L, N, T, b, rho, d, b2, mu, eps):
    """Theorem 1, Eqs. (6), (7): h = 1/L, p = T^(1/3), c = 1/(12 L p h³ρ²) + 30 L²/ρ²."""
    p, h = round(T ** (1 / 3)), 1 / L
    c, eta = 1 / (12 * L * p * h**3 * rho**2) + 30 * L**2 / rho**2, rho / (12 * L * p)
    kappa = (d + b2 - 1) / b2
    settings = {"step_size": rho * h, "fresh_weight_scale": c, "schedule_plateau": 1728 * (L * p * h) ** 3}
    settings |= {"eta": eta, "alpha": (1 / (12 * p) + 30) / (144 * p * p), "local_steps": p, "rounds": -(-T // p)}
    settings |= {"first_batch_size": b * p, "kappa": kappa, "bound": None}
    return settings | {"unstable": kappa > 24 * p, "bias": 2 * L * mu > eps}


def fed_lamb(h, R, k):
    """Corollary 1."""
    return {"step_size": k * (h * R) ** -0.5, "layer_decay": 0, "bound": None}


def local_amsgrad(N, R, d, k):
    """Theorem 2."""
    return {"step_size": k * (N / R / d) ** 0.5, "bound": None}


def fmgda(L_f, mu, N, T, b, q, sigma, zeta, Delta, w_distance, printed=False):
    """Theorem 1, Corollary 1 with steps of at most 1/(20 L q), printed 1/(12 L q); Lemma 1's L; Eq. (11)."""
    T = -(-T // q) * q
    kappa = L_f / mu
    L = L_f + L_f**2 / mu
    h = N ** (2 / 3) / L
    c_1 = 1 / (20 * L * q * h**3) + 60 * L**2 / (b * N)
    upper = min(1 / 6, 1 / (6 * L), mu / (6 * L))
    lower = 211 * mu / (2160 * L_f**2)
    c = max(0.9 * upper, lower) if lower < upper else 0.9 * upper
    c_hat = c * mu**2 / L_f**2 * (math.sqrt(11 / 5) / 24 if printed else math.sqrt(17) / 120)
    most = (12 if printed else 20) * L * q  # 1/η
    n = (N * T) ** (2 / 3)
    bound = 2 * Delta / c_hat * (20 * L * q / T + L / n)
    bound += 12 * L_f**2 / (mu * c) * w_distance**2 * (20 * L * q / T + L / n)
    bound += (1 + 50 * L_f**2 / mu**2) * sigma**2 * (20 * q / T + 20 / n)
    part = (5 / mu**2 if printed else 2.5 * kappa**2) * sigma**2 + sigma**2 / 20 + sigma**2 / (10 * b) + zeta**2 / 4
    bound += part * (288000 * q / (b**2 * T) + 14400 / (b**2 * n)) * 2 * math.log(T + 1)
    return {
        "step_size": c_hat * h,
        "dual_step_size": c * h,
        "fresh_weight_scale": c_1 / c_hat**2,
        "dual_fresh_weight_scale": c_1 / c_hat**2,
        "schedule_plateau": (most * h) ** 3,
        "eta": 1 / most,
        "alpha": c_1 / most**2,
        "c_hat": c_hat,
        "bound": bound if lower < upper and b <= 600 * q * N and T >= N**2 else None,
    }


def fedavg_m(L, Delta, sigma, N, K, R, G_0, b, printed=False):
    """Theorem 1, Eq. (19), and the conditions of Lemmas 5, 9, 10 and Theorem 11; σ² is of a minibatch."""
    s2 = sigma * sigma / b
    beta = min(1, (N * K * L * Delta / (s2 * R)) ** 0.5)
    g = min(1 / 24, beta / 6)  # γL
    x = largest([
        lambda x: beta * x,
        lambda x: 288 * E * x * x * ((1 - beta) ** 2 + E * (beta * g * R) ** 2),
        lambda x: x * x * G_0 * beta**3 * R / (L * Delta),
        lambda x: 4 * beta * N * x * x,
        lambda x: 8 * beta**3 * N * K * x**4,
    ])  # fmt: skip
    if printed:
        roots = (beta * N) ** -0.5, (beta**3 * N * K) ** -0.25, (L * Delta / (G_0 * beta**3 * R)) ** 0.5
        x = min(1, 1 / (beta * g * R), *roots)
    bound = 7 * L * Delta / (g * R) + 39 / 4 * L * Delta / (beta * R) + 78 * G_0 * (E * beta * x) ** 2
    return _momentum(beta, g / L, x, L, K, bound + 19.5 * beta * s2 / (N * K), 1)


def fedavg_m_vr(L, Delta, sigma, N, K, R, G_0, b, printed=False, large_batch=False):
    """Theorem 2, Eq. (27), with x <~ β of Lemmas 12 to 14."""
    s2 = sigma * sigma / b
    beta = min(1, _second(large_batch, printed, R, (N * K * (L * Delta / (s2 * R)) ** 2) ** (1 / 3)))
    g = min(1 / 24, (beta * N * K / 54) ** 0.5)
    B = R * K if large_batch else math.ceil(K / (R * beta * beta))
    x = largest([
        lambda x: 4 * E * x,
        lambda x: 288 * E * (x / beta) ** 2 * (289 / 72 * (1 - beta) ** 2 + 8 * E * (g * beta * R) ** 2),
        lambda x: 64 * N * x * x / beta,
        lambda x: 128 * N * K * x**4 / beta,
        lambda x: 18 / beta**2 * 128 * x * x * (1 / K + 2 * x * x) * g * g,
        lambda x: x * x * G_0 * g * R / (L * Delta),
    ])  # fmt: skip
    x = min((L * Delta / (G_0 * g * R)) ** 0.5, (beta / N) ** 0.5, (beta / N / K) ** 0.25) if printed else x
    bound = 7 * L * Delta / (g * R) + 4.875 * s2 / (N * B * beta * R) + 312 * G_0 * (E * x) ** 2
    return _momentum(beta, g / L, x, L, K, bound + 19.5 * beta * s2 / (N * K), B)


def scaffold_m(L, Delta, sigma, N, S, K, R, b, G_0=None, printed=False):
    """Theorem 3, Eq. (28), without its fourth entry unless printed; γL <= β/12 and ηK <= Nγ/(5S) of Lemmas 16 to 18."""
    s2 = sigma * sigma / b
    beta = min(1, S * N ** (-2 / 3), (L * Delta * S * K / (s2 * R)) ** 0.5)
    beta = min(beta, S * (L * Delta / (G_0 * N)) ** 0.5) if printed else beta
    g, p = beta if printed else min(beta / 12, 1 / 24), (N - S) / (S * (N - 1))
    y, B = beta * g * N / S, math.ceil(N * K / (S * R))
    x = largest([
        lambda x: 24 * K**0.25 * beta * x,
        lambda x: 5 * S * x / (N * g),
        lambda x: 9 / beta * (160 * E * beta * x * x + 24 * y * y * (6 * p + 80 * E * beta * x * x)),
        lambda x: S * K / 4 * (10 * x * x * (1 / K + 2 * (beta * x) ** 2) + 960 * E * beta * x * x / K),
        lambda x: 20 * E * beta * x * x * S,
    ])  # fmt: skip
    x = min(S**-0.5, K**-0.25 / beta, S**0.5 / N) if printed else x
    bound = 7 * L * Delta / (g * R) + 9.75 * L * Delta / (beta * R) + 146.25 * beta * N * s2 / (B * S * S * R)
    return _momentum(beta, g / L, x, L, K, bound + 390 * beta * s2 / (S * K), B)


def scaffold_m_vr(L, Delta, sigma, N, S, K, R, b, printed=False, large_batch=False):
    """Theorem 4, Eq. (30), with 126 and x <= β/80.5 of Lemmas 20 and 21."""
    s2 = sigma * sigma / b
    beta = min(S / N, _second(large_batch, printed, R, (K * L * Delta / (s2 * R)) ** (2 / 3) * S ** (1 / 3)))
    g, p = min(1, (beta * S) ** 0.5) if printed else min(1 / 24, (beta * S / 126) ** 0.5), (N - S) / (S * (N - 1))
    y = beta * g * N / S
    B = math.ceil(S * K * R / N if large_batch else max(S * K / (N * R * beta**2), N * K / (S * R)))
    x = largest([
        lambda x: 4 * E * x,
        lambda x: 10 * S * x / (N * g),
        lambda x: 9 / beta * (720 * x * x / beta + 18 * y * y * (4 * p + 720 * x * x / beta)),
        lambda x: S * K / 5 * (64 * x * x / beta * (1 / K + 2 * x * x) + 8640 * x * x / (beta * K)),
        lambda x: 720 * S * x * x / beta,
    ])  # fmt: skip
    x = min((beta / S) ** 0.5, (beta / S / K) ** 0.25) if printed else x
    bound = 7 * L * Delta / (g * R) + 4.875 * s2 / (N * B * beta * R) + 73.125 * beta * N * s2 / (B * S * S * R)
    return _momentum(beta, g / L, x, L, K, bound + 292.5 * beta * s2 / (S * K), B)


def _second(large_batch, printed, R, beta):
    """The weight of Theorems 15 and 22: the larger of 1/R and the other entry, printed as the smaller."""
    return (min if printed else max)(1 / R, beta) if large_batch else beta


def _momentum(beta, gamma, x, L, K, bound, B):
    found = {"fresh_weight": beta, "server_step_size": gamma, "step_size": x / (K * L), "bound": bound}
    return found | ({"B": B} if B > 1 else {})


def draw(name, seed, printed=False):
    """Random constants of a theorem."""
    r = np.random.default_rng(seed)
    some = {name: 10 ** r.uniform(-1.5, 1.5) for name in ("L", "Delta", "sigma", "zeta", "G", "rho", "G_0")}
    N, b, q, K = (int(r.integers(low, high)) for low, high in ((2, 40), (1, 9), (1, 12), (1, 20)))
    T, R = int(10 ** r.uniform(3.5, 6)), int(10 ** r.uniform(1, 5))
    if name == "stem":
        return {"L": some["L"], "N": N, "T": T, "b": b}
    if name == "fafedzo":
        its = {"L": some["L"], "rho": some["rho"], "N": N, "T": T, "b": b, "mu": some["Delta"], "eps": some["sigma"]}
        return its | {"d": int(10 ** r.uniform(1, 5)), "b2": K}
    if name in ("fed_lamb", "local_amsgrad"):
        return {"R": R, "k": some["L"]} | ({"h": N} if name == "fed_lamb" else {"N": N, "d": T})
    if name == "fafed":
        return {key: some[key] for key in ("L", "rho", "sigma", "zeta", "Delta", "G")} | {
            "N": N,
            "T": T,
            "b": b,
            "q": q,
        }
    if name == "fmgda":
        L_f = 10 ** r.uniform(0, 1)
        its = {key: some[key] for key in ("sigma", "zeta", "Delta")} | {"w_distance": some["G"], "L_f": L_f}
        return its | {"mu": L_f * r.uniform(0.1, 1), "N": N, "T": T, "b": b, "q": q}
    its = {key: some[key] for key in ("L", "Delta", "sigma")} | {"N": N, "K": K, "R": R, "b": b}
    its |= {"S": int(r.integers(1, N + 1))} if name.startswith("scaffold") else {}
    has_start = name.startswith("fedavg") or (name == "scaffold_m" and printed)
    return its | ({"G_0": some["G_0"]} if has_start else {})


BOUNDED = ["fafed", "fmgda", "fedavg_m", "fedavg_m_vr", "scaffold_m", "scaffold_m_vr"]
WARNED = {"too large": "is above its limit 120", "unstable": "SGD is unstable", "bias": "bias stays above"}
PRINTED, LARGE = {"printed": True}, {"large_batch": True}
CASES = [(name, {}) for name in [*BOUNDED, "stem", "fafedzo", "fed_lamb", "local_amsgrad"]]
CASES += [(name, PRINTED) for name in BOUNDED]
CASES += [(name, kind) for name in ("fedavg_m_vr", "scaffold_m_vr") for kind in (LARGE, LARGE | PRINTED)]


@pytest.mark.parametrize(("name", "kind"), CASES, ids=lambda one: one if isinstance(one, str) else "-".join(one))
def test_settings_and_bounds_are_those_of_a_second_transcription(name, kind):
    num_bounds, warned = 0, set()
    for seed in range(100):
        constants = draw(name, seed, kind.get("printed", False)) | kind
        expected, found = globals()[name](**constants), getattr(theory, name)(**constants)
        values, words = found.algorithm | found.run | found.derived, "".join(found.warnings)
        for key, value in expected.items():
            if key in WARNED:
                assert (WARNED[key] in words) == value, (seed, key)
                warned.add((key, value))
            elif key == "step_size" and value < 1e-30:
                assert "p_S" in words, seed  # a condition of which the left side has no x
            elif key != "bound":
                assert values[key] == pytest.approx(value, rel=1e-12), (seed, key)
        if found.bound is not None:
            num_bounds += 1
            assert found.bound == pytest.approx(expected["bound"], rel=1e-12), seed
        else:
            assert found.warnings or name == "stem", seed
    if name in BOUNDED:
        assert num_bounds >= 30 or kind.get("printed"), num_bounds
    else:
        assert num_bounds == 0 and len(warned) == (4 if name == "fafedzo" else 0)
