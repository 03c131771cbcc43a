"""What is measured of many kinds of tasks equals scikit-learn, for the resulting model and on any number of ranks."""

import pytest
from helpers import PROGRAMS, start

pytest.importorskip("sklearn")


@pytest.mark.rarely
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("program", "number"), [("tasks_measured", 50), ("silo_files_measured", 17)])
def test_metrics_equal_those_of_scikit_learn(tmp_path, ranks, program, number):
    ended = start(ranks, PROGRAMS / f"{program}.py", tmp_path, timeout=1500)
    assert ended.returncode == 0 and "WRONG" not in ended.stdout, ended.stdout[-3000:] + ended.stderr[-2000:]
    assert f"compared {number}" in ended.stdout
