"""The table of costs: against the specification's, those in docs/ and of ``--list``, and what a run really does."""

import dataclasses
import re
from fractions import Fraction

import costs
import numpy as np
import pytest
from helpers import ROOT

import fedmpi.algorithms
from fedmpi.algorithms import CODA, SCAFFOLD, SCAFFOLDM, Algorithm, FedAvg, LocalAMSGrad, MimeAdam
from fedmpi.federation import simulate as simulation
from fedmpi.ground.registry import command_name, find, known

EVERY_CLASS = list(known(fedmpi.algorithms, Algorithm).values())

# The specification's table: up, down, Allreduces of a round, gradients per local step, private vectors
SPECIFIED = {
    "fedavg": (1, 1, (1,), 1, ()),
    "fedprox": (1, 1, (1,), 1, ()),
    "naive_adaptive_fedavg": (1, 1, (1,), 1, ("v",)),
    "fedadam": (1, 1, (1,), 1, ()),
    "fedyogi": (1, 1, (1,), 1, ()),
    "fedadagrad": (1, 1, (1,), 1, ()),
    "fedams": (1, 1, (1,), 1, ()),
    "fedavgm": (1, 1, (1,), 1, ()),
    "diloco": (1, 1, (1,), 1, ("m", "v")),
    "local_adam": (3, 3, (3,), 1, ()),
    "desloc": (1.5, 1.5, (1, Fraction(1, 3), Fraction(1, 6)), 1, ()),
    "feddyn": (1, 1, (1,), 1, ("h_i",)),
    "fedadamw": (2, 3, (2,), 1, ()),
    "fedlada": (2, 3, (2,), 1, ()),
    "fedmuon": (2, 3, (2,), 1, ()),
    "fedexp": (1, 1, (1,), 1, ()),
    "fednova": (1, 1, (1,), 1, ()),
    "scaffnew": (1, 1, (1,), 1, ("c_i",)),
    "scaffold": (2, 2, (2,), 1, ("c_i",)),
    "scaffold_m": (2, 2, (2,), 1, ("c_i",)),
    "stem": (2, 2, (2,), 2, ("x_prev",)),
    "fafed": (3, 3, (3,), 2, ("x_prev",)),
    "fafed_code": (3, 3, (3,), 2, ("x_prev",)),
    "mimeadam": (2, 4, (1, 1), 2, ()),
    "local_amsgrad": (2, 2, (1, 1), 1, ("m", "v")),
    "fed_lamb": (2, 2, (2,), 1, ()),
    "fedzo": (1, 1, (1,), 1, ()),
    "fafedzo": (3, 3, (3,), 2, ("x_prev",)),
    "fedavg_m": (1, 1, (1,), 1, ()),
    "fedavg_m_vr": (1, 1, (1,), 2, ()),
    "scaffold_m_vr": (2, 2, (2,), 2, ("c_i",)),
    "mb_storm": (1, 1, (1,), 2, ()),
    "ce_lsgd": (1, 1, (1, 1), 2, ()),
    "local_sgda": (1, 1, (1,), 1, ()),
    "coda": (1, 1, (1,), 1, ()),
    "momentum_local_sgda": (2, 2, (2,), 1, ()),
    "codasca": (2, 2, (2,), 1, ("c_i",)),
    "fmgda": (2, 2, (2,), 2, ("x_prev",)),
}
AT_START = {"stem": 1, "fafed": 2, "fafed_code": 2, "fafedzo": 2, "fedavg_m_vr": 1, "scaffold_m": 1, "scaffold_m_vr": 1}
AT_START |= {"mb_storm": 1, "ce_lsgd": 1, "local_amsgrad": 1}


@pytest.mark.parametrize("name", SPECIFIED)
def test_costs_are_those_of_the_specification(name):
    c = costs.cost(find("algorithm", name, fedmpi.algorithms, Algorithm))
    up, down, allreduces, gradients, private = SPECIFIED[c.name]
    assert (c.up, c.down, c.allreduces) == (up, down, allreduces)
    assert (c.gradients_per_step, c.private) == (gradients, private)
    assert c.at_start == AT_START.get(c.name, 0)
    assert c.passes == (c.name == "mimeadam")
    assert (c.up_alone, c.down_alone, c.gradients_alone) == ((1, 1, 2) if c.name == "ce_lsgd" else (0, 0, 0))
    assert c.numbers == (c.name in ("fedexp", "fednova"))
    assert c.estimates == (c.name in ("fedzo", "fafedzo"))


