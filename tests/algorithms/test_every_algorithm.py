"""What every algorithm must do: equal its plain twin of `reference.py`, keep the rules, allocate nothing."""

import dataclasses
import functools
import inspect
import itertools
import math
import sys
import textwrap
import threading

import numpy as np
import pytest
import reference
import reference_minmax
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fedmpi.algorithms
from fedmpi import simulate
from fedmpi.algorithms import (
    CELSGD,
    DESLOC,
    FAFED,
    MBSTORM,
    SCAFFOLD,
    SCAFFOLDM,
    SCAFFOLDMVR,
    STEM,
    Algorithm,
    DiLoCo,
    FAFEDCode,
    FedAdagrad,
    FedAdam,
    FedAdamW,
    FedAMS,
    FedAvg,
    FedAvgM,
    FedAvgMVR,
    FedAvgServerMomentum,
    FedDyn,
    FedExP,
    FedLADA,
    FedLAMB,
    FedMuon,
    FedNova,
    FedProx,
    FedYogi,
    LocalAdam,
    LocalAMSGrad,
    MimeAdam,
    NaiveAdaptiveFedAvg,
    Scaffnew,
    schedules,
)
from fedmpi.algorithms.check import skipping_rows
from fedmpi.comm.solo import SoloLink
from fedmpi.federation.participation import Plan
from fedmpi.federation.rounds import Federation
from fedmpi.federation.variables import Variables
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import command_name, find, known
from fedmpi.oracles import FunctionOracle

DIM = 5
LAYERS = [slice(0, 2), slice(2, 3), slice(3, 5)]
SHAPES = [(1, 2), (1,), (2, 1)]  # of these layers, for methods that need matrices
X0 = np.array([1.0, -0.5, 0.0, 2.0, 0.3])


def gradient(client, x, sample):
    """Clients with curvatures and minima of their own; samples scale, shift and bend the gradient."""
    x = np.asarray(x)
    i = np.arange(DIM)
    curvature = 1 + 0.5 * np.cos(client + i)
    noise = np.sin(3 * sample + 2 * client + i)
    return (curvature + 0.3 * noise) * (x - 0.5 * client + 0.2 * i) + 0.2 * np.sin(x + sample) + 0.1 * noise


