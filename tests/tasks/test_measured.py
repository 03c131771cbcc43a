"""What is measured of many kinds of tasks equals scikit-learn, for the resulting model and on any number of ranks."""

import pytest
from helpers import PROGRAMS, start

pytest.importorskip("sklearn")


@pytest.mark.parametrize("ranks", [2])
def test_45_tasks(tmp_path, ranks):
    ended = start(ranks, PROGRAMS / "tasks_measured.py", tmp_path)
    assert ended.returncode == 0 and "WRONG" not in ended.stdout, ended.stdout[-3000:] + ended.stderr[-2000:]
    assert "compared 45" in ended.stdout
