"""The theorems' settings: known answers, both forms of a schedule, and conditions that hold or are named."""

import math

import numpy as np
import pytest

import fedmpi
from fedmpi import algorithms, theory
from fedmpi.algorithms.base import Algorithm
from fedmpi.algorithms.schedules import CubeRoot
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import known
from fedmpi.training.settings import RunSettings

FAFED = {"L": 2, "N": 8, "T": 64000, "b": 4, "rho": 0.5}
FULL = {"L": 2, "Delta": 1.5, "sigma": 3, "N": 8, "K": 4, "R": 1000, "G_0": 5}
PART = {"L": 2, "Delta": 1.5, "sigma": 3, "N": 8, "S": 4, "K": 4, "R": 1000}
FMGDA = {"L_f": 2, "mu": 1, "N": 8, "T": 64000, "b": 4}
# function, constants, expected values of `algorithm`, `run` and `derived` in one dict, and the bound
KNOWN = [
    (
        "fafed",
        FAFED | {"Delta": 1.5, "sigma": 3, "zeta": 1, "G": 5},
        {"local_steps": 10, "first_batch_size": 40, "rounds": 6400, "h_bar": 2, "step_size": 1, "W": 110592000}
        | {"fresh_weight_scale": 30.00208, "eta": 0.002083333, "alpha": 1.302174e-4, "M": 198.5948},
        329.8939,
    ),
    (
        "fafed",
        {"L": 1, "N": 4, "T": 16000},
        {"local_steps": 10, "rounds": 1600, "step_size": 2.519842, "schedule_plateau": 27648000, "c": 15.00052}
        | {"eta": 0.008333333, "alpha": 0.001041703},
        None,
    ),
    ("fafed", FAFED | {"q": 3}, {"W": 2985984, "c": 30.00694, "eta": 0.006944444, "alpha": 0.001447094}, None),
    (
        "fafedzo",
        {"L": 2, "T": 8000, "rho": 0.5},
        {"local_steps": 20, "W": 13824000, "c": 480.0667, "step_size": 0.25, "eta": 0.001041667, "alpha": 5.209057e-4},
        None,
    ),
    (
        "fedavg_m",
        FULL,
        {"fresh_weight": 0.1032796, "server_step_size": 0.008606630, "x": 0.01166012, "step_size": 0.001457515},
        2.073805,
    ),
    ("fedavg_m", FULL | {"printed": True}, {"x": 0.5625, "gamma": 0.008606630}, None),
    (
        "fedavg_m_vr",
        FULL,
        {"beta": 0.01526286, "gamma": 0.02083333, "B": 18, "x": 1.531470e-4, "step_size": 1.914338e-5},
        0.6079402,
    ),
    ("fedavg_m_vr", FULL | {"printed": True}, {"x": 0.04367902}, None),
    (
        "scaffold_m",
        PART | {"G_0": 5},
        {"beta": 0.07302967, "fourth_entry": 1.095445, "gamma": 0.003042903, "x": 0.002434322, "B": 1}
        | {"step_size": 3.042903e-4, "participation": 0.5},
        19.92012,
    ),
    ("scaffold_m", PART | {"printed": True}, {"gamma": 0.03651484, "x": 0.25}, None),
    (
        "scaffold_m_vr",
        PART,
        {"beta": 0.01922999, "gamma": 0.01235391, "x": 2.383648e-4, "step_size": 2.979560e-5, "B": 6},
        4.062456,
    ),
    ("scaffold_m_vr", PART | {"printed": True}, {"gamma": 0.1386723, "x": 0.06933613}, None),
    (
        "fmgda",
        FMGDA | {"c": 0.025},
        {"kappa": 2, "L": 6, "local_steps": 10, "h_bar": 0.6666667, "c_1": 67.50281, "c_1_limit": 101.25}
        | {"W": 5.12e8, "eta": 8.333333e-4, "alpha": 4.687695e-5, "c_lower": 0.02442130, "c_upper": 0.02777778}
        | {"c_hat": 2.147451e-4, "step_size": 1.431634e-4, "dual_step_size": 0.01666667}
        | {"fresh_weight_scale": 1.463779e9, "dual_fresh_weight_scale": 1.463779e9},
        None,
    ),
    (
        "fmgda",
        FMGDA | {"c": 0.025, "printed": True},
        {"W": 1728 * 64000, "c_hat": 0.025 / 4 * (11 / 2880) ** 0.5},
        None,
    ),
    ("fed_lamb", {"h": 4, "R": 100}, {"step_size": 0.05, "layer_decay": 0}, None),
    ("local_amsgrad", {"N": 50, "R": 100, "d": 159010}, {"step_size": 0.001773261}, None),
]