# (class, settings that the twin has too), every option of every class at least once
CASES = [
    (FedAvg, {"step_size": 0.1}),
    (FedAvg, {"step_size": 0.1, "server_step_size": 0.7}),
    (FedProx, {"step_size": 0.1, "proximal_weight": 0.5}),
    (FedProx, {"step_size": 0.1, "proximal_weight": 0.5, "server_step_size": 1.5}),
    (SCAFFOLD, {"step_size": 0.1}),
    (SCAFFOLD, {"step_size": 0.1, "server_step_size": 0.7, "c0": "gradient"}),
    (SCAFFOLD, {"step_size": 0.1, "option": "I"}),
    (FedDyn, {"step_size": 0.1, "proximal_weight": 0.3}),
    (FedExP, {"step_size": 0.1, "epsilon": 0.01}),
    (FedNova, {"step_size": 0.1}),
    (FedNova, {"step_size": 0.05, "momentum": 0.6}),
    (FedNova, {"step_size": 0.1, "proximal_weight": 0.5}),
    (FedNova, {"step_size": 0.05, "momentum": 0.6, "proximal_weight": 0.5}),
    (Scaffnew, {"step_size": 0.1}),
    (Scaffnew, {"step_size": 0.1, "probability": 0.2}),
    (STEM, {"step_size": 0.1, "fresh_weight": 0.3}),
    (STEM, {"step_size": 0.1, "fresh_weight_scale": 40.0}),
    (NaiveAdaptiveFedAvg, {"step_size": 0.1, "second_moment_decay": 0.8, "epsilon": 1e-8}),
    (NaiveAdaptiveFedAvg, {"step_size": 0.1, "second_moment_decay": 0.8, "epsilon": 0.0}),
    (NaiveAdaptiveFedAvg, {"step_size": 0.1, "second_moment_decay": 0.8, "epsilon": 1e-8, "v0": 0.3}),
    (FAFED, {"step_size": 0.1, "fresh_weight": 0.3, "second_moment_decay": 0.6, "epsilon": 0.05}),
    (FAFED, {"step_size": 0.1, "fresh_weight_scale": 40.0, "second_moment_decay": 0.6, "epsilon": 0.05}),
    *(
        (FAFED, {"step_size": 0.1, "fresh_weight": 0.3, "second_moment_decay": 0.6, "epsilon": 0.05, **option})
        for option in (
            {"adaptive_matrix": "global"},
            {"adaptive_matrix": "adagrad_norm"},
            {"v_every": 2},
            {"v_every": 3, "adaptive_matrix": "global"},
        )
    ),
    *(
        (FAFEDCode, {"step_size": 0.1, "fresh_weight": 0.3, "second_moment_decay": 0.6, "epsilon": 0.05, **option})
        for option in (
            {},
            {"sync_order": "paper", "first_step": "adaptive"},
            {"sync_order": "paper", "prev_grad_scale": 0.95},
            {"first_step": "adaptive", "prev_grad_scale": 0.95, "adaptive_matrix": "global"},
            {"m_every": 2, "v_every": 3},
            {"m_every": 3},
            {"v_every": 2},
            {"v_every": 2, "sync_order": "paper"},
        )
    ),
    *(
        (FedAdam, {"step_size": 0.1, "server_step_size": 0.2, "momentum": 0.7, "epsilon": 0.01, **option})
        for option in (
            {"second_moment_decay": 0.8},
            {"second_moment_decay": 0.8, "correction": "torch"},
            {"second_moment_decay": 0.8, "correction": "keras", "v0": 0.0},
            {"second_moment_decay": 0.8, "correction": "flower", "v0": 0.0},
            {"second_moment_decay": 0.8, "v0": 0.0},
        )
    ),
    *(
        (
            FedYogi,
            {
                "step_size": 0.1,
                "server_step_size": 0.2,
                "momentum": 0.7,
                "second_moment_decay": 0.6,
                "epsilon": 0.1,
                **option,
            },
        )
        for option in ({}, {"correction": "torch"}, {"correction": "keras"})
    ),
    (FedAdagrad, {"step_size": 0.1, "server_step_size": 0.2, "momentum": 0.3, "epsilon": 0.01}),
    *(
        (
            FedAMS,
            {
                "step_size": 0.1,
                "server_step_size": 0.2,
                "momentum": 0.7,
                "second_moment_decay": 0.4,
                "epsilon": 0.01,
                **option,
            },
        )
        for option in (
            {},
            {"option": 2},
            {"correction": "torch"},
            {"correction": "torch", "option": 2},
            {"correction": "keras", "option": 2},
            {"correction": "flower"},
            {"correction": "torch", "epsilon": 0.0, "v0": 1e-3},
        )
    ),
    (FedAvgServerMomentum, {"step_size": 0.1, "momentum": 0.7}),
    (FedAvgServerMomentum, {"step_size": 0.1, "momentum": 0.7, "server_step_size": 0.6}),
    (
        DiLoCo,
        {
            "step_size": 0.05,
            "server_step_size": 0.7,
            "momentum": 0.8,
            "first_moment_decay": 0.7,
            "second_moment_decay": 0.9,
            "epsilon": 1e-3,
            "decay": 0.2,
        },
    ),
    *(
        (LocalAdam, {"step_size": 0.05, "momentum": 0.7, "second_moment_decay": 0.8, "epsilon": 0.1, **option})
        for option in ({}, {"m_every": 2}, {"v_every": 3}, {"m_every": 3, "v_every": 2}, {"m_every": 9, "v_every": 9})
    ),
    (DESLOC, {"step_size": 0.05, "momentum": 0.7, "second_moment_decay": 0.8, "epsilon": 0.1}),
    (DESLOC, {"step_size": 0.05, "epsilon": 0.1, "m_every": 2, "v_every": 4}),
    *(
        (
            FedAdamW,
            {
                "step_size": 0.05,
                "momentum": 0.7,
                "second_moment_decay": 0.8,
                "epsilon": 0.1,
                "alignment": 0.4,
                "decay": 0.3,
                "form": form,
            },
        )
        for form in ("paper", "code")
    ),
    (FedLADA, {"step_size": 0.05, "momentum": 0.7, "second_moment_decay": 0.8, "epsilon": 0.1, "alignment": 0.6}),
    (
        FedMuon,
        {
            "step_size": 0.01,
            "momentum": 0.7,
            "alignment": 0.4,
            "matrix_factor": 4.0,
            "first_moment_decay": 0.6,
            "second_moment_decay": 0.8,
            "epsilon": 0.1,
        },
    ),
    *(
        (MimeAdam, {"step_size": 0.05, "momentum": 0.7, "second_moment_decay": 0.8, "epsilon": 0.3, **option})
        for option in (
            {},
            {"v0": 0.0},
            {"lite": True, "v0": 0.2},
            {"server_step_size": 0.7},
            {"update": "fresh", "v0": 0.0, "correction": "torch"},
            {"update": "fresh", "correction": "keras", "server_step_size": 1.5, "lite": True},
        )
    ),
    (LocalAMSGrad, {"step_size": 0.1, "momentum": 0.7, "second_moment_decay": 0.8}),
    (LocalAMSGrad, {"step_size": 0.1, "momentum": 0.7, "second_moment_decay": 0.8, "v0": 0.3}),
    (LocalAMSGrad, {"step_size": 0.1, "momentum": 0.7, "second_moment_decay": 0.8, "refresh": "after"}),
    (LocalAMSGrad, {"step_size": 0.1, "momentum": 0.7, "second_moment_decay": 0.8, "v_every": 2}),
    (LocalAMSGrad, {"step_size": 0.1, "momentum": 0.7, "second_moment_decay": 0.8, "v_every": 3, "refresh": "after"}),
    (FedLAMB, {"step_size": 0.1, "momentum": 0.7, "second_moment_decay": 0.8, "epsilon": 1e-3}),
    (FedLAMB, {"step_size": 0.1, "momentum": 0.7, "second_moment_decay": 0.8, "epsilon": 1e-3, "layer_decay": 0.1}),
    (FedLAMB, {"step_size": 0.1, "momentum": 0.7, "second_moment_decay": 0.8, "epsilon": 1e-3, "v_every": 2}),
    (FedAvgM, {"step_size": 0.1, "fresh_weight": 0.3}),
    (FedAvgM, {"step_size": 0.1, "fresh_weight": 0.3, "server_step_size": 0.15}),
    (FedAvgM, {"step_size": 0.03, "fresh_weight": 0.3, "server_step_size": 0.05, "form": "reparameterised"}),
    (FedAvgMVR, {"step_size": 0.1, "fresh_weight": 0.3}),
    (FedAvgMVR, {"step_size": 0.1, "fresh_weight": 0.3, "server_step_size": 0.15}),
    (SCAFFOLDM, {"step_size": 0.1, "fresh_weight": 0.3}),
    (SCAFFOLDM, {"step_size": 0.1, "fresh_weight": 0.3, "server_step_size": 0.15, "c0": "zero"}),
    (SCAFFOLDM, {"step_size": 0.03, "fresh_weight": 0.3, "form": "reparameterised"}),
    (SCAFFOLDMVR, {"step_size": 0.1, "fresh_weight": 0.3}),
    (SCAFFOLDMVR, {"step_size": 0.1, "fresh_weight": 0.3, "server_step_size": 0.15, "c0": "zero"}),
    (MBSTORM, {"step_size": 0.1, "fresh_weight": 0.3}),
    (MBSTORM, {"step_size": 0.1, "fresh_weight": 0.3, "server_step_size": 0.15}),
    (CELSGD, {"step_size": 0.1, "fresh_weight": 0.3}),
    (CELSGD, {"step_size": 0.1, "fresh_weight": 0.3, "local": "all"}),
]
EVERY_CLASS = list(known(fedmpi.algorithms, Algorithm).values())
TWINS = {name for name, f in vars(reference).items() if inspect.isgeneratorfunction(f)} - {"steps", "fedopt"}
# A class that has no settings worth a case of their own needs no line above.
CASES += [
    (cls, {"step_size": 0.1})
    for cls in EVERY_CLASS
    if command_name(cls) in TWINS and cls not in {listed for listed, _ in CASES}
]
EVERY_CASE = pytest.mark.parametrize(
    ("cls", "settings"),
    CASES,
    ids=lambda value: command_name(value) if inspect.isclass(value) else "-".join(map(str, value.values())),
)
ELSEWHERE = ("fedmpi.algorithms.minmax", "fedmpi.algorithms.zeroth_order")  # test_minmax.py, test_zeroth_order.py

