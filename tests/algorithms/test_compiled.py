"""The compiled update: the same numbers as the algorithm's own arithmetic, and one line if there is none."""

import shutil

import h5py
import numpy as np
import pytest
import torch
from conftest import train
from test_every_algorithm import X0, gradient

from fedmpi import simulate
from fedmpi.algorithms import FAFED, FAFedZO, FedAvg
from fedmpi.errors import UserError

WORDS = ["--rounds", 6, "--local_steps", 3, "--dtype", "float64", "--model", "mlp", "--seed", 3]


def vectors(folder):
    with h5py.File(folder / "model.h5") as file:
        found = []
        file.visititems(lambda name, item: found.append(item[()].ravel()) if isinstance(item, h5py.Dataset) else None)
    return np.concatenate(found)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_run_with_the_compiled_update_gives_the_same_model(tmp_path):
    options = ["--algorithm.prev_grad_scale", 0.95, "--algorithm.fresh_weight_scale", 900]
    for name, fused in (("own", "false"), ("fused", "true")):
        ended = train(2, tmp_path, "--clients", 3, *WORDS, *options, "--name", name, "--fused_update", fused)
        assert ended.returncode == 0, ended.stderr
    own, fused = (vectors(tmp_path / name) for name in ("own", "fused"))
    np.testing.assert_allclose(fused, own, rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("sync_order", ["paper", "code"])
def test_every_row_at_every_moment_is_the_same(sync_order):
    own = FAFED(step_size=0.1, fresh_weight_scale=40.0, epsilon=0.05, prev_grad_scale=0.9, sync_order=sync_order)
    compiled = own.compiled(torch.ones(5, dtype=torch.float64))
    for a, b in zip(simulate(own, gradient, X0), simulate(compiled, gradient, X0), strict=True):
        for name in a["rows"]:
            np.testing.assert_allclose(b["rows"][name], a["rows"][name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("algorithm", "line"),
    [
        (FedAvg(), "^fused_update = true: there is no compiled update of FedAvg; leave fused_update off$"),
        (FAFedZO(), "there is no compiled update of FAFedZO; leave fused_update off"),
        (FAFED(adaptive_matrix="global"), "adaptive_matrix = global, only with diagonal; leave fused_update off"),
    ],
    ids=["fedavg", "fafedzo", "global"],
)
def test_one_line_if_there_is_no_compiled_update(algorithm, line):
    with pytest.raises(UserError, match=line):
        algorithm.compiled(torch.ones(5))


@pytest.mark.parametrize(
    ("words", "environment", "line"),
    [
        (["--algorithm", "compiling.Compiling"], {}, "asked to compile for torch.float64 ["),
        ([], {"CXX": "/nowhere/g++"}, "install a C++ compiler or leave fused_update off"),
    ],
    ids=["own", "no-compiler"],
)
def test_a_run_asks_its_algorithm_and_ends_with_one_line(tmp_path, words, environment, line):
    environment = {**environment, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ended = train(2, tmp_path, *WORDS, *words, "--fused_update", "true", env=environment)
    assert ended.returncode == 2 and line in ended.stderr and len(ended.stderr.strip().splitlines()) == 1, ended.stderr