@pytest.mark.parametrize(("name", "constants", "expected", "bound"), KNOWN)
def test_known_answers(name, constants, expected, bound):
    found = getattr(theory, name)(**constants)
    values = found.algorithm | found.run | found.derived
    assert {key: values[key] for key in expected} == pytest.approx(expected, rel=1e-6)
    assert found.bound == (bound and pytest.approx(bound, rel=1e-6))
    assert found.method == name and found.source
    known(algorithms, Algorithm)[name](**found.algorithm)  # its settings exist and are in their ranges
    RunSettings(**RunSettings.filled({key: value for key, value in found.run.items() if "." not in key}))


def test_the_schedule_of_eq_5_after_its_plateau():
    given = theory.fafed(**FAFED, q=3).algorithm
    eta = given["step_size"] * CubeRoot(1.5, 1.0, given["schedule_plateau"])(8957949)
    assert eta == pytest.approx(0.004815009, rel=1e-6)
    assert given["fresh_weight_scale"] * eta**2 == pytest.approx(6.956904e-4, rel=1e-6)


@pytest.mark.parametrize("name", ["fafed", "stem", "fmgda"])
@pytest.mark.parametrize("scales", [{}, {"step_scale": 12.0, "weight_scale": 1.5}])
def test_both_forms_of_a_schedule_have_the_same_iterates(name, scales):
    """With Remark 1's q the plateau is longer than the run."""
    constants = {"L_f": 2, "mu": 1} if name == "fmgda" else {"L": 1}
    traces = []
    for schedule in ("cube_root", "constant"):
        given = getattr(theory, name)(**constants, **scales, N=2, T=32, schedule=schedule)
        algorithm = known(algorithms, Algorithm)[name](**given.algorithm)
        arguments = {"num_clients": 2, "rounds": given.run["rounds"], "local_steps": given.run["local_steps"]}
        dual = {"ascent": slice(1, 2)} if name == "fmgda" else {}
        trace = fedmpi.simulate(algorithm, lambda i, x, s: x - i + s, x0=[3.0, 4.0], **arguments, **dual)
        traces.append(trace[-1]["rows"]["x"])
    assert not np.allclose(traces[0], [3.0, 4.0], atol=1e-4)
    np.testing.assert_allclose(traces[0], traces[1], rtol=1e-12)


def test_factors_multiply_one_quantity_each():
    for name, constants in (("fafed", FAFED), ("fmgda", FMGDA), ("fedavg_m", FULL)):
        fixed = {} if name == "fedavg_m" else {"schedule": "constant"}
        plain = getattr(theory, name)(**constants, **fixed).algorithm
        steps = getattr(theory, name)(**constants, **fixed, step_scale=0.5).algorithm
        weights = getattr(theory, name)(**constants, **fixed, weight_scale=0.5).algorithm
        for key, value in plain.items():
            if "step_size" in key:
                assert (steps[key], weights[key]) == pytest.approx((value / 2, value))
            elif "fresh_weight" in key:
                assert (steps[key], weights[key]) == pytest.approx((value, value / 2))


def random_constants(draw, partial):
    N = int(draw.integers(2, 40))
    given = {"L": 10 ** draw.uniform(-2, 2), "Delta": 10 ** draw.uniform(-2, 2), "sigma": 10 ** draw.uniform(-1, 2)}
    given |= {"N": N, "K": int(draw.integers(1, 20)), "R": int(10 ** draw.uniform(1, 5)), "b": int(draw.integers(1, 5))}
    return given | ({"S": int(draw.integers(1, N + 1))} if partial else {"G_0": 10 ** draw.uniform(-2, 2)})