# num_clients, local steps, rounds, participants of each round
FULL = (3, 2, 6, lambda r: [0, 1, 2])
PARTIAL = (3, 2, 7, lambda r: [[0, 2], [1], [1, 2], [0, 2], [0], [0, 1, 2], [2]][r])
LONGER = (3, 3, 4, lambda r: [[0, 1, 2], [1, 2], [0, 1], [0, 2]][r])
ALONE = (1, 2, 6, lambda r: [0])


def chosen(round_index):
    """Any participant of `round_index` in each of the settings above."""
    return [2, 1, 1, 0, 0, 2, 2][round_index]


def twin_of(cls):
    return getattr(reference, command_name(cls))


def run_twin(cls, settings, num_clients, local_steps, rounds, participants, drawn=chosen):
    """The twin's trace: a list of {row: array}, each entry a copy."""
    extra = {}
    if cls is CELSGD:
        extra["chosen"] = drawn
    if cls in (FedLAMB, FedAdamW):
        extra["segments"] = LAYERS
    if cls is FedMuon:
        extra["shapes"] = SHAPES
    clients = reference.Clients(gradient, num_clients)
    K = local_steps if isinstance(local_steps, list) else [local_steps] * num_clients
    trace = twin_of(cls)(clients, X0, rounds, K, participants, **settings, **extra)
    return [{name: np.array(value) for name, value in rows.items()} for rows in trace], clients


