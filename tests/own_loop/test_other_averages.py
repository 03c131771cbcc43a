"""The rows of docs/coming_from.md about averagers of PyTorch users, run on two ranks beside `fedmpi.average`."""

import importlib.util
import re

import pytest
from helpers import PROGRAMS, ROOT, start

ROWS = re.findall(
    r"^\| (torch|accelerate|torchft) `(.+?)`[^|]*\| `(.+?)`"
    r"(?:, and `(.+?)` times `fed.step\(\)` before the loop)? \| nothing \|$",
    (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def test_the_page_has_the_rows():
    classes = [(system, there.partition("(")[0]) for system, there, _, _ in ROWS]
    averager = ("torch", "PeriodicModelAverager")
    others = [("accelerate", "LocalSGD"), ("torchft", "LocalSGD"), ("torchft", "DiLoCo")]
    assert classes == [averager, averager, ("torch", "PostLocalSGDOptimizer"), *others]


@pytest.mark.parametrize("system", ["torch", "accelerate", "torchft"])
def test_nothing_remains(system):
    if importlib.util.find_spec(system) is None:
        pytest.skip(f"{system} is not installed")
    rows = [row[1:] for row in ROWS if row[0] == system]
    words = [word for there, here, steps in rows for word in (there, here, steps or "0")]
    ended = start(2, PROGRAMS / "other_averages.py", *words)
    assert ended.returncode == 0, ended.stderr
    found = dict(line.rsplit(": ", 1) for line in ended.stdout.splitlines() if "(" in line)
    assert found.keys() == {there for there, _, _ in rows}, ended.stdout
    assert all(float(difference) <= 1e-12 for difference in found.values()), found