@pytest.mark.parametrize("name", ["fedavg_m", "fedavg_m_vr", "scaffold_m", "scaffold_m_vr"])
def test_the_momentum_theorems_conditions_hold_or_are_named(name):
    """x = ηKL is the largest that meets the conditions; a condition that no x meets is a warning, and no bound."""
    draw = np.random.default_rng(0)
    for _ in range(200):
        given = random_constants(draw, name.startswith("scaffold"))
        found = getattr(theory, name)(**given)
        assert (found.bound is None) == bool(found.warnings)
        assert found.algorithm["step_size"] > 0
        if not found.warnings:
            assert found.bound > 7 * given["Delta"] / (found.algorithm["server_step_size"] * given["R"])
            larger = getattr(theory, name)(**given, step_scale=1.001)
            assert larger.warnings and larger.bound is None
        else:
            assert "p_S" in "".join(found.warnings)  # S far below N


def test_the_second_variants_take_the_larger_weight():
    beta = {printed: theory.fedavg_m_vr(**FULL, large_batch=True, printed=printed).derived for printed in (True, False)}
    assert beta[True]["beta"] == pytest.approx(1 / 1000) and beta[False]["beta"] == pytest.approx(0.01526286)
    assert beta[False]["B"] == 4000
    assert theory.scaffold_m_vr(**PART, large_batch=True).derived["B"] == 4 * 4 * 1000 // 8


def test_samples_and_gradients_are_those_of_the_run():
    found = theory.fafed(**FAFED)  # of each client a first batch of q b samples, then two gradients of each sample
    assert found.run["rounds"] * found.run["local_steps"] == 64000 and found.run["first_batch_size"] == 40
    costs = {"samples_per_client": 64000 * 4, "samples": 8 * 64000 * 4 + 8 * 40, "gradients": 16 * 64000 * 4 + 8 * 40}
    assert {name: found.derived[name] for name in costs} == costs
    half, steps = theory.scaffold_m_vr(**PART | {"b": 2}), 4 * 4 * 1000 * 2
    first = 8 * half.run["first_batch_size"]
    assert (half.derived["samples"], half.derived["gradients"]) == (steps + first, 2 * steps + first)
    plain = theory.fedavg_m(**FULL).derived
    assert plain["samples"] == plain["gradients"] == 8 * 4 * 1000


def test_a_weight_is_at_most_1():
    assert theory.fafed(**FAFED, schedule="constant", weight_scale=1e9).algorithm["fresh_weight"] == 1
    assert theory.fedavg_m(**FULL, weight_scale=1e9).algorithm["fresh_weight"] == 1


def test_stem_is_fafed_with_a_matrix_of_ones():
    stem, fafed = theory.stem(L=2, N=8, T=64000, b=4), theory.fafed(L=2, N=8, T=64000, b=4)
    assert stem.algorithm == {key: value for key, value in fafed.algorithm.items() if key != "epsilon"}
    assert stem.run == fafed.run and stem.bound is None and "derived" in stem.source


def test_without_noise_nothing_is_averaged_out():
    assert theory.fedavg_m(**FULL | {"sigma": 0}).derived["beta"] == 1
    assert theory.scaffold_m_vr(**PART | {"sigma": 0}).derived["beta"] == 0.5


def test_sigma_is_of_one_sample():
    one, four = theory.fedavg_m(**FULL), theory.fedavg_m(**FULL | {"sigma": 6}, b=4)
    assert four.bound == pytest.approx(one.bound)
    assert theory.scaffold_m_vr(**PART | {"sigma": 6}, b=4).run["first_batch_size"] == 24