def run_ours(algorithm, num_clients, local_steps, rounds, participants, drawn=chosen):
    if isinstance(local_steps, list):
        local_steps = local_steps.__getitem__
    return simulate(
        algorithm,
        gradient,
        X0,
        num_clients,
        rounds,
        local_steps,
        participants=participants,
        chosen=drawn,
        shapes=SHAPES,
    )


def assert_same(trace, twin):
    """Every row that the twin knows, at every moment, to 1e-12 of the row's size."""
    assert len(trace) == len(twin)
    for record, expected in zip(trace, twin):
        for name, value in expected.items():
            np.testing.assert_allclose(
                record["rows"][name],
                value,
                rtol=1e-12,
                atol=1e-12 * np.abs(value).max(),
                err_msg=f"{name} in round {record['round']}, step {record['step']}",
            )


@pytest.mark.rarely("fedmpi", "tests/algorithms")
@pytest.mark.parametrize("setup", [FULL, PARTIAL, LONGER, ALONE], ids=["full", "partial", "longer", "alone"])
@EVERY_CASE
def test_trace_equals_the_reference(cls, settings, setup):
    drawn = (lambda r: 0) if setup is ALONE else (lambda r: setup[3](r)[-1])
    twin, _ = run_twin(cls, settings, *setup, drawn=drawn)
    assert_same(run_ours(cls(**settings), *setup, drawn=drawn), twin)


