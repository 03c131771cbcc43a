"""How many methods equal a second transcription of their paper's listing: python docs/comparison/twins.py

The transcriptions (`tests/algorithms/reference*.py`) are float64 numpy loops over all clients, written from the papers'
equations and not from `fedmpi.algorithms`. Every row of every method is compared after every local step and every
exchange, to 1e-12 of the row's size. Run it in a clone, with the packages of `pip install '.[dev]'`.
"""

import inspect
import pathlib
import re
import subprocess
import sys

import fedmpi.algorithms
from fedmpi.algorithms import Algorithm
from fedmpi.ground.registry import known

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS = ("algorithms/test_every_algorithm.py", "algorithms/test_minmax.py", "oracles/test_zeroth_order.py")


def main():
    sys.path.insert(0, str(ROOT / "tests" / "algorithms"))
    import reference
    import reference_minmax

    twins = {
        name
        for module in (reference, reference_minmax)
        for name, function in vars(module).items()
        if inspect.isfunction(function)
    }
    methods = set(known(fedmpi.algorithms, Algorithm))
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{test}" for test in TESTS)]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    found = re.search(r"^.*\d+ passed.*$", ended.stdout, re.MULTILINE)
    if ended.returncode or not found:
        raise SystemExit(ended.stdout + ended.stderr)
    print(f"{len(methods & twins)} of {len(methods)} methods have a second transcription: {', '.join(sorted(methods))}")
    print(f"their tests: {found[0].strip('= ')}")
    return len(methods - twins) > 0


if __name__ == "__main__":
    sys.exit(main())