def test_violated_conditions_are_warnings():
    assert theory.fafed(**FAFED).warnings == ()
    assert "b <= 720 q N" in theory.fafed(**FAFED | {"b": 60000}).warnings[0]
    assert "N² = 64" in theory.fafed(L=1, N=8, T=63).warnings[0]
    assert "N² = 64" in theory.fmgda(L_f=2, mu=1, N=8, T=63).warnings[0]
    assert theory.fafed(L=1, N=8, T=64).warnings == theory.fmgda(L_f=2, mu=1, N=8, T=64).warnings == ()
    assert "no c" in theory.fmgda(L_f=1, mu=0.5, N=8, T=64000).warnings[0]
    assert "claimed" in theory.fafedzo(L=1, T=8).source
    unstable = theory.fafedzo(L=1, T=1, d=784, b2=20, mu=0.1, eps=0.01)
    assert unstable.derived["kappa"] == pytest.approx(40.15)
    assert "unstable" in unstable.warnings[1] and "bias" in unstable.warnings[2]
    assert unstable.run["oracle.directions"] == 20


def violations(name, c, x, y, w):
    """Text of a condition -> by which factor its left side is too large, at x = ηKL, y = γL and w = β."""
    N, K, R, e = c["N"], c["K"], c["R"], math.e
    far = c["L"] * c["Delta"] / c["G_0"] if "G_0" in c else None
    S = c.get("S", N)
    z, p = w * y * N / S, (N - S) / (S * (N - 1))
    return {
        "fedavg_m": {
            "γL <= min{1/24, β/6}": y / min(1 / 24, w / 6),
            "ηKL <= 1/β": x * w,
            "288e x²((1-β)² + e(βγLR)²) <= 1": 288 * e * x * x * ((1 - w) ** 2 + e * (w * y * R) ** 2),
            "x <= (LΔ/(G_0 β³R))^(1/2)": far and x / (far / (w**3 * R)) ** 0.5,
            "x <= (4βN)^(-1/2)": x / (4 * w * N) ** -0.5,
            "x <= (8β³NK)^(-1/4)": x / (8 * w**3 * N * K) ** -0.25,
        },
        "fedavg_m_vr": {
            "γL <= min{1/24, (βNK/54)^(1/2)}": y / min(1 / 24, (w * N * K / 54) ** 0.5),
            "ηKL <= 1/(4e)": x * 4 * e,
            "288e x²(289/72 (1-β)² + 8e(γβLR)²) <= β²": (
                288 * e * (x / w) ** 2 * (289 * (1 - w) ** 2 / 72 + 8 * e * (w * y * R) ** 2)
            ),
            "x <= (β/(64N))^(1/2)": x / (w / 64 / N) ** 0.5,
            "x <= (β/(128NK))^(1/4)": x / (w / 128 / N / K) ** 0.25,
            "128x²(1/K + 2x²)(γL)² <= β²/18": 128 * x * x * (1 / K + 2 * x * x) * y * y / (w * w / 18),
            "x <= (LΔ/(G_0 γLR))^(1/2)": far and x / (far / (y * R)) ** 0.5,
        },
        "scaffold_m": {
            "γL <= min{β/12, 1/24}": y / min(1 / 24, w / 12),
            "βx <= 1/(24K^(1/4))": w * x * 24 * K**0.25,
            "ηK <= Nγ/(5S)": x / (N * y / (5 * S)),
            "160eβx² + 24y²(6p_S + 80eβx²) <= β/9": (
                (160 * e * w * x * x + 24 * z * z * (6 * p + 80 * e * w * x * x)) / (w / 9)
            ),
            "10x²(1/K + 2(βx)²) + 960eβx²/K <= 4/(SK)": (
                (10 * x * x * (1 / K + 2 * (w * x) ** 2) + 960 * e * w * x * x / K) / (4 / (S * K))
            ),
            "80eβx² <= 4/S": 80 * e * w * x * x / (4 / S),
        },
        "scaffold_m_vr": {
            "γL <= min{1/24, (βS/126)^(1/2)}": y / min(1 / 24, (w * S / 126) ** 0.5),
            "ηKL <= 1/(4e)": x * 4 * e,
            "ηK <= γN/(10S)": x / (y * N / (10 * S)),
            "720x²/β + 18y²(4p_S + 720x²/β) <= β/9": (
                (720 * x * x / w + 18 * z * z * (4 * p + 720 * x * x / w)) / (w / 9)
            ),
            "64(x²/β)(1/K + 2x²) + 8640x²/(βK) <= 5/(SK)": (
                (64 * x * x / w * (1 / K + 2 * x * x) + 8640 * x * x / (w * K)) / (5 / (S * K))
            ),
            "720x²/β <= 1/S": 720 * x * x / w / (1 / S),
        },
    }[name]


