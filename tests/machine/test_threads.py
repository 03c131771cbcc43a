"""How many threads a rank takes, and who decides it."""

import types

import pytest
import torch

import fedmpi
from fedmpi.comm import host
from fedmpi.comm.host import choose_threads
from fedmpi.own_loop import base

LINK = types.SimpleNamespace(usable_cores=8, local_size=2, rank=0)


@pytest.mark.parametrize(
    ("given", "variables", "bound", "expected"),
    [
        (3, {"OMP_NUM_THREADS": "2"}, 8, (3, "--threads")),
        (None, {"OMP_NUM_THREADS": "2,1", "SLURM_CPUS_PER_TASK": "5"}, 8, (2, "OMP_NUM_THREADS")),
        (None, {"OMP_NUM_THREADS": "", "SLURM_CPUS_PER_TASK": "5"}, 8, (5, "SLURM_CPUS_PER_TASK")),
        (None, {}, 8, (4, "")),
        (None, {}, 1, (1, "")),
    ],
)
def test_what_decides_the_threads(monkeypatch, given, variables, bound, expected):
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.setenv(name, variables.get(name, ""))
    monkeypatch.setattr(host, "usable_cores", lambda: list(range(bound)))
    assert choose_threads(LINK, given) == expected


@pytest.mark.parametrize(("before", "during"), [(6, 2), (5, 5), (1, 1)])  # 6: as many as torch takes by itself
def test_a_loop_takes_its_share_unless_the_user_has_chosen(monkeypatch, capsys, before, during):
    monkeypatch.setattr(base, "library_threads", lambda: {6})
    monkeypatch.setattr(base, "choose_threads", lambda link: (2, ""))
    usual = torch.get_num_threads()
    torch.set_num_threads(before)
    try:
        fed = fedmpi.average(torch.nn.Linear(2, 1), every=1)
        assert torch.get_num_threads() == during
        assert ("2 of its 6 threads" in capsys.readouterr().err) == (during == 2)
        fed.finish()
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(usual)