# Round methods let every client have its own number of local steps.
@pytest.mark.parametrize("participants", [FULL[3], lambda r: [[0, 1], [1, 2], [2], [0, 2]][r]], ids=["full", "partial"])
@pytest.mark.parametrize(
    ("cls", "settings"),
    [(c, s) for c, s in CASES if c.clock == "round_index"],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_clients_with_step_counts_of_their_own(cls, settings, participants):
    setup = (3, [2, 4, 1], 4, participants)
    twin, _ = run_twin(cls, settings, *setup, drawn=lambda r: participants(r)[0])
    trace = run_ours(cls(**settings), *setup, drawn=lambda r: participants(r)[0])
    after, expected = [], []
    for r in range(4):
        after.append([record for record in trace if record["round"] == r and record["step"] is None])
    twin = iter(twin[1:])
    for r in range(4):
        *_, last = [next(twin) for _ in range(max([2, 4, 1][i] for i in participants(r)) + 1)]
        expected.append(last)
    assert_same([a for (a,) in after], expected)


SCHEDULES = {
    "cube_root": (
        {"schedule_offset": 2.0, "schedule_rate": 3.0, "schedule_plateau": 6.0},
        lambda t: (max(2.0, 6.0 - 3.0 * t) + 3.0 * t) ** (-1 / 3),  # w_t = max(w, W - σ² t), plus σ² t
    ),
    "step": ({"schedule_period": 2, "schedule_factor": 0.5}, lambda t: 0.5 ** (t // 2)),
    "cosine": (
        {"schedule_period": 4, "schedule_factor": 0.2},
        lambda t: 0.2 + 0.8 * (1 + math.cos(math.pi * min(t, 4) / 4)) / 2,
    ),
}


# Cases take turns: a schedule is computed in one place for all classes, and each of these must follow it.
IN_TURN = [(*case, *turn) for case, turn in zip(CASES, itertools.cycle(itertools.product(SCHEDULES, [1, 3])))]


@pytest.mark.parametrize(("cls", "settings", "schedule", "every"), IN_TURN)
def test_schedules(cls, settings, schedule, every):
    fields, factor = SCHEDULES[schedule]
    scheduled = {**settings, "step_size": lambda t: settings["step_size"] * factor(t // every)}
    twin, _ = run_twin(cls, scheduled, 3, 2, 6, FULL[3])
    algorithm = cls(**settings, schedule=schedule, schedule_every=every, **fields)
    assert_same(run_ours(algorithm, 3, 2, 6, FULL[3]), twin)


def test_every_class_has_its_twin_and_a_case():
    names = {command_name(cls) for cls in EVERY_CLASS}
    assert {command_name(cls) for cls, _ in CASES} == TWINS <= names
    assert names - TWINS <= set(vars(reference_minmax))  # zeroth-order and min-max methods


def test_the_package_finds_its_classes_by_itself(tmp_path, monkeypatch):
    """A new algorithm is a class in a file: it can be imported, completed and chosen by its name."""
    offered = {getattr(fedmpi.algorithms, name) for name in dir(fedmpi.algorithms)}
    assert offered == {*EVERY_CLASS, Algorithm, fedmpi.algorithms.Exchange}
    assert fedmpi.algorithms.__all__ == dir(fedmpi.algorithms)
    with pytest.raises(ImportError, match="cannot import name 'Novel'"):
        from fedmpi.algorithms import Novel
    program = """
        import dataclasses
        from fedmpi.algorithms.fedavg import FedAvg

        @dataclasses.dataclass(frozen=True)
        class Novel(FedAvg):
            pass

        class _Helper(FedAvg):
            pass
    """
    (tmp_path / "novel_algorithm.py").write_text(textwrap.dedent(program), encoding="utf-8")
    monkeypatch.setattr(fedmpi.algorithms, "__path__", [*fedmpi.algorithms.__path__, str(tmp_path)])
    from fedmpi.algorithms import Novel

    assert Novel().step_size == 0.1
    assert set(dir(fedmpi.algorithms)) - {cls.__name__ for cls in offered} == {"Novel"}
    assert find("algorithm", "novel", fedmpi.algorithms, Algorithm) is Novel
    monkeypatch.delattr(fedmpi.algorithms, "novel_algorithm")
    monkeypatch.delitem(sys.modules, "fedmpi.algorithms.novel_algorithm")


def test_help_of_the_cube_root_schedule():
    """With σ² = 3 the step size stands still while 3 t <= W - w = 4, and falls from then on."""
    help_text = FedAvg.__dataclass_fields__["schedule_plateau"].metadata["help"]
    assert "max(w, W - σ² t)" in help_text and "W - σ² t" in schedules.CubeRoot.__doc__
    factors = [schedules.CubeRoot(2.0, 3.0, 6.0)(t) for t in range(3)]
    assert factors[0] == factors[1] > factors[2]


@pytest.mark.parametrize("algorithm", [MimeAdam(), SCAFFOLD(option="I", c0="gradient")], ids=["mimeadam", "scaffold"])
def test_the_initial_batch_and_all_data_are_samples_of_their_own(algorithm):
    asked = set()

    def spy(client, x, sample):
        asked.add(sample)
        return gradient(client, x, sample)

    simulate(algorithm, spy, X0, rounds=1, local_steps=2)
    assert asked == {-2, 0, 1} | ({-1} if algorithm.exchanged_at_start else set())


@EVERY_CASE
def test_every_setting_has_a_range_and_a_help_text(cls, settings):
    for field in dataclasses.fields(cls):
        assert field.metadata.get("help"), field.name
    with pytest.raises(UserError, match="step_size"):
        cls(**{**settings, "step_size": -1.0})
    with pytest.raises(UserError, match="schedule"):
        cls(**settings, schedule="cubic")


# What the letters of the papers may be, whatever the method: (values outside, values inside).
OF_LETTERS = {
    "step_size": ([0.0, -0.1], [1e-9]), "server_step_size": ([0.0, -0.1], [1e-9]), "dual_step_size": ([0.0], [1e-9]),
    "momentum": ([-1e-9, 1.0], [0.0]), "fresh_weight": ([-1e-9, 1.0001], [0.0, 1.0]),
    "second_moment_decay": ([-1e-9, 1.0001], [0.0]), "first_moment_decay": ([-1e-9, 1.0], [0.0]),
    "v0": ([-1e-9], [1e-9]),
}  # fmt: skip


@pytest.mark.parametrize("cls", known(fedmpi.algorithms, Algorithm).values())
def test_ranges_of_the_papers_letters(cls):
    for field in dataclasses.fields(cls):
        outside, inside = OF_LETTERS.get(field.name, ((), ()))
        for value in inside:
            assert getattr(cls(**{field.name: value}), field.name) == value
        for value in outside:
            with pytest.raises(UserError, match=f"^algorithm.{field.name} = {value}: expected a number"):
                cls(**{field.name: value})


def test_settings_that_do_not_go_together():
    with pytest.raises(UserError, match="epsilon"):
        FedAMS(epsilon=0.0)
    for cls in (FedAdam, FedYogi, FedAMS):
        for correction in ("torch", "keras", "flower"):
            with pytest.raises(UserError, match="second_moment_decay"):
                cls(correction=correction, second_moment_decay=1.0)
        assert cls(second_moment_decay=1.0).correction == "none"
    with pytest.raises(UserError, match="correction = torch: expected none, or update = fresh"):
        MimeAdam(correction="torch")
    for cls in (FedAvgM, SCAFFOLDM):
        with pytest.raises(UserError, match="fresh_weight"):
            cls(form="reparameterised", fresh_weight=0.0)


@EVERY_CASE
def test_absent_clients_keep_their_state_and_draw_nothing(cls, settings):
    num_clients, local_steps, rounds, participants = PARTIAL
    asked = []

    def spy(client, x, sample):
        asked.append(client)
        return gradient(client, x, sample)

    algorithm = cls(**settings)
    trace = simulate(
        algorithm,
        spy,
        X0,
        rounds=rounds,
        local_steps=local_steps,
        participants=participants,
        chosen=lambda r: participants(r)[-1],
    )
    before, *after = [record for record in trace if record["step"] is None]
    for record in after:
        absent = set(range(num_clients)) - set(participants(record["round"]))
        for client in absent:
            for name in algorithm.client_rows:
                np.testing.assert_array_equal(record["rows"][name][client], before["rows"][name][client])
        for name in algorithm.exchanged:
            rows, skips = record["rows"][name], name in skipping_rows(algorithm)
            if skips and not (rows == rows[0]).all():  # it was not due
                np.testing.assert_array_equal(rows[[*absent]], before["rows"][name][[*absent]])
            else:
                np.testing.assert_array_equal(rows, np.tile(rows[0], (num_clients, 1)))
        before = record
    asked.clear()
    simulate(algorithm, spy, X0, rounds=3, participants=lambda r: [1], chosen=lambda r: 1)
    in_start = num_clients if algorithm.exchanged_at_start else 0
    assert set(asked[in_start:]) == {1}


class ThreadLink(SoloLink):
    """Ranks as threads of this process: sums over them in the order of ranks."""

    def __init__(self, rank, shared):
        super().__init__()
        self.rank, self.size, self._shared = rank, len(shared["values"]), shared

    def _all_of(self, value):
        self._shared["values"][self.rank] = value
        self._shared["barrier"].wait(timeout=300)
        values = list(self._shared["values"])
        self._shared["barrier"].wait(timeout=300)
        return values

    def average(self, block, divisor, out, kind):
        first, *others = self._all_of(block.clone())
        total = first.clone()
        for other in others:
            total.add_(other)
        super().average(total, divisor, out)

    def allgather(self, values, kind):
        return np.stack(self._all_of(np.array(values)))


class BufferedOracle(FunctionOracle):
    """Moves float buffers as batch-norm layers do: at the first gradient of a pair, not at the second."""

    def gradient(self, z, xi):
        self.client.buffers.lerp_(z[:2] + self.client.index, 0.1)
        return super().gradient(z, xi)

    def gradient_pair(self, z, z_prev, xi):
        return self.gradient(z, xi), super().gradient(z_prev, xi)


def run_rank(algorithm, link, clients, setup, weights=None):
    """The server's rows and buffers as a rank sees them after the start and after every round."""
    num_clients, local_steps, rounds, participants = setup
    federation = Federation(
        algorithm,
        link,
        dict.fromkeys(clients, functools.partial(BufferedOracle, gradient)),
        Plan(num_clients, local_steps, participants, chosen=lambda r: participants(r)[-1], weights=weights),
        Variables(torch.tensor(X0), torch.ones(2, dtype=torch.float64), LAYERS, shapes=tuple(SHAPES)),
        poison=True,
    )
    seen = []

    def look():
        rows = {**federation.store.averaged_rows(), **federation.store.server_rows()}
        rows["buffers"] = federation.store.buffers
        seen.append({name: row.numpy().copy() for name, row in rows.items()})

    federation.start()
    look()
    for _ in range(rounds):
        federation.run_round()
        look()
    return seen, federation


def run_one_client_per_rank(algorithm, setup, **options):
    """What every rank sees, one after the other."""
    shared = {"values": [None] * setup[0], "barrier": threading.Barrier(setup[0])}
    seen, errors = [None] * setup[0], []

    def rank(index):
        try:
            seen[index], _ = run_rank(algorithm, ThreadLink(index, shared), [index], setup, **options)
        except BaseException as error:
            errors.append(error)
            shared["barrier"].abort()

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(setup[0])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return seen


@pytest.mark.rarely("fedmpi", "tests/algorithms")
@pytest.mark.parametrize("setup", [FULL, PARTIAL], ids=["full", "partial"])
@EVERY_CASE
def test_placing_clients_on_ranks_changes_nothing_and_ranks_agree(cls, settings, setup):
    """Clients that work in the averaged memory itself, as under mpirun, and clients that share a rank."""
    ranks = run_one_client_per_rank(cls(**settings), setup)
    alone, _ = run_rank(cls(**settings), SoloLink(), range(setup[0]), setup)
    for number, moment in enumerate(alone):
        for name, row in moment.items():
            for rank in ranks:
                np.testing.assert_array_equal(rank[number][name], row, err_msg=f"{name} after {number} rounds")


@pytest.mark.parametrize("setup", [FULL, PARTIAL], ids=["full", "partial"])
def test_weights_of_clients(setup):
    """c stays the weighted mean of all c_i, and FedAvg-M without momentum is FedAvg also with uneven steps."""
    weights = [1.0, 2.0, 5.0]
    for algorithm in (SCAFFOLD(c0="gradient"), SCAFFOLDM(), SCAFFOLDMVR()):
        seen, federation = run_rank(algorithm, SoloLink(), range(3), setup, weights=weights)
        mean = sum(w * client.c_i for w, client in zip(weights, federation.clients)) / sum(weights)
        np.testing.assert_allclose(seen[-1]["c"], mean, rtol=1e-12)
    uneven = (3, [2, 4, 1].__getitem__, *setup[2:])
    fedavg, _ = run_rank(FedAvg(step_size=0.1), SoloLink(), range(3), uneven, weights=weights)
    fedavg_m, _ = run_rank(FedAvgM(step_size=0.1, fresh_weight=1.0), SoloLink(), range(3), uneven, weights=weights)
    for a, b in zip(fedavg, fedavg_m):
        np.testing.assert_allclose(a["x"], b["x"], rtol=1e-12)


class BigTensors(TorchDispatchMode):
    """Counts operations whose output is new memory of at least `dim` elements."""

    def __init__(self, dim):
        super().__init__()
        self.dim, self.found = dim, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        known_memory = {
            tensor.untyped_storage().data_ptr()
            for tensor in (*args, *(kwargs or {}).values())
            if isinstance(tensor, torch.Tensor)
        }
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            is_big = isinstance(tensor, torch.Tensor) and tensor.numel() >= self.dim
            if is_big and tensor.untyped_storage().data_ptr() not in known_memory:
                self.found.append(str(function))
        return result


class QuietOracle(FunctionOracle):
    """Gradients of ½ h ‖x - b‖² in rows that exist already."""

    def __init__(self, client, dim):
        super().__init__(None, client)
        self._rows = torch.zeros(2, dim, dtype=torch.float64)
        self._next = 0

    def gradient(self, z, xi):
        self._next = 1 - self._next
        return torch.mul(z, 1.0 + 0.1 * xi, out=self._rows[self._next]).sub_(self.client.index)


def new_vectors_in_round_2(algorithm, num_clients, dim, **layout):
    """Names of operations that allocated half a model or more in a federation's second round."""
    federation = Federation(
        algorithm,
        SoloLink(),
        dict.fromkeys(range(num_clients), functools.partial(QuietOracle, dim=dim)),
        Plan(num_clients, local_steps=3),
        Variables(torch.ones(dim, dtype=torch.float64), **layout),
    )
    federation.start()
    federation.run_round()
    with BigTensors(dim // 2) as big:
        federation.run_round()
    return big.found


@pytest.mark.rarely("fedmpi", "tests/algorithms")
@pytest.mark.parametrize("num_clients", [1, 3])
@pytest.mark.parametrize(
    "algorithm",
    [*(cls(**settings) for cls, settings in CASES), *(cls() for cls in EVERY_CLASS)],
    ids=lambda algorithm: command_name(type(algorithm)),
)
def test_nothing_as_long_as_the_model_is_allocated_after_the_first_round(algorithm, num_clients):
    assert new_vectors_in_round_2(algorithm, num_clients, 1000, segments=[slice(0, 500), slice(500, 1000)]) == []