@pytest.mark.parametrize("cls", EVERY_CLASS, ids=command_name)
def test_rows_said_to_be_sent_down_exist(cls):
    algorithm = cls()
    assert set(algorithm.downlink or ()) <= {*algorithm.exchanged, *algorithm.server_rows}


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        (SCAFFOLD(option="I"), {"passes": 1}),
        (SCAFFOLD(c0="gradient"), {"at_start": 1}),
        (SCAFFOLDM(c0="zero"), {"at_start": 0}),
        (LocalAMSGrad(refresh="after", v0=0.1), {"allreduces": (2,), "at_start": 0}),
        (MimeAdam(lite=True), {"down": 3, "gradients_per_step": 1, "client_memory": 4}),
        (FedAvg(server_step_size=0.5), {"server_memory": 1}),
        (
            CODA(stage_output="average"),
            {"up": 2, "down": 2, "allreduces": (2,), "client_memory": 3, "server_memory": 2},
        ),
    ],
    ids=lambda value: command_name(type(value)) if isinstance(value, Algorithm) else "",
)
def test_options_that_change_the_costs(algorithm, changes):
    assert costs.cost(algorithm) == dataclasses.replace(costs.cost(type(algorithm)), **changes)


@pytest.mark.parametrize("cls", EVERY_CLASS, ids=command_name)
def test_costs_are_what_a_run_counts(cls, monkeypatch):
    """Bytes of the traffic account and gradient evaluations of `simulate`, 3 clients, 4 rounds of 5 steps."""
    links, calls = [], np.zeros(3, int)

    class Link(simulation.SoloLink):
        def __init__(self):
            super().__init__()
            links.append(self)

    def gradient(client, x, sample):
        calls[client] += 1
        return 0.1 * x + client

    def count(rounds):
        calls[:] = 0
        simulation.simulate(cls(), gradient, np.ones(7), rounds=rounds, local_steps=5, chosen=lambda r: 1)
        return links[-1].traffic, calls.copy()

    monkeypatch.setattr(simulation, "SoloLink", Link)
    c = costs.cost(cls)
    skips = any(exchange.due for exchange in cls().exchanges())
    rounds = costs.PERIOD if skips else 1
    # some rounds more cost as many times a round, whatever the start does once
    (before, calls_before), (after, calls_after) = count(3), count(3 + rounds)
    sent = after.nbytes - before.nbytes - 8 * c.numbers
    assert sent == 8 * 7 * (c.up + c.up_alone) * rounds == 8 * 7 * sum(c.allreduces) * rounds
    of_rows = sum(c.allreduces) * rounds if skips else len(c.allreduces)
    assert after.collectives - before.collectives == of_rows + (c.numbers > 0)
    gradients = np.full(3, 5 * c.gradients_per_step + c.passes) * rounds
    gradients[1] += c.gradients_alone * (5 - 1)
    np.testing.assert_array_equal(calls_after - calls_before, gradients)


def test_the_table_names_every_algorithm_and_its_paper():
    lines = costs.table().split("\n")
    for cls in EVERY_CLASS:
        (line,) = [line for line in lines if line.split(" ")[0] == command_name(cls)]
        assert costs.cost(cls).paper in line
    fafed = next(line for line in lines if line.startswith("fafed "))
    assert fafed.split() == ["fafed", "Wu", "et", "al.", "2023", "3", "3", "3d", "2", "2", "6", "1", "x_prev"]
    fedzo = next(line for line in lines if line.startswith("fedzo "))
    assert "  0; b1 (b2 + 1) losses  " in fedzo


def test_the_page_of_algorithms_and_the_list_show_the_table(request):
    """``pytest tests/federation/test_costs.py --write-golden`` writes both."""
    page, listed, now = ROOT / "docs" / "algorithms.md", ROOT / "fedmpi" / "config" / "costs.txt", f"{costs.table()}\n"
    table = re.compile(r"(?<=^```text\n)algorithm .*?(?=^```$)", re.DOTALL | re.MULTILINE)
    text = page.read_text(encoding="utf-8")
    if request.config.getoption("--write-golden"):
        text = table.sub(lambda _: now, text)
        page.write_text(text, encoding="utf-8")
        listed.write_text(now, encoding="utf-8")
    assert table.findall(text) == [now]
    assert listed.read_text(encoding="utf-8") == now