@pytest.mark.parametrize("name", ["fedavg_m", "fedavg_m_vr", "scaffold_m", "scaffold_m_vr"])
@pytest.mark.parametrize("scales", [{"step_scale": 1e5}, {"step_scale": 1e5, "weight_scale": 3.0, "printed": True}])
def test_each_violated_condition_has_its_factor(name, scales):
    """By how much x = ηKL, γ and β of the prescription are too large, from the text of each condition."""
    constants = PART if name.startswith("scaffold") else FULL
    found = getattr(theory, name)(**constants, **scales)
    x = found.algorithm["step_size"] * constants["K"] * constants["L"]
    y, w = found.algorithm["server_step_size"] * constants["L"], found.algorithm["fresh_weight"]
    expected = violations(name, constants, x, y, w)
    if "printed" not in scales:  # a condition on x / γ holds as before
        expected = {text: factor for text, factor in expected.items() if factor > 1 + 1e-9}
    said = dict(reversed(line.removeprefix("violated by the factor ").split(": ", 1)) for line in found.warnings)
    assert [*said] == [*expected] and found.bound is None
    assert {text: float(factor) for text, factor in said.items()} == pytest.approx(expected, rel=6e-4)


def test_bounds_of_fmgda_need_all_constants():
    constants = FMGDA | {"sigma": 1, "zeta": 1, "Delta": 2, "w_distance": 1}
    found = theory.fmgda(**constants)
    assert math.isfinite(found.bound) and found.bound != theory.fmgda(**constants, printed=True).bound
    assert theory.fmgda(**FMGDA).bound is None


@pytest.mark.parametrize(
    ("name", "constants", "message"),
    [
        ("fafed", FAFED | {"L": 0}, "L = 0: expected a number > 0"),
        ("fafed", FAFED | {"N": 2.5}, "N = 2.5: expected a whole number >= 1"),
        ("fafed", FAFED | {"L": "2"}, "L = 2: expected a number > 0"),
        ("fafed", FAFED | {"b": 0.5}, "b = 0.5: expected a whole number >= 1"),
        ("fafed", FAFED | {"schedule": "cosine"}, "schedule = cosine: expected constant or cube_root"),
        ("scaffold_m", PART | {"S": 9}, "S = 9: expected at most N = 8 clients"),
        ("scaffold_m", PART | {"sigma": -1}, "sigma = -1: expected a number >= 0"),
        ("fmgda", FMGDA | {"mu": 3}, "expected L_f >= 1 and mu <= L_f"),
    ],
)
def test_wrong_constants_are_one_line(name, constants, message):
    with pytest.raises(UserError, match=message):
        getattr(theory, name)(**constants)


@pytest.mark.parametrize(("rho", "printed", "largest"), [(1.0, False, 5760), (2.0, True, 17280), (0.4, True, None)])
def test_the_limit_of_fafeds_c_is_that_of_the_condition_that_is_violated(rho, printed, largest):
    """Printed it is 120 L²/(b N ρ), which no b meets if ρ <= 1/2; the proof has ρ², and then b <= 720 q N."""

    def warnings(b):
        return theory.fafed(L=1, N=2, T=64, q=4, rho=rho, printed=printed, b=b).warnings

    if largest is None:
        (words,) = warnings(4)
        assert "its limit 120 L²/(b N ρ), as printed, 37.5: expected ρ > 0.5" in words
    else:
        assert not warnings(largest)
        (words,) = warnings(largest + 1)
        assert words.endswith(f" = {largest}") and ("as printed" in words) == printed
