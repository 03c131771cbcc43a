"""The compiled update: the same numbers as the algorithm's own arithmetic, one line where it cannot be had."""

import shutil

import h5py
import numpy as np
import pytest
from conftest import train

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


@pytest.mark.parametrize(
    ("words", "environment", "line"),
    [
        (["--algorithm", "fedavg"], {}, "there is none for FedAvg"),
        (["--algorithm.adaptive_matrix", "global"], {}, "adaptive_matrix = diagonal"),
        ([], {"CXX": "/nowhere/g++"}, "install a C++ compiler"),
    ],
)
def test_one_line_where_it_cannot_be_had(tmp_path, words, environment, line):
    environment = {**environment, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ended = train(2, tmp_path, *WORDS, *words, "--fused_update", "true", env=environment)
    assert ended.returncode == 2 and line in ended.stderr and len(ended.stderr.strip().splitlines()) == 1, ended.stderr
